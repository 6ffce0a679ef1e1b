"""The client against a server that is down, slow, broken or another one: a clear error or a retry, never a hang."""

import threading
import time
from http.client import HTTPConnection
from typing import Any

import pytest

from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.vllm import client as client_module
from gruppo.rollout.vllm.client import ServerDownError, ServerRefusedError, VLLMClient
from tests.rollout.vllm_doubles import Double, serving


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.02)


@pytest.fixture
def double() -> Any:
    with serving("org/model") as double:
        yield double


def client_of(double: Double, timeout: float = 5.0) -> VLLMClient:
    return VLLMClient(double.url, request_timeout=timeout)


def test_what_a_server_says_of_itself(double: Double) -> None:
    facts = client_of(double).facts()
    assert (facts.model, facts.root, facts.version) == ("org/model", "org/model", "0.32.0")
    assert (facts.context_length, facts.logprobs_mode, facts.transfer) == (128, "processed_logprobs", "ipc")
    assert (facts.unpickles, facts.workers, facts.instance) == (True, 1, double.instance)


MODEL = {"logprobs_mode": "x", "generation_config": "vllm", "override_generation_config": {}}
KNOWN = {"vllm_config": {"instance_id": "1", "model_config": MODEL}, "vllm_env": {}}
ANSWERS: dict[str, Any] = {
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "m", "max_model_len": 8}]},
    "/get_world_size": {"world_size": 1},
    "/server_info?config_format=json": KNOWN,
}
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"/version": {}}, "is not a vLLM server"),
    (
        {"/version": {"version": "0.10.2"}, "/server_info?config_format=json": {}},
        "vLLM 0.10.2 of the server",
    ),
    ({"/version": {"version": "0.34.0"}, "/v1/models": {}}, "vLLM 0.34.0 of the server at .* is not supported"),
    ({"/v1/models": {}}, r"does not report its settings as vLLM 0.24 to 0.33 does \(KeyError: 'data'\)"),
    ({"/v1/models": {"data": []}}, "does not report its settings .*IndexError"),
    ({"/get_world_size": {}}, "does not report its settings .*world_size"),
    ({"/server_info?config_format=json": {**KNOWN, "vllm_config": "a text"}}, "does not report its settings"),
    ({"/server_info?config_format=json": {"vllm_config": KNOWN["vllm_config"]}}, "KeyError: 'vllm_env'"),
]


@pytest.mark.parametrize(("answers", "message"), OTHERS)
def test_a_server_that_speaks_otherwise(answers: dict[str, Any], message: str) -> None:
    client = VLLMClient("http://127.0.0.1:8000", request_timeout=1.0)
    client.get = (ANSWERS | answers).__getitem__  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=message):
        client.facts()


def test_a_server_that_is_none(double: Double) -> None:
    double.broken["/version"] = [404]
    with pytest.raises(ConfigError, match="has no /version: it is not a vLLM server"):
        client_of(double).facts()


def test_a_slow_health_check_names_no_setting(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEALTH_SECONDS", 0.1)
    double.slow["/health"] = 0.5
    with pytest.raises(ServerDownError) as found:
        client_of(double).wait_until_up(0.0)
    assert "had no answer within 0.1 s.)" in str(found.value)


def test_a_restart_shows(double: Double) -> None:
    client = client_of(double)
    before = client.instance()
    assert client.instance() == before
    double.restart()
    assert client.instance() != before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "must be a URL"),
        ("ftp://x", "must be a URL"),
        ("", "must be a URL"),
        ("http://x?key=1", "must be a URL"),
        ("http://x:99999", "is not a URL"),
        ("http://[::1", "is not a URL"),
    ],
)
def test_an_address_that_is_none(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VLLMClient(url, request_timeout=1.0)


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="user name or a password") as error:
        VLLMClient("http://user:secret@127.0.0.1:8000", request_timeout=1.0)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.3.0.1", True),
        ("http://localhost:9/", True),
        ("http://[::1]:8000", True),
        ("http://0.0.0.0:8000", False),
        ("http://10.0.0.2:8000", False),
        ("https://gpu.example.org", False),
    ],
)
def test_what_stays_on_this_machine(url: str, loopback: bool) -> None:
    assert VLLMClient(url, request_timeout=1.0).is_loopback is loopback


def test_a_path_before_the_endpoints(double: Double) -> None:
    client = VLLMClient(f"{double.url}/prefix/", request_timeout=5.0)
    with pytest.raises(ServerRefusedError, match="/prefix/v1/models: status 404"):
        client.get("/v1/models")
    assert double.log[-1][0] == "/prefix/v1/models"


# ---- down


def test_a_server_that_is_not_there(double: Double) -> None:
    double.stop()
    client, start = client_of(double), time.monotonic()
    with pytest.raises(ServerDownError, match=r"No vLLM server answered at .* within 0.2 s .*gruppo vllm-serve"):
        client.wait_until_up(0.2)
    assert time.monotonic() - start < 2
    with pytest.raises(ConnectionError, match=r"GET .*/v1/models failed"):
        client.get("/v1/models")
    double.start()


