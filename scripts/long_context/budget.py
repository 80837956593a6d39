"""The smallest budget of a cache policy that keeps to a stated loss of accuracy, on text of the owner's.

    ids = torch.tensor([w.prompt + w.continuation for w in text_windows(tokenizer, 1024, 32, 8, text)])
    found = smallest_budget(model, ids, loss=0.02)
    PrivateConfig(kv_cache=found.policy)

What holds on this text holds for text like it: tasks that look for one thing far back lose more
(docs/studies/kv-accuracy.md).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from private_llm_hf.transformers_versions import CACHE
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from long_context.plain_attention import Scoring, mass_of, policy_attention
from long_context.plain_cache import PolicyCache, PolicyLayer
from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy

BUDGETS = (0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of the text that stay, of the policies that are tried if none are given."""


@dataclass(frozen=True)
class Tried:
    """One policy on the calibration text.

    agreement: the share of tokens where the most likely one is that of the full cache. perplexity: over that of the
    full cache, less 1. attended, held: shares of the text that a step attends to, and that are in memory.
    """

    policy: CachePolicy
    agreement: float
    perplexity: float
    attended: float
    held: float

    def loss(self, measure: Literal["agreement", "perplexity"]) -> float:
        """What is lost by that measure."""
        return 1 - self.agreement if measure == "agreement" else self.perplexity


@dataclass(frozen=True)
class BudgetFound:
    """policy: the first within the loss, `KEEP_ALL` if none is. tried: all that were measured. tokens: how many."""

    policy: CachePolicy
    tried: tuple[Tried, ...]
    tokens: int


def attended(policy: CachePolicy, length: int) -> int:
    """Entries that the first step after a prompt of `length` tokens attends to."""
    held = policy.entries(length, length, length) + 1
    shape = None if policy.selection is None else policy.selection.shape(held)
    return held if shape is None else held - shape.clustered + shape.chosen


def smallest_budget(
    model: PreTrainedModel,
    ids: Tensor,
    loss: float = 0.01,
    measure: Literal["agreement", "perplexity"] = "agreement",
    continuation: int = 32,
    policies: Sequence[CachePolicy] | None = None,
    base: MPCacheConfig | None = None,
    trying: Callable[[CachePolicy], object] = lambda policy: None,
) -> BudgetFound:
    """The first of `policies` whose loss against the full cache is at most `loss`, on `ids`, int64 [B, S].

    The first S - continuation tokens of each row are its prompt; the others are given one a call. measure: the share of
    tokens whose most likely value is another ("agreement"), or the relative rise of the perplexity. policies: from
    small to large budgets, searched by halves; what is returned was measured, and is within the loss, or is KEEP_ALL.
    Default: MPCache with the shares `BUDGETS`, with `base`'s clusters and without, and its other settings. trying: is
    told each policy before it is measured. Raises ConfigError for a loss below 0 or, of agreement, of 1 or more, a text
    of fewer tokens than can show the loss, and no policies.
    """
    tokens, length = ids.shape[0] * (continuation - 1), ids.shape[1] - continuation
    if loss < 0:
        raise ConfigError(f"loss: got {loss}; want 0 or more")
    if measure == "agreement" and loss >= 1:
        raise ConfigError(f"loss: got {loss}; want a share of the tokens, below 1")
    if continuation < 2 or length < 1:
        raise ConfigError(
            f"ids: got rows of {ids.shape[1]} tokens, {continuation} of them to predict; want 2 or more, and a prompt"
        )
    if measure == "agreement" and loss and tokens * loss < 1:
        rows = math.ceil(1 / loss / (continuation - 1))
        raise ConfigError(f"ids: {tokens} tokens cannot show a loss of {loss}; want {rows} or more rows")
    candidates = list(_default(length, base) if policies is None else policies)
    if not candidates:
        raise ConfigError("policies: got none; want at least one")
    tried: list[Tried] = []
    with policy_attention(model):
        prefill = record(model, input_ids=ids[:, :length])
        full = forced(model, prefill, KEEP_ALL, ids[:, length:])
        low, high = 0, len(candidates)
        while low < high:
            middle = (low + high) // 2
            trying(candidates[middle])
            tried.append(_try(model, prefill, candidates[middle], ids[:, length:], full))
            low, high = (low, middle) if tried[-1].loss(measure) <= loss else (middle + 1, high)
    return BudgetFound(candidates[low] if low < len(candidates) else KEEP_ALL, tuple(tried), tokens)


def _default(length: int, base: MPCacheConfig | None) -> list[CachePolicy]:
    """MPCache with each share that stays, with its clusters and without, from small to large budgets."""
    base = MPCacheConfig() if base is None else base
    every = [replace(base, gamma=gamma, levels=levels) for gamma in BUDGETS for levels in {base.levels, ()}]
    made: list[CachePolicy] = []
    for policy in sorted(every, key=lambda policy: attended(policy, length)):
        if not made or attended(policy, length) > attended(made[-1], length):
            made.append(policy)
    return made


