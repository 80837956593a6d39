"""Whose GELU and softmax a run computes: this library's ("ours"), or another system's, which a plug-in brings.

A plug-in (`PrivateConfig.plugins`, `private-llm --plugin`) is a module that calls `register_approximations` when it is
imported, at the owner, the client and every party. MPCFormer's, SecFormer's and PUMA's functions are such a plug-in:
`scripts/studies/rivals` of the repository.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from private_llm.errors import ConfigError, NeedsDistillation

if TYPE_CHECKING:
    from torch import nn  # settings are read without PyTorch, which takes a second to import

OURS = "ours"


@dataclass(frozen=True, eq=False)
class Approximations:
    """One system's GELU and softmax.

    Functions take and give `Fixed`. gelu: of any shape. softmax: over the last dimension, with a sink or None; ragged:
    of each row of a flat secret, with its `Rows` and sinks; both as `approx.softmax`. emulated: a context in which
    plaintext models compute the same, a given one also where it spells GELU by hand. distilled: what models must be
    distilled for, or "". squares: whether its softmax squares scores, so that a score far below all others weighs most.
    gelu_bits: bits of magnitude that arguments of its GELU may have, if fewer than this library's.
    """

    name: str
    gelu: Callable[..., Any]
    softmax: Callable[..., Any]
    ragged: Callable[..., Any]
    emulated: Callable[[nn.Module | None], AbstractContextManager[None]]
    distilled: str = ""
    squares: bool = False
    gelu_bits: int | None = None


_TABLE: dict[str, Approximations] = {}


def register_approximations(made: Approximations) -> None:
    """Offer a system's functions in this process, under its name. Raises ConfigError for a name that is taken."""
    if made.name in (OURS, *_TABLE):
        raise ConfigError(f"approximations {made.name!r} are registered already; want another name")
    _TABLE[made.name] = made


def approximations_of(name: str) -> Approximations | None:
    """What is registered under a name; None for "ours". Raises ConfigError for any other name."""
    if name != OURS and name not in _TABLE:
        raise ConfigError(
            f"approximations: got {name!r}; want one of {', '.join(map(repr, (OURS, *_TABLE)))}, or a name that a "
            "plug-in registers. Those of 'mpcformer', 'secformer' and 'puma' are in scripts/studies/rivals of the "
            "repository: put scripts/studies on PYTHONPATH and load them with plugins=('rivals',), or "
            "`private-llm --plugin rivals ...` (`private-llm docs studies/approximations`)"
        )
    return _TABLE.get(name)


def check_approximations(name: str, ring: int, sharded: bool) -> None:
    """Raise ConfigError for a name that is not registered, and where only this library's functions run."""
    if approximations_of(name) is None:
        return
    if sharded:
        raise ConfigError(
            f"approximations: got {name!r}; nodes of a sharding plan compute the functions themselves in the clear, so "
            "want 'ours'"
        )
    if ring == 32:
        raise ConfigError(f"approximations: got {name!r} in a 32-bit ring, which has no GELU and softmax; want ring=64")


def emulated(name: str, model: nn.Module | None = None) -> AbstractContextManager[None]:
    """Inside, plaintext operations compute GELU and softmax of that name; so does what `model` spells by hand.

    Other models compute with the operations meanwhile, too. SiLU, x sigmoid(1.702 x) and norms stay.
    """
    found = approximations_of(name)
    return nullcontext() if found is None else found.emulated(model)


def warn_of_functions(model: str, name: str) -> None:
    """Warn (NeedsDistillation) where the functions are far from those that a model was trained with."""
    found = approximations_of(name)
    if found is not None and found.distilled:
        warnings.warn(
            f"{model}: approximations={name!r} computes other functions instead of {found.distilled}. Unless the model "
            "was trained with these (distilled), its answers may be far from the plaintext model's; the default "
            "approximations work with any model",
            NeedsDistillation,
            stacklevel=5,
        )
