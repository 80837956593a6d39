"""What model owners and parties type: share files, ranges, and being a party.

Each function parses the options of the command of its name, and imports what runs it (`commands/`) when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from private_llm.errors import ConfigError
from private_llm_cli.help_pages import Command, Group
from private_llm_cli.kv_cache import KvCacheOption, kv_cache_of
from private_llm_cli.options import (
    SHARED,
    AgreedAdderOption,
    EpsilonOption,
    FracOption,
    GgufOption,
    HeadBudgetOption,
    HostsOption,
    Json,
    LevelsOption,
    LoopbackOption,
    MatmulOption,
    NeuronBudgetOption,
    OrdersOption,
    ParallelSessionsOption,
    PlanOption,
    ProtocolOption,
    RangesOption,
    RingOption,
    RotateRolesOption,
    SparsityOption,
    SplitOption,
    TaskOption,
    TimeoutOption,
    TlsOption,
    WeakOption,
    adder_of,
    bits,
    config_of,
    plan_of,
    remote,
    sparsity_of,
)


def share(
    checkpoint: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    out: Annotated[str, typer.Option("--out", help="Folder for one share file per party.")],
    task: TaskOption = "causal-lm",
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    as_json: Json = False,
    frac_bits: FracOption = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a sharing that is in the folder already.")] = False,
    prg: Annotated[str, typer.Option(help="Cipher of masks: aes, or chacha20, which GPUs make from seeds.")] = "aes",
    gguf_file: GgufOption = None,
    ranges: RangesOption = None,
    sparsity: SparsityOption = "",
    orders: OrdersOption = None,
    levels: LevelsOption = None,
    neuron_budget: NeuronBudgetOption = None,
    head_budget: HeadBudgetOption = None,
    epsilon: EpsilonOption = None,
) -> None:
    """As the model owner: split a checkpoint into one share file per party, tensor by tensor."""
    from private_llm_cli.commands.parties import share as run

    more = sparsity_of(sparsity, orders, levels, neuron_budget, head_budget, epsilon)
    if sparsity == SHARED:
        raise ConfigError("sparsity: whoever shares a model holds its predictors; want the folder of them")
    config = config_of(protocol, ring, prg=prg, **bits(frac_bits), **more)
    run(checkpoint, Path(out), config, task, as_json, force, gguf_file, ranges)


def calibrate(
    model: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    text: Annotated[Path | None, typer.Option(help="A text like those of your users (default: a bundled one).")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Images like your users' (default: noise); repeat.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the ranges here, for --ranges.")] = None,
    task: TaskOption = "causal-lm",
    ring: RingOption = 64,
    frac_bits: FracOption = None,
    gguf_file: GgufOption = None,
    as_json: Json = False,
) -> None:
    """As the model owner: find the range of every module's values (share, generate and patch() do it by themselves)."""
    from private_llm_cli.commands.calibrate import calibrate as run

    config = config_of("trio", ring, **bits(frac_bits))
    run(model, config, task, text, out, as_json, gguf_file, image or [])


def kv_budget(
    model: Annotated[str, typer.Argument(help="Model folder or hub id (default: the bundled model).")] = "",
    text: Annotated[Path | None, typer.Option(help="A text like those of your users (default: a bundled one).")] = None,
    loss: Annotated[float, typer.Option(help="Share of next tokens that may differ from the full cache's.")] = 0.02,
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of a prompt (default: 1024, or as many as the model has room for).")
    ] = None,
    continuation: Annotated[int, typer.Option(help="Tokens after it that are predicted.")] = 32,
    count: Annotated[int, typer.Option(help="Prompts.")] = 8,
    as_json: Json = False,
) -> None:
    """As the model owner: find the smallest budget of the KV cache that keeps the model's next tokens."""
    from private_llm_cli.commands.kv_budget import kv_budget as run
    from private_llm_cli.commands.models import demo_model

    run(model or demo_model(), text, loss, prompt, continuation, count, as_json)


