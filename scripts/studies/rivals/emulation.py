"""Plaintext models with another system's functions: GELU, softmax and fused attention give way to their formulas.

For calibration, comparison and distillation: gradients flow through the formulas.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from private_llm_hf.models.handlers import match
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from private_llm.tensor.dispatch import TorchArg
from rivals import formulas

Function = Callable[[Tensor], Tensor]
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


@contextmanager
def emulated(name: str, model: nn.Module | None) -> Iterator[None]:
    """Inside, operations of PyTorch compute GELU and softmax of `name`, and `model` those GELUs that it spells by hand.

    Other models compute with the operations meanwhile, too. SiLU, x sigmoid(1.702 x) and norms stay.
    """
    gelu, modules = formulas.gelu(name), () if model is None else model.modules()
    spelled = [module for module in modules if match("gelus", module) in ("tanh", "none")]
    for module in spelled:
        module.__dict__["forward"] = gelu
    try:
        with _Emulated(gelu, formulas.softmax(name)):
            yield
    finally:
        for module in spelled:
            del module.__dict__["forward"]


class _Emulated(TorchFunctionMode):
    """While it is on, operations of PyTorch compute these functions. GELUs that a model spells out are not seen."""

    def __init__(self, gelu: Function, softmax: Function) -> None:
        super().__init__()
        self._gelu, self._softmax = gelu, softmax

    def __torch_function__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        """Run the operation, or what stands for it."""
        given = kwargs or {}
        if func is F.gelu:
            return self._gelu(args[0])
        if func in _SOFTMAX:
            return _over_last(self._softmax, *args, **given)
        if func is F.scaled_dot_product_attention:
            return _attention(self._softmax, *args, **given)
        return func(*args, **given)


def _over_last(
    softmax: Function, x: Tensor, dim: int | None = None, *_: object, dtype: torch.dtype | None = None, **__: object
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    if dim in (-1, x.ndim - 1):
        return softmax(x)
    return softmax(x.movedim(dim or 0, -1)).movedim(-1, dim or 0)


def _attention(
    softmax: Function, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """PyTorch's fused attention, spelled out."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    mixed: Tensor = F.dropout(softmax(scores), dropout_p, training=dropout_p > 0) @ value
    return mixed
