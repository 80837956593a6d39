"""The options that commands share, alone and in groups, and what they mean as settings of `PrivateConfig`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.protocol_facts import ASSISTED, CASCADE, hides, protocol_names
from private_llm.tls_config import TLSConfig
from private_llm_cli.commands.models import want_draft
from private_llm_cli.kv_cache import KvCacheOption, kv_cache_of

PLUGINS: ContextVar[tuple[str, ...]] = ContextVar("PLUGINS", default=())  # as `private-llm --plugin` named them

SHAPES = (
    "opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "llama-7b", "llama-8b", "llama-13b", "qwen3-8b", "gpt2",
    "bert-base", "resnet-18", "resnet-50", "mobilenet-v2", "convnext-tiny", "lenet5", "alexnet", "vgg16-cifar10",
    "vgg16-imagenet", "vgg16-imagenet-average", "resnet50-average",
)  # fmt: skip
"""What `estimate` knows by name. Spelled out: the list itself is in a package that is slow to import."""


def protocol_name(text: str) -> str:
    """The name of a protocol on offer. Raises BadParameter for another."""
    offered = (*protocol_names(), CASCADE, ASSISTED)
    if text not in offered:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, offered))}.")
    return text


DemoModel = StrEnum("DemoModel", ["BUNDLED", "SMOLLM2"])
AdderName = StrEnum("AdderName", ["AUTO", "PREFIX", "RIPPLE", "KEYS"])
Orders = StrEnum("Orders", ["FRESH", "KEPT"])
Levels = StrEnum("Levels", ["BUDGET", "NOISY", "OPEN"])
PartyMode = StrEnum("PartyMode", ["AUTO", "THREADS", "PROCESSES"])
ExpertsPlace = StrEnum("ExpertsPlace", ["AUTO", "SERVERS", "CLIENT"])

PARTIES, WRITING, PROTOCOL = "Parties", "How text is written", "Protocol"
SHARES = "Computation on shares (trio, quad, dealer, plain)"
SERVERS = "Linear layers at servers (assisted)"
SHARDING = "Token sharding (cascade; after first layers under trio, quad, dealer)"
SPARSITY = "Predicted sparsity (trio, quad, dealer, plain)"
"""Groups of options in help pages: in parentheses the protocols of an option, if it is not of all."""
PROTOCOLS = f"<{'|'.join((*protocol_names(), CASCADE, ASSISTED))}>"  # how help texts show protocols' names


def option(panel: str, help_text: str, *names: str, **more: Any) -> Any:  # noqa: ANN401 - typer's own
    """An option in a group of help pages."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **more)


