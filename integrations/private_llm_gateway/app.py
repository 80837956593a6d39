"""The gateway as an ASGI application, and serving it."""

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib import resources
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from private_llm.errors import ConfigError
from private_llm_gateway.endpoints import Endpoints
from private_llm_gateway.errors import SERVER, ApiError, in_words
from private_llm_gateway.guard import Connection, Guard
from private_llm_gateway.request_executor import RequestExecutor
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings, bound_socket
from private_llm_gateway.usage import GatewayMetrics


def create_app(models: Mapping[str, Served], settings: GatewaySettings) -> FastAPI:
    """The application over models by name, and the chat page. Raises ConfigError without models."""
    if not models:
        raise ConfigError("models: got none; want at least one")
    known = dict(models)
    runner = RequestExecutor(known, settings)

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        runner.close()

    app = FastAPI(title="private-llm", docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    app.state.runner = runner
    app.include_router(Endpoints(known, settings, runner, GatewayMetrics(known, runner)).router)
    app.include_router(page_router)
    app.add_middleware(Guard, settings=settings)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _other_error)
    return app


class Server(uvicorn.Server):
    """A server that calls `ready` in its event loop when it answers, `ending` there as soon as a signal has come."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._ending = ready, ending
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn. Called by the signal, maybe in the middle of anything, so what is to be done comes later."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending)


def server_of(app: FastAPI, settings: GatewaySettings, ready: Callable[[], None] = lambda: None) -> Server:
    """What serves the application. Requests are not logged: addresses and times are in the metrics."""
    runner: RequestExecutor = app.state.runner
    return Server(_config(app, settings, lifespan="on", timeout_graceful_shutdown=5), ready, runner.stop)


def _config(app: ASGIApp, settings: GatewaySettings, **more: Any) -> uvicorn.Config:  # noqa: ANN401 - uvicorn's own
    return uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_keep_alive=30, ws="none",
        limit_concurrency=settings.connections, http=Connection, loop="asyncio", **more,
    )  # fmt: skip


def serve(
    app: FastAPI, settings: GatewaySettings, listening: socket.socket | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Serve until a signal. listening: of `bound_socket`, made before a model was started. ready: called as soon as
    requests are answered. Raises ConfigError.
    """
    at = listening or bound_socket(settings)

    def answering() -> None:
        gc.freeze()  # models stay: to look through them for garbage takes 0.3 s, in which nobody is answered
        ready()

    try:
        server_of(app, settings, answering).run(sockets=[at])
    finally:
        at.close()


async def _http_error(request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    words = {
        404: ("there is nothing at this address; the base URL of clients ends in /v1", "unknown_url"),
        405: (f"this address wants another method ({(headers or {}).get('Allow', 'POST')})", "method_not_allowed"),
    }
    message, code = words.get(status, ("the request was refused", None))
    return JSONResponse(ApiError(status, message, code=code).body(), status, headers)


async def _other_error(request: Request, error: Exception) -> Response:
    return in_words(error).response()


# -- answers before the parties are ready: 503 with the cause ---------------------------------------------------------
@contextlib.contextmanager
def answering_meanwhile(settings: GatewaySettings, listening: socket.socket) -> Iterator[Callable[[str], None]]:
    """Answer requests at `listening` with 503 while what is inside runs; the function takes what is waited for now."""
    why = "it has just begun"

    def say(text: str) -> None:
        nonlocal why
        why = text

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":  # asks for no token, so it names nobody
            await JSONResponse({"status": "starting"}, 503)(scope, receive, send)
            return
        told = f"the gateway is starting: {why}"
        error = ApiError(503, told, SERVER, None, "party_unavailable", settings.retry_after_s)
        await error.response()(scope, receive, send)

    server = uvicorn.Server(_config(Guard(app, settings), settings, lifespan="off", timeout_graceful_shutdown=1))
    own = listening.dup()  # closed by the server; the socket itself goes on listening
    thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, name="starting", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        server.should_exit = True
        thread.join()


# -- the chat page: files of this package, with headers that let it load nothing from elsewhere ------------------------
# The page itself holds no secret and needs no token; what it asks of the gateway does. Its text is inserted as text,
# and browsers that know trusted types refuse anything else.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No inline script or style, nothing from another origin, no frame around it."""

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def _read() -> dict[str, tuple[bytes, str]]:
    folder = resources.files("private_llm_gateway") / "page"
    ending = {file.name: file.name[file.name.rfind(".") :] for file in folder.iterdir()}
    return {name: ((folder / name).read_bytes(), _TYPES[end]) for name, end in ending.items() if end in _TYPES}


_FILES = _read()
page_router = APIRouter(include_in_schema=False)  # `/` and `/page/...`, without a token


@page_router.get("/")
def index() -> Response:
    """The page."""
    return file("index.html")


@page_router.get("/page/{name}")
def file(name: str) -> Response:
    """What the page loads; 404 for anything else."""
    found = _FILES.get(name)
    if found is None:
        return Response("no such file", 404, HEADERS, "text/plain")
    return Response(found[0], 200, HEADERS, found[1])
