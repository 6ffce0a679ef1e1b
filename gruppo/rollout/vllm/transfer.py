"""Sends weights to a vLLM server: by CUDA IPC on one GPU, by NCCL between GPUs.

    begin ─► start_weight_update ─► update_weights, once or more ─► finish_weight_update ─► reset_prefix_cache

IPC: tensors are copied into one buffer on the GPU, and the server receives its CUDA IPC handle. The handle is pickled,
and unpickling lets anyone who can reach the server's port run code there. Hence IPC is used only on loopback, and only
if the server was started with VLLM_ALLOW_INSECURE_SERIALIZATION=1. The buffer is reused once the server has confirmed
that it read it, and freed at the end of the update.

NCCL: trainer and workers join a process group once. The trainer broadcasts while an HTTP call tells the workers what
to receive. This needs vLLM in the trainer's environment, for its code that packs tensors, and a GPU other than the
server's: NCCL refuses two ranks on one GPU.
"""

import base64
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gruppo.config.vllm import GROUP_PORT
from gruppo.errors import ConfigError, RolloutError, install_line
from gruppo.rollout.vllm.client import ServerFacts, ServerRefusedError, VLLMClient
from gruppo.rollout.vllm.threads import started
from gruppo.rollout.vllm.versions import PACKING_SAID_ONCE, check_version, release_of

__all__ = ["IPCSender", "NCCLSender", "Sender", "make_sender", "push"]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 29
# Of NCCL. Trainer and server must agree, and their releases of vLLM, whose defaults these are, may differ.
PACKING: Mapping[str, Any] = {"packed": True, "packed_buffer_size_bytes": 1 << 30, "packed_num_buffers": 2}

Weights = Iterator[tuple[str, Tensor]]


class Sender:
    """A way to send weights to the server."""

    whole_at: str | None = None  # the server instance whose last update is known to have succeeded

    def begin(self, facts: ServerFacts) -> None:
        """Set up the transfer, once per server instance, before its first update."""

    def forget(self) -> None:
        """Another sender takes over: set up the transfer again if this sender is used later."""
        self.whole_at = None

    def send(self, weights: Weights) -> None:
        """Send all weights, in as many calls as needed."""
        raise NotImplementedError

    def release(self) -> None:
        """Free what the server could read until the update ended."""


def push(client: VLLMClient, sender: Sender, facts: ServerFacts, weights: Weights) -> None:
    """One complete update of the server's weights; if it raises, their state is unknown."""
    sender.begin(facts)
    if sender.whole_at != facts.instance:
        _close(client)
    sender.whole_at = None
    client.post_once("/start_weight_update")
    try:
        sender.send(weights)
        client.post_once("/finish_weight_update")
    finally:
        sender.release()
    _drop_old_keys(client)
    sender.whole_at = facts.instance


