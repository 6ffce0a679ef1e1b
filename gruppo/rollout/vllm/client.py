"""HTTP to a stock vLLM server. This is the only module of the package that opens connections itself.

Every call has a time limit on its total duration, from resolving the address to the last byte, not only between two
packets. Calls without side effects (`get`, and completions, whose seeds make them repeatable) are retried if the
server does not answer. Calls that change the server, in particular weight updates, are made once: if one fails, it is
unknown whether it took effect, and the caller has to start over.
"""

import http.client
import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.vllm.threads import started
from gruppo.rollout.vllm.versions import check_version, supported

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
HEALTH_SECONDS = 5.0  # a server that is up answers at once
RETRIES = 3
BUSY = (502, 503, 504)  # temporarily unavailable; every other status is an answer
READ_BYTES = 1 << 20
BOTH_WAYS = 2  # socket.SHUT_RDWR; `socket` is not imported, since with it this module could also listen


class ServerDownError(RolloutError, ConnectionError):
    """The server did not answer, or not in time."""


class ServerRefusedError(RolloutError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServerFacts:
    """What a server reports about itself.

    `instance` is generated whenever a server starts: if it has changed, the server has lost the weights it was sent.
    """

    instance: str
    version: str
    model: str  # the model name to use in requests
    root: str  # the folder or name the model was loaded from
    context_length: int
    logprobs_mode: str
    transfer: str | None  # how weights can be sent: "ipc", "nccl"; None: not at all
    unpickles: bool  # VLLM_ALLOW_INSECURE_SERIALIZATION
    workers: int
    api_processes: int = 1  # behind one port; each has its own instance id
    generation_config: str = "vllm"  # where defaults of sampling settings come from; "vllm": they are neutral
    overrides: bool = False  # of these defaults, by --override-generation-config
    connector: str | None = None  # the KV connector, which stores KV cache outside the engine


class Line:
    """A set of calls that can be cancelled together: whoever waits for an answer gets an error at once.

    The server sees that the connection is closed, and aborts the request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[Any] = set()
        self._given_up = threading.Event()

    def join(self, connected: Any) -> None:
        """Add a connection; raises if the line has been cancelled."""
        with self._lock:
            if self._given_up.is_set():
                raise ConnectionAbortedError("the call was cancelled")
            self._sockets.add(connected)

    def leave(self, connected: Any) -> None:
        with self._lock:
            self._sockets.discard(connected)

    def hang_up(self) -> None:
        with self._lock:
            self._given_up.set()
            for connected in self._sockets:
                with suppress(OSError):  # the other side may have closed it already
                    connected.shutdown(BOTH_WAYS)

    def sleep(self, seconds: float) -> bool:
        """Sleep, but return early if the line is cancelled; returns whether it has been."""
        return self._given_up.wait(seconds)


class VLLMClient:
    """A client of one server.

    Example:
        client = VLLMClient("http://127.0.0.1:8000", request_timeout=600.0)
        client.wait_until_up(240.0)
        client.facts().model -> "Qwen/Qwen2.5-0.5B"
    """

    def __init__(self, base_url: str, *, request_timeout: float):
        self.url = base_url.rstrip("/")
        self.host, self._port, self._prefix, self._secure = _parts_of(base_url)
        self.request_timeout = request_timeout

    @property
    def is_loopback(self) -> bool:
        """Whether traffic stays on this machine."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:  # a host name, which may resolve to anything
            return False

    # ---- what a trainer asks

    def wait_until_up(self, seconds: float, pause: Callable[[], None] = lambda: None) -> None:
        """Wait until the server is ready to answer, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while True:
            pause()
            try:
                self._call("GET", "/health", None, HEALTH_SECONDS)
                return
            except (ServerDownError, ServerRefusedError) as error:
                if time.monotonic() >= deadline:
                    raise ServerDownError(
                        f"No vLLM server answered at {self.url} within {seconds:g} s ({error}). Start one with "
                        "`gruppo vllm-serve MODEL`, or set vllm_server_host, vllm_server_port or vllm_server_timeout."
                    ) from error
            time.sleep(min(POLL_SECONDS, max(deadline - time.monotonic(), 0.0)))

    def facts(self) -> ServerFacts:
        """What the server reports about itself; raises if that lacks something a trainer needs."""
        version = self._version()
        try:
            info = self.get("/server_info?config_format=json")
        except ServerRefusedError as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"The server at {self.url} has no /server_info: it was started without VLLM_SERVER_DEV_MODE=1 and "
                "does not accept weights. Start it with `gruppo vllm-serve MODEL`."
            ) from error
        models, workers = self.get("/v1/models"), self.get("/get_world_size")
        with self._in_known_words():
            card, config = models["data"][0], info["vllm_config"]
            transfer, variables = config.get("weight_transfer_config") or {}, info["vllm_env"]
            parallel = config.get("parallel_config") or {}
            return ServerFacts(
                instance=str(config["instance_id"]),
                version=version,
                model=card["id"],
                root=card.get("root") or card["id"],
                context_length=int(card["max_model_len"]),
                logprobs_mode=str(config["model_config"]["logprobs_mode"]),
                transfer=transfer.get("backend"),
                unpickles=str(variables.get("VLLM_ALLOW_INSECURE_SERIALIZATION", False)).lower() in ("1", "true"),
                workers=int(workers["world_size"]),
                generation_config=str(config["model_config"]["generation_config"]),
                overrides=bool(config["model_config"]["override_generation_config"]),
                api_processes=int(parallel.get("_api_process_count", 1)),
                connector=(config.get("kv_transfer_config") or {}).get("kv_connector"),
            )

    def _version(self) -> str:
        """The server's release; raises if it is not a supported one."""
        try:
            said = self.get("/version").get("version")
        except ServerRefusedError as error:
            if error.status != 404:
                raise
            said = None
        if said is None:
            raise ConfigError(f"The server at {self.url} has no /version: it is not a vLLM server.")
        check_version(str(said), f"the server at {self.url}")
        return str(said)

    @contextmanager
    def _in_known_words(self) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"The server at {self.url} does not report its settings as vLLM {supported()} does "
                f"({type(error).__name__}: {error}). Start it with `gruppo vllm-serve MODEL`."
            ) from error

    def instance(self) -> str:
        """The instance id of the server that answers; it changes when the server restarts."""
        info = self.get("/server_info?config_format=json")
        with self._in_known_words():
            return str(info["vllm_config"]["instance_id"])

    def complete(self, body: Mapping[str, Any], line: Line | None = None) -> dict[str, Any]:
        """Sample; retried if the server does not answer, unless the line is cancelled or the call timed out."""
        reply = self._repeated("POST", "/v1/completions", body, line)
        if "choices" not in reply:
            raise RolloutError(f"{self.url}/v1/completions returned no choices: {str(reply)[:500]}")
        return reply

    def get(self, path: str) -> dict[str, Any]:
        return self._repeated("GET", path, None)

    def post_once(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A call that changes the server: never retried."""
        return self._call("POST", path, body or {}, self.request_timeout)

    def own_address(self) -> str:
        """The address of this machine as the server sees it."""
        connection = self._connection(HEALTH_SECONDS)
        try:
            return str(_connected(connection, time.monotonic() + HEALTH_SECONDS).getsockname()[0])
        except OSError as error:
            raise ServerDownError(f"{self.url} cannot be reached: {error}") from error
        finally:
            connection.close()

    # ---- calls

    def _repeated(
        self, method: str, path: str, body: Mapping[str, Any] | None, line: Line | None = None
    ) -> dict[str, Any]:
        line = line or Line()
        for attempt in range(1, RETRIES + 1):
            try:
                return self._call(method, path, body, self.request_timeout, line)
            except ServerDownError as error:
                if attempt == RETRIES or isinstance(error.__cause__, TimeoutError) or line.sleep(0):
                    raise
                logger.warning(f"{error} Retrying ({attempt} of {RETRIES - 1}).")
                line.sleep(POLL_SECONDS * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self.host, self._port, timeout=timeout)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float, line: Line | None = None
    ) -> dict[str, Any]:
        where, deadline = f"{method} {self.url}{path}", time.monotonic() + seconds
        connection, connected, line = self._connection(seconds), None, line or Line()
        try:
            connected = _connected(connection, deadline)
            line.join(connected)
            payload = None if body is None else json.dumps(body).encode()
            headers = {} if payload is None else {"Content-Type": "application/json"}
            connection.response_class = _response_by(deadline)
            connection.request(method, self._prefix + path, payload, headers)
            response = connection.getresponse()
            text = _read(response)
        except TimeoutError as error:
            setting = " (vllm_request_timeout)" if seconds == self.request_timeout else ""
            raise ServerDownError(f"{where} had no answer within {seconds:g} s{setting}.") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerDownError(f"{where} failed: {type(error).__name__}: {error}.") from error
        finally:
            line.leave(connected)
            connection.close()
        if response.status in BUSY:
            raise ServerDownError(f"{where}: status {response.status}. {_message(text)}")
        if response.status != 200:
            raise ServerRefusedError(f"{where}: status {response.status}. {_message(text)}", response.status)
        return _parsed(text, where)


def _parts_of(url: str) -> tuple[str, int | None, str, bool]:
    """Host, port, path, and whether it is https; raises for anything else in the URL, which would not be used."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is none
        raise ConfigError(f"vllm_server_base_url={url!r} is not a URL such as http://127.0.0.1:8000.") from None
    if "@" in parts.netloc:  # not shown: it may be a password
        raise ConfigError("vllm_server_base_url contains a user name or a password, which is not supported.")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(f"vllm_server_base_url={url!r} must be a URL such as http://127.0.0.1:8000.")
    return host, port, parts.path.rstrip("/"), parts.scheme == "https"


def _connected(connection: http.client.HTTPConnection, deadline: float) -> Any:
    """The connected socket. A thread connects: resolving a name and trying its addresses has no overall time limit."""
    attempt = started(connection.connect)
    try:
        attempt.result(max(deadline - time.monotonic(), 0.0))
        connection.sock.settimeout(_left(deadline))
    except TimeoutError:
        attempt.add_done_callback(lambda _: connection.close())
        raise
    return connection.sock


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the call timed out")
    return left


class _InTime(io.RawIOBase):
    """Reads from a socket until a deadline, which a peer cannot extend by sending a few bytes at a time."""

    def __init__(self, received: Any, connected: Any, deadline: float):
        self.received, self.connected, self.deadline = received, connected, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self.connected.settimeout(_left(self.deadline))
        count: int | None = self.received.readinto(buffer)
        return count

    def close(self) -> None:
        self.received.close()
        super().close()


def _response_by(deadline: float) -> type[http.client.HTTPResponse]:
    """A response class whose status, headers and body must arrive before the deadline."""

    class Response(http.client.HTTPResponse):
        def __init__(self, sock: Any, *args: Any, **settings: Any):
            super().__init__(sock, *args, **settings)
            self.fp = io.BufferedReader(_InTime(self.fp.detach(), sock, deadline))

    return Response


def _read(response: http.client.HTTPResponse) -> bytes:
    parts = []
    while part := response.read1(READ_BYTES):
        parts.append(part)
    if response.length:  # read1 does not raise if the connection closes early
        raise http.client.IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        reply = json.loads(text)
    except ValueError as error:
        raise RolloutError(f"{where} did not return JSON: {text[:200]!r}") from error
    if not isinstance(reply, dict):
        raise RolloutError(f"{where} returned {str(reply)[:200]}, not an object.")
    return reply


def _message(text: bytes) -> str:
    """The message of an error response, in the formats of vLLM and FastAPI."""
    try:
        reply = json.loads(text)
        error = reply.get("error", reply.get("detail", reply))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
    except (ValueError, AttributeError):
        return text.decode(errors="replace")[:2000]
