"""Finding models for the commands; imports the HuggingFace integration when called."""

from __future__ import annotations

import difflib
import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_llm_hf.checkpoint import want_config

from private_llm.errors import ConfigError, PrivateLLMError, meant
from private_llm.net.addresses import addresses_of, open_connection, shown
from private_llm.net.roles import called
from private_llm.protocol_facts import CLIENT
from private_llm_cli.commands.output import NOTES, say_first

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from private_llm.config import PrivateConfig

BUNDLED = "the demo model"
AUTO = "auto"  # of --draft: looked-up drafts where they pay
DEMO_PROMPT = "The history of the city begins with"
CHAT_PROMPT = "What is the capital of France?"
LONG_PROMPT = (
    DEMO_PROMPT + " the old bridge over the river , which was built of stone by the people of the town in the early "
    "years of the century"
)
"""Long enough to be dealt to the CompNodes of the default plan."""


_NO_TOKENIZER = "there is no vocabulary; save the model's tokenizer beside the weights (tokenizer.save_pretrained)"
_HUB_S = 10.0
"""Seconds that the hub may take to answer at all."""
_LOOK_S = 0.5
"""Seconds in which a party that listens is reached."""
_WEIGHTS = (".safetensors", ".bin", ".gguf")


def demo_model() -> str:
    """The folder of the bundled model. Raises ConfigError if this installation lacks it."""
    folder = Path(str(resources.files("private_llm_hf").joinpath("demo_model")))
    if not (folder / "config.json").is_file():
        raise ConfigError("the demo model is not part of this installation; name a model folder instead")
    return str(folder)


def smollm2_model(cache: Path | None = None) -> str:
    """The folder of SmolLM2-135M-Instruct, converted at its first use. Raises ConfigError if it is not installed."""
    from private_llm_hf.models import smollm2

    quiet()
    return str(smollm2.folder(cache))


def shape_of(source: str) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Class and configuration of a built-in shape, a config.json, a model folder or a hub id. Raises ConfigError."""
    from private_llm_hf.tools.estimate import model_class_of, named_shape, shape_names
    from transformers import AutoConfig

    found = named_shape(source)
    if found is not None:
        return found
    if "/" not in source and not Path(source).exists():
        raise ConfigError(
            f"{source!r}: no such folder, and no built-in shape{meant([source], shape_names())}; want a model "
            f"folder, a hub id such as 'facebook/opt-125m', or one of the built-in shapes {', '.join(shape_names())}"
        )
    config: PretrainedConfig = _load("configuration", AutoConfig, source)
    return model_class_of(config), config


def tokenizer_of(source: str, gguf_file: str | None = None) -> Any:  # noqa: ANN401 - a transformers tokenizer
    """The tokenizer of a model folder or hub id, or of a GGUF file there. Raises ConfigError."""
    from private_llm_hf.checkpoint.checkpoint import Checkpoint, has_words
    from transformers import AutoTokenizer

    want_hub("tokenizer", source)
    checkpoint = Checkpoint(source, **gguf_options(gguf_file))
    found = _load("tokenizer", AutoTokenizer, checkpoint.tokenizer_source, **checkpoint.tokenizer_options)
    if not has_words(found):
        raise _unusable("tokenizer", source, ValueError(_NO_TOKENIZER))
    return found


# -- before anything is imported that takes seconds -------------------------------------------------------------------
def want_model(source: str, gguf_file: str | None = None) -> None:
    """Raises ConfigError for a path without a model, and for a folder without that GGUF file."""
    folder = Path(source)
    if source and gguf_file is None and not source.endswith(".gguf"):
        want_config("model", source)
    if gguf_file is not None and folder.is_dir() and not (folder / gguf_file).is_file():
        there = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "it holds none"
        raise ConfigError(f"gguf-file: got {gguf_file!r}, which is not in {source}; want a file there: {there}")


def want_draft(draft: str, *more: str) -> None:
    """Raises ConfigError for what is neither 'lookup', one of `more`, nor a model."""
    if draft in (names := ("", "lookup", *more)):
        return
    if not Path(draft).exists() and (near := difflib.get_close_matches(draft, names, 1)):
        raise ConfigError(f"draft: got {draft!r}, and there is no such folder; did you mean {near[0]!r}?")
    want_config("draft", draft)
    want_hub("draft", draft)


def loading(
    config: PrivateConfig, source: str, quiet: bool, ahead: bool = True, groups: bool = False,
    default: str = BUNDLED,
) -> None:  # fmt: skip
    """The first line of a command that takes long, and for whom it will wait. ahead: whether other processes begin to
    compile kernels while this one imports. groups: whether others may stand in for the parties of config.hosts.
    default: what is loaded if `source` is empty. Raises ConfigError for links that need certificates, and for a name
    that is neither a folder nor at the hub.
    """
    addresses = addresses_of(config, CLIENT, (), b"") if config.hosts else []
    say_first(f"loading {source or default}", quiet)
    for party, address in enumerate(addresses):
        try:
            open_connection(address, _LOOK_S).close()
        except OSError as error:
            text = f"{called(config, party)} does not answer at {shown(address)} ({error.strerror or error}); "
            text += "other --groups are tried: " if groups else "this command will wait for it: "
            text += "check that it was started, its address (--hosts) and the firewall"
            NOTES.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
            break
    if source:
        want_hub("model", source)
    if ahead:
        from private_llm.replay.ahead import compile_ahead  # PyTorch, too: mistakes are told before

        compile_ahead(config)


# -- what transformers loads ------------------------------------------------------------------------------------------


def gguf_options(gguf_file: str | None) -> dict[str, Any]:
    """What from_pretrained needs to read a GGUF file."""
    return {} if gguf_file is None else {"gguf_file": gguf_file}


def plaintext_model(source: str, auto: str = "AutoModelForCausalLM") -> Any:  # noqa: ANN401 - a transformers model
    """The model itself in float32, as this class of transformers loads it, for comparison. Raises ConfigError."""
    import private_llm_hf  # noqa: F401 - makes plain networks known to transformers
    import torch
    import transformers

    return _load("model", getattr(transformers, auto), source, dtype=torch.float32).eval()


def image_config(source: str) -> Any:  # noqa: ANN401 - a transformers configuration
    """The configuration of an image classifier, or of any other model. Raises ConfigError."""
    import private_llm_hf  # noqa: F401 - makes plain networks known to transformers
    from transformers import AutoConfig

    return _load("configuration", AutoConfig, source)


def loaded_from(auto: Any, source: str, config: PrivateConfig, **form: Any) -> Any:  # noqa: ANN401 - a private model
    """The private model that `auto` makes of a checkpoint, or at the parties of `config`, whose own shares it uses
    then, as it says where there are weights here, too. Raises ConfigError.
    """
    if not config.hosts:
        _want_weights(source)
    quiet()
    try:
        made = auto.from_pretrained(source, config, **form)
    except PrivateLLMError:
        raise
    except (OSError, ValueError) as error:
        raise _unusable("model", source, error) from error
    if made.stored and config.plan is None and _holds_weights(Path(source)):
        NOTES.print(f"The parties use shares of their own; the weights in {source} stay unread.", markup=False)
    return made


def check_length(source: str, length: int) -> None:
    """Raise DomainError where the decoder of a folder has fewer positions; of others the model says so later."""
    from private_llm_hf.models.inputs import GENERATED, check_positions

    if (Path(source) / "config.json").is_file() and not (known := image_config(source)).is_encoder_decoder:
        check_positions(known, length, GENERATED)


def quiet() -> None:
    """No progress bars of transformers beside our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _load(what: str, auto: Any, source: str, **more: Any) -> Any:  # noqa: ANN401 - transformers' auto classes
    quiet()
    if "gguf_file" not in more:
        want_config(what, source)
        want_hub(what, source)
    if what == "model":
        _want_weights(source)
    try:
        return auto.from_pretrained(source, **more)
    except Exception as error:
        raise _unusable(what, source, error) from error


