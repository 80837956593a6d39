"""A gateway that speaks what the chat page asks for, with answers by rule: what the page's tests talk to."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from private_llm_gateway.app import page_router
from sse_starlette import EventSourceResponse

TOKEN = "token-for-tests"
ATTACK = "<img src=/attack onerror=\"document.title='broken into'\"><script>document.title='broken into'</script>"
INFO: dict[str, Any] = {
    "model": "tiny-model",
    "protocol": "trio",
    "parties": [
        {"name": "party 0", "host": "127.0.0.1:7000", "holds": "keys of random streams, no share of the text"},
        {"name": "party 1", "host": "127.0.0.1:7001", "holds": "one share of the text and of the weights"},
        {"name": "party 2", "host": "127.0.0.1:7002", "holds": "the other share"},
    ],
    "sentence": "No single party learns your text, the answer or the weights, unless two of them work together.",
    "one_machine": True,
}


@dataclass
class Fake:
    """What was asked, and what becomes of it. token: "" for a gateway that wants none."""

    token: str = TOKEN
    info: dict[str, Any] = field(default_factory=lambda: dict(INFO))
    asked: list[dict[str, Any]] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    gone: int = 0
    """Answers that the page gave up."""
    go_on: threading.Event = field(default_factory=threading.Event)
    """An answer to "slow" waits for this after its second piece."""

    def app(self) -> FastAPI:
        """The server."""
        app = FastAPI()
        app.include_router(page_router)

        @app.middleware("http")
        async def guard(request: Request, call_next: Any) -> Response:
            self.addresses.append(str(request.url))
            wanted = {"", f"Bearer {self.token}"} if self.token == "" else {f"Bearer {self.token}"}
            if request.url.path.startswith("/v1") and request.headers.get("authorization", "") not in wanted:
                return refused(401, "Incorrect API key provided: want 'Authorization: Bearer TOKEN'")
            answer: Response = await call_next(request)
            return answer

        @app.get("/v1/private/info")
        def info() -> dict[str, Any]:
            return self.info

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.asked.append(body)
            text = body["messages"][-1]["content"]
            if text == "nearly full" and body.get("max_tokens", 0) > 9:
                return refused(400, "Too long.", code="context_length_exceeded")
            if text == "full":
                return refused(400, "Too long.", code="context_length_exceeded")
            if text == "busy":
                return refused(429, "Too many requests wait.", {"Retry-After": "7"})
            return EventSourceResponse(self._answer(text), ping=1)

        return app

    async def _answer(self, text: str) -> AsyncIterator[dict[str, str]]:
        pieces = {
            "attack": [ATTACK[:20], ATTACK[20:]],
            "endless": [f"word{i} " for i in range(2000)],
            "fail": ["this ", "was ", "said "],
            "cut": ["half "],
            "end": ["half "],
        }.get(text, ["The ", "capital ", "is ", "Pâris", ".\n", "  Next ", "line."])
        try:
            for count, piece in enumerate(pieces, 1):
                await asyncio.sleep(0.02)
                while (text == "late" or (text == "slow" and count > 2)) and not self.go_on.is_set():
                    await asyncio.sleep(0.01)
                yield data(chunk({"content": piece}, count))
            if text == "fail":
                yield data({"error": {"message": f"Party 1 stopped. {ATTACK}", "type": "server_error"}})
            elif text == "end":
                yield data({"error": {"message": "the gateway was stopped", "type": "server_error"}})
            elif text != "cut":
                yield data(chunk({}, len(pieces), "length" if text == "long" else "stop"))
                usage = {"prompt_tokens": 9, "completion_tokens": len(pieces), "total_tokens": 9 + len(pieces)}
                yield data({**chunk({}, len(pieces)), "choices": [], "usage": usage})
                yield {"data": "[DONE]"}
        except (asyncio.CancelledError, GeneratorExit):  # the second where the server was sending as the page left
            self.gone += 1
            raise


def data(value: object) -> dict[str, str]:
    return {"data": json.dumps(value)}


def chunk(delta: dict[str, str], tokens: int, finish: str | None = None) -> dict[str, Any]:
    """One chunk, with what it cost so far."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    spent = {"bytes": 1_234_567 * tokens, "rounds": 300 * tokens, "tokens_per_s": 3.456}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": INFO["model"]}
    return {**head, "choices": [choice], "private_llm": spent}


def refused(status: int, words: str, headers: dict[str, str] | None = None, code: str | None = None) -> JSONResponse:
    """OpenAI's error envelope."""
    error = {"message": words, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
