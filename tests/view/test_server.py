"""The viewer over HTTP: loopback, reading only, and nothing for other pages of the same browser."""

import http.client
import json
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gruppo.view.queries import Desk
from gruppo.view.server import POLICY, STATIC, host_name

Ask = Callable[..., tuple[int, dict[str, str], bytes]]


@pytest.fixture(scope="module")
def ask(desk: Desk, served: Callable[[Desk], str]) -> Ask:
    where = urlsplit(served(desk)).netloc

    def request(path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(where, timeout=20)
        connection.putrequest(method, path, skip_host=host is not None)
        for each in [] if host is None else host.split("|"):
            connection.putheader("Host", each)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return found

    return request


def test_the_page_and_its_files(ask: Ask) -> None:
    for path, kind in (("/", "text/html"), ("/static/app.js", "text/javascript"), ("/static/style.css", "text/css")):
        status, headers, body = ask(path)
        assert status == 200
        assert headers["content-type"].startswith(kind)
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
        assert body
    assert "unsafe" not in POLICY


def test_answers_are_json(ask: Ask) -> None:
    status, headers, body = ask("/api/groups?run=0&split=train&order=spread&descending=1&filter=truncated")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["total"] == 1
    status, _, body = ask("/api/groups?order=luck")
    assert status == 400
    assert "cannot be sorted by 'luck'" in json.loads(body)["error"]
    assert ask("/api/nothing")[0] == 400
    assert ask("/nothing")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_only_reading_is_allowed(ask: Ask, method: str) -> None:
    assert ask("/api/state", method)[0] in (400, 405)
    assert ask("/api/state", "HEAD")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[(own, 200) for own in ("localhost", "LOCALHOST:99", "127.0.0.1", "127.0.0.1:8123", "[::1]:8123")],
        *[
            (other, 421)
            for other in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", "[::2]:1")
        ],
        *[("localhost|evil.example", 400), ("", 421)],
    ],
)
def test_the_name_in_host_must_be_of_loopback(ask: Ask, host: str, status: int) -> None:
    assert ask("/api/state", host=host)[0] in (status, 421 if status != 200 else 200)


def test_host_names() -> None:
    names = ("localhost", "localhost:1", "[::1]", "[::1]:1", "::1", "")
    assert [host_name(name) for name in names] == ["localhost", "localhost", "[::1]", "[::1]", ":", ""]


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static//etc/passwd"]
)
def test_files_outside_of_the_page_are_not_served(ask: Ask, path: str) -> None:
    assert ask(path)[0] == 404


def test_everything_that_the_page_loads_is_in_the_package() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    sources = [page, *((STATIC / name).read_text(encoding="utf-8") for name in _own_files())]
    for source in sources:
        for scheme in ("http://", "https://", "//cdn"):
            assert scheme not in source.replace("http://www.w3.org/2000/svg", "")
    assert (STATIC / "vendor" / "uPlot.LICENSE").read_text(encoding="utf-8").startswith("The MIT License")


def test_everything_that_the_page_loads_is_in_the_wheel() -> None:
    project = tomllib.loads((STATIC.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["gruppo"]
    for path in (path for path in STATIC.rglob("*") if path.is_file()):
        own = path.relative_to(STATIC.parents[1])
        assert any(own.match(pattern) and own.parent == Path(pattern).parent for pattern in patterns), own


def test_text_reaches_the_page_as_text_only() -> None:
    """No module has a way to turn text into elements or code."""
    for name in _own_files():
        source = (STATIC / name).read_text(encoding="utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "srcdoc"):
            assert way not in source, f"{name}: {way}"


def _own_files() -> list[str]:
    return [path.name for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".svg")]


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_a_missing_server_is_named(desk: Desk, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from gruppo.errors import ConfigError
    from gruppo.view.server import serve

    monkeypatch.setattr("uvicorn.Server.run", lambda server: pytest.fail("it serves"))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r'pip install "starlette.*" "uvicorn.*"'):
        serve(desk)


def test_a_port_that_is_taken_is_told_once(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    from gruppo.errors import ConfigError
    from gruppo.view.server import HOST, serve

    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} cannot be used"):
            serve(desk, port)
    assert capfd.readouterr() == ("", "")


def test_half_a_surrogate_pair_does_not_break_an_answer(ask: Ask, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"overview": lambda asked: {"name": "\ud800"}}
    monkeypatch.setattr(desk, "answers", answers)
    status, _, body = ask("/api/overview")
    assert (status, json.loads(body)) == (200, {"name": "?"})
