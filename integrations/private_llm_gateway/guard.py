"""Who may call the gateway, and how long: tokens, host names, origins, sizes and times of bodies, idle connections.

A web page that resolves its own name to this machine (DNS rebinding) sends its own name as Host, and any other page's
request carries its Origin; both are refused, on loopback also where no token is asked for.
"""

import asyncio
import hmac
import time
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from private_llm_gateway.errors import ApiError
from private_llm_gateway.settings import GatewaySettings

HEAD_S = 10.0  # seconds from a connection, or from the first byte after an answer, to the end of a request's headers
READ_S = 60.0  # in which a client that fell behind must catch up (to 16 KiB here), or take the end of an answer
_AT_ONCE = 4096  # bytes that are read before others have their turn: 700 chunks of one byte, 3 ms
_OPEN = ("/", "/health", "/favicon.ico")
_OPEN_BELOW = "/page/"
_FRAMING = "invalid_framing"


class Guard:
    """Refuses what may not come in, reads bodies within their limits, and passes on the rest."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings) -> None:
        self.app, self.settings = app, settings
        names = {settings.host, *settings.allowed_hosts}
        if settings.loopback:
            names |= {"localhost", "127.0.0.1", "::1"}
        self._names = {name.strip("[]").lower() for name in names}
        self._any_name = not settings.loopback and not settings.allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            if "transfer-encoding" in headers and "content-length" in headers:
                # of two lengths: where a proxy before this gateway reads two requests, too
                raise ApiError(400, "want Content-Length or Transfer-Encoding, not both of them", code=_FRAMING)
            self._check(scope["path"], headers)
            _check_form(scope["method"], headers)
            most = self.settings.max_body if scope["method"] == "POST" and not _is_open(scope["path"]) else 0
            body = await self._body(headers, receive, most)
        except ApiError as error:
            unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
            closing = {"Connection": "close"} if unread else {}  # reading on would be work for nothing
            await error.response(**closing)(scope, receive, send)
            return
        if body is None:  # the client left
            return
        read = False

        async def replay() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _check(self, path: str, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        name = _part(f"//{host}", "hostname")
        if name is None or (not self._any_name and name not in self._names):
            told = "host: this gateway is not called by that name; start it with --allow-host"
            raise ApiError(403, told, code="unknown_host")
        origin = headers.get("origin")
        if origin is not None and _part(origin, "netloc") != host.lower():
            raise ApiError(403, "origin: pages of other sites may not call this gateway", code="origin_not_allowed")
        token = self.settings.token
        if token is None or _is_open(path):
            return
        kind, given = credentials(headers)
        if kind != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
            told = "Incorrect API key provided: want the token that the gateway printed when it started, as "
            raise ApiError(401, f"{told}'Authorization: Bearer TOKEN'", code="invalid_api_key")

    async def _body(self, headers: Mapping[str, str], receive: Receive, most: int) -> bytes | None:
        """All of it. most: bytes; with 0 it is refused at its head, since strangers may call such addresses."""
        length = headers.get("content-length", "0")
        if not most and "transfer-encoding" in headers:
            raise _too_large(most)
        if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise _too_large(most)
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self.settings.body_s):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    parts.append(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            told = f"the body did not arrive within {self.settings.body_s:g} s"
            raise ApiError(408, told, code="request_timeout") from None
        return b"".join(parts)


def credentials(headers: Mapping[str, str]) -> tuple[str, str]:
    """The kind of a request's Authorization in small letters, and the token: one for all ways to write them."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    return kind.lower(), given.strip()


def _is_open(path: str) -> bool:
    """Whether an address is answered without a token."""
    return path in _OPEN or path.startswith(_OPEN_BELOW)


def _check_form(method: str, headers: Mapping[str, str]) -> None:
    """Raises ApiError (415) for a body that says it is no JSON: pages of other sites must ask first to send JSON."""
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if method == "POST" and kind != "application/json":
        raise ApiError(415, "want a body of Content-Type: application/json", code="unsupported_media_type")
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "want a body without Content-Encoding", code="unsupported_media_type")


def _part(address: str, name: Literal["hostname", "netloc"]) -> str | None:
    try:
        found: str | None = getattr(urlsplit(address), name)
    except ValueError:
        return None
    return None if found is None else found.lower()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")


class Connection(H11Protocol):
    """A connection of the gateway, which is closed if it does not get on with its request, so that it keeps nobody out.
    `since`: since when it waits for a request, None while it does not.

    uvicorn closes connections that are idle after an answer, but waits for ever for the first request of one, and for
    the rest of a request line or headers. Here that takes `HEAD_S` at most; and when more than half of all connections
    allowed wait so, or after an answer, the one that waits longest makes room: anybody on the machine may open some.
    `Guard` limits a body's time; some of it is read at a time, since taking small chunks apart takes long. Whoever does
    not read its answer has `READ_S`: otherwise the rest of it, the request and the connection would stay for ever.
    """

    since: float | None = None
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        transport.max_size = _AT_ONCE  # type: ignore[attr-defined]  # of asyncio's own loop
        self._follow()
        waiting = [each for each in self.connections if isinstance(each, Connection) and each.since is not None]
        if self.limit_concurrency is not None and len(waiting) > self.limit_concurrency // 2:
            min(waiting, key=lambda each: each.since or 0.0)._end()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest, or no more."""
        super().data_received(data)
        self._follow()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: clients that offer HTTP/2 are answered without it, and need no package for WebSockets."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop()
        self._caught_up()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads less than it is sent."""
        super().pause_writing()
        self._fall_behind()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._caught_up()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """An answer is written, or waits to be."""
        super().on_response_complete()
        self._fall_behind()
        if self.conn.trailing_data[0]:
            self._follow()
        elif self.since is None and not self.transport.is_closing():
            self.since = time.monotonic()

    def _follow(self) -> None:
        """Start waiting, or stop."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None:
            self.since = time.monotonic()
            self._timer = self.loop.call_later(HEAD_S, self._end)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.since = None, None

    def _fall_behind(self) -> None:
        """Give the client its time to read."""
        self._caught_up()
        if self.transport.get_write_buffer_size():
            self._unread = self.loop.call_later(READ_S, self._end_unread)

    def _caught_up(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _end_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self._end()

    def _end(self) -> None:
        self._stop()
        self.transport.abort()
