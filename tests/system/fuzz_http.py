"""What `fuzz.py` does to the gateway: bodies with any value in any field of any endpoint, and HTTP that is none.

Most cases are bodies, given to the application as ASGI messages in pieces. The others are bytes on a connection to a
server: changed request lines, headers, lengths and chunks, requests one behind the other, and connections that end or
are reset anywhere. The model is tiny, and every answer short. An answer must be the API's: success, an error that
the caller has made, in the envelope, or "not ready"; never an unforeseen error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import traceback
from importlib import resources
from random import Random
from typing import Any

from fuzz_mutators import any_text, any_value, changed, edited, edits, encoded
from fuzz_wire import Failure
from private_llm_gateway import app, endpoints
from private_llm_gateway.app import bound_socket, create_app, server_of
from private_llm_gateway.errors import ApiError, in_words
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_hf import patch
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from private_llm.config import PrivateConfig

TOKEN = "a-token-of-fuzzing"
_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
          "max_position_embeddings": 48, "vocab_size": 4096}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", None]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
CHAT = {
    "model": "tiny", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 2, "temperature": 0.5,
    "top_p": 0.9, "seed": 7, "n": 1, "stop": ["."], "stream": False, "stream_options": None, "logprobs": True,
    "top_logprobs": 2, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1}, "user": "u",
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "tools": [],
}  # fmt: skip
COMPLETION = {
    "model": "tiny", "prompt": ["Once upon", [5, 6]], "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 0,
    "n": 1, "stop": None, "stream": False, "suffix": None, "best_of": 1,
}  # fmt: skip
EMBEDDINGS = {"model": "vectors", "input": ["Once", "upon"], "encoding_format": "float", "dimensions": 16}
POSTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/embeddings": EMBEDDINGS}
GETS = ("/v1/models", "/v1/models/tiny", "/v1/private/info", "/health", "/metrics", "/v1/models/%ff%00", "/", "/x")
REFUSED = {400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 417, 429, 431, 499, 503, 505}
"""Statuses that say whose fault it is; 503: not ready."""
_WAIT_S = 5.0


class Http:
    """A gateway in this process."""

    def __init__(self) -> None:
        config = PrivateConfig(protocol="plain", insecure=True, party_mode="threads")
        words = AutoTokenizer.from_pretrained(str(resources.files("private_llm_hf").joinpath("demo_model")))
        models = (("tiny", LlamaForCausalLM(LlamaConfig(**_SIZES))), ("vectors", BertModel(BertConfig(**_SIZES))))
        self._models = {name: Served(name, SessionPool(patch(model, config), 1), words) for name, model in models}
        listening = bound_socket(GatewaySettings(port=0, token=TOKEN))
        settings = GatewaySettings(port=listening.getsockname()[1], token=TOKEN, body_s=1.0)
        self._address = listening.getsockname()
        self._server = server_of(create_app(self._models, settings), settings)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()
        self._app = create_app(self._models, settings)
        self._loop = asyncio.new_event_loop()
        self._unforeseen = ""
        endpoints.in_words = app.in_words = self._in_words
        for path, value in POSTS.items():  # a valid request of each kind is one
            status, raw = self._loop.run_until_complete(self._ask(path, "POST", HEADERS, [json.dumps(value).encode()]))
            if status != 200:
                raise Failure(f"{path}: {status}: {raw[:300]!r}")

    def _in_words(self, error: BaseException) -> ApiError:
        """As the gateway's own, but the traceback is kept for the report."""
        told = in_words(error)
        if told.code == "internal_error":
            self._unforeseen = "".join(traceback.format_exception(error))
        return told

    def make(self, random: Random) -> dict[str, Any]:
        """A request: a path, headers and a body in pieces; or bytes on a connection."""
        path, raw = body(random)
        if random.random() < 0.85:
            cuts = sorted(random.randrange(len(raw) + 1) for _ in range(random.randrange(3)))
            pieces = [raw[a:b].hex() for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
            return {"path": path, "pieces": pieces, "leaves": random.random() < 0.05}
        return {"sent": [piece.hex() for piece in _spoken(random, path, raw)], "end": random.choice(_ENDS)}

    def run(self, case: dict[str, Any]) -> None:
        """Every answer is one of the API."""
        if "sent" in case:
            self._speak([bytes.fromhex(piece) for piece in case["sent"]], case["end"])
            return
        pieces = [bytes.fromhex(piece) for piece in case["pieces"]]
        asked = self._ask(case["path"], "POST", HEADERS, pieces, case["leaves"])
        status, raw = self._loop.run_until_complete(asked)
        if not case["leaves"]:
            self._check(status, raw)

    def _check(self, status: int, raw: bytes, enveloped: bool = True) -> None:
        """Raise Failure for an answer that is none of the API. enveloped: in JSON."""
        try:
            check(status, raw, enveloped)
        except Failure as error:
            raise Failure(f"{error}{self._unforeseen}") from None

    async def _ask(
        self, path: str, method: str, headers: list[tuple[bytes, bytes]], pieces: list[bytes], leaves: bool = False
    ) -> tuple[int, bytes]:
        """One request as ASGI; status 0 if nothing was answered."""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        status, body, left = 0, bytearray(), list(pieces)

        async def receive() -> dict[str, Any]:
            if left:
                return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or leaves}
            if not leaves:
                await asyncio.sleep(3600)  # the client stays
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            body.extend(message.get("body", b""))

        await self._app(scope, receive, send)  # type: ignore[arg-type]
        return status, bytes(body)

    def _speak(self, pieces: list[bytes], end: str) -> None:
        """Bytes on a connection; what comes back until it closes or is silent."""
        got = bytearray()
        line = socket.create_connection(self._address, timeout=_WAIT_S)
        with line, contextlib.suppress(OSError):  # silence, or the server has hung up
            for piece in pieces:
                line.sendall(piece)
            if end == "reset":
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end in ("reset", "leave"):
                return
            if end == "half":
                line.shutdown(socket.SHUT_WR)
            line.settimeout(0.05)
            while piece := line.recv(1 << 16):
                got += piece
        for part in bytes(got).split(b"HTTP/1.1 ")[1:]:
            status = int(part[:3]) if part[:3].isdigit() else 0
            if status >= 500 and status not in REFUSED:
                raise Failure(f"answered {part[:300]!r}{self._unforeseen}")

    def close(self) -> None:
        """Ask once more in order, and stop. Raises Failure if the server does not answer or does not end."""
        with socket.create_connection(self._address, timeout=_WAIT_S) as line:
            line.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            if not line.recv(15).startswith(b"HTTP/1.1 200"):
                raise Failure("the gateway is not healthy afterwards")
        self._server.should_exit = True
        self._thread.join(30)
        if self._thread.is_alive():
            raise Failure("the gateway did not stop")
        for served in self._models.values():
            served.pool.close()


