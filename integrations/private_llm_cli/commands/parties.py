"""`private-llm share` and `party`: what the model owner and the parties' hosts run."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from private_llm.errors import ConfigError, PrivateLLMError
from private_llm_cli import options
from private_llm_cli.commands.calibrate import ranges_from
from private_llm_cli.commands.models import gguf_options, image_config, quiet
from private_llm_cli.commands.output import CONSOLE, emit_json, emit_table, progress_bar, size
from private_llm_cli.kv_cache import KvCacheOption, kv_cache_of

TASKS = {
    "causal-lm": "AutoPrivateModelForCausalLM", "seq2seq": "AutoPrivateModelForSeq2SeqLM",
    "classification": "AutoPrivateModelForSequenceClassification", "features": "AutoPrivateModel",
    "image": "AutoPrivateModelForImageClassification", "masked-lm": "AutoPrivateModelForMaskedLM",
    "token-classification": "AutoPrivateModelForTokenClassification",
    "question-answering": "AutoPrivateModelForQuestionAnswering",
}  # fmt: skip
"""What a shared checkpoint will be used for, and which of the integration's auto classes loads it."""


def auto_class(task: str) -> Any:  # noqa: ANN401 - one of the integration's auto classes
    """Which auto class loads a checkpoint for a task. Raises ConfigError."""
    import private_llm_hf

    if task not in TASKS:
        raise ConfigError(f"task: got {task!r}; want one of {', '.join(TASKS)}")
    return getattr(private_llm_hf, TASKS[task])


@options.grouped
def share(
    checkpoint: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    out: Annotated[str, typer.Option("--out", help="Folder for one share file per party.")],
    predictors: options.Sparsity,
    task: options.Task = "causal-lm",
    protocol: options.ProtocolOption = "trio",
    ring: options.RingBits = 64,
    as_json: options.Json = False,
    frac_bits: options.FracBits = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a sharing that is in the folder already.")] = False,
    prg: Annotated[str, typer.Option(help="Cipher of masks: aes, or chacha20, which GPUs make from seeds.")] = "aes",
    gguf_file: options.GgufFile = None,
    ranges: options.RangesFile = None,
) -> None:
    """As the model owner: split a checkpoint into one share file per party, tensor by tensor."""
    more = predictors.sparse_settings()
    if predictors.sparsity == options.SHARED:
        raise ConfigError("sparsity: whoever shares a model holds its predictors; want the folder of them")
    config = options.config_of(protocol, ring, prg=prg, frac_bits=frac_bits, **more)
    from private_llm_hf.api import share_checkpoint

    from private_llm.net.roles import named

    folder = Path(out)
    quiet()
    auto = auto_class(task)
    if gguf_file is None and not checkpoint.endswith(".gguf"):
        image_config(checkpoint)  # says what is wrong with a configuration
    try:
        with progress_bar(None, as_json) as step:
            step("sharing", 0)
            paths = share_checkpoint(
                checkpoint, folder, config, auto=auto, overwrite=force, ranges=ranges_from(ranges),
                **gguf_options(gguf_file), progress=lambda name, done, total: step(f"{done}/{total} {name}"),
            )  # fmt: skip
    except PrivateLLMError:
        raise
    except (OSError, ValueError) as error:
        named_by_it = getattr(error, "filename", None)
        if named_by_it is not None and Path(named_by_it).absolute().is_relative_to(folder.absolute()):
            raise  # the folder for the shares is wrong, not the checkpoint
        raise ConfigError(f"checkpoint {checkpoint!r}: {str(error).splitlines()[0]}") from None
    if as_json:
        emit_json({"name": "share", "files": {str(path): path.stat().st_size for path in paths}})
        return
    for number, path in enumerate(paths):
        holder = named(config, f"party {number}")
        CONSOLE.print(f"for {holder} alone: {path} ({size(path.stat().st_size)})", highlight=False, markup=False)
    CONSOLE.print(
        f"for users: {folder / 'client'} (configuration and tokenizer, no weights)", highlight=False, markup=False
    )


