"""What a model predicts after a prompt when its cache holds what a policy left: text that is given, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.kv_policies.policy import CachePolicy
from private_llm_hf.long_context.recording import Prefill
from private_llm_hf.transformers_versions import CACHE


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
def forced(model: Any, prefill: Prefill, policy: CachePolicy, given: Tensor) -> Forced:  # noqa: ANN401
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
