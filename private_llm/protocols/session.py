"""A session: one party's identity, protocol and settings; passed explicitly, never global."""

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kernels.devices import device_for
from private_llm.net.transport import CLIENT, MetaTransport, PlacedTransport, Transport
from private_llm.protocols.ends import ClientEnd, PartySetup
from private_llm.protocols.plain import CheckedPlain
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import protocol_spec
from private_llm.protocols.settings_table import TABLE_BYTES, other_settings, settings_table
from private_llm.protocols.share import Share
from private_llm.protocols.weight_sharing import keys_held
from private_llm.ranges import Ranges
from private_llm.ring.prg import CIPHERS, Seed, makes_streams
from private_llm.ring.ring import Ring

PendingRangeCheck = tuple[Share, int, Tensor | None]
"""Signed sums [n] of watched rows, the bits that they may have, and in a batch of several clients which of its rows
they belong to, int64 [n] (the number of rows for all of them)."""


class NumericContext:
    """The ranges that a session works with, set once when its model is loaded; and `tokens` of the running call.

    compared_quantity: which of `ranges.QUANTITIES` the arguments of comparisons are (`exact.comparisons.comparing`).
    shared_ranges: quantities of which every module counts as having the widest range of all modules that have one.
    lazy_masks: whether masks of weights stay seeds until a layer runs. module_bits: kept by `tensor.fixed.module_bits`.
    tokens: which columns of a text's rows are no padding, [rows, columns] of 1 and 0; None where that is not known.
    """

    def __init__(self) -> None:
        self.ranges = Ranges()
        self.compared_quantity = "compare"
        self.shared_ranges: frozenset[str] = frozenset()
        self.lazy_masks = False
        self.module_bits: dict[tuple[str, frozenset[str], bool], Any] = {}
        self.tokens: Tensor | None = None


class RangeChecks:
    """The checks of ranges that a call owes (tensor/range_check.py).

    deferred: a secret tensor, and the bits that its sums may have, to be checked unless the operation on it checks it
    anyway. batch: of a call whose rows belong to several clients their number, so that each row has a verdict of its
    own; None: one verdict for the call. ranked_wrong: what parties opened to move chosen rows shows, to all of them,
    that what was ranked left its range. bounds: of the last verdict, for sums of these numbers and bits.
    """

    def __init__(self) -> None:
        self.pending: list[PendingRangeCheck] = []
        self.deferred: tuple[Any, int] | None = None
        self.batch: int | None = None
        self.ranked_wrong = False
        self.bounds: tuple[object, Tensor] | None = None

    def clear(self) -> None:
        """Owe nothing any more: the call is over."""
        self.pending, self.deferred, self.ranked_wrong = [], None, False


@dataclass(frozen=True, eq=False)
class Session:
    """Everything an operation of one party needs. Compared by identity: secrets of two sessions never meet.

    device: where inputs arrive, "meta" to count costs. numerics: ranges of the loaded model. checks: what a call owes.
    """

    config: PrivateConfig
    protocol: Protocol
    device: str = "cpu"
    numerics: NumericContext = field(default_factory=NumericContext)
    checks: RangeChecks = field(default_factory=RangeChecks)

    @cached_property
    def ring(self) -> Ring:
        """The ring of arithmetic shares, Z/2^64 or Z/2^32."""
        return self.protocol.ring

    @cached_property
    def frac(self) -> int:
        """Default fractional bits of secret values (`PrivateConfig.frac_bits`)."""
        return self.config.frac_bits

    @cached_property
    def party(self) -> int:
        """This party's number."""
        return self.protocol.party

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """The module `name` is being computed: its ranges hold, and costs are booked under it."""
        end = self.protocol
        outer, before, end.module = end.ledger.enter(name), end.module, name
        try:
            yield
        finally:
            end.module = before
            end.ledger.leave(outer)

    def exponent(self, quantity: str) -> int | None:
        """What calibration tells of the module that is being computed (`ranges.QUANTITIES`): an exponent of two.

        None without calibration or for a module that it did not meet. Public and local.
        """
        ranges = self.numerics.ranges
        found = ranges.of(self.protocol.module, quantity) if ranges.modules else None
        return ranges.widest[quantity] if found is not None and quantity in self.numerics.shared_ranges else found

    def __repr__(self) -> str:
        return f"Session({self.protocol.name}, party {self.party}, ring {self.ring.bits}, f={self.frac})"


