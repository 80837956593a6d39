"""The options that commands share, and what they mean as settings of `PrivateConfig`."""

from __future__ import annotations

from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.protocol_facts import CASCADE, protocol_facts, protocol_names

PLUGINS: ContextVar[tuple[str, ...]] = ContextVar("PLUGINS", default=())
"""What `private-llm --plugin` named, for the configurations that commands make."""

SHAPES = (
    "opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "llama-7b", "llama-13b", "gpt2", "bert-base", "resnet-18",
    "resnet-50", "mobilenet-v2", "convnext-tiny", "lenet5", "alexnet", "vgg16-cifar10", "vgg16-imagenet",
    "vgg16-imagenet-average", "resnet50-average",
)  # fmt: skip
"""What `estimate` knows by name. Spelled out: the list itself is in a package that is slow to import."""


def protocol_name(text: str) -> str:
    """The name of a protocol on offer. Raises BadParameter for another."""
    offered = (*protocol_names(), CASCADE)
    if text not in offered:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, offered))}.")
    return text


class DemoModel(StrEnum):
    """Models of `demo`."""

    BUNDLED = "bundled"
    SMOLLM2 = "smollm2"


class Adder(StrEnum):
    """How comparisons are made."""

    AUTO = "auto"
    PREFIX = "prefix"
    RIPPLE = "ripple"
    KEYS = "keys"


class Orders(StrEnum):
    """In which order it is opened what a sparse run computes."""

    FRESH = "fresh"
    KEPT = "kept"


class Levels(StrEnum):
    """How much of it is opened."""

    BUDGET = "budget"
    NOISY = "noisy"
    OPEN = "open"


class PartyMode(StrEnum):
    """Where the parties run."""

    AUTO = "auto"
    THREADS = "threads"
    PROCESSES = "processes"


PARTIES, PROTOCOL, SHARDING = "Parties", "Protocol and numbers", "Token sharding (protocol cascade)"
SPARSITY, WRITING, CACHE = "Predicted sparsity", "How text is written", "Cache of keys and values"
"""Groups of options in help pages."""

Json = Annotated[bool, typer.Option("--json", help="Print figures as JSON, one object per line.")]
PROTOCOLS = f"<{'|'.join((*protocol_names(), CASCADE))}>"
"""How help texts show the names of this library's protocols."""
ProtocolOption = Annotated[
    str,
    typer.Option(
        "--protocol",
        parser=protocol_name,
        metavar=PROTOCOLS,
        help="'plain' hides nothing (for comparison).",
        rich_help_panel=PROTOCOL,
    ),
]
RingOption = Annotated[int, typer.Option("--ring", help="Bits of the ring: 64 or 32.", rich_help_panel=PROTOCOL)]
MatmulOption = Annotated[
    str, typer.Option(help="'masked', or under 'dealer' 'remask': operand-sized traffic.", rich_help_panel=PROTOCOL)
]
AdderOption = Annotated[
    Adder | None,
    typer.Option(
        "--adder",
        help="Of comparisons: few rounds (prefix, the default), fewest bytes (ripple), comparison keys (keys), or for "
        "each the fastest at --bandwidth and --latency (auto; without a bandwidth it is prefix).",
        rich_help_panel=PROTOCOL,
    ),
]
AgreedAdderOption = Annotated[
    str,
    typer.Option(
        "--adder",
        help="How comparisons are made, the same at all endpoints: prefix, ripple, keys (parties far apart), or "
        "auto,bandwidth_mbit=1000,latency_ms=20, which chooses by price (default: prefix).",
        rich_help_panel=PROTOCOL,
    ),
]
ReluBitsOption = Annotated[
    int | None,
    typer.Option(
        "--relu-bits", help="Lowest bits that ReLU compares (default: what its range needs).", rich_help_panel=PROTOCOL
    ),
]
ReluLowOption = Annotated[
    int, typer.Option("--relu-low", help="How many of them, the lowest, ReLU leaves out.", rich_help_panel=PROTOCOL)
]
ApproximationsOption = Annotated[
    str,
    typer.Option(
        "--approximations",
        help="Whose GELU and softmax: 'ours', or a name that a --plugin registers.",
        rich_help_panel=PROTOCOL,
    ),
]
PartyOption = Annotated[
    PartyMode, typer.Option("--party-mode", help="Parties as threads or as processes.", rich_help_panel=PARTIES)
]


FracOption = Annotated[
    int | None,
    typer.Option("--frac-bits", help="Fractional bits (default: 18; 12 in 32 bits).", rich_help_panel=PROTOCOL),
]


def bits(frac_bits: int | None) -> dict[str, Any]:
    """Settings of --frac-bits."""
    return {} if frac_bits is None else {"frac_bits": frac_bits}


def config_of(protocol: str, ring: int, mode: PartyMode = PartyMode.AUTO, **more: Any) -> PrivateConfig:  # noqa: ANN401
    """The configuration of a command. Raises ConfigError for settings that do not go together."""
    values: dict[str, Any] = {"protocol": protocol, "ring": ring, "plugins": PLUGINS.get(), **more}
    if "hosts" in more and mode is not PartyMode.AUTO:
        raise ConfigError(f"party-mode: got {mode.value!r} with --hosts, where the parties run already; leave it out")
    values.setdefault("party_mode", mode.value)
    if ring == 32:
        values.setdefault("frac_bits", 12)
    return PrivateConfig.from_dict({**values, "insecure": protocol != CASCADE and not protocol_facts(protocol).hides})


