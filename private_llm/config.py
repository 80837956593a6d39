"""What a user chooses: one frozen, checked configuration; an unknown key is an error."""

import dataclasses
import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from private_llm.approximations import OURS, approximations_of, check_approximations
from private_llm.errors import ConfigError, refuse_unknown
from private_llm.kv_cache.policies import policy_of
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy
from private_llm.protocol_facts import ASSISTED, CASCADE, ProtocolFacts, may_take_keys, names_where, protocol_facts
from private_llm.sparsity_config import CometConfig
from private_llm.tls_config import TLSConfig
from private_llm.token_sharding import ShardingPlan
from private_llm.typed_settings import check_types, refuses_unknown, settings_of

VERSION = "0.1.0"
"""Of the library; parties with different versions refuse each other."""
MAX_PARALLEL_SESSIONS = 64  # parallel sessions that a session may have

PROMPT_CHUNKS = (512, 128)  # tokens of a row in a chunk of a long prompt, and where arrays of that many are too large

_AGREED = (
    "protocol", "ring", "frac_bits", "weights", "reveal", "adder", "bandwidth_mbit", "latency_ms", "relu_bits",
    "relu_low", "truncation", "matmul", "prg", "parallel_sessions", "rotate_roles", "plan", "split", "guard", "plugins",
    "kv_cache", "approximations", "sparsity", "weight_bits", "expert_capacity",
)  # fmt: skip
"""What all parties must agree upon: these settings change the order or the meaning of messages."""

_TYPED_BELOW = ("plugins", "kv_cache", "sparsity", "plan", "split", "device", "device_map", "max_memory")
"""Settings whose own checks say more than their types."""

PLANNED = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that Accelerate makes


def _device_name(key: str, where: object, *more: str) -> str:
    number = isinstance(where, int) and not isinstance(where, bool) and where >= 0
    name = f"cuda:{where}" if number or str(where).isdecimal() else str(where)
    if name not in more and not re.fullmatch(r"cpu|cuda:\d+", name):
        raise ConfigError(f"{key}: got device {where!r}; want a GPU's number, 'cuda:N', {', '.join(('cpu', *more))}")
    return name