@options.grouped
def party(
    context: typer.Context,
    links: options.LinkOptions,
    sharding: options.Sharding,
    predictors: options.SharedSparsity,
    index: Annotated[int | None, typer.Option("--index", help="This party's or node's number, from 0.")] = None,
    shares: Annotated[Path | None, typer.Option("--shares", help="This party's share file.")] = None,
    protocol: options.ProtocolOption = "trio",
    ring: options.RingBits = 64,
    reveal: Annotated[str, typer.Option(help="As the client's.")] = "logits",
    matmul: options.MatmulOption = "masked",
    adder: options.AgreedAdder = "",
    offline_folder: Annotated[str | None, typer.Option(help="Where this party stores preprocessing.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Stop after this many sessions (default: never).")] = None,
    device: Annotated[str, typer.Option(help="Where shares live: 'cpu', 'cuda:N', or 'cuda'.")] = "cpu",
    device_map: Annotated[
        str, typer.Option(help="'auto', 'disk' (read layers as they run), or JSON {module: device}.")
    ] = "",
    max_memory: Annotated[str, typer.Option(help="JSON {device: size} for a planned --device-map.")] = "",
    offload_folder: Annotated[str | None, typer.Option(help="Disk for weights that come from the client.")] = None,
    weights_at_rest: Annotated[
        str, typer.Option(help="Weights between uses: 'resident', 'seeds' (no masks), 'auto' (as is faster, or fits).")
    ] = "auto",
    frac_bits: options.FracBits = None,
    parallel_sessions: options.ParallelSessionsOption = 1,
    rotate_roles: options.RotateRoles = False,
    kv_cache: KvCacheOption = "",
    model: Annotated[str, typer.Option(help="Under 'cascade': this CompNode's own copy of the public model.")] = "",
    allow: Annotated[
        str | None, typer.Option(help="Users to admit: a file, one name a line, read at every handshake, or a,b.")
    ] = None,
    idle: Annotated[float, typer.Option(help="Seconds without a call that end a session (0: never).")] = 1800.0,
    settings: Annotated[
        Path | None, typer.Option("--config", help="Serve many clients at a time, as this settings file says (TOML).")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="With --config: look at everything, and end.")] = False,
    example_config: Annotated[bool, typer.Option("--example-config", help="Print a settings file, and end.")] = False,
    as_json: options.Json = False,
) -> None:
    """Be one party or node: with --config for many clients at a time, otherwise for one session after the other."""
    if settings is not None or check or example_config:
        _hosted(context, settings, check, example_config, as_json)
        return
    if index is None:
        raise ConfigError("index: got none; want this party's number, from 0, or --config with a settings file")
    if not links.hosts:
        raise ConfigError("hosts: got none; want host:port of every party, in order, the same at all endpoints")
    if sessions is not None and sessions < 1:
        raise ConfigError(f"sessions: got {sessions}; want at least 1, or leave it out to serve until interrupted")
    endpoints = options.config_of(protocol, ring, **sharding.settings()).endpoints
    if not 0 <= index < endpoints:
        raise ConfigError(f"index: got {index}; want 0 to {endpoints - 1} for {protocol!r}")
    more = links.link_settings(f"party{index}")
    if allow is not None:
        if links.tls is None:
            raise ConfigError("--allow: users are known by their certificates; want --tls")
        more["tls"] |= {"allow": str(Path(allow).resolve()) if Path(allow).is_file() else allow}
    more["idle_s"] = idle or None
    more |= (
        devices(device, device_map, max_memory, offload_folder, weights_at_rest)
        | options.adder_of(adder)
        | {"parallel_sessions": parallel_sessions, "rotate_roles": rotate_roles}
        | sharding.settings()
        | kv_cache_of(kv_cache)
        | predictors.sparse_settings()
    )
    if predictors.sparsity not in ("", options.SHARED):
        raise ConfigError(
            f"sparsity: got {predictors.sparsity!r}; a party holds no predictors: want 'shared', or a share file"
        )
    config = options.config_of(
        protocol, ring, reveal=reveal, matmul=matmul, offline_folder=offline_folder, frac_bits=frac_bits, **more
    )
    from private_llm_hf.client.launch import serve_party

    serve_party(config, index, shares, sessions, notice, model or None)


def _hosted(context: typer.Context, settings: Path | None, check: bool, example_config: bool, as_json: bool) -> None:
    """`party` with a settings file, which no other option may contradict."""
    from private_llm_hosting.settings import EXAMPLE, read_settings

    own = ("settings", "check", "example_config", "as_json")
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in own}
    typed = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    others = sorted(name.replace("_", "-") for name in typed)
    if others:
        raise ConfigError(f"--config: the file holds all settings; leave out --{', --'.join(others)}")
    if example_config:
        sys.stdout.write(EXAMPLE)
        return
    if settings is None:
        raise ConfigError("--check: got no settings file; want --config party.toml")
    if check:
        _check(settings, as_json)
        return
    from private_llm_hf.service.party_service import PartyService
    from private_llm_hosting.run import run_party

    run_party(read_settings(settings), PartyService)


def _check(path: Path, as_json: bool) -> None:
    """Print a row for each thing looked at; exit code 2 if one of them is wrong."""
    from private_llm_hosting.check import check_party
    from private_llm_hosting.settings import read_settings

    from private_llm.net.wire import legible

    found = check_party(read_settings(path))
    if as_json:
        for each in found:
            emit_json({"name": "check", "what": each.what, "found": each.found, "verdict": each.verdict})
    else:
        rows = [(legible(each.what), legible(each.found), each.verdict) for each in found]
        emit_table(f"party {path}", ("what", "found", "verdict"), rows)
    wrong = sum(each.verdict == "error" for each in found)
    if wrong:
        if not as_json:
            CONSOLE.print(f"{wrong} to put right before this party can start", highlight=False)
        raise typer.Exit(2)


def notice(line: str) -> None:
    """Print what a serving party reports: plain text, because others' words stand in it, which may look like markup.

    A terminal that is gone does not end the party.
    """
    from private_llm.net.wire import legible

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
