"""What a gateway answers before its parties are ready: 503 with the cause, so that no client waits for nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from private_llm_gateway.connections import Connection
from private_llm_gateway.errors import SERVER, ApiError
from private_llm_gateway.guard import Guard
from private_llm_gateway.settings import GatewaySettings


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
        told = ApiError(
            503, f"the gateway is starting: {why}", SERVER, None, "party_unavailable", settings.retry_after_s
        )
        await JSONResponse(told.body(), told.status, told.headers())(scope, receive, send)

    config = uvicorn.Config(
        Guard(app, settings), log_level="warning", access_log=False, server_header=False, lifespan="off",
        limit_concurrency=settings.connections, timeout_graceful_shutdown=1, http=Connection, loop="asyncio",
    )  # fmt: skip
    server = uvicorn.Server(config)
    own = listening.dup()  # closed by the server; the socket itself goes on listening
    thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, name="starting", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        server.should_exit = True
        thread.join()
