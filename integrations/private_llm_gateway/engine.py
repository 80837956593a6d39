"""Running requests on sessions: generation, logits of prompts, hidden states, in a worker thread.

A request whose session fails goes on once on a renewed session: what was written so far becomes part of its prompt, so
that greedy text stays the same and nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from private_llm.errors import ConfigError, PartiesBusy, TransportError
from private_llm_gateway.answer import Answer, Likelihood, Piece
from private_llm_gateway.pool import Abandoned
from private_llm_gateway.sampling import Chooser, Watcher, choose, likelihood, likelihoods_of_prompt
from private_llm_gateway.served import Served

_LOOK_S = 0.5
"""How often the parties are asked what they sent: asking takes a trip to them."""


@dataclass(frozen=True)
class Spent:
    """What a request cost so far: bytes over all links, rounds, and tokens in a second since its first."""

    bytes: int = 0
    rounds: int = 0
    tokens_per_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"bytes": self.bytes, "rounds": self.rounds, "tokens_per_s": round(self.tokens_per_s, 3)}


Tell = Callable[[Piece, Spent], None]


class _Meter:
    """What one request costs, over the sessions that it runs on."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a private model
        self._model = model
        self._before = (0, 0)
        self._now = (0, 0)
        self._looked = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._tokens = 0
        self._read(reset=True)
        self._now = (0, 0)

    def token(self, count: int) -> None:
        """Tokens came."""
        self._tokens += count
        if self._first is None:
            self._first = (time.monotonic(), self._tokens)

    def spent(self, now: bool = False) -> Spent:
        """The cost, as of a moment ago or of `now`."""
        if now or time.monotonic() - self._looked > _LOOK_S:
            self._read(reset=False)
            self._looked = time.monotonic()
        began, first = self._first or (time.monotonic(), 0)
        seconds = time.monotonic() - began
        speed = (self._tokens - first) / seconds if seconds > 0 else 0.0
        return Spent(self._before[0] + self._now[0], self._before[1] + self._now[1], speed)

    def renewed(self) -> None:
        """The session that was counted is over; a new one begins."""
        self._before = (self._before[0] + self._now[0], self._before[1] + self._now[1])
        self._now = (0, 0)

    def _read(self, reset: bool) -> None:
        try:
            costs = self._model.cost(reset=reset)
        except ConfigError:  # nothing is counted with these parties
            return
        self._now = (costs.bytes_total, costs.rounds)


class _Run:
    """One request on one session, which may be renewed once."""

    def __init__(self, served: Served, model: Any, gone: Callable[[], bool]) -> None:  # noqa: ANN401
        self.served, self.model, self.gone = served, model, gone
        self.again = True
        self.meter = self.trying(lambda: _Meter(model))

    def trying(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        """The result of `work`, which is done again on a renewed session if the first one fails meanwhile."""
        while True:
            try:
                return work()
            except PartiesBusy:
                raise
            except TransportError:
                if not self.again or self.gone():
                    raise
                self.again = False
                self.served.pool.renew(self.model)
                if hasattr(self, "meter"):
                    self.meter.renewed()


def write(
    served: Served, groups: Sequence[Sequence[Answer]], tell: Tell, gone: Callable[[], bool], wait_s: float,
    echo: bool = False,
) -> tuple[Spent, list[list[Likelihood]]]:  # fmt: skip
    """Write answers, group by group (each of one prompt), telling what is new after every token.

    Returns the cost and, with `echo`, the likelihoods of each group's prompt. Raises Abandoned if the client is gone,
    PoolBusy, and errors of the library.
    """
    with served.pool.session(wait_s, gone) as model, torch.inference_mode():
        run = _Run(served, model, gone)
        prompts = [run.trying(partial(_prompt, run, group)) for group in groups] if echo else []
        for group in groups:
            run.trying(partial(_write_group, run, group, tell))
        return run.trying(lambda: run.meter.spent(now=True)), prompts


def embed(
    served: Served, rows: list[list[int]], gone: Callable[[], bool], wait_s: float
) -> tuple[Spent, Tensor]:  # fmt: skip
    """Sentence vectors [B, hidden] of token rows: the mean of each row's hidden states, of length 1."""
    length = max(map(len, rows))
    pad = served.tokenizer.pad_token_id or 0
    ids = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    with served.pool.session(wait_s, gone) as model, torch.inference_mode():
        run = _Run(served, model, gone)
        states = run.trying(lambda: model(input_ids=ids, attention_mask=mask).last_hidden_state)
        weights = mask[..., None].to(states.dtype)
        made = torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)
        return run.trying(lambda: run.meter.spent(now=True)), made


def _write_group(run: _Run, group: Sequence[Answer], tell: Tell) -> None:
    """Generate all answers of one prompt that are not finished, side by side."""
    for answer in group:
        answer.end_if_full()
    live = [answer for answer in group if answer.finish is None]
    written = sum(len(answer.tokens) for answer in live)

    def after() -> bool:
        nonlocal written
        before, written = written, sum(len(answer.tokens) for answer in live)
        run.meter.token(written - before)
        _tell(run, live, tell)
        return run.gone()

    _tell(run, group, tell)
    if not live or run.gone():
        _leave(run)
        return
    ids = torch.tensor([[*answer.prompt, *answer.tokens] for answer in live])
    chooser = None if all(answer.writing.plain for answer in live) else Chooser(live)
    ends = live[0].ends
    run.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=_config(max(answer.left for answer in live), ends, run.served),
        logits_processor=LogitsProcessorList([] if chooser is None else [chooser]),
        stopping_criteria=StoppingCriteriaList([Watcher(live, chooser, after)]),
    )
    _leave(run)


def _leave(run: _Run) -> None:
    if run.gone():
        raise Abandoned


def _tell(run: _Run, answers: Sequence[Answer], tell: Tell) -> None:
    """What is new, with the cost: that of now for the last piece."""
    for answer in answers:
        piece = answer.new()
        if piece is not None:
            tell(piece, run.meter.spent())


def _config(count: int, ends: tuple[int, ...], served: Served) -> GenerationConfig:
    """Greedy decoding without the model's own habits (its repetition penalty, for instance): the request says all."""
    return GenerationConfig(
        max_new_tokens=count, min_new_tokens=0, do_sample=False, num_beams=1, repetition_penalty=1.0,
        no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, eos_token_id=list(ends) or None,
        pad_token_id=served.pad, bos_token_id=served.tokenizer.bos_token_id, use_cache=True,
        return_dict_in_generate=False,
    )  # fmt: skip


def _prompt(run: _Run, group: Sequence[Answer]) -> list[Likelihood]:
    """The likelihoods of a prompt's tokens, by one forward call, whose last logits also give the first new token."""
    prompt = group[0].prompt
    count = group[0].writing.logprobs or 0
    logits = run.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    for answer in group:
        if answer.left and not answer.tokens:
            token = choose(answer, logits[-1])
            answer.take(token, *likelihood(logits[-1], token, count))
            run.meter.token(1)
    return likelihoods_of_prompt(logits, prompt, count, run.served.offsets(prompt))
