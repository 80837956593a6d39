"""The architectures that are supported, as data (models/*.json): what kind each is, and a rule for each module."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from transformers import PretrainedConfig

from private_llm.errors import PatchMismatch


@dataclass(frozen=True)
class Architecture:
    """Public facts of a model type.

    kind: which stacks it has. positions: "limited" by max_position_embeddings, "after padding" (counted from
    pad_token_id + 1 over unmasked tokens, as RoBERTa does) or "unlimited" (relative positions).
    images: "sized" as config.image_size says, or "any" size that the layers can take.
    """

    kind: Literal["decoder", "encoder", "encoder-decoder", "vision"]
    positions: Literal["limited", "after padding", "unlimited"] = "limited"
    images: Literal["sized", "any"] = "sized"

    @property
    def caches(self) -> bool:
        """Whether it generates with a KV cache."""
        return self.kind in ("decoder", "encoder-decoder")


@dataclass(frozen=True)
class ModuleRule:
    """What runs in place of a module, and what of it is public."""

    pattern: re.Pattern[str]
    becomes: str
    public: str


def architecture(config: PretrainedConfig) -> Architecture:
    """The architecture of a configuration. Raises PatchMismatch, listing what is supported."""
    return architecture_of(config.model_type)


def architecture_of(model_type: object) -> Architecture:
    """The architecture of a model type. Raises PatchMismatch, listing what is supported."""
    table = _architectures()
    found = table.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise PatchMismatch(
            f"unknown architecture {str(model_type)[:80]!r}; supported: {', '.join(sorted(table))} (another one needs "
            "an entry in private_llm_hf/models/architectures.json and a test against its plaintext self)"
        )
    return found


@functools.cache
def _architectures() -> dict[str, Architecture]:
    return {name: Architecture(**facts) for name, facts in _read("architectures.json").items()}


@functools.cache
def module_rules() -> tuple[ModuleRule, ...]:
    """Rules by class name, first match wins."""
    rules = _read("modules.json")
    return tuple(ModuleRule(re.compile(f"(?:{names})$"), r["becomes"], r["public"]) for names, r in rules.items())


@functools.cache
def table(section: str) -> dict[str, Any]:
    """A section of replacements.json: what of a family is done in another way."""
    found: dict[str, Any] = _read("replacements.json")[section]
    return found


def attention_of(model_type: str) -> str:
    """`private_llm`, or for families that bypass the attention registry the spelling that our op table serves."""
    spellings = table("attention")
    found: str = spellings.get(model_type, spellings["_"])
    return found


def positions_by_mask() -> frozenset[str]:
    """Model types that number positions by unmasked tokens unless they are given numbers."""
    found: list[str] = _read("replacements.json")["positions_by_mask"]
    return frozenset(found)


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files("private_llm_hf").joinpath("models", name).read_text())
    return found
