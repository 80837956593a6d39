"""Choosing tokens from logits, each answer by its own settings and its own random numbers.

A token is drawn as the arg max of the warped log-probabilities plus Gumbel noise, which is an exact sample of them
(Gumbel 1954; Maddison, Tarlow and Minka 2014, section 2), from a generator that belongs to the answer alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TemperatureLogitsWarper, TopPLogitsWarper

from private_llm_gateway.completion import Completion, Likelihood, SamplingParams

_GREEDY = 1e-4
"""Temperatures below are greedy: logits divided by them would be infinite."""


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
    """The token that follows logits [V]."""
    params = answer.params
    scores = _changed(answer, logits.to(torch.float64))
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
        allowed = answer.written.allowed(len(scores), answer.left)
        if bool(allowed.any()):
            scores = scores.masked_fill(~allowed, float("-inf"))
    return scores
