"""Serves the answers over HTTP: on loopback only, read-only, and not accessible to other pages in the same browser.

A page from another site can make the browser send requests to a server on this machine. It cannot read the answers
unless its host name resolves to this machine (DNS rebinding); therefore `Host` must name loopback.
"""

import json
import logging
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.errors import ConfigError, DataError, install_line
from gruppo.view.queries import Desk, Question

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["STATIC", "make_app", "serve"]

STATIC = Path(__file__).parent / "static"
HOST = "127.0.0.1"
OWN_NAMES = {"127.0.0.1", "localhost", "[::1]"}
METHODS = {"GET", "HEAD"}

# The page loads only its own files, and no text in it can become code, a form or a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def host_name(header: str) -> str:
    """The name in a `Host` header, without the port.

    Example:
        host_name("localhost:8123") == "localhost"; host_name("[::1]:8123") == "[::1]"
    """
    return header.rpartition(":")[0] if ":" in header.rpartition("]")[2] else header


class Guard:
    """Middleware that admits only GET and HEAD requests addressed to loopback, and adds HEADERS to every response."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket is rejected before it opens
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if scope["method"] not in METHODS:
            refusal = PlainTextResponse("This page is read-only.", 405, {"Allow": "GET, HEAD"})
            await refusal(scope, receive, with_headers)
        elif len(hosts) != 1 or host_name(hosts[0]) not in OWN_NAMES:
            refusal = PlainTextResponse("Open this page as 127.0.0.1 or localhost.", 421)
            await refusal(scope, receive, with_headers)
        else:
            await self.app(scope, receive, with_headers)


def make_app(desk: Desk) -> "Starlette":
    """The Starlette application: the page, its files, and `/api/<question>`."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.responses import FileResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    def page(request: "Request") -> "Response":
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")

    async def api(request: "Request") -> "Response":
        values: dict[str, list[str]] = {}
        for name, value in request.query_params.multi_items():
            values.setdefault(name, []).append(value)
        try:
            answer: Any = await run_in_threadpool(desk.answer, request.path_params["question"], Question(values))
            status = 200
        except (DataError, ConfigError) as error:
            answer, status = {"error": str(error)}, 400
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # A lone surrogate cannot be encoded as UTF-8, and JSON from an untrusted file may contain one.
        return Response(text.encode("utf-8", "replace"), status, media_type="application/json")

    routes = [
        Route("/", page),
        Route("/api/{question}", api),
        Mount("/static", StaticFiles(directory=STATIC, follow_symlink=False)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard)])


def serve(desk: Desk, port: int = 0, *, ready: Callable[[str], None] | None = None, open_page: bool = False) -> None:
    """Serve until interrupted; `ready` is called with the address. Runs are read in a background thread meanwhile."""
    try:
        import starlette  # noqa: F401 - make_app needs it
        import uvicorn
    except ImportError as error:
        raise ConfigError(f"The page needs a web server: {install_line('view')}") from error

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            log = logging.getLogger("uvicorn.error")
            log.disabled = True  # a port that cannot be used is reported below, once
            try:
                await super().startup(sockets)
            finally:
                log.disabled = False
            if not self.should_exit:
                address = f"http://{HOST}:{self.servers[0].sockets[0].getsockname()[1]}/"
                if ready is not None:
                    ready(address)
                if open_page:
                    webbrowser.open(address)

    threading.Thread(target=desk.warm_up, name="gruppo-view-index", daemon=True).start()
    config = uvicorn.Config(make_app(desk), host=HOST, port=port, log_level="warning", server_header=False)
    try:
        Server(config).run()
    except SystemExit as error:  # raised by uvicorn when it cannot bind
        raise ConfigError(f"Port {port} cannot be used; leave --port out to take a free one.") from error
