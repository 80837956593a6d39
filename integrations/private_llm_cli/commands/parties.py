"""`private-llm share` and `party`: what the model owner and the parties' hosts run."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.net.roles import named
from private_llm.net.wire import legible
from private_llm_cli.commands.calibrate import ranges_from
from private_llm_cli.commands.models import gguf_options, image_config, quiet
from private_llm_cli.commands.output import CONSOLE, emit_json, progress_bar, size

TASKS = (
    "causal-lm", "seq2seq", "classification", "features", "image", "masked-lm", "token-classification",
    "question-answering",
)  # fmt: skip
"""What a shared checkpoint will be used for: which of transformers' auto classes loads it."""


def auto_class(task: str) -> Any:  # noqa: ANN401 - one of the integration's auto classes
    """Which auto class loads a checkpoint for a task. Raises ConfigError."""
    import private_llm_hf as hf

    autos = (
        hf.AutoPrivateModelForCausalLM, hf.AutoPrivateModelForSeq2SeqLM, hf.AutoPrivateModelForSequenceClassification,
        hf.AutoPrivateModel, hf.AutoPrivateModelForImageClassification, hf.AutoPrivateModelForMaskedLM,
        hf.AutoPrivateModelForTokenClassification, hf.AutoPrivateModelForQuestionAnswering,
    )  # fmt: skip
    if task not in TASKS:
        raise ConfigError(f"task: got {task!r}; want one of {', '.join(TASKS)}")
    return autos[TASKS.index(task)]


def share(
    source: str, out: Path, config: PrivateConfig, task: str, as_json: bool, force: bool = False,
    gguf_file: str | None = None, ranges: Path | None = None,
) -> None:  # fmt: skip
    """Write one share file per party. force: over those of another sharing. ranges: a file of `calibrate`."""
    from private_llm_hf.api import share_checkpoint

    quiet()
    auto = auto_class(task)
    if gguf_file is None and not source.endswith(".gguf"):
        image_config(source)  # says what is wrong with a configuration
    try:
        with progress_bar(None, as_json) as step:
            step("sharing", 0)
            paths = share_checkpoint(
                source, out, config, auto=auto, overwrite=force, ranges=ranges_from(ranges), **gguf_options(gguf_file),
                progress=lambda name, done, total: step(f"{done}/{total} {name}"),
            )  # fmt: skip
    except PrivateLLMError:
        raise
    except (OSError, ValueError) as error:
        named_by_it = getattr(error, "filename", None)
        if named_by_it is not None and Path(named_by_it).absolute().is_relative_to(out.absolute()):
            raise  # the folder for the shares is wrong, not the checkpoint
        raise ConfigError(f"checkpoint {source!r}: {str(error).splitlines()[0]}") from None
    if as_json:
        emit_json({"name": "share", "files": {str(path): path.stat().st_size for path in paths}})
        return
    for party, path in enumerate(paths):
        holder = named(config, f"party {party}")
        CONSOLE.print(f"for {holder} alone: {path} ({size(path.stat().st_size)})", highlight=False, markup=False)
    CONSOLE.print(
        f"for users: {out / 'client'} (configuration and tokenizer, no weights)", highlight=False, markup=False
    )


def party(
    number: int, config: PrivateConfig, share_file: Path | None, sessions: int | None, checkpoint: str | None
) -> None:
    """Serve sessions until interrupted."""
    from private_llm_hf.client.launch import serve_party

    serve_party(config, number, share_file, sessions, notice, checkpoint)


def notice(line: str) -> None:
    """Print what a serving party reports: plain text, because others' words stand in it, which may look like markup.

    A terminal that is gone does not end the party.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
        sys.stderr.write(f"{legible(line)}\n")
        sys.stderr.flush()


def devices(
    device: str, device_map: str, max_memory: str, offload_folder: str | None, weights_at_rest: str = "auto"
) -> dict[str, Any]:
    """Settings of where a party's layers lie, from text. Raises ConfigError for JSON that is none."""
    whole = re.fullmatch(r"disk|cpu|cuda:\d+", device_map)
    return {
        "device": device,
        "device_map": {"": device_map} if whole else _mapping("device-map", device_map) or device_map or None,
        "max_memory": _mapping("max-memory", max_memory),
        "offload_folder": offload_folder,
        "weights_at_rest": weights_at_rest,
    }


def _mapping(option: str, text: str) -> dict[str, Any] | None:
    """The JSON object in an option, None if it is something else and not a device map's name."""
    if not text or (option == "device-map" and not text.startswith("{")):
        return None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--{option}: {error}; want a JSON object") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--{option}: got {text!r}; want a JSON object")
    return found