def party(
    context: typer.Context,
    index: Annotated[int | None, typer.Option("--index", help="This party's or node's number, from 0.")] = None,
    hosts: HostsOption = None,
    shares: Annotated[Path | None, typer.Option("--shares", help="This party's share file.")] = None,
    tls: TlsOption = None,
    allow_plain_loopback: LoopbackOption = False,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    reveal: Annotated[str, typer.Option(help="As the client's.")] = "logits",
    matmul: MatmulOption = "masked",
    adder: AgreedAdderOption = "",
    offline_folder: Annotated[str | None, typer.Option(help="Where this party stores preprocessing.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Stop after this many sessions (default: never).")] = None,
    timeout: TimeoutOption = 120.0,
    device: Annotated[str, typer.Option(help="Where shares live: 'cpu', 'cuda:N', or 'cuda'.")] = "cpu",
    device_map: Annotated[
        str, typer.Option(help="'auto', 'disk' (read layers as they run), or JSON {module: device}.")
    ] = "",
    max_memory: Annotated[str, typer.Option(help="JSON {device: size} for a planned --device-map.")] = "",
    offload_folder: Annotated[str | None, typer.Option(help="Disk for weights that come from the client.")] = None,
    weights_at_rest: Annotated[
        str, typer.Option(help="Weights between uses: 'resident', 'seeds' (no masks), 'auto' (as is faster, or fits).")
    ] = "auto",
    frac_bits: FracOption = None,
    parallel_sessions: ParallelSessionsOption = 1,
    rotate_roles: RotateRolesOption = False,
    plan: PlanOption = "",
    accept_weak_plan: WeakOption = False,
    split: SplitOption = None,
    kv_cache: KvCacheOption = "",
    sparsity: SparsityOption = "",
    orders: OrdersOption = None,
    levels: LevelsOption = None,
    epsilon: EpsilonOption = None,
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
    as_json: Json = False,
) -> None:
    """Be one party or node: with --config for many clients at a time, otherwise for one session after the other."""
    if settings is not None or check or example_config:
        _hosted(context, settings, check, example_config, as_json)
        return
    from private_llm_cli.commands.parties import devices
    from private_llm_cli.commands.parties import party as run

    if index is None:
        raise ConfigError("index: got none; want this party's number, from 0, or --config with a settings file")
    if not hosts:
        raise ConfigError("hosts: got none; want host:port of every party, in order, the same at all endpoints")
    if sessions is not None and sessions < 1:
        raise ConfigError(f"sessions: got {sessions}; want at least 1, or leave it out to serve until interrupted")
    endpoints = config_of(protocol, ring, **plan_of(plan, accept_weak_plan, split)).endpoints
    if not 0 <= index < endpoints:
        raise ConfigError(f"index: got {index}; want 0 to {endpoints - 1} for {protocol!r}")
    more = remote(hosts, tls, f"party{index}", allow_plain_loopback)
    if allow is not None:
        if tls is None:
            raise ConfigError("--allow: users are known by their certificates; want --tls")
        more["tls"] |= {"allow": str(Path(allow).resolve()) if Path(allow).is_file() else allow}
    more["idle_s"] = idle or None
    more |= (
        devices(device, device_map, max_memory, offload_folder, weights_at_rest)
        | bits(frac_bits)
        | adder_of(adder)
        | {"parallel_sessions": parallel_sessions, "rotate_roles": rotate_roles}
        | plan_of(plan, accept_weak_plan, split)
        | kv_cache_of(kv_cache)
        | sparsity_of(sparsity, orders, levels, epsilon=epsilon)
    )
    if sparsity not in ("", SHARED):
        raise ConfigError(f"sparsity: got {sparsity!r}; a party holds no predictors: want 'shared', or a share file")
    config = config_of(
        protocol, ring, reveal=reveal, matmul=matmul, offline_folder=offline_folder, timeout_s=timeout, **more
    )
    run(index, config, shares, sessions, model or None)