Json = Annotated[bool, typer.Option("--json", help="Print figures as JSON, one object per line.")]
Prompt = Annotated[str, typer.Option("--prompt", help="Text to continue.")]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="How many tokens at most.")]
Task = Annotated[str, typer.Option(help="causal-lm, seq2seq, classification, features, image or masked-lm.")]
GgufFile = Annotated[str | None, typer.Option("--gguf-file", help="A GGUF file in the model's folder or repository.")]
RangesFile = Annotated[Path | None, option(SHARES, "A file of `private-llm calibrate --out`.", "--ranges")]
ProtocolOption = Annotated[
    str,
    option(
        PROTOCOL,
        "'plain' hides nothing (for comparison). `--protocol NAME --help` lists what NAME takes.",
        "--protocol",
        parser=protocol_name,
        metavar=PROTOCOLS,
    ),
]
RingBits = Annotated[int, option(SHARES, "Bits of the ring: 64 or 32.", "--ring")]
FracBits = Annotated[int | None, option(SHARES, "Fractional bits (default: 18; 12 in 32 bits).", "--frac-bits")]
MatmulOption = Annotated[str, option(SHARES, "'masked', or under 'dealer' 'remask': operand-sized traffic.")]
Reveal = Annotated[str, option(SHARES, "What the client opens: 'logits' or 'token'.", "--reveal")]
WeightsOption = Annotated[str, option(SHARES, "'secret', or 'public' for open-weight models.", "--weights")]
AdderOption = Annotated[
    AdderName | None,
    option(
        SHARES,
        "Of comparisons: few rounds (prefix, the default), fewest bytes (ripple), comparison keys (keys), or for "
        "each the fastest at --bandwidth and --latency (auto; without a bandwidth it is prefix).",
        "--adder",
    ),
]
AgreedAdder = Annotated[
    str,
    option(
        SHARES,
        "How comparisons are made, the same at all endpoints: prefix, ripple, keys (parties far apart), or "
        "auto,bandwidth_mbit=1000,latency_ms=20, which chooses by price (default: auto without a network, as prefix).",
        "--adder",
    ),
]
ReluBits = Annotated[
    int | None, option(SHARES, "Lowest bits that ReLU compares (default: what its range needs).", "--relu-bits")
]
ReluLow = Annotated[int, option(SHARES, "How many of them, the lowest, ReLU leaves out.", "--relu-low")]
ApproximationsOption = Annotated[
    str, option(SHARES, "Whose GELU and softmax: 'ours', or a name that a --plugin registers.", "--approximations")
]
ParallelSessionsOption = Annotated[
    int, option(SHARES, "Sessions side by side that share the rows of a batch.", "--parallel-sessions")
]
ExpertsOption = Annotated[
    ExpertsPlace,
    option(
        SERVERS, "All experts at the servers, chosen ones here, or here if all take 1 GB (auto).",
        "--experts",
    ),
]  # fmt: skip
WeightBits = Annotated[
    int, option(SERVERS, "16, or 8: faster and less exact; the error is said (all endpoints alike).", "--weight-bits")
]
ExpertCapacity = Annotated[
    float | None,
    option(
        SHARES,
        "Tokens of a prompt that an expert of a mixture takes, at most, in parts of an equal share, such as 1.5: fewer "
        "bytes, less exact (default: all tokens; the same at all endpoints).",
        "--expert-capacity",
    ),
]
RotateRoles = Annotated[
    bool, option(SHARES, "Another party plays each role in each parallel session.", "--rotate-roles")
]
PlanOption = Annotated[str, option(SHARDING, "alpha,c,m[,rho], for instance 8,8,2.", "--plan")]
WeakPlan = Annotated[bool, option(SHARDING, "Use a plan that its audit calls weak.", "--accept-weak-plan")]
SplitOption = Annotated[
    int | None, option(SHARDING, "First layers under --protocol, the rest on the nodes of --plan.", "--split")
]


def config_of(
    protocol: str, ring: int, mode: PartyMode = PartyMode.AUTO, frac_bits: int | None = None, **more: Any,  # noqa: ANN401
) -> PrivateConfig:  # fmt: skip
    """The configuration of a command. Raises ConfigError for settings that do not go together."""
    values: dict[str, Any] = {"protocol": protocol, "ring": ring, "plugins": PLUGINS.get(), **more}
    if "hosts" in more and mode is not PartyMode.AUTO:
        raise ConfigError(f"party-mode: got {mode.value!r} with --hosts, where the parties run already; leave it out")
    values.setdefault("party_mode", mode.value)
    if frac_bits is not None or ring == 32:
        values["frac_bits"] = 12 if frac_bits is None else frac_bits
    return PrivateConfig.from_dict({**values, "insecure": not hides(protocol)})


def adder_of(text: str) -> dict[str, Any]:
    """Settings of --adder. Raises ConfigError for names and settings that there are not."""
    if not text:
        return {}
    name, *parts = (part.strip() for part in text.split(","))
    wanted = f"{', '.join(AdderName)}, and the network for auto alone, as auto,bandwidth_mbit=1000,latency_ms=20"
    if name not in [*AdderName] or (parts and name != AdderName.AUTO):
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


def parse_shape(text: str) -> tuple[int, ...]:
    """ "128x768x3072" as (128, 768, 3072). Raises ConfigError."""
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"shape: got {text!r}; want positive sizes joined by 'x', for instance 128x768x3072")
    return shape


# -- groups: a command that takes one has all of its options ----------------------------------------------------------
def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: each parameter that is a group (a dataclass of options) becomes the group's options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}

    @functools.wraps(command)
    def called(**given: Any) -> None:  # noqa: ANN401 - what was typed
        made = {
            name: group(**{each.name: given.pop(each.name) for each in dataclasses.fields(group) if each.name in given})
            for name, group in groups.items()
        }
        command(**given, **made)

    taken: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            options = {each.name: (types[each.name], each.default) for each in dataclasses.fields(groups[name])}
        else:
            options = {name: (hints[name], parameter.default)}
        for option, (annotation, default) in options.items():
            taken[option] = inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
    called.__signature__ = inspect.Signature(list(taken.values()))  # type: ignore[attr-defined]
    called.__annotations__ = {name: parameter.annotation for name, parameter in taken.items()}
    return called


