"""Comparing a private model with its plaintext self.

LOGIT_ERROR: weights and activations carry 18 fractional bits, so a product of two numbers of size up to 4 is off by
at most 2 * 4 * 2^-19, a row of 64 of them by 1e-3 in the worst case and by 1.2e-4 if roundings are independent. The
tiny models chain about ten such rows, plus functions with errors around 1e-4: 64 roundings to the same side in every
row would give 1e-2, independent ones 1e-3. The bound lies between; ten times it would still change no token below.
"""

from __future__ import annotations

import torch
from private_llm_hf.checkpoint.share_files import ShareFile
from torch import Tensor

from private_llm.protocols.share import Share

LOGIT_ERROR = 4e-3

PADDED = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
BATCH = {"input_ids": PADDED, "attention_mask": MASK}


def worst(private: Tensor, plain: Tensor, mask: Tensor | None = None) -> float:
    """Largest difference, at unmasked positions."""
    difference = (private.detach() - plain.detach()).abs()
    return float((difference if mask is None else difference[mask.bool()]).max())


GREEDY = {"max_new_tokens": 4, "do_sample": False}


def shares_of(file: ShareFile) -> dict[str, Share]:
    """All shares of a file."""
    return {name: file.weight(name) for name in file.shapes}