def _unusable(what: str, source: str, error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if what == "tokenizer" and said.startswith("Couldn't instantiate the backend"):
        said = f"{_NO_TOKENIZER}, or its format needs the package sentencepiece or tiktoken"
    said = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", said)
    return ConfigError(f"{what} of {source!r}: {said} (want a model folder or a hub id)")


def want_hub(what: str, source: str) -> None:
    """Raises ConfigError for no folder while the hub has no such name, or is silent (transformers tries a minute)."""
    from huggingface_hub import constants, get_session, get_token

    kept = Path(constants.HF_HUB_CACHE) / f"models--{source.replace('/', '--')}"
    if Path(source).exists() or kept.exists():
        return
    why = f"HF_HUB_OFFLINE forbids to look at {constants.ENDPOINT}"
    try:
        if not constants.HF_HUB_OFFLINE:
            headers = {"authorization": f"Bearer {token}"} if (token := get_token()) else {}
            asked = f"{constants.ENDPOINT}/{source}/resolve/main/config.json"
            found = get_session().head(asked, headers=headers, timeout=_HUB_S)
            if found.status_code != 401 and found.headers.get("X-Error-Code") != "RepoNotFound":
                return
            why = f"{constants.ENDPOINT} holds no model of this name that you may read"
    except Exception as error:  # noqa: BLE001 - whatever the network raises
        why = f"{constants.ENDPOINT} cannot be reached to look for it ({error})"
    raise ConfigError(
        f"{what} of {source!r}: there is no such folder here, and {why}; want a model folder, or a hub id and a network"
    )


def _holds_weights(folder: Path) -> bool:
    return folder.is_dir() and any(path.suffix in _WEIGHTS for path in folder.iterdir())


def _want_weights(source: str) -> None:
    """Raises ConfigError for a folder that describes a model and does not hold it."""
    folder = Path(source)
    if (folder / "config.json").is_file() and not _holds_weights(folder):
        raise ConfigError(
            f"model of {source!r}: the folder holds no weights; if it is the client folder of share files, say where "
            "the parties are (--hosts), else name a model folder"
        )