def config_of_run(*settings: Any, **more: Any) -> PrivateConfig:  # noqa: ANN401 - those of `config_of`
    """The configuration of a command that runs a model: other processes compile kernels while this one imports."""
    from private_llm.kernels.ahead import compile_ahead

    config = config_of(*settings, **more)
    compile_ahead(config)
    return config


def adder_of(text: str) -> dict[str, Any]:
    """Settings of --adder. Raises ConfigError for names and settings that there are not."""
    if not text:
        return {}
    name, *parts = (part.strip() for part in text.split(","))
    wanted = f"{', '.join(Adder)}, and the network for auto alone, as auto,bandwidth_mbit=1000,latency_ms=20"
    if name not in [*Adder] or (parts and name != Adder.AUTO):
        raise ConfigError(f"adder: got {text!r}; want {wanted}")
    network: dict[str, float] = {}
    for part in parts:
        key, _, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if key not in ("bandwidth_mbit", "latency_ms") or key in network or not 0 <= number < float("inf"):
            raise ConfigError(f"adder: got {part!r}; want {wanted}")
        network[key] = number
    return {"adder": name, **network}


PlanOption = Annotated[
    str, typer.Option("--plan", help="Under 'cascade': alpha,c,m[,rho], for instance 8,8,2.", rich_help_panel=SHARDING)
]
WeakOption = Annotated[
    bool, typer.Option("--accept-weak-plan", help="Use a plan that its audit calls weak.", rich_help_panel=SHARDING)
]
SplitOption = Annotated[
    int | None,
    typer.Option(
        "--split", help="First layers under --protocol, the rest on the nodes of --plan.", rich_help_panel=SHARDING
    ),
]


def plan_of(text: str, weak: bool = False, split: int | None = None) -> dict[str, Any]:
    """Settings of a sharding plan."""
    if split is not None:
        return {**plan_of(text, weak), "split": split}
    if not text:
        return {}
    parts = text.split(",")
    if len(parts) not in (3, 4) or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"plan: got {text!r}; want alpha,c,m or alpha,c,m,rho, for instance 8,8,2")
    names = ("alpha", "c", "m", "rho")
    return {"plan": {**dict(zip(names, map(int, parts), strict=False)), "accept_weak_plan": weak}}


SparsityOption = Annotated[
    str,
    typer.Option(
        "--sparsity",
        help="Skip what predictors mark as inactive: their folder, or 'shared' if they were shared with the model.",
        rich_help_panel=SPARSITY,
    ),
]
OrdersOption = Annotated[
    Orders | None,
    typer.Option(
        "--orders", help="With --sparsity: 'kept' saves, and links patterns (default: fresh).", rich_help_panel=SPARSITY
    ),
]
LevelsOption = Annotated[
    Levels | None,
    typer.Option(
        "--levels",
        help="With --sparsity: a public 'budget' of units, what is active (open), or that and noise.",
        rich_help_panel=SPARSITY,
    ),
]
NeuronBudgetOption = Annotated[
    float | None,
    typer.Option(
        "--neuron-budget", help="With --sparsity: the share of neurons that a position opens.", rich_help_panel=SPARSITY
    ),
]
HeadBudgetOption = Annotated[
    float | None,
    typer.Option(
        "--head-budget", help="With --sparsity: the share of heads that a position opens.", rich_help_panel=SPARSITY
    ),
]
EpsilonOption = Annotated[
    float | None,
    typer.Option(
        "--epsilon", help="With --levels noisy: of the noise on each count (default: 0.1).", rich_help_panel=SPARSITY
    ),
]
SHARED = "shared"
"""What --sparsity says where predictors come with the model's shares."""


def sparsity_of(
    sparsity: str,
    orders: Orders | None,
    levels: Levels | None,
    neurons: float | None = None,
    heads: float | None = None,
    epsilon: float | None = None,
) -> dict[str, Any]:
    """Settings of --sparsity and what belongs to it. Raises ConfigError for the others without it."""
    given: dict[str, Any] = {"orders": orders and orders.value, "levels": levels and levels.value}
    given |= {"neuron_budget": neurons, "head_budget": heads, "epsilon": epsilon}
    chosen = {key: value for key, value in given.items() if value is not None}
    if not sparsity:
        if chosen:
            names = ", ".join(f"--{key.replace('_', '-')}" for key in chosen)
            raise ConfigError(f"{names}: want --sparsity as well, with a folder of predictors or 'shared'")
        return {}
    if epsilon is not None and levels != Levels.NOISY:
        raise ConfigError("--epsilon: it is of the noise of --levels noisy; want both, or neither")
    if sparsity == SHARED and (neurons is not None or heads is not None):
        raise ConfigError("--neuron-budget, --head-budget: whoever shares the model sets them; want --sparsity FOLDER")
    return {"sparsity": {"predictors": None if sparsity == SHARED else sparsity, **chosen}}


