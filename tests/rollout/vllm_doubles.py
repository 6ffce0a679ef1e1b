"""A stand-in for a vLLM server that implements its protocol; vllm_package.py has one for the package and its engine.

Both have a small model, store the weights that they are sent and sample from them, so that stale, partially sent or
lost weights are visible in the tokens. Both have a prefix cache that survives weight updates unless it is reset.
"""

import base64
import json
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch import Tensor

from tests.helpers import tiny_model, tiny_tokenizer

EOS = 1
GPU = "GPU-of-the-test"
PACKING = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}


def saved_model(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Save a tiny model with its tokenizer to a folder, as vLLM expects it."""
    tiny_model(seed, **settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class Sampler:
    """A model that is sampled token by token, with a cache of its logits after each prompt."""

    def __init__(self, context_length: int = 128, **model: Any) -> None:
        self.context_length = context_length
        self.factor = 1.0  # scales the logits, to simulate arithmetic that differs from the trainer's
        self.model = tiny_model(seed=1234, **model).eval()
        self.prefixes: dict[tuple[int, ...], Tensor] = {}
        self.counted: set[str] = set()  # weights received in a load that has not ended
        self.lost: set[str] = set()

    def begin(self) -> None:
        """Like vLLM, count weights that an unfinished earlier load received as loaded: their new values are lost."""
        self.lost = set(self.counted)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights.items():
            if name not in own:
                raise KeyError(f"There is no module or parameter named {name!r}")
            self.counted.add(name)
            if name not in self.lost:
                with torch.no_grad():
                    own[name].copy_(tensor)

    def end(self) -> None:
        self.counted, self.lost = set(), set()

    def complete(self, prompt: Sequence[int], words: Mapping[str, Any]) -> list[dict[str, Any]]:
        if len(prompt) + words["max_tokens"] > self.context_length:
            raise ValueError(f"maximum context length is {self.context_length} tokens")
        if max(prompt) >= self.model.config.vocab_size:
            raise ValueError(f"Token id {max(prompt)} is out of vocabulary")
        if words.get("min_tokens", 0) > words["max_tokens"]:
            raise ValueError(f"min_tokens must be less than or equal to max_tokens={words['max_tokens']}")
        if words.get("temperature") == 0 and words.get("n", 1) > 1:
            raise ValueError(f"n must be 1 when using greedy sampling, got {words['n']}.")
        return [self._one(list(prompt), words, number) for number in range(words.get("n", 1))]

    @torch.no_grad()
    def _one(self, prompt: list[int], words: Mapping[str, Any], number: int) -> dict[str, Any]:
        random = torch.Generator()
        if words.get("seed") is not None:
            random.manual_seed(words["seed"] + number)
        else:
            random.seed()
        ids: list[int] = []
        logps: list[float] = []
        while len(ids) < words["max_tokens"]:
            scores = self._scores(prompt, ids)
            temperature = words.get("temperature", 1.0)
            distribution = (scores / (temperature or 1.0)).log_softmax(-1)
            if temperature == 0:
                token = int(scores.argmax())
            else:
                token = int(torch.multinomial(distribution.exp(), 1, generator=random))
            ids.append(token)
            logps.append(distribution[token].item())
            if token in words.get("stop_token_ids", ()):
                return {"ids": ids, "logps": logps, "finish": "stop", "stop": token}
            text = tiny_tokenizer().decode(ids)
            for string in words.get("stop", ()):
                if string in text:
                    return {"ids": ids, "logps": logps, "finish": "stop", "stop": string}
        return {"ids": ids, "logps": logps, "finish": "length", "stop": None}

    def _scores(self, prompt: list[int], ids: list[int]) -> Tensor:
        if not ids and tuple(prompt) in self.prefixes:
            return self.prefixes[tuple(prompt)]
        scores: Tensor = self.model(input_ids=torch.tensor([prompt + ids])).logits[0, -1].float() * self.factor
        if not ids:
            self.prefixes[tuple(prompt)] = scores
        return scores


# ---- the server


def share_bytes(buffer: Tensor) -> dict[str, Any]:
    """Replaces `transfer.share`: returns the contents of the buffer instead of a handle to its GPU memory."""
    return {GPU: bytes(buffer.numpy().tobytes())}


class RefusalError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Double:
    """A vLLM server on its own port; its responses, including errors, have the form of those of its `version`.

    Tests change its attributes: `slow` and `broken` map paths to seconds and statuses; `log` contains every call.
    """

    def __init__(self, folder: str | Path = "", *, transfer: str | None = "ipc", **model: Any):
        self.folder, self.transfer, self.model = str(folder), transfer, model
        self.version, self.dev_mode, self.mode = "0.32.0", True, "processed_logprobs"
        self.unpickles, self.workers, self.api_processes = True, 1, 1
        self.slow: dict[str, float] = {}
        self.broken: dict[str, list[int]] = {}
        self.before: dict[str, Callable[[], None]] = {}  # by path: called before the request is answered
        self.log: list[tuple[str, Any]] = []
        self.queries: list[tuple[str, str]] = []  # the path and the query string of each call
        self.busy = False  # another client's request is running
        self.generation_config, self.overrides = "vllm", dict[str, Any]()
        self.keeps_old = False  # the reset of the cache is answered with a failure
        self.stuck = False  # a request waits for KV cache entries of another machine and cannot be preempted
        self.connector: str | None = None
        self.outside: dict[tuple[int, ...], Tensor] = {}  # the cache of the KV connector
        self.closing = threading.Event()
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the server: a new instance with fresh weights."""
        self.restart()
        double = self

        class Handler(_Handler):
            server_state = double

        self.closing.clear()
        self.http = _Server(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def restart(self) -> None:
        """Replace the instance between two calls, at the same address."""
        self.instance, self.active, self.sampler = str(time.time_ns()), False, Sampler(**self.model)
        self.packed = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def calls(self, path: str) -> list[Any]:
        return [body for called, body in self.log if called == path]

    # ---- answers

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.log.append((path, body))
        if path in self.before:
            self.before[path]()
        if self.closing.wait(self.slow.get(path, 0.0)):
            return 503, {}
        if self.broken.get(path):
            return self.broken[path].pop(0), {"error": {"message": "broken on purpose"}}
        handler = {
            ("GET", "/health"): dict,
            ("GET", "/version"): lambda: {"version": self.version},
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/completions"): lambda: self._complete(body),
        } | (self._dev_mode(body) if self.dev_mode else {})
        if (method, path) not in handler:
            elsewhere = any(path == known for _, known in handler)
            return (405, {"detail": "Method Not Allowed"}) if elsewhere else (404, {"detail": "Not Found"})
        try:
            return 200, handler[method, path]()
        except RefusalError as error:
            return _error(error.status, str(error))
        except ValueError as error:
            return _error(400, str(error))
        except (KeyError, RuntimeError) as error:
            method = "reset_prefix_cache" if path == "/reset_prefix_cache" else "collective_rpc"
            return _error(500, f"Call to {method} method failed: {error}")

    def _dev_mode(self, body: Any) -> dict[tuple[str, str], Callable[[], Any]]:
        return {
            ("GET", "/server_info"): self._info,
            ("GET", "/get_world_size"): lambda: {"world_size": self.workers},
            ("POST", "/init_weight_transfer_engine"): lambda: self._init(_member(body, "init_info")),
            ("POST", "/start_weight_update"): lambda: self._start(body),
            ("POST", "/update_weights"): lambda: self._update(_member(body, "update_info")),
            ("POST", "/finish_weight_update"): self._finish,
            ("POST", "/reset_prefix_cache"): self._reset,
        }

    def _since(self, minor: int) -> bool:
        """Whether this is vLLM 0.`minor` or a later one."""
        return int(self.version.split(".")[1]) >= minor

    def _reset(self) -> Any:
        """Before vLLM 0.26 the response does not report entries that were not dropped, except in one case."""
        query = parse_qs(next(query for path, query in reversed(self.queries) if path == "/reset_prefix_cache"))
        begins_anew = query.get("reset_running_requests") == ["true"]
        if begins_anew and self.stuck:
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")
        dropped = begins_anew or not (self.busy or self.stuck)
        if dropped:
            self.sampler.prefixes.clear()
        if query.get("reset_external") == ["true"]:
            self.outside.clear()
        return {"success": dropped and not self.keeps_old} if self._since(26) else None

    def _models(self) -> Any:
        length = self.sampler.context_length
        return {
            "data": [{"id": self.folder, "root": self.folder, "max_model_len": length, "created": int(time.time())}]
        }

    def _info(self) -> Any:
        transfer = None if self.transfer is None else {"backend": self.transfer}
        config = {"logprobs_mode": self.mode, "model": self.folder}
        config |= {"generation_config": self.generation_config, "override_generation_config": self.overrides}
        return {
            "vllm_config": {
                "instance_id": self.instance,
                "model_config": config,
                "weight_transfer_config": transfer,
                "parallel_config": {"_api_process_count": self.api_processes},
                "kv_transfer_config": None if self.connector is None else {"kv_connector": self.connector},
            },
            "vllm_env": {"VLLM_ALLOW_INSECURE_SERIALIZATION": self.unpickles},
            "system_env": {},
        }

    def _init(self, info: dict[str, Any]) -> Any:
        needed = {"master_address", "master_port", "rank_offset", "world_size"} if self.transfer == "nccl" else set()
        if not needed <= info.keys() <= needed | (PACKING if self._packing_is_said_once() else set()):
            raise RuntimeError(f"Invalid init_info: {info}")
        self.packed = info.get("packed", False)
        return {"message": "Weight transfer initialized"}

    def _start(self, body: Any) -> Any:
        if body is None:
            raise RefusalError(400, "Invalid JSON format")
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.active = True
        self.sampler.begin()
        return {"message": "Weight update started"}

    def _update(self, info: dict[str, Any]) -> Any:
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.sampler.load(self._unpacked(info))
        except BaseException:
            self.active = False
            raise
        return {"message": "Weights updated"}

    def _packing_is_said_once(self) -> bool:
        return self._since(27 if self.transfer == "ipc" else 28)

    def _unpacked(self, info: dict[str, Any]) -> dict[str, Tensor]:
        if not self.unpickles:
            raise RuntimeError("Refusing to deserialize `ipc_handles_pickled`")
        if self._packing_is_said_once() and "packed" in info:
            raise RuntimeError("IPCWeightTransferUpdateInfo.__init__() got an unexpected keyword argument 'packed'")
        assert self.packed if self._packing_is_said_once() else info["packed"]
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        content, weights, at = handles[GPU], {}, 0
        for name, dtype, shape, size in zip(
            info["names"], info["dtype_names"], info["shapes"], info["tensor_sizes"], strict=True
        ):
            kind = getattr(torch, dtype)
            assert size == math.prod(shape) * kind.itemsize
            assert at % kind.itemsize == 0, "a view of the buffer must be aligned"
            weights[name] = torch.frombuffer(bytearray(content[at : at + size]), dtype=kind).reshape(shape)
            at += size
        return weights

    def _finish(self) -> Any:
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active = False
        self.sampler.end()
        return {"message": "Weight update finished"}

    def _complete(self, body: dict[str, Any]) -> Any:
        if body["model"] != self.folder:
            raise RefusalError(404, f"The model `{body['model']}` does not exist.")
        assert body["return_token_ids"]
        if self.connector is not None:
            self.sampler.prefixes |= self.outside
        choices = [
            {
                "index": index,
                "text": "",
                "token_ids": one["ids"],
                "logprobs": {"token_logprobs": one["logps"]} if "logprobs" in body else None,
                "finish_reason": one["finish"],
                "stop_reason": None if one["stop"] == EOS else one["stop"],
            }
            for index, one in enumerate(self.sampler.complete(body["prompt"], body))
        ]
        if self.connector is not None:
            self.outside |= self.sampler.prefixes
        return {"choices": choices[::-1]}  # clients must not rely on their order


def _member(body: Any, name: str) -> dict[str, Any]:
    if body is None:
        raise RefusalError(400, "Invalid JSON format")
    if body.get(name) is None:
        raise RefusalError(400, f"Missing '{name}' in request body")
    found: dict[str, Any] = body[name]
    return found


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "", "param": None, "code": status}}


class _Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = False  # a model still running when the program exits would make it fail


class _Handler(BaseHTTPRequestHandler):
    server_state: Double

    def do_GET(self) -> None:
        self._reply("GET", None)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._reply("POST", json.loads(text) if text else None)

    def _reply(self, method: str, body: Any) -> None:
        parts = urlsplit(self.path)
        self.server_state.queries.append((parts.path, parts.query))
        status, reply = self.server_state.answer(method, parts.path, body)
        text = b"" if reply is None else json.dumps(reply).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        except OSError:
            pass  # the client has disconnected

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(folder: str | Path = "", **settings: Any) -> Iterator[Double]:
    double = Double(folder, **settings)
    try:
        yield double
    finally:
        double.stop()
