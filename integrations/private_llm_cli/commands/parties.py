"""`private-llm share` and `party`: what the model owner and the parties' hosts run."""

import contextlib
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from private_llm_hf.checkpoint import want_share_file

from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.net.addresses import addresses_of, listen
from private_llm.protocol_facts import ASSISTED, hides
from private_llm_cli import options
from private_llm_cli.commands.calibrate import ranges_from
from private_llm_cli.commands.models import gguf_options, image_config, loading, quiet, want_hub, want_model
from private_llm_cli.commands.output import CONSOLE, emit_json, emit_table, progress_bar, say_first, size
from private_llm_cli.kv_cache import KvCacheOption, kv_cache_of

if TYPE_CHECKING:
    from private_llm_hosting.settings import PartySettings

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
    want_model(checkpoint, gguf_file)
    folder, known = Path(out), ranges_from(ranges)
    taken = next(each for each in (folder, *folder.parents) if each.exists())
    if not taken.is_dir():
        raise ConfigError(f"out: got {out!r}, and {taken} is a file; want a folder, where each party gets a file")
    loading(config, checkpoint, as_json, ahead=False)
    auto = auto_class(task)
    from private_llm_hf.api import share_checkpoint

    from private_llm.net.roles import named

    quiet()
    if gguf_file is None and not checkpoint.endswith(".gguf"):
        image_config(checkpoint)  # says what is wrong with a configuration
    try:
        with progress_bar(None, as_json) as step:
            step("sharing", 0)
            paths = share_checkpoint(
                checkpoint, folder, config, auto=auto, overwrite=force, ranges=known,
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
    client = folder / "client"
    held = "configuration and tokenizer, no weights"
    if not any(client.glob("tokenizer*")):
        lacking = "" if task == "image" else "; the checkpoint has no tokenizer, which users need for texts"
        held = f"configuration, no weights{lacking}"
    CONSOLE.print(f"for users: {client} ({held})", highlight=False, markup=False)


@options.grouped
def party(
    context: typer.Context,
    links: options.LinkOptions,
    sharding: options.Sharding,
    predictors: options.SharedSparsity,
    settings: Annotated[
        Path | None, typer.Option("--config", help="A settings file (TOML); other options replace what it says.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Look at all files, names and ports, and end.")] = False,
    example_config: Annotated[
        bool, typer.Option("--example-config", help="Print a settings file for --protocol, and end.")
    ] = False,
    index: Annotated[int | None, typer.Option("--index", help="This party's or node's number, from 0.")] = None,
    shares: Annotated[
        Path | None, options.option(options.SHARES, "This party's share file, or its folder.", "--shares")
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients to serve at a time; 1: one after the other.")] = 1,
    protocol: options.ProtocolOption = "trio",
    ring: options.RingBits = 64,
    reveal: Annotated[str, options.option(options.SHARES, "As the client's.")] = "logits",
    matmul: options.MatmulOption = "masked",
    adder: options.AgreedAdder = "",
    offline_folder: Annotated[str | None, typer.Option(help="Where this party stores preprocessing.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Stop after this many sessions (default: never).")] = None,
    device: Annotated[
        str, typer.Option(help="Where shares (or weights, 'assisted') live: 'cpu', 'cuda:N', 'cuda'.")
    ] = "cpu",
    device_map: Annotated[
        str, options.option(options.SHARES, "'auto', 'disk' (read layers as they run), or JSON {module: device}.")
    ] = "",
    max_memory: Annotated[str, options.option(options.SHARES, "JSON {device: size} for a planned --device-map.")] = "",
    offload_folder: Annotated[
        str | None, options.option(options.SHARES, "Disk for weights that come from the client.")
    ] = None,
    weights_at_rest: Annotated[
        str,
        options.option(
            options.SHARES,
            "Weights between uses: 'resident', 'seeds' (no masks), 'auto' (as is faster, or fits).",
        ),
    ] = "auto",
    frac_bits: options.FracBits = None,
    parallel_sessions: options.ParallelSessionsOption = 1,
    rotate_roles: options.RotateRoles = False,
    weight_bits: options.WeightBits = 16,
    expert_capacity: options.ExpertCapacity = None,
    kv_cache: KvCacheOption = "",
    model: Annotated[str, typer.Option(help="The public model that a CompNode or a server of 'assisted' reads.")] = "",
    allow: Annotated[
        str | None, typer.Option(help="Users to admit: a file, one name a line, read at every handshake, or a,b.")
    ] = None,
    idle: Annotated[float, typer.Option(help="Seconds without a call that end a session (0: never).")] = 1800.0,
    as_json: options.Json = False,
) -> None:
    """Be one party or node: for one client after the other, or with --clients for several at a time."""
    from private_llm_hosting.settings import example_of, read_settings

    if example_config:
        sys.stdout.write(example_of(protocol))
        return
    if predictors.sparsity not in ("", options.SHARED):
        raise ConfigError(
            f"sparsity: got {predictors.sparsity!r}; a party holds no predictors: want 'shared', or a share file"
        )
    given = {
        "party": index, "hosts": links.hosts, "protocol": protocol, "clients": clients, "sessions": sessions,
        "checkpoint": model, "models": {"model": str(shares)},
    }  # fmt: skip
    computation = {
        "ring": ring, "reveal": reveal, "matmul": matmul, "offline_folder": offline_folder, "frac_bits": frac_bits,
        "parallel_sessions": parallel_sessions, "rotate_roles": rotate_roles, "idle_s": idle,
        "insecure": not hides(protocol), "weight_bits": weight_bits, "expert_capacity": expert_capacity,
        "timeout_s": links.timeout, "allow_plain_loopback": links.allow_plain_loopback,
        **devices(device, device_map, max_memory, offload_folder, weights_at_rest),
    }  # fmt: skip
    tables = {"tls": _tls(links.tls, allow)}
    tables["computation"] = (
        _typed(context, computation)
        | options.adder_of(adder)
        | sharding.settings()
        | kv_cache_of(kv_cache)
        | predictors.sparse_settings()
        | ({"plugins": options.PLUGINS.get()} if options.PLUGINS.get() else {})
    )
    found = read_settings(settings, options=_typed(context, given) | tables)
    if check:
        _check(found, as_json)
        return
    _want(found)
    if found.service is None:
        from private_llm_hf.client.launch import serve_party

        share_file = next(iter(found.models.values()), None)
        serve_party(found.config, found.party, share_file, found.sessions, notice, found.checkpoint)
    else:
        from private_llm_hf.service.party_service import PartyService
        from private_llm_hf.service.product_service import ProductService
        from private_llm_hosting.run import run_service

        assisted = found.config.protocol == ASSISTED
        run_service(found, partial(ProductService, checkpoint=found.checkpoint) if assisted else PartyService)


def _want(settings: "PartySettings") -> None:
    """Raises what is wrong with links, port and files before PyTorch is imported, and says what is loaded then."""
    config, number = settings.config, settings.party
    addresses = addresses_of(config, number, (), b"")
    for path in settings.models.values():
        if config.facts is None:
            raise ConfigError(
                f"shares: got {path}, and protocol {config.protocol!r} has public weights; leave --shares out (--model "
                "names the checkpoint that a CompNode or a server of 'assisted' reads)"
            )
        want_share_file(path)
    reads = config.plan is None or number < config.plan.alpha  # else an error will say that this endpoint reads none
    if settings.checkpoint is not None and reads:
        want_model(settings.checkpoint)
        want_hub("model", settings.checkpoint)
    listen(addresses[number], anywhere=config.tls is not None).close()
    if settings.log_format == "text":
        held = ", ".join(map(str, settings.models.values())) or settings.checkpoint
        say_first(f"loading {held}" if held else "starting")


_OPTIONS = {
    "party": "index", "checkpoint": "model", "models": "shares", "idle_s": "idle", "timeout_s": "timeout",
    "insecure": "protocol",
}  # fmt: skip
"""Options of another name than their settings."""


def _typed(context: typer.Context, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings whose options stand on the command line: the others are as the file says."""
    sources = {name: context.get_parameter_source(_OPTIONS.get(name, name)) for name in settings}
    return {
        name: settings[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    }


def _tls(folder: Path | None, allow: str | None) -> dict[str, Any]:
    """Settings of --tls and --allow, which replace those of the same meaning."""
    found: dict[str, Any] = dict.fromkeys(("certificate", "key", "ca"))
    made = {} if folder is None else found | {"folder": str(folder)}
    if allow is None:
        return made
    in_file = Path(allow).is_file()
    return made | {"allow": None if in_file else allow, "allow_file": allow if in_file else None}


def _check(settings: "PartySettings", as_json: bool) -> None:
    """Print a row for each thing looked at; exit code 2 if one of them is wrong."""
    say_first("looking at files, names and ports", as_json)
    from private_llm_hosting.check import check_party

    from private_llm.net.roles import legible

    found = check_party(settings)
    if as_json:
        for each in found:
            emit_json({"name": "check", "what": each.what, "found": each.found, "verdict": each.verdict})
    else:
        rows = [(legible(each.what), legible(each.found), each.verdict) for each in found]
        emit_table(f"party {settings.party}", ("what", "found", "verdict"), rows)
    wrong = sum(each.verdict == "error" for each in found)
    if wrong:
        if not as_json:
            CONSOLE.print(f"{wrong} to put right before this party can start", highlight=False)
        raise typer.Exit(2)


def notice(line: str) -> None:
    """Print what a party reports, as plain text: others' words may look like markup. Goes on without a terminal."""
    from private_llm.net.roles import legible

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
