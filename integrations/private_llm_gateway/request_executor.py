"""Requests in worker threads, watched from the event loop, which never computes and never waits for a party."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from private_llm_gateway.completion import CompletionChunk
from private_llm_gateway.engine import SendChunk
from private_llm_gateway.errors import SERVER, ApiError
from private_llm_gateway.pool import Abandoned, PoolBusy
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_gateway.usage import Usage

_LOOK_S = 0.2  # how often it is asked whether a client is still there

RequestWork = Callable[[SendChunk, Callable[[], bool]], Any]  # in a thread: tells pieces; asks whether nobody waits


class ClientGone(Exception):
    """Nobody waits for the answer."""


def stopping() -> ApiError:
    """What those are told whose answer is not whole when the gateway ends."""
    return ApiError(503, "the gateway was stopped before the answer was whole", SERVER, None, "gateway_stopped")


class RequestTask:
    """One request in its thread."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.stopped = False
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[CompletionChunk, Usage] | None] = asyncio.Queue()
        self._waiting: asyncio.Task[tuple[CompletionChunk, Usage] | None] | None = None
        self.future: Future[Any]

    def tell(self, piece: CompletionChunk, usage: Usage) -> None:
        """From the thread: something is new."""
        self._put((piece, usage))

    def end(self) -> None:
        """From the thread: nothing more comes."""
        self._put(None)

    def stop(self) -> None:
        """Nothing more may come: the gateway ends. In the event loop."""
        self.stopped = True
        self.gone.set()
        self._news.put_nowait(None)

    def _put(self, news: tuple[CompletionChunk, Usage] | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the gateway ends
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    async def result(self) -> Any:  # noqa: ANN401 - of the work
        """What the work returned. Raises what it raised."""
        return await asyncio.wrap_future(self.future)

    async def present(self, ready: asyncio.Task[Any], disconnected: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a task while the client is there. Raises ClientGone."""
        while not ready.done():
            await asyncio.wait({ready}, timeout=_LOOK_S)
            if not ready.done() and await disconnected():
                ready.cancel()
                raise ClientGone

    async def whole(self, disconnected: Callable[[], Awaitable[bool]]) -> Any:  # noqa: ANN401 - of the work
        """The result, while the client waits for it. Raises ClientGone, and what the work raised."""
        try:
            ready = asyncio.ensure_future(self.result())
            await self.present(ready, disconnected)
            return await ready
        except ClientGone:
            if self.stopped:
                raise stopping() from None
            raise
        finally:
            self.gone.set()

    async def first(self, seconds: float, disconnected: Callable[[], Awaitable[bool]]) -> None:
        """Wait until something is there to send, or for so long. Raises ClientGone, and what the work raised."""
        self._waiting = asyncio.ensure_future(self._news.get())
        try:
            async with asyncio.timeout(seconds):
                await self.present(asyncio.ensure_future(asyncio.shield(self._waiting)), disconnected)
        except TimeoutError:
            return
        except BaseException:
            self.gone.set()
            raise
        if self._waiting.result() is None:
            if self.stopped:
                raise stopping()
            await self.result()

    async def pieces(self) -> AsyncIterator[tuple[CompletionChunk, Usage]]:
        """What comes, until all is there. Raises ApiError if the gateway ends before."""
        while True:
            waiting, self._waiting = self._waiting, None
            news = await (waiting or self._news.get())
            if news is None and self.stopped:
                raise stopping()
            if news is None:
                return
            yield news


class RequestExecutor:
    """Threads for all requests of a gateway: one for each session, and one for each request that may wait."""

    def __init__(self, models: dict[str, Served], settings: GatewaySettings) -> None:
        self._settings = settings
        self._most = {name: served.pool.size + settings.max_waiting for name, served in models.items()}
        self._threads = ThreadPoolExecutor(sum(self._most.values()), thread_name_prefix="request")
        self._lock = threading.Lock()
        self._running: set[RequestTask] = set()
        self.taken: Counter[str] = Counter()

    def start(self, served: Served, work: RequestWork) -> RequestTask:
        """Begin. Raises ApiError (429) if too many wait already."""
        with self._lock:
            if self.taken[served.name] >= self._most[served.name]:
                raise self._busy(f"{self.taken[served.name]} requests run or wait already")
            self.taken[served.name] += 1
        task = RequestTask()
        with self._lock:
            self._running.add(task)
        task.future = self._threads.submit(self._run, served.name, task, work)
        return task

    def stop(self) -> None:
        """Tell all clients that the gateway ends, and their requests to end at their next token. In the event loop."""
        with self._lock:
            for task in self._running:
                task.stop()

    def close(self) -> None:
        """Stop all requests, each at its next token."""
        with self._lock:
            for task in self._running:
                task.gone.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, name: str, task: RequestTask, work: RequestWork) -> Any:  # noqa: ANN401
        try:
            return work(task.tell, task.gone.is_set)
        except PoolBusy:
            raise self._busy(f"no session came free within {self._settings.wait_s:g} s") from None
        except Abandoned:
            raise ClientGone from None
        finally:
            with self._lock:
                self.taken[name] -= 1
                self._running.discard(task)
            task.end()

    def _busy(self, why: str) -> ApiError:
        return ApiError(
            429, f"the gateway is busy: {why}; try again later", "rate_limit_error", None, "rate_limit_exceeded",
            self._settings.retry_after_s,
        )  # fmt: skip
