"""A long prompt as calls of a chunk each, one after the other behind one KV cache.

What a party holds at the peak of a call are arrays as large as its scores, [heads, queries, keys]: in chunks they grow
with the prompt, not with its square. Chunks have one size, so that programs of them are the same for all prompts; what
is left over comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from private_llm_hf.client.session_client import Secret
from private_llm_hf.wire.commands import Call


def chunks(
    call: Call, secrets: Sequence[Secret], past: int, size: int, by_token: bool
) -> Iterator[tuple[Call, list[Secret], int]]:  # fmt: skip
    """The calls of a prompt, with their secrets and numbers of tokens. size: tokens of each but the first.

    past: positions that the cache holds before. by_token: whether outputs are of each token, not of the last one alone.
    Only those are opened, and their logits made, that are wanted.
    """
    length = call.secret[0].shape[1]
    kept = call.public.get("logits_to_keep", 0) or length
    start = 0
    while start < length:
        stop = start + (((length - start) % size) or size)
        wanted = min(stop - start, stop - length + int(kept)) if by_token else int(stop == length)
        public = {name: _of_tokens(value, name, start, stop, past) for name, value in call.public.items()}
        if "logits_to_keep" in public:
            public["logits_to_keep"] = max(wanted, 1)
        public = {name: value for name, value in public.items() if name != "attention_mask" or not _all(value)}
        yield (
            replace(
                call, public=public, outputs=call.outputs if wanted > 0 else (), more=stop < length,
                secret=tuple(replace(x, shape=(x.shape[0], stop - start, *x.shape[2:])) for x in call.secret),
            ),
            [_secret(secret, call.rows, start, stop) for secret in secrets],
            stop - start,
        )  # fmt: skip
        start = stop


def joined(opened: Sequence[dict[str, Tensor]], by_token: bool) -> dict[str, Tensor]:
    """The outputs of all chunks as those of one call."""
    last = opened[-1]
    if not by_token:
        return last
    return {name: torch.cat([each[name] for each in opened if name in each], dim=1) for name in last}


def _of_tokens(value: Tensor | bool | int, name: str, start: int, stop: int, past: int) -> Tensor | bool | int:
    """What of a public argument belongs to a chunk: a mask is of all positions so far, others are of new ones."""
    if not isinstance(value, Tensor):
        return value
    return value[:, : past + stop] if name == "attention_mask" else value[:, start:stop]


def _all(mask: object) -> bool:
    return isinstance(mask, Tensor) and bool(mask.all())


def _secret(secret: Secret, rows: int, start: int, stop: int) -> Secret:
    if isinstance(secret, Tensor):
        return secret[:, start:stop]
    ids, vocabulary = secret
    return ids.view(rows, -1)[:, start:stop].reshape(-1), vocabulary