def _hosted(context: typer.Context, settings: Path | None, check: bool, example_config: bool, as_json: bool) -> None:
    """`party` with a settings file, which no other option may contradict."""
    from private_llm_cli.commands import hosting

    own = ("settings", "check", "example_config", "as_json")
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in own}
    typed = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    others = sorted(name.replace("_", "-") for name in typed)
    if others:
        raise ConfigError(f"--config: the file holds all settings; leave out --{', --'.join(others)}")
    if example_config:
        hosting.example()
        return
    if settings is None:
        raise ConfigError("--check: got no settings file; want --config party.toml")
    if check:
        hosting.check(settings, as_json)
        return
    hosting.party(settings)


# -- certificates: a set for trying out, and keys that each organisation makes at home --------------------------------
# Each function parses the options of the command of its name, and imports what runs it (`commands/`) when it is called.
certs = typer.Typer(
    cls=Group,
    name="certs", help="Certificates for mutual TLS: a set for trying out, or keys made at home.",
    invoke_without_command=True, no_args_is_help=True,
)  # fmt: skip

DaysOption = Annotated[float, typer.Option(help="How long it is valid.")]


@certs.callback()
def trial(
    context: typer.Context,
    out: Annotated[str, typer.Option("--out", help="Folder for ca.pem and one certificate per endpoint.")] = "",
    parties: Annotated[int | None, typer.Option(help="How many parties (default: those of --protocol).")] = None,
    days: Annotated[float, typer.Option(help="How long they are valid.")] = 365.0,
    protocol: ProtocolOption = "trio",
    plan: PlanOption = "",
    split: SplitOption = None,
    user: Annotated[
        list[str] | None, typer.Option("--user", help="Name of a user with a certificate of its own; repeat.")
    ] = None,
) -> None:
    """Certificates for mutual TLS. Without a command: a whole set at once, for trying out on machines of your own."""
    from private_llm_cli.commands.certs import trial as run

    if context.invoked_subcommand is not None:
        if out:
            raise ConfigError(
                f"--out: it stands before {context.invoked_subcommand!r}, which has its own; want it after"
            )
        return
    if not out:
        raise ConfigError("--out: got none; want a folder for the set, or one of ca, request, sign, show")
    config = config_of(protocol, 64, **plan_of(plan, split=split))
    run(Path(out), config, parties, days, user or ())


@certs.command(cls=Command)
def ca(
    out: Annotated[str, typer.Option("--out", help="Folder for ca.key (never leaves it) and ca.pem (for everybody).")],
    days: DaysOption = 1825.0,
) -> None:
    """As the keeper of the CA: make it, once."""
    from private_llm_cli.commands.certs import ca as run

    run(Path(out), days)


@certs.command(cls=Command)
def request(
    name: Annotated[str, typer.Option("--name", help="party0, party1, ..., client, or client:NAME.")],
    out: Annotated[str, typer.Option("--out", help="Folder for the key (never leaves it) and the request (.csr).")],
) -> None:
    """As a party or user: make a key at home, and a request that the CA signs."""
    from private_llm_cli.commands.certs import request as run

    run(Path(out), name)


@certs.command(cls=Command)
def sign(
    file: Annotated[Path, typer.Argument(help="A request (.csr).")],
    ca: Annotated[Path, typer.Option("--ca", help="Folder of the CA.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the certificate (default: the file's).")] = None,
    days: DaysOption = 90.0,
    name: Annotated[str, typer.Option("--name", help="Refuse a request for another name.")] = "",
) -> None:
    """As the keeper of the CA: sign a request whose fingerprint its sender has read to you."""
    from private_llm_cli.commands.certs import sign as run

    run(file, ca, out, days, name)


@certs.command(cls=Command)
def show(
    files: Annotated[list[Path], typer.Argument(help="Certificates or requests.")],
    as_json: Json = False,
) -> None:
    """What stands in certificates and requests: name, days left, fingerprint."""
    from private_llm_cli.commands.certs import show as run

    run(files, as_json)
