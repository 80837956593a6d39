"""One answer while it is written: how its tokens are chosen, the text that may be shown so far, and why it ended.

Text is decoded as tokens come; what may still become a stop text, or half a character, is held back.

Each answer has its own settings and its own random numbers. A token is drawn as the arg max of the warped
log-probabilities plus Gumbel noise, which is an exact sample of them (Gumbel 1954; Maddison, Tarlow and Minka 2014,
section 2), from a generator that belongs to the answer alone.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TemperatureLogitsWarper, TopPLogitsWarper

from private_llm_gateway.constrained import Grammar
from private_llm_gateway.decoding import DecodedText, TokenTexts

Finish = Literal["stop", "length"]
_GREEDY = 1e-4  # temperatures below are greedy: logits divided by them would be infinite
_TRIES = 4  # tokens that are drawn, where the text must be closed soon, before what closes it is taken
_TAIL = 16  # tokens of the prompt that the first token's text is decoded after: a character of theirs may not be whole


@dataclass(frozen=True)
class SamplingParams:
    """How to write. logprobs: how many of the likeliest tokens to report beside each token's own (None: nothing).
    temperature 0 is greedy. frequency, presence, bias: added to logits, as OpenAI's. grammar: what the text must be.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = field(default=None, compare=False)

    @cached_property
    def added(self) -> Tensor | None:
        """`bias` as a tensor of tokens and values, float64 [2, N]."""
        return torch.tensor(self.bias, dtype=torch.float64).T if self.bias else None

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is all that is wanted."""
        bare = self.presence == self.frequency == 0 and not self.bias
        return self.temperature == 0 and bare and self.logprobs is None and self.grammar is None


@dataclass(frozen=True)
class Likelihood:
    """A token's log-probability and the likeliest tokens', before temperature and penalties. at: where its text is."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    at: int


@dataclass(frozen=True)
class CompletionChunk:
    """What is new of an answer. ahead: of the prompt's tokens, if they are wanted, once."""

    index: int
    text: str
    likelihoods: tuple[Likelihood, ...]
    finish: Finish | None
    ahead: tuple[Likelihood, ...] = ()


