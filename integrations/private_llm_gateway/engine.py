"""Running requests on sessions: generation, logits of prompts, hidden states, in worker threads.

A request whose session fails goes on once on a renewed session: what was written so far becomes part of its prompt, so
that greedy text stays the same and nothing is lost. The prompts of one request run side by side on as many sessions as
nobody else waits for; party services merge what sessions ask at the same time.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from private_llm_hf.transformers_versions import CACHE
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from private_llm.errors import ConfigError, PartiesBusy, PrivateLLMError, TransportError
from private_llm_gateway import completion
from private_llm_gateway.completion import Completion
from private_llm_gateway.decoding import DecodedText
from private_llm_gateway.pool import Abandoned
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_gateway.usage import Usage, UsageMeter, UsageTotal

_LOG = logging.getLogger("private_llm")
_LOOK_S = 0.2  # how often a thread that waits for others looks after its client

SendChunk = Callable[[completion.CompletionChunk, Usage], None]

_RENEWALS = 3
"""How often a request's session may be renewed: the end of a party is met where its connection to this client ends, and
again, on sessions that were renewed too early for it, where the links between the parties end and form anew."""


class _Generation:
    """A request, or a part of it, on one session, which may be renewed."""

    def __init__(
        self, served: Served, model: Any, gone: Callable[[], bool], total: UsageTotal, rows: int, owner: str = "",  # noqa: ANN401
    ) -> None:  # fmt: skip
        self.served, self.model, self.gone, self.total, self.rows, self.owner = served, model, gone, total, rows, owner
        self.renewals = 0
        model.on_chunk = self._look
        self.meter: UsageMeter = self.trying(lambda: UsageMeter(self.model, total))

    def trying(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        """The result of `work`, which is done again on a renewed session if the first one fails meanwhile."""
        while True:
            try:
                return work()
            except PartiesBusy:
                raise
            except TransportError:
                if self.renewals == _RENEWALS or self.gone() or not self.served.pool.renews:
                    raise
                self.renewals += 1
                self.served.pool.renew(self.model)
                if hasattr(self, "meter"):
                    self.meter.renewed(self.model)

    def _look(self, *_: int) -> None:
        """After each chunk of a long prompt. Raises Abandoned: nobody waits for the rest."""
        if self.gone():
            raise Abandoned

    def count_last(self) -> None:
        """Add what was sent before the work ended, unless the session is over as well."""
        with contextlib.suppress(PrivateLLMError):
            self.meter.look(now=True)


class _WorkerGroup:
    """The sessions of one request, which take its groups one after the other."""

    def __init__(
        self, served: Served, groups: Sequence[Sequence[Completion]], tell: SendChunk, gone: Callable[[], bool],
        rows: int, echo: bool, total: UsageTotal, owner: str,
    ) -> None:  # fmt: skip
        self.served, self.tell, self.gone, self.rows, self.echo, self.total = served, tell, gone, rows, echo, total
        self.owner = owner
        self._left = deque(groups)
        self._at_work = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self, model: Any) -> None:  # noqa: ANN401
        """Write groups on a session until none is left. Raises what went wrong, which ends the others' work, too."""
        generation: _Generation | None = None
        while (group := self._next()) is not None:
            try:
                generation = generation or _Generation(
                    self.served, model, self._over, self.total, self.rows, self.owner
                )
                self.total.add(read=len(group[0].prompt))
                if self.echo:
                    generation.trying(partial(_prompt, generation, group))
                generation.trying(partial(_write_group, generation, group, self.tell))
                generation.trying(partial(generation.meter.look, now=True))
            except BaseException as error:
                if generation is not None:
                    generation.count_last()
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
            with self.served.pool.spare_session() as model, torch.no_grad():
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

    def _next(self) -> Sequence[Completion] | None:
        with self._changed:
            if not self._left or self._error is not None:
                return None
            self._at_work += 1
            return self._left.popleft()