def _try(model: PreTrainedModel, prefill: "Prefill", policy: CachePolicy, given: Tensor, full: "Forced") -> Tried:
    """The first place is the prompt's, and does not count."""
    found, counts = forced(model, prefill, policy, given), torch.ones_like(given, dtype=torch.bool)
    counts[:, 0] = False
    return Tried(
        policy,
        float((found.best == full.best)[counts].double().mean()),
        math.exp(found.mean_loss(counts) - full.mean_loss(counts)) - 1,
        found.attended,
        found.held,
    )


# -- what a model predicts after a prompt: text that is given, token by token -----------------------------------------
@dataclass(frozen=True, eq=False)
class Forced:
    """best: the most likely token at each place, int64 [B, n]. loss: nats of each given token, [B, n].

    attended, held: the mean share of the text that a step attends to, and that is in memory after it, over layers and
    steps.
    """

    best: Tensor
    loss: Tensor
    attended: float
    held: float

    def mean_loss(self, counts: Tensor) -> float:
        """Nats per token where bool `counts` [B, n] says so."""
        return float(self.loss[counts].mean())


@torch.no_grad()
def forced(model: Any, prefill: "Prefill", policy: CachePolicy, given: Tensor) -> Forced:  # noqa: ANN401
    """Feed `given`, int64 [B, n], after the prompt, one token a call as generate() does; inside `policy_attention`.

    The first place is what the prompt itself predicts, whatever the policy.
    """
    cache = prefill.cache(policy)
    logits, attended, held = [prefill.logits], [], []
    for token in given[:, :-1].split(1, dim=1):
        logits.append(model(input_ids=token, **{CACHE: cache}, use_cache=True).logits[:, -1])
        length = cache.get_seq_length()
        attended += [count / length for count in cache.attended()]
        held += [count / length for count in cache.entries()]
    made = torch.stack(logits, dim=1).float()
    loss = F.cross_entropy(made.flatten(0, 1), given.flatten(), reduction="none").view(given.shape)
    shares = [sum(part) / len(part) if part else 1.0 for part in (attended, held)]
    return Forced(made.argmax(-1), loss, *shares)


# -- a prompt read once, for caches of many policies ------------------------------------------------------------------
#     with policy_attention(model):
#         prefill = record(model, input_ids=ids)
#         for policy in policies:
#             model(next_ids, past_key_values=prefill.cache(policy))
#
# What is kept are the keys, values and queries of the prompt; the attention that a policy counts is made from these
# when it is first asked for.
@dataclass(frozen=True, eq=False)
class RecordedAttention:
    """What one layer's attention was given: q [B, H, S, D], k and v [B, G, S, D], and what a query may see."""

    query: Tensor
    keys: Tensor
    values: Tensor
    allowed: Tensor | None
    scoring: Scoring
    masses: dict[int, Tensor] = field(default_factory=dict)

    def mass(self, counted: int, among: Tensor | None) -> Tensor | None:
        """Of the last `counted` queries [B, G, S], or those of them `among` says; remembered if all. None for 0."""
        if counted and among is not None:
            return mass_of(self.query, self.keys, self.allowed, self.scoring, counted, among)
        if counted and counted not in self.masses:
            self.masses[counted] = mass_of(self.query, self.keys, self.allowed, self.scoring, counted)
        return self.masses.get(counted)


@dataclass(frozen=True, eq=False)
class Prefill:
    """A prompt's calls, layer by layer, and the logits after its last token [B, V]."""

    config: PreTrainedConfig
    calls: tuple[RecordedAttention, ...]
    logits: Tensor

    @property
    def length(self) -> int:
        """Tokens of the prompt, with padding."""
        return int(self.calls[0].keys.shape[2])

    def cache(self, policy: CachePolicy) -> PolicyCache:
        """A cache that has read the prompt under `policy`; keys and values are shared until entries are dropped.

        Raises ConfigError for policies that change how the prompt is read (merged heads).
        """
        if policy.merged_heads != 1:
            raise ConfigError(
                f"kv_cache: {policy.name} reads the prompt in another way; give it a PolicyCache of its own"
            )
        cache = PolicyCache(policy, self.config)
        for layer, call in zip(cache.layers, self.calls, strict=True):
            layer.update(call.keys, call.values)
            layer.choose(call.query, call.allowed)
            mass = call.mass(*layer.counted(self.length))
            layer.attended(call.query, mass, call.allowed, call.scoring)
        return cache


class _RecordingLayer(PolicyLayer):
    """Keeps everything, and what attention was given."""

    call: RecordedAttention

    def attended(self, query: Tensor, mass: Tensor | None, allowed: Tensor | None, call: Scoring) -> None:
        super().attended(query, mass, allowed, call)
        if self.keys is not None and self.values is not None:
            self.call = RecordedAttention(query, self.keys, self.values, allowed, call)


def record(model: PreTrainedModel, **inputs: Any) -> Prefill:  # noqa: ANN401 - what the model's forward takes
    """Read a prompt, inside `policy_attention(model)`, without gradients. inputs: as for the model's forward."""
    cache = PolicyCache(KEEP_ALL, model)
    cache.layers = [_RecordingLayer(KEEP_ALL, layer.number, layer.windowed, None) for layer in cache.layers]
    with torch.no_grad():
        logits = model(**inputs, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
    return Prefill(model.config, tuple(layer.call for layer in cache.layers), logits)
