"""What each address of the API does, once a request has come in."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from private_llm_gateway import engine, requests, responses
from private_llm_gateway.completion import CompletionChunk
from private_llm_gateway.errors import ApiError, bad, in_words
from private_llm_gateway.fields import Fields, body_of, refuse_unsupported
from private_llm_gateway.guard import credentials
from private_llm_gateway.prompts import check_context, of_field
from private_llm_gateway.request_executor import ClientGone, RequestExecutor, RequestTask
from private_llm_gateway.requests import Wanted, find_model
from private_llm_gateway.responses_api import KeptResponses, ResponseAsked, named_here
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_gateway.usage import GatewayMetrics, Usage, UsageTotal

_FIRST_S = 10.0  # errors within this time have a status of their own; later ones are events of the stream that began
_PING_S = 15
_LINE_END = "\n"  # of a stream's lines: clients that look for two of them do not find those of sse-starlette (CR LF)
StreamEvent = tuple[str, str | None]  # data of an event, and its kind
WriteEvents = Callable[[dict[str, Any]], list[StreamEvent]]  # the events of a chunk
ReadRequest = Callable[[Mapping[str, Served], Mapping[str, Any], int], Wanted]

_MOST_READING = 2  # bodies at a time: reading holds the interpreter, and a thread of the pool that streams share


class Endpoints:
    """All addresses over some models."""

    def __init__(
        self, models: Mapping[str, Served], settings: GatewaySettings, runner: RequestExecutor, metrics: GatewayMetrics
    ) -> None:
        self.models, self.settings, self.runner, self.metrics = models, settings, runner, metrics
        self._began = int(time.time())
        self._reading = asyncio.Semaphore(_MOST_READING)
        self.router = APIRouter()
        self._add("/v1/chat/completions", partial(self._text, requests.chat), "POST")
        self._kept = KeptResponses()
        self._add("/v1/responses", self._respond, "POST")
        self._add("/v1/responses/{id}", self._kept_response, "GET", "DELETE")
        self._add("/v1/completions", partial(self._text, requests.completion), "POST")
        self._add("/v1/embeddings", self._embeddings, "POST")
        self._add("/v1/models", self._models, "GET")
        self._add("/v1/models/{name:path}", self._model, "GET")
        self._add("/v1/private/info", self._info, "GET")
        self._add("/health", self._health, "GET")
        self._add("/metrics", self._metrics, "GET")

    def _add(self, path: str, endpoint: Callable[[Request], Any], *methods: str) -> None:
        async def answer(request: Request) -> Response:
            began = time.monotonic()
            try:
                response: Response = await endpoint(request)
            except ClientGone:
                response = Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is told in the envelope
                response = in_words(error).response()
            if isinstance(response, EventSourceResponse):
                response.body_iterator = self._until_told(response.body_iterator, path, began)
            else:
                self.metrics.answered(path, response.status_code, time.monotonic() - began)
            return response

        self.router.add_route(path, answer, [*methods])

    async def _until_told(self, events: Any, path: str, began: float) -> AsyncIterator[ServerSentEvent]:  # noqa: ANN401
        """A stream, counted when it is over."""
        status = 499
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
            status = 200
        finally:
            self.metrics.answered(path, status, time.monotonic() - began)

    # -- texts --------------------------------------------------------------------------------------------------
    async def _text(self, read: ReadRequest, request: Request) -> Response:
        raw = await request.body()
        async with self._reading:
            wanted = await run_in_threadpool(lambda: read(self.models, body_of(raw), self.settings.max_choices))

        def failed(error: ApiError) -> StreamEvent:
            return _json(error.body()), None

        return await self._answer(request, wanted, dict, lambda chunk: [(_json(chunk), None)], failed, ("[DONE]",))

    async def _answer(
        self, request: Request, wanted: Wanted, whole: Callable[[dict[str, Any]], dict[str, Any]], write: WriteEvents,
        failed: Callable[[ApiError], StreamEvent], last: Sequence[str] = (),
    ) -> Response:  # fmt: skip
        """whole: what is sent of all answers at once. failed, last: events of an error, and after all chunks."""
        owner, made = _owner(request), responses.Response(wanted)

        def work(tell: engine.SendChunk, gone: Callable[[], bool]) -> Any:  # noqa: ANN401
            ahead = wanted.echo and wanted.logprobs
            with self._counted_usage(wanted.served) as total:
                return engine.write(wanted.served, wanted.groups, tell, gone, self.settings, total, ahead, owner)

        async def events() -> AsyncIterator[ServerSentEvent]:
            try:
                async for chunk in self._chunks(wanted, made, task, write):
                    for told in chunk:
                        yield _event(*told)
                for data in last:
                    yield _event(data)
            except ClientGone:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is told in the envelope
                yield _event(*failed(in_words(error)))
            finally:
                task.gone.set()

        task = self.runner.start(wanted.served, work)
        if not wanted.stream:
            spent = await task.whole(request.is_disconnected)
            return await run_in_threadpool(lambda: _sent(whole(made.whole(spent))))
        await task.first(_FIRST_S, request.is_disconnected)
        return EventSourceResponse(events(), sep=_LINE_END, ping=_PING_S)

    async def _chunks(
        self, wanted: Wanted, made: responses.Response, task: RequestTask, write: WriteEvents
    ) -> AsyncIterator[list[StreamEvent]]:
        """The chunks of a stream, each as `write` has it."""
        for chunk in await run_in_threadpool(made.opening):
            yield write(chunk)
        ended: list[CompletionChunk] = []
        async for piece, spent in task.pieces():
            if piece.text or piece.likelihoods or piece.ahead:
                open_ = dataclasses.replace(piece, finish=None)
                yield await run_in_threadpool(_chunk, write, made, open_, spent)
            if piece.finish is not None:
                ended.append(piece)
        total = await task.result()
        for piece in ended:
            end = CompletionChunk(piece.index, "", (), piece.finish)
            yield await run_in_threadpool(_chunk, write, made, end, total)
        if wanted.usage:
            yield await run_in_threadpool(write, made.usage(total))

    # -- responses: chats in another form ------------------------------------------------------------------------
    async def _respond(self, request: Request) -> Response:
        raw, owner = await request.body(), _owner(request)

        def read() -> tuple[ResponseAsked, Wanted]:
            asked = ResponseAsked(body_of(raw), owner, self._kept)
            wanted = requests.chat(self.models, asked.chat, 1)
            given = {name: asked.chat[name] for name in ("temperature", "top_p")}  # checked by now
            asked.response |= {name: float(value) for name, value in given.items() if value is not None}
            return asked, wanted

        try:
            async with self._reading:
                asked, wanted = await run_in_threadpool(read)
        except ApiError as error:
            raise named_here(error) from None

        def write(chunk: dict[str, Any]) -> list[StreamEvent]:
            return [(_json(each), each["type"]) for each in asked.events(chunk)]

        def failed(error: ApiError) -> StreamEvent:
            return _json(asked.failed(error)), "response.failed"

        return await self._answer(request, wanted, asked.whole, write, failed)

    async def _kept_response(self, request: Request) -> Response:
        name, owner = request.path_params["id"], _owner(request)
        if request.method == "DELETE":
            self._kept.delete(owner, name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return await run_in_threadpool(lambda: _sent(self._kept.find(owner, name).response))

    @contextlib.contextmanager
    def _counted_usage(self, served: Served) -> Iterator[UsageTotal]:
        """Usage that the metrics count at the end, also of requests that failed or that nobody waits for any more."""
        total = UsageTotal()
        try:
            yield total
        finally:
            self.metrics.record_usage(served.name, total)

    # -- vectors ------------------------------------------------------------------------------------------------
    async def _embeddings(self, request: Request) -> Response:
        raw = await request.body()
        async with self._reading:
            served, rows, encoded = await run_in_threadpool(lambda: self._read_embeddings(body_of(raw)))
        tokens = sum(map(len, rows))

        def work(_: engine.SendChunk, gone: Callable[[], bool]) -> Any:  # noqa: ANN401
            with self._counted_usage(served) as total:
                return engine.embed(served, rows, gone, self.settings, total)

        spent, vectors = await self.runner.start(served, work).whole(request.is_disconnected)
        return await run_in_threadpool(lambda: _sent(responses.embeddings(served, vectors, tokens, encoded, spent)))

    def _read_embeddings(self, body: Mapping[str, Any]) -> tuple[Served, list[list[int]], bool]:
        served = find_model(self.models, body, "encoder")
        refuse_unsupported(body, "embeddings")
        fields = Fields(body)
        form = "float" if body.get("encoding_format") is None else body["encoding_format"]
        if form not in ("float", "base64"):
            raise bad("encoding_format", "want float or base64")
        if fields.integer("dimensions", 1, 1 << 20) not in (None, served.size):
            told = f"unsupported; this model's vectors have {served.size}"
            raise bad("dimensions", told, "unsupported_parameter")
        rows = of_field(served, "input", body.get("input"), self.settings.max_choices)
        check_context(served, max(map(len, rows)), 0, "input")
        return served, rows, form == "base64"

    # -- facts --------------------------------------------------------------------------------------------------
    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry(served) for served in self.models.values()]})

    async def _model(self, request: Request) -> Response:
        if not request.path_params["name"]:
            return await self._models(request)
        return JSONResponse(self._entry(find_any(self.models, request.path_params["name"])))

    def _entry(self, served: Served) -> dict[str, Any]:
        more = {"kind": served.kind, "context": served.context, "protocol": served.config.protocol}
        if served.kind == "decoder":
            more["chat_template"] = served.chat
        made = {"id": served.name, "object": "model", "created": self._began, "owned_by": "private-llm"}
        return {**made, "private_llm": more}

    async def _info(self, request: Request) -> Response:
        name = request.query_params.get("model") or next(iter(self.models))
        return JSONResponse(find_any(self.models, name).about())

    async def _health(self, _: Request) -> Response:
        ready = all(served.pool.healthy for served in self.models.values())
        for served in self.models.values():
            served.pool.heal()
        ended = "the parties failed when they were asked last; they are called again"
        return JSONResponse({"status": "ok" if ready else ended}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")


def find_any(models: Mapping[str, Served], name: str) -> Served:
    """A model by its name. Raises ApiError (404)."""
    return find_model(models, {"model": name}, models[name].kind if name in models else "decoder")


def _sent(made: Mapping[str, Any]) -> Response:
    """An object as JSON, each item of its lists on its own: one call for all of them would hold up other threads."""
    parts = []
    for name, value in made.items():
        told = f"[{','.join(map(_json, value))}]" if isinstance(value, list) else _json(value)
        parts.append(f"{_json(name)}:{told}")
    return Response("{" + ",".join(parts) + "}", media_type="application/json")


def _owner(request: Request) -> str:
    """Whose request it is: a digest of its key."""
    return hashlib.sha256(" ".join(credentials(request.headers)).encode()).hexdigest()


def _event(data: str, kind: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(data, event=kind, sep=_LINE_END)  # that of the response is for its pings


def _chunk(write: WriteEvents, made: responses.Response, piece: CompletionChunk, spent: Usage) -> list[StreamEvent]:
    return write(made.chunk(piece, spent))


def _json(made: object) -> str:
    """In ASCII: clients that read lines of text would end one at U+2028 and its like as well."""
    return json.dumps(made, separators=(",", ":"))