def import_plugins(names: Iterable[str]) -> None:
    """Import modules that register handlers or protocols. Raises ConfigError for one that is not found."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"plugins: {name!r} cannot be imported ({error}); want a Python module on this endpoint's path"
            ) from None


@refuses_unknown
@dataclass(frozen=True)
class PrivateConfig:
    """How a model is run privately. Raises ConfigError for settings that are unknown, out of range or contradictory.

    protocol: "trio" (three parties, semi-honest, honest majority), "quad" (four parties, one of them malicious: abort),
    "dealer" (two parties and a dealer of random numbers, party 0), "cascade" (token sharding: statistical protection
    only, public weights, nodes as in `plan`), "assisted" (public weights: two servers multiply masked rows, the client
    computes the rest; docs/assisted.md), "plain" (no secrecy; needs insecure=True), or one that was registered
    (protocols/registry.py).
    ring: bits of the ring, 64 or 32. frac_bits: fractional bits of activations and weights.
    weights: "secret" (shared by the model owner) or "public" (an open-weight model; linear layers get local). reveal:
    "logits" (the client opens logits), or only their arg max: "token" (models that generate) or "class" (classifiers).
    adder: how comparisons are made: by a circuit, "prefix" (few rounds) or "ripple" (fewest bytes); by comparison keys,
    "keys" (trio and dealer: one round for a comparison or a whole function, one to two kilobytes an element); or "auto"
    (for each the fastest at `bandwidth_mbit` per party and `latency_ms`; "prefix" without a bandwidth). In calls of
    many tokens "auto" can cost a few percent more than "prefix": compare both with `private-llm estimate`.
    bandwidth_mbit: Mbit/s of a party's connection, for adder="auto" alone. latency_ms: one way between parties. All
    endpoints agree on the three (docs/deploy.md, "Parties that are far apart").
    relu_bits: key bits of ReLU: its inputs stay below 2^(relu_bits-1-frac_bits) in magnitude (None: 2^20, or the
    whole ring). relu_low: lowest bits that ReLU ignores: inputs from 0 to 2^(relu_low-frac_bits) may become 0.
    truncation: "unit" (at most one unit in the last place too high) or "exact" (floor, by one more comparison).
    approximations: whose GELU and softmax are computed: "ours", or a name that a plug-in registers, as of other systems
    for comparisons (docs/studies/approximations.md).
    matmul: "masked" (output-sized traffic), or for "dealer" also "remask" (both operands masked anew each time).
    kv_cache: which entries of the KV cache stay after each call, and which a token attends to: KeepAll(),
    SlidingWindow(recent=256, first=4) (the first tokens and the most recent ones), MPCacheConfig(gamma=0.5) (those of
    most attention, chosen in secret), or one of its rivals (docs/kv-cache.md). Later steps do not see what is evicted.
    prompt_chunk: read longer prompts of decoders so many tokens at a time, with the same result: memory then grows with
    the prompt, not with its square, and each chunk takes the rounds of a prompt. "auto": 512, or 128 for many heads,
    rows or tokens; in one piece where chunks would change the result (policies that evict, sparsity, a sharding plan,
    rotary frequencies that depend on the length), where a number is a ConfigError. None: always in one piece.
    sparsity: leave out neurons and heads that predictors mark as inactive (`CometConfig`, docs/sparsity.md).
    expert_capacity: let each expert of a mixture take at most so many times its equal part of a row's tokens, those of
    largest weight (docs/models.md), in place of all tokens (None): fewer bytes, and answers differ.
    parallel_sessions: sessions side by side that share the rows of a batch, so that one computes while another sends or
    waits (rows beyond the batch idle). rotate_roles: in each of them another party plays each role, so that all parties
    and links carry the same; each party then holds a weight share for each different assignment of roles (for trio
    min(parallel_sessions, 6)). prg: cipher of the parties' common streams: "aes" (made on the CPU), "chacha20" (made
    where shares live), or "auto": ChaCha20 if all parties say, when they meet, that their `device` is a GPU; else AES.
    party_mode: "threads" or "processes" on this machine, "remote" (addresses in `hosts`), "distributed" (one
    process per party under torchrun or Accelerate's launcher, the client last), or "auto": the last two where `hosts`
    or a launcher's environment are there, else threads.
    trusted_network: let "distributed" span machines, although its links do not encrypt.
    hosts: "host:port" of each party for party_mode="remote". tls: certificates of this endpoint,
    or, of a user, the folder of them.
    allow_plain_loopback: permit unencrypted sockets, on loopback addresses only.
    timeout_s: seconds of silence after which a party counts as dead.
    busy_wait_s: seconds that a client waits for remote parties that serve another client (0: not at all).
    idle_s: seconds without a call after which a remote party ends a session, so that others get their turn (None:
    never). A client that thinks between calls sends nothing, so this is the longest thought.
    device: where a party's shares, or a server's public weights, live: "cpu", "cuda:N", or "cuda" (party modulo GPUs).
    Parties need not agree on devices and folders.
    device_map: how a party's layers are spread, as in transformers: "auto", "balanced", "balanced_low_0",
    "sequential", or {module name: GPU number, "cuda:N", "cpu" or "disk"} for the whole model; None: all on `device`.
    weights_at_rest: what a party holds of secret weights while it does not use them: "resident" (all parts of their
    shares: 16 bytes a weight, quad 24, in the 64-bit ring), "seeds" (what it received, 0 or 8 bytes; masks are made
    from their seeds whenever a layer runs, with the same results), or "auto" (seeds where memory is too short for the
    other, and for large models where seeds are faster). Parties need not agree.
    max_memory: {device: bytes, or text like "20GB"} that the planned maps may use. offload_folder: where a party writes
    weights that are mapped to "disk" and come from the client (with a share file it reads that file instead).
    offline_folder: where a party keeps what `model.preprocess` stores (default: the system's temporary folder), and a
    server of "assisted" which blocks of corrections it has heard of (default: in memory).
    replay: run steps that repeat, such as decoding a token, as recorded programs, without Python; False: always Python
    (same messages, same results). Under trio and dealer, in the 64-bit ring, on CPUs and on one GPU without a
    device_map (as CUDA graphs), up to 16 rows, on a GPU also full chunks of a prompt; modules whose weights are public,
    or whose products are faster on several threads, stay in Python. Endpoints need not agree.
    calibrate: run the owner's plaintext model on a bundled text before its weights are shared, and give every module
    the public powers of two that its values need (docs/ranges.md); False: one size for all, and larger messages.
    guard: check inside the protocol that values stay in their ranges; the client alone learns one bit per call, and
    gets a DomainError instead of a wrong answer.
    debug_ranges: check that no value leaves the safe range (opens nothing to the parties' network; plain only).
    insecure: must be True for protocol="plain".
    corrections: for "assisted", a folder that `private-llm prepare` filled; one server is then online in place of two.
    experts: for "assisted", where experts of a mixture compute: all of them for every token at the "servers", chosen
    ones at the "client", which then holds all in float32, or "auto": at the client where that takes 1 GB at most.
    weight_bits: for "assisted", of the weights by which servers multiply: 16, or 8, which is faster and sends and holds
    less, and makes answers differ from the plaintext model's by an error that is said when a model is loaded.
    plugins: names of Python modules that this endpoint imports first, such as a file that calls `register_handler` or
    registers a protocol. All endpoints need the same; nobody imports what another endpoint names.
    plan: which node sees which tokens, for protocol="cascade" and after a split. split: the first `split` layers run
    under a secret-sharing protocol, the rest on the nodes of `plan`, which then see no token (public weights; endpoints
    are the parties first, then the nodes).
    """

    protocol: str = "trio"
    ring: Literal[64, 32] = 64
    frac_bits: int = 18
    weights: Literal["secret", "public"] = "secret"
    reveal: Literal["logits", "token", "class"] = "logits"
    adder: Literal["auto", "prefix", "ripple", "keys"] = "auto"
    bandwidth_mbit: float | None = None
    latency_ms: float = 0.05
    relu_bits: int | None = None
    relu_low: int = 0
    truncation: Literal["unit", "exact"] = "unit"
    approximations: str = OURS
    matmul: Literal["masked", "remask"] = "masked"
    kv_cache: CachePolicy = KEEP_ALL
    prompt_chunk: int | Literal["auto"] | None = "auto"
    sparsity: CometConfig | None = None
    expert_capacity: float | None = None
    prg: Literal["auto", "aes", "chacha20"] = "auto"
    parallel_sessions: int = 1
    rotate_roles: bool = False
    party_mode: Literal["auto", "threads", "processes", "remote", "distributed"] = "auto"
    hosts: tuple[str, ...] = ()
    tls: TLSConfig | None = None
    allow_plain_loopback: bool = False
    trusted_network: bool = False
    timeout_s: float = 120.0
    calibrate: bool = True
    guard: bool = True
    busy_wait_s: float = 30.0
    idle_s: float | None = 1800.0
    debug_ranges: bool = False
    insecure: bool = False
    plugins: tuple[str, ...] = ()
    plan: ShardingPlan | None = None
    split: int | None = None
    device: str = "cpu"
    device_map: str | Mapping[str, int | str] | None = field(default=None, hash=False)
    max_memory: Mapping[int | str, int | str] | None = field(default=None, hash=False)
    weights_at_rest: Literal["auto", "resident", "seeds"] = "auto"
    offload_folder: str | None = None
    offline_folder: str | None = None
    corrections: str | None = None
    experts: Literal["auto", "servers", "client"] = "auto"
    weight_bits: Literal[16, 8] = 16
    replay: bool = True

    def __post_init__(self) -> None:
        self._import_plugins()
        if isinstance(self.hosts, str):
            raise ConfigError(f"hosts: got the text {self.hosts!r}; want a list, {self.hosts.split(',')!r}")
        tls: object = self.tls
        if isinstance(tls, str | Path):
            object.__setattr__(self, "tls", TLSConfig.in_folder(tls))
        check_types(self, but=_TYPED_BELOW)
        self._check_protocol()
        self._check_plan()
        check_approximations(self.approximations, self.ring, sharded=self.plan is not None)
        self._check_kv_cache()
        self._check_sparsity()
        top, most, bits = 20 if self.ring == 64 else 13, MAX_PARALLEL_SESSIONS, self.frac_bits
        relu, chunk, mbit, capacity = self.relu_bits, self.prompt_chunk, self.bandwidth_mbit, self.expert_capacity
        for key, fits, want in (
            ("frac_bits", 4 <= bits <= top, f"4 to {top} in a {self.ring}-bit ring"),
            ("bandwidth_mbit", mbit is None or mbit > 0, "a positive number, or None"),
            ("latency_ms", self.latency_ms >= 0, "a non-negative number"),
            ("relu_bits", relu is None or bits < relu <= self.ring, f"above frac_bits ({bits}), at most {self.ring}"),
            ("relu_low", 0 <= self.relu_low < bits, f"0 or more, below frac_bits ({bits})"),
            ("prompt_chunk", not isinstance(chunk, int) or chunk >= 1, "1 or more tokens, 'auto' or None"),
            ("expert_capacity", capacity is None or 0 < capacity < math.inf, "a positive number, such as 1.5, or None"),
            ("parallel_sessions", 1 <= self.parallel_sessions <= most, f"1 to {most}"),
            ("timeout_s", self.timeout_s > 0, "a positive number of seconds"),
            ("busy_wait_s", self.busy_wait_s >= 0, "0 or more seconds"),
            ("idle_s", self.idle_s is None or self.idle_s > 0, "a positive number of seconds, or None"),
        ):
            if not fits:
                raise ConfigError(f"{key}: got {getattr(self, key)!r}; want {want}")
        if self.rotate_roles and (self.facts is None or not self.facts.equal_parties or self.parallel_sessions == 1):
            equals = names_where(lambda facts: facts.equal_parties)
            raise ConfigError(
                f"rotate_roles: want protocol {equals} (whose parties are equals) and parallel_sessions above 1"
            )
        if self.party_mode == "remote" and len(self.hosts) != self.endpoints:
            given = f"{len(self.hosts)} address{'' if len(self.hosts) == 1 else 'es'}"
            raise ConfigError(f"hosts: got {given}; want {self.endpoints} for {self.protocol!r}")
        if twice := [host for host in self.hosts if self.hosts.count(host) > 1]:
            raise ConfigError(f"hosts: got {twice[0]!r} {len(twice)} times; want one address for each party")
        self._check_devices()

    def _check_protocol(self) -> None:
        """Raises ConfigError for an unknown protocol and for what it cannot do."""
        facts = self.facts
        if facts is not None and self.ring not in facts.rings:
            rings = " or ".join(map(str, facts.rings))
            raise ConfigError(f"ring: got {self.ring}; protocol {self.protocol!r} works with {rings} bits")
        if facts is not None and not facts.hides and not self.insecure:
            raise ConfigError(f"protocol {self.protocol!r} hides nothing; pass insecure=True to use it for tests")
        if self.debug_ranges and (facts is None or not facts.checks_ranges):
            reading = names_where(lambda facts: facts.checks_ranges)
            raise ConfigError(f"debug_ranges reads values, so it needs protocol={reading} (and insecure=True)")
        if self.matmul == "remask" and (facts is None or not facts.remasks):
            ways = names_where(lambda facts: facts.remasks)
            raise ConfigError(f"matmul='remask' is a way of protocol={ways}; the others mask each operand once")
        if self.adder == "keys" and (facts is None or not facts.key_receivers):
            ways = names_where(lambda facts: bool(facts.key_receivers))
            raise ConfigError(
                f"adder='keys' is a way of protocol={ways}: elsewhere nobody makes comparison keys, or nobody could "
                "check them; want 'auto', 'prefix' or 'ripple'"
            )

    def _check_devices(self) -> None:
        """Device names become strings, so that a configuration survives JSON. Raises ConfigError for unknown ones."""
        if not re.fullmatch(r"cpu|cuda(:\d+)?", str(self.device)):
            raise ConfigError(f"device: got {self.device!r}; want 'cpu', 'cuda' or 'cuda:N'")
        if isinstance(self.device_map, Mapping):
            named = {name: _device_name("device_map", where, "disk") for name, where in self.device_map.items()}
            object.__setattr__(self, "device_map", named)
        elif self.device_map is not None and self.device_map not in PLANNED:
            raise ConfigError(
                f"device_map: got {self.device_map!r}; want {', '.join(map(repr, PLANNED))} or a mapping from module "
                "names to devices"
            )
        if self.max_memory is not None:
            if self.device_map not in PLANNED:
                raise ConfigError("max_memory is for a planned device_map ('auto', ...); a mapping says it all")
            limits = {_device_name("max_memory", where): size for where, size in self.max_memory.items()}
            object.__setattr__(self, "max_memory", limits)
        if self.weights_at_rest == "seeds" and (self.weights == "public" or self.facts is None or not self.facts.hides):
            raise ConfigError(
                "weights_at_rest: got 'seeds', but public weights, and those of a protocol that hides nothing, have no "
                "masks that could be made from seeds; want 'auto'"
            )
        if self.weights_at_rest == "seeds" and self.sparsity is not None:
            raise ConfigError(
                "weights_at_rest: got 'seeds' with sparsity, whose listed neurons are read from memory; want 'resident'"
            )

    def _import_plugins(self) -> None:
        if isinstance(self.plugins, str):
            raise ConfigError(f"plugins: got the text {self.plugins!r}; want a list, [{self.plugins!r}]")
        check_types(self, but=[name for name in settings_of(type(self)) if name != "plugins"])
        object.__setattr__(self, "plugins", tuple(self.plugins))
        import_plugins(self.plugins)

    def _check_assisted(self) -> None:
        """Weights are public, and what the client computes itself has no settings. Raises ConfigError for those."""
        object.__setattr__(self, "weights", "public")
        kept = {each.name: each.default for each in dataclasses.fields(self)}
        of_shares = (
            "ring", "frac_bits", "reveal", "adder", "bandwidth_mbit", "relu_bits", "relu_low", "truncation",
            "approximations", "kv_cache", "sparsity", "parallel_sessions", "rotate_roles", "plan", "split",
            "device_map", "max_memory", "offload_folder", "expert_capacity",
        )  # fmt: skip
        cache = "; give generate() a cache that evicts (`private-llm docs kv-cache`, 'Under assisted')"
        if told := [name for name in of_shares if getattr(self, name) != kept[name]]:
            raise ConfigError(
                f"{told[0]}: got {getattr(self, told[0])!r}; protocol='assisted' has no such setting: the client "
                "computes everything but linear layers in floating point"
                f"{cache if told[0] == 'kv_cache' else ''}"
            )

    def _check_plan(self) -> None:
        if self.protocol == ASSISTED:
            self._check_assisted()
            return
        if self.corrections is not None:
            raise ConfigError(f"corrections: protocol {self.protocol!r} has none; they are for 'assisted'")
        for name, kept in (("experts", "auto"), ("weight_bits", 16)):
            if getattr(self, name) != kept:
                raise ConfigError(f"{name}: protocol {self.protocol!r} has no such setting; it is for 'assisted'")
        if self.plan is not None and not isinstance(self.plan, ShardingPlan):
            raise ConfigError(f"plan: got {self.plan!r}; want a ShardingPlan, such as ShardingPlan(alpha=8, c=8, m=2)")
        if self.split is not None:
            if isinstance(self.split, bool) or not isinstance(self.split, int) or self.split < 1:
                raise ConfigError(f"split: got {self.split!r}; want 1 or more layers under {self.protocol!r}, or None")
            if self.facts is None or not self.facts.hides:
                raise ConfigError(f"split: want a protocol of secret shares before it; got {self.protocol!r}")
        elif self.facts is not None:
            if self.plan is not None:
                raise ConfigError(
                    f"plan: got one for protocol={self.protocol!r}; sharding plans are for 'cascade', or for the "
                    "layers after a split (split=1 or more)"
                )
            return
        if self.reveal != "logits" or self.parallel_sessions != 1 or self.rotate_roles:
            raise ConfigError(
                "token sharding returns logits to the client, in one session: leave out reveal, parallel_sessions and "
                "rotate_roles"
            )
        # Its nodes hold the model in the clear: nobody may read "secret" off the configuration.
        object.__setattr__(self, "weights", "public")
        object.__setattr__(self, "plan", self.plan or ShardingPlan())

    def _check_kv_cache(self) -> None:
        if not isinstance(self.kv_cache, CachePolicy):
            raise ConfigError(f"kv_cache: got {self.kv_cache!r}; want a policy, such as MPCacheConfig(), or KeepAll()")
        if self.plan is not None and self.kv_cache != KEEP_ALL:
            raise ConfigError("kv_cache: nodes of a sharding plan keep all entries; leave it out")
        eviction, other = self.kv_cache.eviction, approximations_of(self.approximations)
        if eviction is not None and not eviction.drop and other is not None and other.squares:
            raise ConfigError(
                f"kv_cache: got drop=False with approximations={self.approximations!r}, whose softmax squares scores: "
                "entries under a mask, far below all others, would weigh most; want drop=True"
            )

    def _check_sparsity(self) -> None:
        if self.expert_capacity is not None and self.plan is not None:
            raise ConfigError("expert_capacity: nodes of a sharding plan compute chosen experts; leave one of both out")
        if self.sparsity is None:
            return
        if not isinstance(self.sparsity, CometConfig):
            raise ConfigError(f"sparsity: got {self.sparsity!r}; want CometConfig(predictors='folder'), or None")
        if self.plan is not None:
            raise ConfigError("sparsity: nodes of a sharding plan compute everything; leave sparsity or the plan out")
        if self.weights == "public":
            raise ConfigError(
                "sparsity: with weights='public' all parties know the order of neurons, so what is opened in it names "
                "them, and predictors are secret weights; want weights='secret'"
            )

    @property
    def facts(self) -> ProtocolFacts | None:
        """What is known of the protocol; None for cascade and assisted. Raises ConfigError if it is gone."""
        return None if self.protocol in (CASCADE, ASSISTED) else protocol_facts(self.protocol)

    @property
    def parties(self) -> int:
        """Number of computing parties (of protocol "cascade": nodes, of "assisted": servers)."""
        return self.endpoints if self.facts is None else self.facts.parties

    @property
    def endpoints(self) -> int:
        """Number of processes besides the client: parties, and after a split the nodes, numbered after them."""
        if self.protocol == ASSISTED:  # one for masks, one for masked rows; or one, which is not told what it is for
            return 1 if self.corrections is not None or len(self.hosts) == 1 else 2
        nodes = 0 if self.plan is None else self.plan.nodes
        return nodes if self.facts is None else self.facts.parties + nodes

    @property
    def may_take_keys(self) -> bool:
        """Whether comparisons may be made by comparison keys: asked for, or chosen for each by a stated network."""
        known = self.facts is not None and bool(self.facts.key_receivers)
        return known and may_take_keys(self.adder, self.bandwidth_mbit)

    @property
    def offline_receivers(self) -> tuple[int, ...]:
        """The roles that receive, and store, what the helping party sends ahead of a call."""
        if self.facts is None:
            return ()
        more = self.facts.key_receivers if self.may_take_keys else ()
        return tuple(sorted({*self.facts.offline_receivers, *more}))

    @property
    def helper(self) -> int | None:
        """The role that works in preprocessing only, or None."""
        return None if self.facts is None else self.facts.helper

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PrivateConfig":
        """Build from a mapping (for instance JSON); unknown keys raise ConfigError."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"settings: got {type(values).__name__}; want a mapping from settings to values")
        refuse_unknown(values, settings_of(cls))
        values = dict(values)
        for key, read in _FROM_DICT.items():
            if isinstance(values.get(key), dict):
                values[key] = read(values[key])
        if not isinstance(values.get("hosts", ""), str):
            values["hosts"] = tuple(values["hosts"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`."""
        return {**dataclasses.asdict(self), "kv_cache": self.kv_cache.to_dict()}

    def agreed(self) -> dict[str, Any]:
        """The settings that all endpoints must agree upon, for JSON; equal ones are equal there."""
        values = self.to_dict()
        shared = {key: values[key] for key in _AGREED}
        for key in ("bandwidth_mbit", "latency_ms", "expert_capacity"):  # 20 in one place is 20.0 in another
            shared[key] = None if shared[key] is None else float(shared[key])
        shared["sparsity"] = None if self.sparsity is None else self.sparsity.agreed()
        if shared["plan"] is not None:  # what a client accepts is its own business
            shared["plan"] = {k: v for k, v in shared["plan"].items() if k not in ("rho", "accept_weak_plan")}
        return shared

    def agreement(self) -> bytes:
        """Digest of everything all parties must agree upon, with the library's version."""
        return hashlib.sha256(json.dumps([VERSION, self.agreed()], sort_keys=True).encode()).digest()


def _tls_of(values: dict[str, Any]) -> TLSConfig:
    refuse_unknown(values, settings_of(TLSConfig), "tls: ")
    return TLSConfig(**values)


_FROM_DICT: dict[str, Callable[[dict[str, Any]], object]] = {
    "tls": _tls_of, "plan": ShardingPlan.from_dict, "sparsity": CometConfig.from_dict, "kv_cache": policy_of,
}  # fmt: skip
"""Settings that are objects, from what `to_dict` makes of them."""


def chunk_sizes(config: PrivateConfig) -> tuple[int, ...]:
    """How many tokens of a row full chunks of a long prompt may have; () where prompts are read in one piece."""
    chunk = config.prompt_chunk
    return PROMPT_CHUNKS if chunk == "auto" else () if chunk is None else (chunk,)
