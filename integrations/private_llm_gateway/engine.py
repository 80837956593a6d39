"""Running requests on sessions: generation, logits of prompts, hidden states, in worker threads.

A request whose session fails goes on once on a renewed session: what was written so far becomes part of its prompt, so
that greedy text stays the same and nothing is lost. The prompts of one request run side by side on as many sessions as
nobody else waits for; party services merge what sessions ask at the same time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from private_llm.errors import PartiesBusy, PrivateLLMError, TransportError
from private_llm_gateway.answer import Answer, Piece
from private_llm_gateway.decoding import Text
from private_llm_gateway.pool import Abandoned
from private_llm_gateway.sampling import Chooser, Watcher, choose, likelihood, likelihoods_of_prompt
from private_llm_gateway.served import Served
from private_llm_gateway.spending import Bill, Meter, Spent

_LOG = logging.getLogger("private_llm")
_LOOK_S = 0.2
"""How often a thread that waits for others looks after its client."""

Tell = Callable[[Piece, Spent], None]


@dataclass(frozen=True)
class Limits:
    """wait_s: seconds that a request waits for a session. rows: texts side by side on one session."""

    wait_s: float
    rows: int


_RENEWALS = 3
"""How often a request's session may be renewed: the end of a party is met where its connection to this client ends, and
again, on sessions that were renewed too early for it, where the links between the parties end and form anew."""


class _Run:
    """A request, or a part of it, on one session, which may be renewed."""

    def __init__(self, served: Served, model: Any, gone: Callable[[], bool], bill: Bill, rows: int) -> None:  # noqa: ANN401
        self.served, self.model, self.gone, self.bill, self.rows = served, model, gone, bill, rows
        self.renewals = 0
        self.meter: Meter = self.trying(lambda: Meter(model, bill))

    def trying(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        """The result of `work`, which is done again on a renewed session if the first one fails meanwhile."""
        while True:
            try:
                return work()
            except PartiesBusy:
                raise
            except TransportError:
                if self.renewals == _RENEWALS or self.gone():
                    raise
                self.renewals += 1
                self.served.pool.renew(self.model)
                if hasattr(self, "meter"):
                    self.meter.renewed()

    def count_last(self) -> None:
        """Add what was sent before the work ended, unless the session is over as well."""
        with contextlib.suppress(PrivateLLMError):
            self.meter.look(now=True)


class _Crew:
    """The sessions of one request, which take its groups one after the other."""

    def __init__(
        self, served: Served, groups: Sequence[Sequence[Answer]], tell: Tell, gone: Callable[[], bool], rows: int,
        echo: bool, bill: Bill,
    ) -> None:  # fmt: skip
        self.served, self.tell, self.gone, self.rows, self.echo, self.bill = served, tell, gone, rows, echo, bill
        self._left = deque(groups)
        self._at_work = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self, model: Any) -> None:  # noqa: ANN401
        """Write groups on a session until none is left. Raises what went wrong, which ends the others' work, too."""
        run: _Run | None = None
        while (group := self._next()) is not None:
            try:
                run = run or _Run(self.served, model, self._over, self.bill, self.rows)
                self.bill.prompt(len(group[0].prompt))
                if self.echo:
                    run.trying(partial(_prompt, run, group))
                run.trying(partial(_write_group, run, group, self.tell))
                run.trying(partial(run.meter.look, now=True))
            except BaseException as error:
                if run is not None:
                    run.count_last()
                with self._changed:
                    self._error = self._error or error
                raise
            finally:
                with self._changed:
                    self._at_work -= 1
                    self._changed.notify_all()

    def help(self) -> None:
        """Work on a further session, if there is one. What goes wrong is told by `finish`."""
        try:
            with self.served.pool.spare_session() as model, torch.inference_mode():
                if model is not None:
                    self.work(model)
        except Exception as error:  # noqa: BLE001 - `work` has kept it; a session that cannot be had is no failure
            _LOG.debug("a further session ended: %s", error)

    def finish(self) -> None:
        """Wait for the others' groups. Raises what went wrong with the first that failed."""
        with self._changed:
            while self._at_work:
                self._changed.wait(_LOOK_S)
            if self._error is not None:
                raise self._error

    def _over(self) -> bool:
        return self._error is not None or self.gone()

    def _next(self) -> Sequence[Answer] | None:
        with self._changed:
            if not self._left or self._error is not None:
                return None
            self._at_work += 1
            return self._left.popleft()