def test_a_server_that_comes_up_is_waited_for(double: Double) -> None:
    double.broken["/health"] = [503, 500, 404]
    client_of(double).wait_until_up(5.0)
    assert len(double.calls("/health")) == 4


def test_a_server_that_never_becomes_healthy(double: Double) -> None:
    double.broken["/health"] = [500] * 10_000
    with pytest.raises(ServerDownError, match="status 500"):
        client_of(double).wait_until_up(0.2)


def test_waiting_can_be_ended(double: Double) -> None:
    double.broken["/health"] = [503] * 10_000

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client_of(double).wait_until_up(60.0, stop)


# ---- slow


def test_every_call_has_a_time_limit(double: Double) -> None:
    double.slow = {"/v1/models": 3.0, "/update_weights": 3.0}
    client, start = client_of(double, timeout=0.2), time.monotonic()
    with pytest.raises(ServerDownError, match=r"had no answer within 0.2 s \(vllm_request_timeout\)"):
        client.get("/v1/models")
    with pytest.raises(ServerDownError, match="had no answer within"):
        client.post_once("/update_weights", {"update_info": {}})
    assert time.monotonic() - start < 2
    assert len(double.calls("/v1/models")) == 1, "whoever is too slow is not asked twice"


DROPS = {
    "status": (b"", b"HTTP/1.1 200 " + b"O" * 99),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-Long: " + b"x" * 99),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", b" " * 99),
    "body until the end": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b" " * 99),
    "chunk sizes": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0" * 99),
}


@pytest.mark.parametrize("part", DROPS)
def test_an_answer_that_comes_in_drops_does_not_get_more_time(
    part: str, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.rollout.vllm_doubles import _Handler

    def drops(self: Any, method: str, body: Any) -> None:
        at_once, slowly = DROPS[part]
        self.close_connection = True
        try:
            for sent in [at_once, *(slowly[i : i + 1] for i in range(len(slowly)))]:
                self.wfile.write(sent)
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            return

    monkeypatch.setattr(_Handler, "_reply", drops)
    start = time.monotonic()
    with pytest.raises(ServerDownError, match=r"had no answer within 0.3 s"):
        client_of(double, timeout=0.3).get("/v1/models")
    assert time.monotonic() - start < 2


def test_connecting_has_the_same_limit(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have many addresses, none of which answers; each of them is tried for as long as all may take."""
    connect, closed = HTTPConnection.connect, threading.Event()

    def slow(self: Any) -> None:
        time.sleep(2.0)
        connect(self)

    def close(self: Any) -> None:
        if self.sock is not None:
            self.sock.close()
            closed.set()

    monkeypatch.setattr(HTTPConnection, "connect", slow)
    monkeypatch.setattr(HTTPConnection, "close", close)
    client, start = client_of(double, timeout=0.2), time.monotonic()
    with pytest.raises(ServerDownError, match=r"had no answer within 0\.2 s"):
        client.get("/v1/models")
    assert time.monotonic() - start < 1.8
    assert closed.wait(10.0), "a connection that comes too late is not kept"
    assert not double.log


# ---- broken


@pytest.mark.parametrize("status", [502, 503, 504])
def test_questions_are_asked_again(double: Double, status: int) -> None:
    double.broken = {"/v1/models": [status, status], "/v1/completions": [status]}
    client = client_of(double)
    assert client.get("/v1/models")["data"]
    body = {"model": "org/model", "prompt": [9], "n": 1, "max_tokens": 2, "return_token_ids": True, "seed": 1}
    assert client.complete(body)["choices"]
    assert len(double.calls("/v1/models")) == 3
    assert len(double.calls("/v1/completions")) == 2


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("status", [500, 503])
def test_what_changes_the_server_is_called_once(double: Double, path: str, status: int) -> None:
    double.broken = {path: [status]}
    with pytest.raises(RolloutError, match=f"{path}: status {status}. broken on purpose"):
        client_of(double).post_once(path, {"update_info": {}})
    assert len(double.calls(path)) == 1


def test_a_refusal_says_why_and_is_not_repeated(double: Double) -> None:
    body = {"model": "another", "prompt": [9], "n": 1, "max_tokens": 2, "return_token_ids": True}
    with pytest.raises(ServerRefusedError, match="The model `another` does not exist"):
        client_of(double).complete(body)
    assert len(double.calls("/v1/completions")) == 1


def test_a_server_without_dev_mode(double: Double) -> None:
    double.dev_mode = False
    with pytest.raises(ConfigError, match=r"VLLM_SERVER_DEV_MODE=1.*gruppo vllm-serve"):
        client_of(double).facts()


def test_something_else_that_answers(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(double, "answer", lambda *call: (200, ["not", "vLLM"]))
    with pytest.raises(RolloutError, match="not an object"):
        client_of(double).get("/v1/models")
    monkeypatch.setattr(double, "answer", lambda *call: (200, {}))
    with pytest.raises(RolloutError, match="returned no choices"):
        client_of(double).complete({})


def test_the_address_that_the_server_sees(double: Double) -> None:
    assert client_of(double).own_address() == "127.0.0.1"
    double.stop()
    with pytest.raises(ServerDownError, match="cannot be reached"):
        client_of(double).own_address()
    double.start()