def join(config: PrivateConfig, party: int, transport: Transport, client: bool = True) -> Session:
    """Agree with all other endpoints on settings and keys, and return this party's session; keep it while you use it.

    Sends a 64-byte greeting to each other endpoint, receives a 32-byte key from the client for each mask of inputs that
    this party knows, and makes the protocol's end (quad: group keys; where comparison keys may be taken, 32 bytes from
    party 0 to each other party, too). client: False for parties that serve many clients, each of whom meets them by
    `meet_client`. Raises ConfigError for other settings or another version elsewhere, or a device that is not here.
    """
    device = device_for(config.device, party)
    others = [p for p in range(config.parties) if p != party]
    seeds = _meet(config, transport, [*others, CLIENT] if client else others, device)
    keys = [_input_key(transport) for _ in range(keys_held(config, party))] if client else []
    return _placed(config, _end(PartySetup(config, party, transport, seeds, keys)), device)


def meet_client(config: PrivateConfig, party: int, transport: Transport) -> list[Seed]:
    """Agree with a client on settings, over links of its own; its keys of input masks that this party holds, in order.

    A 64-byte greeting each way, and 32 bytes for each key. Raises ConfigError for a client with other settings.
    """
    _meet(config, transport, [CLIENT])
    return [_input_key(transport) for _ in range(keys_held(config, party))]


def receiving_end(config: PrivateConfig, party: int, transport: Transport) -> Protocol:
    """An end without keys, to count costs or receive from a client. Raises ConfigError for an unknown protocol."""
    zero = Seed(bytes(32))
    seeds = dict.fromkeys([*range(config.parties), CLIENT], zero)
    return _end(PartySetup(config, party, transport, seeds, [zero] * keys_held(config, party), counting=True))


_ALWAYS = {"receive_input", "reveal", "public", "add_public", "truncate", "mul", "bilinear"}
"""Primitives that every model needs."""


def _end(setup: PartySetup) -> Protocol:
    """This party's end. Raises ConfigError for a protocol without what every model needs, or with flags that nothing
    reads, or one that does not divide or check ranges as it was asked to.
    """
    end = protocol_spec(setup.config.protocol).party(setup)
    flags = [each for each in dir(end) if each.startswith("has_") and isinstance(getattr(end, each), bool)]
    if flags or not end.primitives >= _ALWAYS:
        lacks = f"lacks {', '.join(sorted(_ALWAYS - end.primitives))}, which every model needs"
        sets = f"sets {', '.join(flags)}, which nothing reads: a protocol has what its classes define (`primitives`)"
        raise ConfigError(f"protocol {end.name!r}: its end ({type(end).__name__}) {sets if flags else lacks}")
    if setup.exact and not end.divides_exactly:
        raise ConfigError(
            f"truncation: got 'exact'; protocol {end.name!r} gives the floor or one unit more: want 'unit', or an end "
            "made exact (protocols.exact.exact)"
        )
    if setup.config.debug_ranges and not setup.counting and not isinstance(end, CheckedPlain):
        raise ConfigError(
            f"debug_ranges: protocol {end.name!r} says checks_ranges=True, and its end ({type(end).__name__}) checks "
            "none: want one that inherits protocols.plain.CheckedPlain where the configuration asks for it"
        )
    return end


def _input_key(transport: Transport) -> Seed:
    return Seed(bytes(transport.recv(CLIENT, "input key", (32,), torch.uint8).numpy().tobytes()))


