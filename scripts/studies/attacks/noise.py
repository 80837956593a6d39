"""Rows as they are after a shorter number format: how much rounding vocab-matching stands."""

import torch
from torch import Tensor

from private_llm.errors import DomainError

FORMATS = ("float32", "float16", "bfloat16", "8 bits", "6 bits", "4 bits", "3 bits", "2 bits")
"""Number formats; those of some bits are integers scaled by each row's largest number."""


def rounded(rows: Tensor, form: str) -> Tensor:
    """`rows` [n, numbers] in one of `FORMATS`, as float32 again. Raises DomainError for another format."""
    if form not in FORMATS:
        raise DomainError(f"number format: got {form!r}; want {', '.join(FORMATS)}")
    if form.endswith("bits"):
        steps = 2 ** (int(form.split()[0]) - 1) - 1
        unit: Tensor = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / steps
        return torch.round(rows / unit) * unit
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return rows.to(kinds[form]).float()
