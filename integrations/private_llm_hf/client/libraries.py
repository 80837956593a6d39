"""Other libraries that take a model: what they look at before they use a private one.

transformers' pipelines warn with a list of all classes unless a model's class is in their tables of names. And torch
accepts a module under any attribute name, also one that the owner's class computes: sentence-transformers has a
property `auto_model`, so assigning to it would change nothing, and texts would go through the plaintext model.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from private_llm.errors import ConfigError


def known_to_pipelines(private: type[PreTrainedModel], original: type[PreTrainedModel]) -> None:
    """Put a private class into every table of class names that has its original; no model type leads to it."""
    for title, table in vars(modeling_auto).items():
        if title.endswith("_MAPPING_NAMES") and original.__name__ in _names(table.values()):
            table[private.__name__] = private.__name__


def _names(values: object) -> set[str]:
    found: set[str] = set()
    for value in values:  # type: ignore[attr-defined] # an ordered dictionary's values
        found.update(value if isinstance(value, tuple) else (value,))
    return found


def refuse_swallowed(kind: type) -> None:
    """From now on, assigning a module of this class where the owner has a property raises ConfigError."""

    def check(owner: nn.Module, name: str, module: nn.Module | None) -> None:
        if isinstance(module, kind) and isinstance(getattr(type(owner), name, None), property):
            others = [n for n, held in owner.named_children() if isinstance(held, PreTrainedModel)]
            hint = f"; assign to '{others[0]}', which holds the model" if others else ""
            raise ConfigError(
                f"{type(owner).__name__}.{name} is a property, so what is assigned to it is never used and the "
                f"plaintext model would go on answering{hint}"
            )

    register_module_module_registration_hook(check)