@dataclass(frozen=True)
class Sharding:
    """Settings of token sharding."""

    plan: PlanOption = ""
    accept_weak_plan: WeakPlan = False
    split: SplitOption = None

    def settings(self) -> dict[str, Any]:
        """As `PrivateConfig` has them."""
        return plan_of(self.plan, self.accept_weak_plan, self.split)


SHARED = "shared"  # what --sparsity says where predictors come with the model's shares


@dataclass(frozen=True)
class SharedSparsity:
    """What a party knows of predictors."""

    sparsity: Annotated[
        str,
        option(
            SPARSITY,
            "Skip what predictors mark as inactive: their folder, or 'shared' if they were shared with the model.",
        ),
    ] = ""
    orders: Annotated[
        Orders | None, option(SPARSITY, "With --sparsity: 'kept' saves, and links patterns (default: fresh).")
    ] = None
    levels: Annotated[
        Levels | None,
        option(
            SPARSITY, "With --sparsity: a public 'budget' of units, what is active (open), or that and noise.",
        ),
    ] = None  # fmt: skip
    epsilon: Annotated[
        float | None, option(SPARSITY, "With --levels noisy: of the noise on each count (default: 0.1).")
    ] = None

    def sparse_settings(self) -> dict[str, Any]:
        """Settings of --sparsity and what belongs to it. Raises ConfigError for the others without it."""
        names = ("orders", "levels", "neuron_budget", "head_budget", "epsilon")
        given = {name: getattr(self, name, None) for name in names}
        chosen = {
            name: value.value if isinstance(value, StrEnum) else value
            for name, value in given.items() if value is not None
        }  # fmt: skip
        if not self.sparsity:
            if chosen:
                told = ", ".join(f"--{key.replace('_', '-')}" for key in chosen)
                raise ConfigError(f"{told}: want --sparsity as well, with a folder of predictors or 'shared'")
            return {}
        if self.epsilon is not None and self.levels != Levels.NOISY:
            raise ConfigError("--epsilon: it is of the noise of --levels noisy; want both, or neither")
        if self.sparsity == SHARED and {"neuron_budget", "head_budget"} & set(chosen):
            raise ConfigError(
                "--neuron-budget, --head-budget: whoever shares the model sets them; want --sparsity FOLDER"
            )
        if self.sparsity != SHARED and not (Path(self.sparsity) / "predictors.json").is_file():
            raise ConfigError(
                f"sparsity: {self.sparsity}: no predictors.json; want a folder that `private-llm predictors train` "
                "wrote, or 'shared' if predictors were shared with the model"
            )
        return {"sparsity": {"predictors": None if self.sparsity == SHARED else self.sparsity, **chosen}}


@dataclass(frozen=True)
class Sparsity(SharedSparsity):
    """What whoever has predictors may set."""

    neuron_budget: Annotated[
        float | None, option(SPARSITY, "With --sparsity: the share of neurons that a position opens.")
    ] = None
    head_budget: Annotated[
        float | None, option(SPARSITY, "With --sparsity: the share of heads that a position opens.")
    ] = None


@dataclass(frozen=True)
class LinkOptions:
    """Where the other endpoints are."""

    hosts: Annotated[
        list[str] | None,
        option(PARTIES, "host:port of each party, in order: joined by commas, or the option repeated."),
    ] = None
    tls: Annotated[Path | None, option(PARTIES, "Folder with ca.pem and this endpoint's .pem and .key.")] = None
    allow_plain_loopback: Annotated[bool, option(PARTIES, "Allow unencrypted sockets, on loopback addresses only.")] = (
        False
    )
    timeout: Annotated[float, option(PARTIES, "Seconds of silence after which another endpoint is dead.")] = 120.0

    def client_settings(self) -> dict[str, Any]:
        """As a client's `PrivateConfig` has them."""
        values: dict[str, Any] = {"timeout_s": self.timeout}
        addresses = [address.strip() for item in self.hosts or [] for address in item.split(",") if address.strip()]
        if not addresses:
            if self.hosts or self.tls is not None or self.allow_plain_loopback:
                raise ConfigError(
                    "hosts: got none; want host:port of every party, in order. Without --hosts the parties run on "
                    "this machine, and --tls and --allow-plain-loopback protect nothing"
                )
            return values
        values |= {"party_mode": "remote", "hosts": addresses, "allow_plain_loopback": self.allow_plain_loopback}
        if self.tls is not None:
            values["tls"] = TLSConfig.in_folder(self.tls)
        return values