def write(
    served: Served, groups: Sequence[Sequence[Answer]], tell: Tell, gone: Callable[[], bool], limits: Limits,
    bill: Bill, echo: bool = False,
) -> Spent:  # fmt: skip
    """Write answers, in groups of one prompt each, telling what is new after every token.

    echo: find the likelihoods of the prompts' tokens as well. Returns what `bill` has then; whatever is raised, it has
    what was spent before. Raises Abandoned if the client is gone, PoolBusy, and errors of the library.
    """
    crew = _Crew(served, groups, tell, gone, limits.rows, echo, bill)
    with served.pool.session(limits.wait_s, gone) as model, torch.inference_mode():
        for _ in range(min(len(groups), served.pool.size) - 1):
            threading.Thread(target=crew.help, name="further session", daemon=True).start()
        try:
            crew.work(model)
        finally:
            crew.finish()
    return bill.spent


def embed(
    served: Served, rows: list[list[int]], gone: Callable[[], bool], limits: Limits, bill: Bill
) -> tuple[Spent, Tensor]:  # fmt: skip
    """Sentence vectors [B, size] of token rows, as `served.vectors` makes them of hidden states."""
    order = sorted(range(len(rows)), key=lambda at: len(rows[at]))  # rows of about one length need little padding
    made: list[Tensor] = [torch.empty(0)] * len(rows)
    with served.pool.session(limits.wait_s, gone) as model, torch.inference_mode():
        run = _Run(served, model, gone, bill, limits.rows)
        try:
            for first in range(0, len(order), limits.rows):
                if gone():
                    raise Abandoned
                part = order[first : first + limits.rows]
                bill.prompt(sum(len(rows[at]) for at in part))
                vectors = run.trying(partial(_vectors, run, [rows[at] for at in part]))
                for at, vector in zip(part, vectors, strict=True):
                    made[at] = vector
        finally:
            run.count_last()
    return bill.spent, torch.stack(made)


def _vectors(run: _Run, rows: list[list[int]]) -> Tensor:
    """Of rows in one call."""
    length = max(map(len, rows))
    pad = run.served.tokenizer.pad_token_id or 0
    ids = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    states = run.model(input_ids=ids, attention_mask=mask).last_hidden_state
    return run.served.vectors.of(states, mask)


def _write_group(run: _Run, group: Sequence[Answer], tell: Tell) -> None:
    """Generate all answers of one prompt that are not finished, side by side as far as the parties allow."""
    for answer in group:
        answer.end_if_full()
    _tell(run, group, tell)
    live = [answer for answer in group if answer.finish is None]
    for first in range(0, len(live), run.rows):
        if not run.gone():
            _write_rows(run, live[first : first + run.rows], tell)
    if run.gone():
        raise Abandoned


def _write_rows(run: _Run, live: Sequence[Answer], tell: Tell) -> None:
    """Generate answers in one call after the other."""
    written = sum(len(answer.tokens) for answer in live)

    def after() -> bool:
        nonlocal written
        before, written = written, sum(len(answer.tokens) for answer in live)
        run.bill.tokens(written - before)
        _tell(run, live, tell)
        return run.gone()

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


def _tell(run: _Run, answers: Sequence[Answer], tell: Tell) -> None:
    """What is new, with the cost; all of it comes with the next call if the parties fail here."""
    for answer in answers:
        spent = run.meter.look()
        piece = answer.new()
        if piece is not None:
            tell(piece, spent)


def _config(count: int, ends: tuple[int, ...], served: Served) -> GenerationConfig:
    """Greedy decoding without the model's own habits (its repetition penalty, for instance): the request says all."""
    return GenerationConfig(
        max_new_tokens=count, min_length=0, do_sample=False, num_beams=1, repetition_penalty=1.0,
        no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, eos_token_id=list(ends) or None,
        pad_token_id=served.pad, bos_token_id=served.tokenizer.bos_token_id, use_cache=True,
        return_dict_in_generate=False,
    )  # fmt: skip


def _prompt(run: _Run, group: Sequence[Answer]) -> None:
    """The likelihoods of a prompt's tokens, by one forward call, whose last logits also give the first new token."""
    prompt = group[0].prompt
    count = group[0].writing.logprobs or 0
    logits = run.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    text = Text(run.served.texts)
    ahead = tuple(likelihoods_of_prompt(logits, prompt, count, [text.take(token) for token in prompt]))
    for answer in group:
        answer.ahead = ahead
        if answer.left and not answer.tokens:
            token = choose(answer, logits[-1])
            answer.take(token, *likelihood(logits[-1], token, count))
            run.bill.tokens(1)
