"""What tells of costs and protection: audits of plans, estimates, errors, benchmarks, this machine.

Each function parses the options of the command of its name, and imports what runs it (`commands/`) when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from private_llm.approximations import OURS
from private_llm.errors import ConfigError
from private_llm.protocol_facts import CASCADE
from private_llm.token_sharding import ShardingPlan
from private_llm_cli.kv_cache import KvCacheOption, kv_cache_of
from private_llm_cli.options import (
    PROTOCOLS,
    SHAPES,
    AdderOption,
    ApproximationsOption,
    Json,
    MatmulOption,
    ParallelSessionsOption,
    PartyMode,
    PromptOption,
    ProtocolOption,
    RangesOption,
    ReluBitsOption,
    ReluLowOption,
    RevealOption,
    RingOption,
    RotateRolesOption,
    SplitOption,
    WeakOption,
    WeightsOption,
    config_of,
    plan_of,
    protocol_name,
)


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
    from private_llm_cli.commands.estimate_plans import audit as run

    if not plan:
        raise ConfigError("plan: got an empty text; want alpha,c,m or alpha,c,m,rho, for instance 8,8,2")
    numbers = [node.strip() for node in colluding.split(",")] if colluding else []
    if not all(node.isdecimal() for node in numbers):
        raise ConfigError(f"colluding: got {colluding!r}; want endpoint numbers, for instance 0,1")
    setting = Setting(split, not bidirectional, length, known_prefix, queries)
    run(ShardingPlan(**plan_of(plan)["plan"]), [int(node) for node in numbers], setting, as_json)


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
    reveal: RevealOption = "logits",
    bandwidth: Annotated[float, typer.Option(help="Mbit/s of each direction of a link.")] = 1000.0,
    latency: Annotated[float, typer.Option(help="One-way latency in ms.")] = 1.0,
    gmacs: Annotated[float | None, typer.Option(help="GMAC/s of a party (default: this machine's).")] = None,
    image: Annotated[
        str | None, typer.Option(help="Images: channels x height x width, for instance 3x224x224.")
    ] = None,
    matmul: MatmulOption = "masked",
    adder: AdderOption = None,
    weights: WeightsOption = "secret",
    plan: Annotated[
        list[str] | None, typer.Option("--plan", help="Under 'cascade': alpha,c,m[,rho]; several are compared.")
    ] = None,
    plans: Annotated[bool, typer.Option("--plans", help="Under 'cascade': compare usual plans.")] = False,
    accept_weak_plan: WeakOption = False,
    split: SplitOption = None,
    kv_cache: KvCacheOption = "",
    sparsity: Annotated[
        str,
        typer.Option(
            help="As if predictors left out these shares: neurons=0.9,heads=0.5 and, after further commas, "
            "block=16, rank=128, heads-rank=32, levels=open or levels=budget."
        ),
    ] = "",
    ranges: RangesOption = None,
) -> None:
    """What a run will cost, without weights and without hardware."""
    from private_llm_cli.commands.estimate import estimate as run
    from private_llm_cli.commands.estimate_plans import compare_plans
    from private_llm_cli.commands.hardware import Hardware, Workload

    more: dict[str, Any] = {
        "reveal": reveal,
        "matmul": matmul,
        "weights": weights,
        **kv_cache_of(kv_cache),
    }
    if adder is not None:
        more |= {"adder": adder.value, "bandwidth_mbit": bandwidth, "latency_ms": latency}
    given = [ShardingPlan(**plan_of(text)["plan"]) for text in plan or []]
    if ranges is not None and protocol == CASCADE:
        raise ConfigError("ranges: nodes of token sharding compute in floating point; leave out --ranges")
    if plans or len(given) > 1:
        if sparsity:
            raise ConfigError("sparsity: needs secret shares of the weights; compare plans without --sparsity")
        config = config_of(protocol, ring, **more, **plan_of("", split=split))
        if image is not None:
            raise ConfigError("image: token sharding is for text; leave out --image")
        hardware = Hardware.of(bandwidth, latency, gmacs, sharded=True)
        compare_plans(Workload(model, seq, new, batch), config, given, plans, as_json, hardware)
        return
    config = config_of(protocol, ring, **more, **plan_of("".join(plan or []), accept_weak_plan, split))
    run(model, config, as_json, seq, new, batch, bandwidth, latency, gmacs, image, sparsity, ranges)


def diff(
    model: Annotated[str, typer.Argument(help="Model folder or hub id (default: the bundled model).")] = "",
    prompt: PromptOption = "",
    ring: RingOption = 64,
    frac_bits: Annotated[int | None, typer.Option(help="Fractional bits (default: 18, or 12 in 32 bits).")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every module, not only layers.")] = False,
    as_json: Json = False,
    image: Annotated[Path | None, typer.Option(help="For a classifier of images: the image file.")] = None,
    ranges: RangesOption = None,
    approximations: ApproximationsOption = OURS,
) -> None:
    """Layer by layer against plaintext (with the same functions): errors, and values that leave the ring."""
    from private_llm_cli.commands.calibrate import diff as run
    from private_llm_cli.commands.models import DEMO_PROMPT, demo_model

    more: dict[str, Any] = {} if frac_bits is None else {"frac_bits": frac_bits}
    config = config_of("plain", ring, approximations=approximations, **more)
    run(model or demo_model(), prompt or DEMO_PROMPT, config, everything, as_json, image, ranges)


MOVED = ("cascade", "comet", "mpcache", "pigeon", "wan")
_WHERE = (
    "bench: the table {0!r} moved: it is a study, which the installed package no longer contains. In a checkout of the "
    "repository run `python scripts/studies/bench_{0}.py` (--help lists its options)"
)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Works (default: all but large ones); or kernels, a table of its own."),
    ] = None,
    as_json: Json = False,
    protocol: Annotated[
        str | None, typer.Option("--protocol", parser=protocol_name, metavar=PROTOCOLS, help="Default: trio.")
    ] = None,
    ring: RingOption = 64,
    n: Annotated[int | None, typer.Option("--n", help="How many elements, rows, tokens or images.")] = None,
    repeat: Annotated[int, typer.Option(help="Timed repetitions, once nothing is recorded.")] = 5,
    shape: Annotated[str | None, typer.Option(help="Sizes joined by 'x', for instance 128x768x3072.")] = None,
    party_mode: Annotated[PartyMode, typer.Option("--party-mode", help="auto: threads.")] = PartyMode.AUTO,
    parallel_sessions: ParallelSessionsOption = 1,
    rotate_roles: RotateRolesOption = False,
    bandwidth: Annotated[float | None, typer.Option(help="Emulated Mbit/s of each direction of a link.")] = None,
    latency: Annotated[float | None, typer.Option(help="Emulated one-way latency in ms.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture (.png, .svg): what each party did in the last run.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Smallest shapes: does everything run?")] = False,
    preprocess: Annotated[bool, typer.Option("--preprocess", help="Preprocessing first, timed apart.")] = False,
    matmul: MatmulOption = "masked",
    adder: AdderOption = None,
    relu_bits: ReluBitsOption = None,
    relu_low: ReluLowOption = 0,
    approximations: ApproximationsOption = OURS,
    imagenet: Annotated[bool, typer.Option("--imagenet", hidden=True)] = False,
) -> None:
    """Measure operations, layers and models: time, bytes, rounds and error against float64."""
    for name in [*(names or ()), *(["pigeon"] if imagenet else [])]:
        if name in MOVED:
            raise ConfigError(_WHERE.format(name))
    from private_llm_cli.commands.bench import KERNELS, bench_kernels
    from private_llm_cli.commands.bench import bench as run

    circuit: dict[str, Any] = {
        "relu_bits": relu_bits, "relu_low": relu_low, "approximations": approximations,
    }  # fmt: skip
    if adder is not None:
        circuit |= {"adder": adder.value, "bandwidth_mbit": bandwidth, "latency_ms": latency or 0.0}
    circuit_given = adder is not None or relu_bits is not None or relu_low != 0
    circuit_given = circuit_given or approximations != OURS
    config = config_of(
        protocol or "trio",
        ring,
        party_mode,
        parallel_sessions=parallel_sessions,
        rotate_roles=rotate_roles,
        matmul=matmul,
        **circuit,
    )
    linked = bandwidth is not None or latency is not None
    other = protocol or ring != 64 or preprocess or n or shape or circuit_given or len(names or ()) > 1
    if names and KERNELS in names:
        if other or plot or linked:
            raise ConfigError(
                "kernels is a table of its own: give no other name or option than --repeat, --tiny, --json"
            )
        bench_kernels(as_json, repeat, tiny)
        return
    run(names or (), config, as_json, repeat, shape, n, bandwidth, latency, tiny, plot, preprocess)


def doctor(
    as_json: Json = False,
    threats: Annotated[bool, typer.Option("--threats", help="Print the threat model instead (Markdown).")] = False,
) -> None:
    """What this machine can do: versions, processor, speeds, warnings."""
    from private_llm_cli.commands.doctor import doctor as run

    run(as_json, threats)
