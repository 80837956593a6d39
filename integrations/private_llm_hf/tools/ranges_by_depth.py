"""Ranges of a model that was calibrated for the shape of a wider and deeper one: for estimates, never for a run.

Bytes and rounds depend on ranges, and these on weights that an estimate does without. The package holds what
`private-llm calibrate` measures in SmolLM2-135M-Instruct; a layer of a shape takes what was measured at its depth.
"""

import re
from collections.abc import Mapping
from importlib import resources

import torch
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.approx.norms import fitting_bits
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.ranges import LARGEST_EXPONENT, WEIGHT_ROOM, Ranges

MEASURED = "smollm2"
"""The word for them on command lines."""

_WIDTH, _LAYERS = 576, 30
_OF_ROWS = ("output", "compare", "value", "read")  # norms of whole rows: they grow with the root of their width
_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..+)$")


def ranges_by_depth(model_class: type[PreTrainedModel], config: PretrainedConfig) -> Ranges:
    """SmolLM2's exponents for a shape of LLaMA's layout: of the layer at the same share of the depth.

    Norms of rows grow with the root of the width, rounded up to a power of two; small weights lose fractional bits
    where a product then lacks room for them, and so do residual sums where a norm's sum of squares does. Raises
    ConfigError for a shape that lacks one of the modules.
    """
    text = resources.files("private_llm_hf").joinpath("data", "smollm2-ranges.json").read_text("utf-8")
    measured = Ranges.from_json(text).modules
    more = max(0, config.hidden_size // _WIDTH).bit_length() // 2
    found = {name: known for name, known in measured.items() if not _LAYER.match(name)}
    for number in range(config.num_hidden_layers):
        source = round(number * (_LAYERS - 1) / max(1, config.num_hidden_layers - 1))
        for name, known in measured.items():
            parts = _LAYER.match(name)
            if parts and int(parts[2]) == source:
                found[f"{parts[1]}{number}{parts[3]}"] = known
    with torch.device("meta"):
        there = {name for name, _ in model_class(config).named_modules()}
    missing = sorted(set(found) - there)
    if missing:
        raise ConfigError(
            f"ranges: {MEASURED!r} tells of modules such as {missing[0]!r}, and {model_class.__name__} lacks "
            f"{len(missing)} of {len(found)}; want a shape of LLaMA's layout, a file of `private-llm calibrate`, or "
            "none"
        )
    fewer = fitting_bits(_WIDTH, 0) - fitting_bits(config.hidden_size, 0)
    return Ranges({name: _wider(known, more, fewer, config.hidden_size) for name, known in found.items()})


def _wider(known: Mapping[str, int], more: int, fewer: int, width: int) -> dict[str, int]:
    made = {name: bits + more if name in _OF_ROWS else bits for name, bits in known.items()}
    if "output" in made:
        made["output"] = min(made["output"], LARGEST_EXPONENT)
    if "weight" in made:
        made["weight"] = min(made["weight"], WEIGHT_ROOM - made.get("output", 0))
    if "square" in made:
        fit = fitting_bits(width, made["square"])
        if fit < PrivateConfig().frac_bits:
            made["frac"] = fit
    elif "frac" in made:
        made["frac"] -= fewer
    return made