ParallelSessionsOption = Annotated[
    int,
    typer.Option(
        "--parallel-sessions",
        help="Sessions side by side that share the rows of a batch.",
        rich_help_panel=PROTOCOL,
    ),
]
RotateRolesOption = Annotated[
    bool,
    typer.Option(
        "--rotate-roles",
        help="Another party plays each role in each parallel session.",
        rich_help_panel=PROTOCOL,
    ),
]
PromptOption = Annotated[str, typer.Option("--prompt", help="Text to continue.")]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", help="How many tokens at most.")]
HostsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hosts",
        help="host:port of each party, in order: joined by commas, or the option repeated.",
        rich_help_panel=PARTIES,
    ),
]
TlsOption = Annotated[
    Path | None,
    typer.Option("--tls", help="Folder with ca.pem and this endpoint's .pem and .key.", rich_help_panel=PARTIES),
]
LoopbackOption = Annotated[
    bool, typer.Option(help="Allow unencrypted sockets, on loopback addresses only.", rich_help_panel=PARTIES)
]


TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", help="Seconds of silence after which another endpoint is dead.", rich_help_panel=PARTIES),
]
BusyWaitOption = Annotated[
    float,
    typer.Option(
        "--busy-wait", help="With --hosts: seconds to wait for parties that serve others.", rich_help_panel=PARTIES
    ),
]
RevealOption = Annotated[
    str, typer.Option("--reveal", help="What the client opens: 'logits' or 'token'.", rich_help_panel=PROTOCOL)
]
WeightsOption = Annotated[
    str, typer.Option("--weights", help="'secret', or 'public' for open-weight models.", rich_help_panel=PROTOCOL)
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="Above 0: sample. 0: greedy.", rich_help_panel=WRITING)
]
TopPOption = Annotated[
    float, typer.Option("--top-p", help="With a temperature: nucleus sampling.", rich_help_panel=WRITING)
]
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft", help="Speculative decoding: 'lookup', or a draft model's folder or hub id.", rich_help_panel=WRITING
    ),
]
PathsOption = Annotated[
    int, typer.Option("--draft-paths", help="With a draft: ways to go on that a pass checks.", rich_help_panel=WRITING)
]
AdvanceOption = Annotated[
    int | None,
    typer.Option(
        "--advance",
        help="With a draft: every pass goes on by so many tokens, which hides accepted counts and may end a text "
        "early; 0: by all that are right, which the parties see. Default: by 2, or by none where fewer are known.",
        rich_help_panel=WRITING,
    ),
]
TaskOption = Annotated[str, typer.Option(help="causal-lm, seq2seq, classification, features, image or masked-lm.")]
RangesOption = Annotated[
    Path | None, typer.Option("--ranges", help="A file of `private-llm calibrate --out`.", rich_help_panel=PROTOCOL)
]
GgufOption = Annotated[str | None, typer.Option("--gguf-file", help="A GGUF file in the model's folder or repository.")]


def remote(hosts: list[str] | None, tls: Path | None, endpoint: str, loopback: bool) -> dict[str, Any]:
    """Settings for parties on hosts of their own."""
    addresses = [address.strip() for item in hosts or [] for address in item.split(",") if address.strip()]
    if not addresses:
        if hosts or tls is not None or loopback:
            raise ConfigError(
                "hosts: got none; want host:port of every party, in order. Without --hosts the parties run on this "
                "machine, and --tls and --allow-plain-loopback protect nothing"
            )
        return {}
    values: dict[str, Any] = {"party_mode": "remote", "hosts": addresses}
    if tls is not None:
        names = {"certificate": f"{endpoint}.pem", "key": f"{endpoint}.key", "ca": "ca.pem"}
        missing = [name for name in names.values() if not (tls / name).is_file()]
        if missing:
            raise ConfigError(f"tls: {tls} lacks {', '.join(missing)}; make certificates with `private-llm certs`")
        values["tls"] = {key: str(tls / name) for key, name in names.items()}
    return {**values, "allow_plain_loopback": loopback}


def drafting(draft: str, paths: int, advance: int | None) -> dict[str, Any]:
    """Settings of generate() for speculative decoding. Raises ConfigError for others without a draft."""
    if not draft:
        if paths != 1 or advance is not None:
            raise ConfigError("draft: got none, so --draft-paths and --advance say nothing; want --draft lookup")
        return {}
    from private_llm_hf.client.speculation import FixedCounts, SpeculationConfig

    counts = FixedCounts(advance, window=advance + 12, reserve=8) if advance else None
    return {"speculation": SpeculationConfig(draft, paths=paths, fixed_counts=counts, open_counts=advance == 0)}


def sampling(temperature: float, top_p: float) -> dict[str, Any]:
    """Settings of generate()."""
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature: got {temperature:g}; want 0 (greedy) or a positive number")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top-p: got {top_p:g}; want a probability above 0, at most 1")
    if temperature == 0 and top_p < 1:
        raise ConfigError("top-p: greedy text has no use for it; give a --temperature above 0")
    return {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {"do_sample": False}