@dataclass(frozen=True)
class Run(Sparsity):
    """How a model runs on this machine."""

    protocol: ProtocolOption = "trio"
    ring: RingBits = 64
    party_mode: Annotated[PartyMode, option(PARTIES, "Parties as threads or as processes.")] = PartyMode.AUTO
    adder: AgreedAdder = ""
    expert_capacity: ExpertCapacity = None

    def config(self, **more: Any) -> PrivateConfig:  # noqa: ANN401 - those of `config_of`
        """The configuration."""
        given = self.sparse_settings() | adder_of(self.adder) | {"expert_capacity": self.expert_capacity}
        return config_of(self.protocol, self.ring, self.party_mode, **given, **more)


@dataclass(frozen=True)
class RemoteRun(Run, LinkOptions):
    """How a model runs here or at parties on other hosts."""

    frac_bits: FracBits = None
    reveal: Reveal = "logits"
    weights: WeightsOption = "secret"
    busy_wait: Annotated[float, option(PARTIES, "With --hosts: seconds to wait for parties that serve others.")] = 30.0
    corrections: Annotated[
        str | None, option(SERVERS, "Folder of what `prepare` stored, so that one server is online.")
    ] = None
    experts: ExpertsOption = ExpertsPlace.AUTO
    weight_bits: WeightBits = 16

    def config(self, **more: Any) -> PrivateConfig:  # noqa: ANN401 - those of `config_of`
        """The configuration of a client."""
        more |= self.client_settings() | {"frac_bits": self.frac_bits}
        more |= {"corrections": self.corrections, "experts": self.experts.value, "weight_bits": self.weight_bits}
        return super().config(reveal=self.reveal, weights=self.weights, busy_wait_s=self.busy_wait, **more)


@dataclass(frozen=True)
class TextRun(RemoteRun):
    """How a model that writes text runs."""

    kv_cache: KvCacheOption = ""

    def config(self, **more: Any) -> PrivateConfig:  # noqa: ANN401 - those of `config_of`
        """The configuration of a client."""
        return super().config(**kv_cache_of(self.kv_cache), **more)


@dataclass(frozen=True)
class Writing:
    """How text is written."""

    temperature: Annotated[float, option(WRITING, "Above 0: sample. 0: greedy.")] = 0.0
    top_p: Annotated[float, option(WRITING, "With a temperature: nucleus sampling.")] = 1.0
    draft: Annotated[
        str, option(WRITING, "Speculative decoding: 'lookup' (for text that repeats), or a draft model.")
    ] = ""
    draft_paths: Annotated[int, option(WRITING, "With a draft: ways to go on that a pass checks.")] = 1
    advance: Annotated[
        int | None,
        option(
            WRITING,
            "With a draft: every pass goes on by so many tokens, which hides accepted counts and may end a text "
            "early; 0: by all that are right, which the parties see. Default: by 2, or by none where fewer are known "
            "('assisted': by all).",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what is out of range, for a draft that is none, and for others of drafts without."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature: got {self.temperature:g}; want 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p: got {self.top_p:g}; want a probability above 0, at most 1")
        if self.temperature == 0 and self.top_p < 1:
            raise ConfigError("top-p: greedy text has no use for it; give a --temperature above 0")
        if not self.draft and (self.draft_paths != 1 or self.advance is not None):
            raise ConfigError("draft: --draft-paths and --advance need drafts; add --draft lookup")
        want_draft(self.draft)

    def settings(self) -> dict[str, Any]:
        """Settings of generate(). Raises ConfigError for drafts that cannot be made so."""
        made: dict[str, Any] = {"do_sample": self.temperature > 0}
        if self.temperature:
            made |= {"temperature": self.temperature, "top_p": self.top_p}
        if not self.draft:
            return made
        from private_llm_hf.client.speculation import FixedCounts, SpeculationConfig

        advance = self.advance
        counts = FixedCounts(advance, window=advance + 12, reserve=8) if advance else None
        more = SpeculationConfig(self.draft, paths=self.draft_paths, fixed_counts=counts, open_counts=advance == 0)
        return {**made, "speculation": more}