def _placed(config: PrivateConfig, protocol: Protocol, device: torch.device) -> Session:
    """The session of a protocol end whose values may lie on several devices."""
    several = device.type != "cpu" or config.device_map is not None
    if several:
        protocol.transport = PlacedTransport(protocol.transport, lambda: protocol.device)
    protocol.placed = several
    return Session(config, protocol.on(device), str(device))


def join_as_client(config: PrivateConfig, transport: Transport) -> ClientEnd:
    """The client's end: 64 bytes to each party, 32 a shared key. Raises ConfigError if settings or versions differ."""
    seeds = _meet(config, transport, list(range(config.parties)))
    end = client_end(config, transport)
    end.cipher = seeds[0].cipher
    return end


def client_end(config: PrivateConfig, transport: Transport) -> ClientEnd:
    """The client's end once all have agreed (or for counting costs on a `MetaTransport`).

    Sends keys of input masks, 32 bytes to each holder of each (in all 4 for trio and dealer, 9 for quad). Raises
    ConfigError for an unknown protocol.
    """
    return protocol_spec(config.protocol).client(transport, Ring(config.ring))


def opened(config: PrivateConfig, transport: Transport, shape: tuple[int, ...]) -> Tensor:
    """Ring elements revealed to this endpoint, which needs no key. Raises ProtocolAbort if a lie is noticed (quad)."""
    return protocol_spec(config.protocol).open(transport, Ring(config.ring), shape)


def meta_session(config: PrivateConfig, party: int) -> Session:
    """A session that counts costs on meta tensors: no data, no weights, no other party; nothing is sent.

    Its shares must have the parts that the protocol holds: 1 under plain, 2 under trio and dealer, 3 under quad. Raises
    ConfigError for a protocol that there is not, or that does not divide as it was asked to.
    """
    return Session(config, receiving_end(config, party, MetaTransport(party)).on("meta"), device="meta")


def _meet(
    config: PrivateConfig, transport: Transport, others: list[int], device: torch.device | None = None
) -> dict[int, Seed]:
    """Exchange digests of settings, the cipher for `device` and entropy with `others`; a fresh pairwise seed for each.

    Both ends contribute 32 bytes, so no seed repeats as long as one of them has fresh entropy. Streams are ChaCha20
    where all parties said so, else AES: the only place that decides what prg="auto" is. A client's word does not count.
    """
    mine = {other: secrets.token_bytes(32) for other in others}
    digests = {cipher: _greeting(config, cipher) for cipher in CIPHERS}
    said, table = {transport.me: _wanted(config, device)}, settings_table(config)
    for other in others:
        payload = torch.frombuffer(bytearray(digests[said[transport.me]] + mine[other] + table), dtype=torch.uint8)
        transport.send(other, "hello", payload)
    raws = {}
    for other in others:
        theirs = bytes(transport.recv(other, "hello", (64 + TABLE_BYTES,), torch.uint8).numpy().tobytes())
        found = [cipher for cipher, digest in digests.items() if digest == theirs[:32]]
        if not found:
            raise other_settings(config, transport.name_of(other), theirs[64:])
        said[other] = found[0]
        low, high = sorted([transport.me, other])
        halves = {transport.me: mine[other], other: theirs[32:64]}
        raws[other] = hashlib.blake2b(halves[low] + halves[high], digest_size=32, person=b"pllm-pair").digest()
    agreed = "chacha20" if {said[each] for each in said if each != CLIENT} == {"chacha20"} else "aes"
    return {other: Seed(raw, agreed) for other, raw in raws.items()}


def _wanted(config: PrivateConfig, device: torch.device | None) -> str:
    """The cipher that this endpoint wants: as it is set, else what its device makes best."""
    if config.prg != "auto":
        return config.prg
    return "chacha20" if device is not None and makes_streams(device) else "aes"


def _greeting(config: PrivateConfig, cipher: str) -> bytes:
    return hashlib.blake2b(config.agreement() + cipher.encode(), digest_size=32, person=b"pllm-hello").digest()