def write(
    served: Served, groups: Sequence[Sequence[Completion]], tell: SendChunk, gone: Callable[[], bool],
    settings: GatewaySettings, total: UsageTotal, echo: bool = False, owner: str = "",
) -> Usage:  # fmt: skip
    """Write answers in groups of one prompt each, and tell what is new. echo: with likelihoods of prompts. owner: of
    kept caches. Returns what was spent, as `total` has it however this ends. Raises Abandoned, PoolBusy, errors of the
    library.
    """
    workers = _WorkerGroup(served, groups, tell, gone, settings.rows, echo, total, owner)
    # no inference_mode: its tensors have no version, by which layers under 'assisted' know that they share an input
    alike = partial(served.kept.begins, owner=owner, ids=groups[0][0].prompt)
    with served.pool.session(settings.wait_s, gone, alike) as model, torch.no_grad():
        for _ in range(min(len(groups), served.pool.size) - 1):
            threading.Thread(target=workers.help, name="further session", daemon=True).start()
        try:
            workers.work(model)
        finally:
            workers.finish()
    return total.usage


def publish(served: Served, prefix: list[int], settings: GatewaySettings) -> None:
    """Open all sessions and have each read a prefix that everybody may know, so that requests go on from there.

    Raises ConfigError under a cache policy that evicts entries, for an encoder, and for a model that cannot forget what
    came after the prefix; and errors of the library.
    """
    if served.kind != "decoder":
        raise ConfigError("public prefix: an encoder reads each text anew; start the gateway without it")
    served.kept.public = prefix
    ids = torch.tensor([prefix])

    def read(model: Any) -> None:  # noqa: ANN401 - a private model
        with torch.no_grad():
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=_config(1, (), served)
            )
        served.kept.keep(model, "", made.sequences[0].tolist(), made.past_key_values)
        if not served.kept.begins(model, "", [*prefix, 0]):
            raise ConfigError("public prefix: this model or its cache policy keeps none; start the gateway without it")

    with contextlib.ExitStack() as stack:
        models = [stack.enter_context(served.pool.session(settings.wait_s))]
        with contextlib.suppress(PartiesBusy):  # which let fewer in
            while (more := stack.enter_context(served.pool.spare_session())) is not None:
                models.append(more)
        list(stack.enter_context(ThreadPoolExecutor(len(models))).map(read, models))


def embed(
    served: Served, rows: list[list[int]], gone: Callable[[], bool], settings: GatewaySettings, total: UsageTotal
) -> tuple[Usage, Tensor]:  # fmt: skip
    """Sentence vectors [B, size] of token rows, as `served.vectors` makes them of hidden states."""
    order = sorted(range(len(rows)), key=lambda at: len(rows[at]))  # rows of about one length need little padding
    made: list[Tensor] = [torch.empty(0)] * len(rows)
    with served.pool.session(settings.wait_s, gone) as model, torch.no_grad():
        generation = _Generation(served, model, gone, total, settings.rows)
        try:
            for first in range(0, len(order), settings.rows):
                if gone():
                    raise Abandoned
                part = order[first : first + settings.rows]
                total.add(read=sum(len(rows[at]) for at in part))
                vectors = generation.trying(partial(_vectors, generation, [rows[at] for at in part]))
                for at, vector in zip(part, vectors, strict=True):
                    made[at] = vector
        finally:
            generation.count_last()
    return total.usage, torch.stack(made)


def _vectors(generation: _Generation, rows: list[list[int]]) -> Tensor:
    """Of rows in one call."""
    length = max(map(len, rows))
    pad = generation.served.tokenizer.pad_token_id or 0
    ids = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    states = generation.model(input_ids=ids, attention_mask=mask).last_hidden_state
    return generation.served.vectors.of(states, mask)