class Completion:
    """One answer. ends: the tokens that end any text. A character that the prompt began belongs to the answer."""

    def __init__(
        self, index: int, prompt: list[int], params: SamplingParams, texts: TokenTexts, ends: tuple[int, ...],
        sample: int = 0,
    ) -> None:  # fmt: skip
        self.index, self.prompt, self.params, self.ends = index, prompt, params, ends
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.text = ""
        self.likelihoods: list[Likelihood] = []
        self.ahead: tuple[Likelihood, ...] = ()
        self.generator = torch.Generator().manual_seed(
            secrets.randbits(62) if params.seed is None else (params.seed * 1_000_003 + sample) % (1 << 62)
        )
        self.written = None if params.grammar is None else params.grammar.written()
        self._spoken = DecodedText(texts, prompt[-_TAIL:])
        self._before = len(self._spoken.text)
        self._shown = self._told = 0
        self._reported = self._ahead_told = False

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.params.max_tokens - len(self.tokens)

    def take(self, token: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> None:
        """The next token."""
        self.tokens.append(token)
        if token in self.ends:
            self._end("stop")
            return
        before = len(self.text)
        at = self._spoken.take(token) - self._before
        self.text = self._spoken.text[self._before :]
        if self.params.logprobs is not None:
            self.likelihoods.append(Likelihood(token, logprob, top, at))
        if self.written is not None:
            self.written.take(token)
        if self._stopped(before):
            return
        if self.written is not None and self.written.finished:
            self._end("stop")
        elif self.left == 0:
            self._end("length")

    def end_if_full(self) -> None:
        """An answer of no tokens ends before its first."""
        if self.finish is None and self.left == 0:
            self._end("length")

    def new(self) -> CompletionChunk | None:
        """What may be shown since the last call, if anything."""
        upto = len(self.text) if self.finish is not None else len(self.text) - self._held()
        told = self._told
        while told < len(self.likelihoods) and (self.finish is not None or self.likelihoods[told].at < upto):
            told += 1
        ended = self.finish is not None and not self._reported
        ahead = () if self._ahead_told else self.ahead
        if upto <= self._shown and told == self._told and not ended and not ahead:
            return None
        self._reported = self.finish is not None
        self._ahead_told = self._ahead_told or bool(ahead)
        likelihoods = tuple(self.likelihoods[self._told : told])
        made = CompletionChunk(self.index, self.text[self._shown : upto], likelihoods, self.finish, ahead)
        self._shown, self._told = max(upto, self._shown), told
        return made

    def _end(self, why: Finish) -> None:
        self.finish = why
        before = len(self.text)
        self._spoken.end()
        self.text = self._spoken.text[self._before :]
        self._stopped(before)

    def _stopped(self, before: int) -> bool:
        """Cut the text before the first stop text that ends after `before`, if there is one."""
        longest = max((len(stop) for stop in self.params.stop), default=0)
        begin = max(0, before - longest + 1)
        found = [at for stop in self.params.stop if (at := self.text.find(stop, begin)) >= 0]
        if not found:
            return False
        self.text = self.text[: min(found)]
        self.likelihoods = [each for each in self.likelihoods if each.at < len(self.text)]
        self._told = min(self._told, len(self.likelihoods))
        self.finish = "stop"
        return True

    def _held(self) -> int:
        """Characters at the end with which a stop text may begin."""
        begun = (stop[:size] for stop in self.params.stop for size in range(1, len(stop)))
        return max((len(each) for each in begun if self.text.endswith(each)), default=0)


class TokenSampler(LogitsProcessor):  # type: ignore[misc]
    """Chooses each row's token: its logit becomes 0, all others minus infinity, so that greedy decoding takes it."""

    def __init__(self, answers: Sequence[Completion]) -> None:
        self.answers = answers
        self.chosen: list[tuple[float | None, tuple[tuple[int, float], ...]]] = [(None, ())] * len(answers)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B, V] -> [B, V]."""
        made = torch.full_like(scores, float("-inf"))
        for row, answer in enumerate(self.answers):
            if answer.finish is not None:
                made[row, 0] = 0.0
                continue
            token = choose(answer, scores[row])
            made[row, token] = 0.0
            count = answer.params.logprobs
            self.chosen[row] = (None, ()) if count is None else likelihood(scores[row], token, count)
        return made


class CompletionStopper(StoppingCriteria):  # type: ignore[misc]
    """Hands each new token to its answer, and ends the generation when all are done or nobody wants them."""

    def __init__(self, answers: Sequence[Completion], sampler: TokenSampler | None, after: Callable[[], bool]) -> None:
        self.answers, self.sampler, self.after = answers, sampler, after

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        """input_ids [B, S] with the new tokens; returns which rows are done (bool [B])."""
        for row, answer in enumerate(self.answers):
            if answer.finish is None:
                logprob, top = (None, ()) if self.sampler is None else self.sampler.chosen[row]
                answer.take(int(input_ids[row, -1]), logprob, top)
        over = self.after()
        return torch.tensor([over or answer.finish is not None for answer in self.answers])


def choose(answer: Completion, logits: Tensor) -> int:
    """The token that follows logits [V]. Near the end, one after which what a grammar has begun can still be closed."""
    scores = _changed(answer, logits.to(torch.float64))
    token = _drawn(answer, scores)
    if answer.written is None or (closing := answer.written.closing(answer.left)) is None:
        return token
    for _ in range(_TRIES if answer.written.patient else 0):
        if answer.written.closes(token, answer.left - 1):
            return token
        scores[token] = float("-inf")
        token = _drawn(answer, scores)
    return [*closing, *answer.ends, token][0]


def _drawn(answer: Completion, scores: Tensor) -> int:
    params = answer.params
    if params.temperature < _GREEDY:
        return int(scores.argmax())
    warped = TemperatureLogitsWarper(float(params.temperature))(None, scores[None])
    if params.top_p < 1:
        warped = TopPLogitsWarper(float(params.top_p))(None, warped)
    waiting = torch.empty_like(warped).exponential_(generator=answer.generator)
    return int((warped - waiting.log()).argmax())


def likelihood(logits: Tensor, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of a token under logits [V], and the `count` likeliest with theirs."""
    logprobs = torch.log_softmax(logits.to(torch.float64), -1)
    values, indices = logprobs.topk(count)
    return float(logprobs[token]), tuple(zip(indices.tolist(), values.tolist(), strict=True))


def likelihoods_of_prompt(logits: Tensor, prompt: list[int], count: int, offsets: list[int]) -> list[Likelihood]:
    """Of every token of a prompt, given logits [S, V]; nothing predicts the first one."""
    made = [Likelihood(prompt[0], None, (), offsets[0])]
    for at in range(1, len(prompt)):
        logprob, top = likelihood(logits[at - 1], prompt[at], count)
        made.append(Likelihood(prompt[at], logprob, top, offsets[at]))
    return made


def _changed(answer: Completion, scores: Tensor) -> Tensor:
    """Logits with penalties, bias and the grammar's verdict."""
    params: SamplingParams = answer.params
    if params.presence or params.frequency:
        counts = Counter(answer.tokens)
        seen = torch.tensor(list(counts), dtype=torch.int64)
        times = torch.tensor(list(counts.values()), dtype=scores.dtype)
        scores[seen] -= params.presence + params.frequency * times
    if params.added is not None:
        scores = scores.index_add(0, params.added[0].long(), params.added[1])
    if answer.written is not None:
        scores = scores.masked_fill(~answer.written.allowed(len(scores)), float("-inf"))
    return scores