HEADERS = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {TOKEN}".encode()),
            (b"content-type", b"application/json")]  # fmt: skip
_ENDS = ("wait", "wait", "half", "leave", "reset")
_METHODS = ("GET", "POST", "HEAD", "PUT", "OPTIONS", "BREW", "get", "")
_LINES = ("Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5, 6", "Content-Length: x",
          "Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Host: [", "Host: evil.example", "Origin: http://[",
          "Origin: null", "Expect: 100-continue", "Authorization: Bearer \xff\xfe", "Authorization: Bearer",
          "Upgrade: websocket", "Connection: Upgrade", "X: " + "a" * 70_000, "X:", ":", "no colon", "X: \0", " folded",
          "Cookie: " + "a=b;" * 500, "Content-Type: text/plain", "Content-Encoding: gzip", "Range: bytes=0-",
          "Content-Length: 3")  # fmt: skip


def body(random: Random) -> tuple[str, bytes]:
    """A path and a body for it, changed."""
    path = random.choice(list(POSTS))
    value: object = json.loads(json.dumps(POSTS[path]))
    for name in list(value):  # type: ignore[call-overload]
        if random.random() < 0.4 and name != "model":
            del value[name]  # type: ignore[attr-defined]
    if random.random() < 0.15:
        value["stream"] = True  # type: ignore[index]
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        value = changed(random, value)
    if isinstance(value, dict) and random.random() < 0.5:
        value[random.choice(list(CHAT) + list(COMPLETION))] = any_value(random)
    if isinstance(value, dict):
        value["max_tokens"] = value.get("max_tokens") if random.random() < 0.3 else 1
    return path, encoded(random, value)


def _spoken(random: Random, path: str, raw: bytes) -> list[bytes]:
    """One to three requests as bytes, changed in a header, their framing, or anywhere."""
    whole = b""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        get = random.random() < 0.4
        where = random.choice(GETS) if get else path
        where = where if random.random() < 0.9 else "/" + any_text(random)
        method = random.choice(_METHODS) if random.random() < 0.15 else "GET" if get else "POST"
        lines = ["Host: 127.0.0.1", f"Authorization: Bearer {TOKEN}"]
        lines += random.choices(_LINES, k=random.choice((0, 0, 1, 1, 2)))
        body = b"" if get else raw
        if not get and random.random() < 0.3:
            lines.append("Transfer-Encoding: chunked")
            size = random.choice((f"{len(raw):x}", f"{len(raw):X};a=b", "0", "-1", "ffffffffffffffffff", "zz", "1"))
            body = size.encode() + b"\r\n" + raw + b"\r\n0\r\n\r\n"
        elif not get:
            lines.append(f"Content-Length: {len(raw)}")
        random.shuffle(lines)
        version = "HTTP/1.1" if random.random() < 0.9 else random.choice(("HTTP/1.0", "HTTP/2", "HTTP/9.9", "FTP/1"))
        text = f"{method} {where} {version}\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
        whole += text.encode("utf-8", "replace") + body
    whole = edited(whole, edits(random) if random.random() < 0.4 else [])
    at = random.randrange(len(whole) + 1)
    return [whole[:at], whole[at:]]


def check(status: int, raw: bytes, enveloped: bool = True) -> None:
    """Raise Failure for an answer that is none of the API. enveloped: in JSON, or a stream of it."""
    if status != 200 and status not in REFUSED:
        raise Failure(f"answered {status}: {raw[:500]!r}")
    if not enveloped:
        return
    text = raw.decode("utf-8")
    if status == 200 and text.startswith("data:"):
        if '"error"' in text and "unforeseen" in text:
            raise Failure(f"a stream ended with {text[-500:]}")
        return
    found = json.loads(text)
    if status != 200 and set(found["error"]) != {"message", "type", "param", "code"}:
        raise Failure(f"no envelope: {text[:300]}")
