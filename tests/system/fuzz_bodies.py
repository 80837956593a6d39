"""What `fuzz.py` does to the gateway without a model: bodies by the million.

The application is the gateway's, from the ASGI messages of a request to those of its answer: tokens, host names and
sizes (guard.py), JSON, fields, schemas, prompts, the admission of requests, and answers whole and in streams. What is
left out: sockets (`http` has them), threads (work is done where it is asked for), and the model: texts are made of the
same few tokens, vectors of ones, and a text that a grammar binds is empty. What an answer must be is what `http` wants.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import resources
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from fuzz_http import GETS, HEADERS, POSTS, Http, body
from fuzz_mutators import any_text
from fuzz_wire import Failure
from private_llm_gateway import app, endpoints, request_executor
from private_llm_gateway.app import create_app
from private_llm_gateway.completion import Completion, Likelihood
from private_llm_gateway.engine import SendChunk
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_gateway.usage import Usage, UsageTotal
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from private_llm.config import PrivateConfig

_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
          "max_position_embeddings": 48, "vocab_size": 4096}  # fmt: skip
_TOKENS = (300, 17, 4000)


class _Here:
    """An executor that works where it is asked."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *given: object) -> Future[Any]:
        """As ThreadPoolExecutor."""
        made: Future[Any] = Future()
        try:
            made.set_result(work(*given))
        except Exception as error:
            made.set_exception(error)
        return made


async def _here(work: Callable[..., Any], *given: object) -> Any:
    return work(*given)


class Bodies(Http):
    """The application, in this thread."""

    def __init__(self) -> None:
        config = PrivateConfig(protocol="plain", insecure=True, party_mode="threads")
        words = AutoTokenizer.from_pretrained(str(resources.files("private_llm_hf").joinpath("demo_model")))
        models = (("tiny", LlamaForCausalLM(LlamaConfig(**_SIZES))), ("vectors", BertModel(BertConfig(**_SIZES))))
        known = {}
        for name, model in models:
            model.parties, model.close = SimpleNamespace(config=config), lambda: None
            known[name] = Served(name, SessionPool(model, 1), words)
        request_executor.ThreadPoolExecutor = _Here  # type: ignore[assignment,misc]
        endpoints.run_in_threadpool = _here  # type: ignore[assignment]
        endpoints.engine = SimpleNamespace(write=_write, embed=_embed, SendChunk=SendChunk)  # type: ignore[assignment]
        self._app = create_app(known, GatewaySettings(port=8000, token="a-token-of-fuzzing", body_s=1.0))
        self._loop = asyncio.new_event_loop()
        self._unforeseen = ""
        endpoints.in_words = app.in_words = self._in_words
        for path, value in POSTS.items():  # a valid request of each kind is one
            status, raw = self._loop.run_until_complete(self._ask(path, "POST", HEADERS, [json.dumps(value).encode()]))
            if status != 200:
                raise Failure(f"{path}: {status}: {raw[:300]!r}")

    def make(self, random: Random) -> dict[str, Any]:
        """A request: method, path, headers, and a body in pieces."""
        path, raw = body(random)
        cuts = sorted(random.randrange(len(raw) + 1) for _ in range(random.choice((0, 0, 0, 1, 2))))
        pieces = [raw[a:b].hex() for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        method, headers = "POST", []
        if random.random() < 0.05:
            path = random.choice((*GETS, "/" + any_text(random).encode("utf-8", "replace").decode()))
            method = random.choice(("GET", "GET", "HEAD", "POST", "PUT", "OPTIONS"))
        if random.random() < 0.05:
            name = random.choice(("host", "origin", "authorization", "content-length", "content-type"))
            headers = [[name, any_text(random).encode("utf-8", "replace").hex()]]
        return {"path": path, "pieces": pieces, "method": method, "headers": headers, "leaves": random.random() < 0.02}

    def run(self, case: dict[str, Any]) -> None:
        """The answer is one of the API."""
        own = [(name.encode(), bytes.fromhex(value)) for name, value in case["headers"]]
        headers = [pair for pair in HEADERS if pair[0] not in dict(own)] + own
        pieces = [bytes.fromhex(piece) for piece in case["pieces"]]
        asked = self._ask(case["path"], case["method"], headers, pieces, case["leaves"])
        status, raw = self._loop.run_until_complete(asked)
        if not case["leaves"]:
            api = case["path"] in POSTS or status != 200  # the page and the metrics are no JSON
            self._check(status, raw, api and case["method"] != "HEAD")

    def close(self) -> None:
        """Nothing runs."""


def _write(
    served: Served, groups: Sequence[Sequence[Completion]], tell: SendChunk, gone: Callable[[], bool],
    settings: GatewaySettings, bill: UsageTotal, echo: bool = False, owner: str = "",
) -> Usage:  # fmt: skip
    """As `engine.write`, of some tokens that are always the same."""
    for group in groups:
        for answer in group:
            if echo:
                answer.ahead = tuple(Likelihood(token, None, (), 0) for token in answer.prompt)
            _write_one(answer, tell)
    return Usage()


def _write_one(answer: Completion, tell: SendChunk) -> None:
    answer.end_if_full()
    for token in _TOKENS:
        if answer.finish is None and answer.params.grammar is None:
            answer.take(token, -1.5, ((token, -1.5), (5, -2.0)))
            if (piece := answer.new()) is not None:
                tell(piece, Usage())
    answer.finish = answer.finish or "length"
    if (piece := answer.new()) is not None:
        tell(piece, Usage())


def _embed(
    served: Served, rows: list[list[int]], gone: Callable[[], bool], settings: GatewaySettings, bill: UsageTotal
) -> tuple[Usage, Tensor]:
    """As `engine.embed`."""
    return Usage(), torch.ones(len(rows), served.pool.first.config.hidden_size)