def _write_group(generation: _Generation, group: Sequence[Completion], tell: SendChunk) -> None:
    """Generate all answers of one prompt that are not finished, side by side as far as the parties allow."""
    for answer in group:
        answer.end_if_full()
    _tell(generation, group, tell)
    live = [answer for answer in group if answer.finish is None]
    for first in range(0, len(live), generation.rows):
        if not generation.gone():
            _write_rows(generation, live[first : first + generation.rows], tell, again=first > 0)
    if generation.gone():
        raise Abandoned


def _write_rows(generation: _Generation, live: Sequence[Completion], tell: SendChunk, again: bool) -> None:
    """Generate answers in one call. again: after others of this prompt, whose tokens are counted already."""
    written = sum(len(answer.tokens) for answer in live)

    def after() -> bool:
        nonlocal written
        before, written = written, sum(len(answer.tokens) for answer in live)
        generation.total.tokens(written - before)
        _tell(generation, live, tell)
        return generation.gone()

    rows = [[*answer.prompt, *answer.tokens] for answer in live]
    model, kept, ids = generation.model, generation.served.kept, torch.tensor(rows)
    cache = kept.take(model, generation.owner, rows[0]) if len(rows) == 1 else None
    if cache is not None and not again and not live[0].ahead:  # else the prompt was read for its likelihoods
        generation.total.add(kept=cache.get_seq_length())
    sampler = None if all(answer.params.plain for answer in live) else completion.TokenSampler(live)
    ends = live[0].ends
    more: dict[str, Any] = {} if cache is None else {CACHE: cache}
    if len(rows) == 1 and sampler is None and generation.served.speculation is not None:
        more["speculation"] = generation.served.speculation
    try:
        made = model.generate(
            input_ids=ids,
            **more,
            attention_mask=torch.ones_like(ids),
            generation_config=_config(max(answer.left for answer in live), ends, generation.served),
            logits_processor=LogitsProcessorList([] if sampler is None else [sampler]),
            stopping_criteria=StoppingCriteriaList([completion.CompletionStopper(live, sampler, after)]),
        )
    except Abandoned:  # between parts of the prompt, which the cache holds as far as they were read
        if cache is not None:
            kept.keep(model, generation.owner, rows[0], cache)
        raise
    if len(rows) == 1 and made.past_key_values is not None:
        kept.keep(model, generation.owner, made.sequences[0].tolist(), made.past_key_values)


def _tell(generation: _Generation, answers: Sequence[Completion], tell: SendChunk) -> None:
    """What is new, with the cost; all of it comes with the next call if the parties fail here."""
    for answer in answers:
        usage = generation.meter.look()
        piece = answer.new()
        if piece is not None:
            tell(piece, usage)


def _config(count: int, ends: tuple[int, ...], served: Served) -> GenerationConfig:
    """Greedy decoding without the model's own habits (its repetition penalty, for instance): the request says all."""
    return GenerationConfig(
        max_new_tokens=count, min_length=0, do_sample=False, num_beams=1, repetition_penalty=1.0,
        no_repeat_ngram_size=0, encoder_no_repeat_ngram_size=0, eos_token_id=list(ends) or None,
        pad_token_id=served.pad, bos_token_id=served.tokenizer.bos_token_id, use_cache=True,
        return_dict_in_generate=True,
    )  # fmt: skip


def _prompt(generation: _Generation, group: Sequence[Completion]) -> None:
    """The likelihoods of a prompt's tokens, by one forward call, whose last logits also give the first new token."""
    prompt = group[0].prompt
    count = group[0].params.logprobs or 0
    logits = generation.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    text = DecodedText(generation.served.texts)
    ahead = tuple(completion.likelihoods_of_prompt(logits, prompt, count, [text.take(token) for token in prompt]))
    for answer in group:
        answer.ahead = ahead
        if answer.left and not answer.tokens:
            token = completion.choose(answer, logits[-1])
            answer.take(token, *completion.likelihood(logits[-1], token, count))
            generation.total.tokens(1)
