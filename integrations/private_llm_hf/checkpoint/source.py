"""Where a checkpoint lies: errors that name the folder, the file and the argument in which something is wrong."""

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PrivateLLMError
from private_llm_hf.checkpoint.given_parts import ATTENTION

_CHANGES_NOTHING = ("low_cpu_mem_usage", "weights_only", "resume_download", "_fast_init", "use_kernels")
"""Arguments of transformers' from_pretrained about how it loads: here weights are read one by one."""

_CUT = "it was cut off, or is a pointer or a web page instead of the file"

_QUANTISE = (
    "weights are shared in fixed point (PrivateConfig.ring, frac_bits), so quantising them saves nothing; leave it out"
)
_ADVICE = {
    "load_in_8bit": _QUANTISE,
    "load_in_4bit": _QUANTISE,
    "quantization_config": _QUANTISE,
    "state_dict": "load a plaintext model with it, and private_llm_hf.patch() that one",
    "ignore_mismatched_sizes": "it would leave weights random; load the class that the checkpoint was trained with",
    "output_loading_info": "errors say which weights are missing; leave it out",
    "generation_config": "set it on the private model: model.generation_config = ...",
    "tp_plan": "parties place layers by PrivateConfig(device_map=...); leave it out",
    "from_tf": "convert the checkpoint to safetensors with transformers first",
    "from_flax": "convert the checkpoint to safetensors with transformers first",
    "use_auth_token": "it is called token now",
    "adapter_kwargs": "name the adapter's folder as the source; its base is found by adapter_config.json",
}


def check_options(options: dict[str, Any]) -> None:
    """Take out arguments that change nothing. Raises ConfigError, with advice, for those that have no meaning here."""
    for name in _CHANGES_NOTHING:
        options.pop(name, None)
    check_attention(options.pop("attn_implementation", None))
    for name, advice in _ADVICE.items():
        if options.pop(name, None) not in (None, False):
            raise ConfigError(f"from_pretrained: {name} has no meaning for a private model: {advice}")
    for name in ("dtype", "torch_dtype"):
        value = options.pop(name, None)
        found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        if value not in (None, "auto") and not (isinstance(found, torch.dtype) and found.is_floating_point):
            raise ConfigError(
                f"{name}: got {value!r}; want 'auto' or a floating-point dtype (it changes nothing: weights are shared "
                "in fixed point, see PrivateConfig.ring and frac_bits, and outputs are float32)"
            )
    given = options.get("config")
    if isinstance(given, PrivateConfig):
        raise ConfigError(
            "config: got a PrivateConfig; want it as second argument, from_pretrained(source, PrivateConfig(...)): "
            "config= takes a configuration of transformers"
        )
    if given is not None and not isinstance(given, PretrainedConfig):
        raise ConfigError(
            f"config: got {type(given).__name__}; want a configuration of transformers, such as "
            "AutoConfig.from_pretrained(folder)"
        )


def check_attention(name: object) -> None:
    """Raises ConfigError for attention of somebody's own: all of transformers' ways are the same to a private model."""
    usual = name in (None, *ATTENTION) or str(name).startswith(("paged|", "kernels-community/"))
    if not usual:
        raise ConfigError(
            f"attn_implementation: got {str(name)[:80]!r}; parties compute attention as transformers' own functions do "
            f"({', '.join(ATTENTION)}), and which of these does not matter; leave it out"
        )


@contextmanager
def readable_files(source: str) -> Iterator[None]:
    """Raises ConfigError with the name of a file of weights that cannot be read, where loading fails for it."""
    try:
        yield
    except PrivateLLMError:
        raise
    except (SafetensorError, EOFError, RuntimeError, OSError, ValueError, KeyError) as error:
        broken = _broken_file(source)
        if broken is None:
            raise
        path, why = broken
        size = f"{path.stat().st_size:,} bytes" if path.exists() else "missing"
        raise ConfigError(
            f"checkpoint file {str(path)!r} ({size}) cannot be read: {why}; copy or download it again"
        ) from error


def _broken_file(source: str) -> tuple[Path, str] | None:
    """The first file of weights in a folder, or in the cache of the hub, that is not there or not whole, and why."""
    folder = Path(source)
    if not folder.is_dir():
        try:
            cached = try_to_load_from_cache(source, "config.json")
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    for index in sorted(folder.glob("*.index.json")):
        try:
            named = {folder / file for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return index, f"want the weight_map of a checkpoint in several files ({type(error).__name__}: {error})"
        lacking = sorted(path for path in named if not path.exists())
        if 0 < len(lacking) < len(named):  # with none there, it is a folder without weights
            return lacking[0], f"{index.name} names it, and {len(lacking)} of its {len(named)} files are not there"
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            return path, f"{error}; {_CUT}"
    for path in sorted(folder.glob("*.bin")):
        if not zipfile.is_zipfile(path):
            return path, f"its end is missing, or another program than torch.save wrote it; {_CUT}"
    return None
