"""A plaintext model of transformers with another system's functions, for calibration, comparison and distillation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from private_llm.approx import formulas
from private_llm.approx.emulation import Emulated
from private_llm.errors import NeedsDistillation
from private_llm_hf.handlers import match


@contextmanager
def emulated(model: nn.Module, approximations: str) -> Iterator[None]:
    """Inside, `model` computes GELU and softmax as `PrivateConfig.approximations` of that name does; "ours": exactly.

    Covers operations of PyTorch (also of other models meanwhile) and the GELUs that transformers spells by hand. SiLU,
    x sigmoid(1.702 x) and norms stay.
    """
    if approximations == "ours":
        yield
        return
    gelu = formulas.gelu(approximations)
    spelled = [module for module in model.modules() if match("gelus", module) in ("tanh", "none")]
    for module in spelled:
        module.__dict__["forward"] = gelu
    try:
        with Emulated(approximations):
            yield
    finally:
        for module in spelled:
            del module.__dict__["forward"]


def warn_of_functions(model_class: type[nn.Module], approximations: str) -> None:
    """Warn (NeedsDistillation) where the functions are far from those that a model was trained with."""
    if approximations in ("mpcformer", "secformer"):
        what = "GELU and softmax" if approximations == "mpcformer" else "softmax"
        warnings.warn(
            f"{model_class.__name__}: approximations={approximations!r} puts other functions in the place of {what}. "
            "Answers are the plaintext model's with these functions, which may be far from its own unless it was "
            "distilled with them; the default approximations need no distillation",
            NeedsDistillation,
            stacklevel=5,
        )