def _drop_old_keys(client: VLLMClient) -> None:
    """Drop the KV cache of the old weights, including what a connector stores outside the engine.

    A request that is still running would silently prevent this. With `reset_running_requests` the server restarts such
    requests, and either drops everything or returns an error; since vLLM 0.26 the answer says which it was.
    """
    answer = client.post_once("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
    if answer.get("success") is False:
        raise RolloutError(
            f"The vLLM server at {client.url} did not drop its KV cache, which was computed with the old weights."
        )


def _close(client: VLLMClient) -> None:
    """Finish an update that this trainer or another may have left incomplete.

    vLLM counts the parts it has received of a layer, and a failed update does not reset the count: the next update
    would consider a layer complete while parts of it are missing. Only finishing an update resets the count, and a
    failed update can only be finished by starting another one.
    """
    with suppress(ServerRefusedError):  # an update is already open, which is fine
        client.post_once("/start_weight_update")
    client.post_once("/finish_weight_update")


def make_sender(client: VLLMClient, facts: ServerFacts, *, group_port: int) -> Sender:
    """The sender that the server was started for; raises if it cannot work, with what to change."""
    again = "Start it with `gruppo vllm-serve MODEL --weight-transfer"
    if facts.transfer == "nccl":
        return NCCLSender(client, group_port)
    if facts.transfer != "ipc":
        raise ConfigError(
            f"The server at {client.url} does not accept weights (weight_transfer_config: {facts.transfer!r}). "
            f"{again} ipc` if it shares the trainer's GPU, or with nccl if it has its own."
        )
    if not client.is_loopback:
        raise ConfigError(
            f"The server at {client.url} takes weights by IPC, which pickles handles: it must run on the trainer's "
            f"machine and GPU and listen on 127.0.0.1 only. {again} nccl` for another GPU or machine."
        )
    if not facts.unpickles:
        raise ConfigError(
            f"The server at {client.url} rejects IPC handles: it was started without "
            f"VLLM_ALLOW_INSECURE_SERIALIZATION=1. {again} ipc`, which sets it."
        )
    if facts.workers != 1:
        raise ConfigError(
            f"The server at {client.url} runs on {facts.workers} GPUs, but IPC works only on the trainer's own. "
            f"{again} nccl`."
        )
    if group_port != GROUP_PORT:
        logger.warning(f"vllm_group_port={group_port} has no effect: the server at {client.url} takes weights by IPC.")
    return IPCSender(client)


# ---- parts


def chunks(weights: Weights, most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights in lists of at most `most` bytes and one dtype each; a single tensor may be larger.

    One dtype, because the server reads the tensors of a chunk as views of one buffer, which mixed dtypes would
    misalign.

    Example, float32 tensors of 4 and 8 bytes, then one of bfloat16:
        chunks(weights, 12) -> [[a, b], [c]]
    """
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if chunk and (size + tensor.nbytes > most or tensor.dtype != chunk[0][1].dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


def described(chunk: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """The description of a chunk for the server, the same for IPC and NCCL."""
    return {
        "names": [name for name, _ in chunk],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
        "shapes": [list(tensor.shape) for _, tensor in chunk],
    }


def announced(facts: ServerFacts, packing: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """How tensors are packed, in two parts: what a server is told at the beginning, and what with every chunk.

    Example:
        announced(facts of an IPC server of vLLM 0.26, {"packed": True}) -> {}, {"packed": True}
        announced(facts of an IPC server of vLLM 0.27, {"packed": True}) -> {"packed": True}, {}
    """
    release = release_of(facts.version)
    said_once = release is not None and facts.transfer is not None and release >= PACKING_SAID_ONCE[facts.transfer]
    return (dict(packing), {}) if said_once else ({}, dict(packing))


# ---- one GPU


def share(buffer: Tensor) -> dict[str, Any]:
    """What another process needs to read the buffer, keyed by the UUID of its GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    if not buffer.is_cuda:
        raise ConfigError(f"Weights on the device {buffer.device} cannot be sent by IPC: train on the server's GPU.")
    torch.cuda.current_stream(buffer.device).synchronize()  # the copies into it must be complete
    _, arguments = reduce_tensor(buffer)
    return {str(torch.cuda.get_device_properties(buffer.device).uuid): arguments}


class IPCSender(Sender):
    """Copies tensors into a buffer that the server reads."""

    def __init__(self, client: VLLMClient, chunk_bytes: int = CHUNK_BYTES):
        self.client = client
        self.chunk_bytes = chunk_bytes
        self._buffer: Tensor | None = None
        self._begun_with: str | None = None
        self._said_with_each: dict[str, Any] = {}

    def begin(self, facts: ServerFacts) -> None:
        if self._begun_with != facts.instance:
            said_once, self._said_with_each = announced(facts, {"packed": True})
            self.client.post_once("/init_weight_transfer_engine", {"init_info": said_once})
            self._begun_with = facts.instance

    def forget(self) -> None:
        super().forget()
        self._begun_with = None

    def send(self, weights: Weights) -> None:
        for chunk in chunks(weights, self.chunk_bytes):
            sizes = [tensor.nbytes for _, tensor in chunk]
            used = self._room(sum(sizes), chunk[0][1].device)
            for part, (_, tensor) in zip(used.split(sizes), chunk, strict=True):
                part.copy_(tensor.contiguous().view(-1).view(torch.uint8))
            handle = base64.b64encode(pickle.dumps(share(used))).decode()
            info = {**described(chunk), **self._said_with_each, "tensor_sizes": sizes, "ipc_handles_pickled": handle}
            self.client.post_once("/update_weights", {"update_info": info})  # returns when the server has read it

    def _room(self, size: int, device: torch.device) -> Tensor:
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None  # freed before the new one is allocated
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer[:size]

    def release(self) -> None:
        """Free the buffer. Since vLLM 0.28 the server holds it until the update ends: freed earlier, it would stay."""
        self._buffer = None
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


# ---- several GPUs


def _nccl_code() -> tuple[Callable[..., Any], Callable[..., None]]:
    """vLLM's own code for the trainer's side: a function that joins the group, and one that broadcasts tensors."""
    try:
        import vllm
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
    except ImportError as error:
        raise ConfigError(
            "The server takes weights by NCCL, for which vLLM must be installed in the trainer's environment as well: "
            f"{install_line('vllm')}. A server on the trainer's own GPU can take them by IPC, without vLLM here."
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError("The server takes weights by NCCL, which needs a CUDA device in the trainer as well.")
    check_version(vllm.__version__, "this environment")
    try:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
    except ImportError:  # vLLM 0.24
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        trainer_init = NCCLWeightTransferEngine.trainer_init
    return trainer_init, packed_nccl_broadcast_producer


class NCCLSender(Sender):
    """Broadcasts to the server's workers, in a process group that they form with the trainer."""

    def __init__(self, client: VLLMClient, group_port: int, chunk_bytes: int = CHUNK_BYTES):
        self.client = client
        self.group_port, self.chunk_bytes = group_port, chunk_bytes
        self._join, self._broadcast = _nccl_code()
        self.group: Any = None
        self._group_of: str | None = None  # the server instance that the group was made with
        self._said_with_each: dict[str, Any] = {}

    def begin(self, facts: ServerFacts) -> None:
        if self._group_of == facts.instance:
            return
        self.group = self._group_of = None
        own = {
            "master_address": self.client.own_address(),
            "master_port": self.group_port,
            "world_size": facts.workers + 1,
        }
        said_once, self._said_with_each = announced(facts, PACKING)
        init = {"init_info": {**own, "rank_offset": 1, **said_once}}
        self.group = self._together("/init_weight_transfer_engine", init, lambda: self._join(own))
        self._group_of = facts.instance

    def forget(self) -> None:
        super().forget()
        self.group = self._group_of = None  # also frees the port, which the other sender may listen on

    def send(self, weights: Weights) -> None:
        instance, self._group_of = self._group_of, None  # after a partial broadcast the group's state is unknown
        for chunk in chunks(weights, self.chunk_bytes):
            self._together(
                "/update_weights",
                {"update_info": {**described(chunk), **self._said_with_each}},
                lambda chunk=chunk: self._broadcast(  # type: ignore[misc]
                    iter(chunk),
                    self.group,
                    src=0,
                    post_iter_func=lambda pair: pair[1],
                    buffer_size_bytes=PACKING["packed_buffer_size_bytes"],
                    num_buffers=PACKING["packed_num_buffers"],
                ),
            )
        self._group_of = instance

    def _together(self, path: str, body: dict[str, Any], own: Callable[[], Any]) -> Any:
        """Run `own` while the server handles the call, since each waits for the other; returns the result of `own`.

        If one of them fails, the other would wait forever. Its thread is abandoned, and the error is raised.
        """
        seconds = self.client.request_timeout
        mine, call = started(lambda: _on_device(own)), started(lambda: self.client.post_once(path, body))
        wait([mine, call], timeout=seconds, return_when=FIRST_EXCEPTION)
        if call.done() and (failure := call.exception()) is not None:
            raise failure
        if not mine.done():
            raise RolloutError(f"NCCL had not finished {seconds:g} s after {path} was called (vllm_request_timeout).")
        if (failure := mine.exception()) is not None:
            raise RolloutError(f"NCCL failed during {path}: {failure}") from failure
        call.result(timeout=seconds)
        return mine.result()


def _on_device(own: Callable[[], Any]) -> Any:
    """Run on the trainer's device, which a new thread does not inherit, and synchronize before and after.

    Before, because vLLM packs tensors on its own streams, which do not wait for the update that writes the tensors.
    """
    if not torch.cuda.is_available():
        return own()
    with torch.cuda.device(int(os.environ.get("LOCAL_RANK", "0"))):
        torch.cuda.synchronize()
        result = own()
        torch.cuda.synchronize()
    return result
