"""One party of Quad: the links by role, what it tells party 0, what it records, and the verification of the records.

Roles of Trio's code: 0 is played by parties 0 and 3, roles 1 and 2 by parties 1 and 2. What role 0 sends to role 2 is
sent by party 3; party 0 computes the same bytes and absorbs them into its transcript with party 2, who absorbs what it
received. Party 0 runs after the others: it receives, recomputes and records, and sends nothing before `verify`. A
`Member` addresses a party itself. Numbers from 4 on have no role: nodes after a split, the client.

Records. The transcript of (0, i), i = 1, 2, is all bytes that parties 0 and i must both hold, in order. Each absorbs
its own copy into a GMAC tag (a polynomial over GF(2^128), NIST SP 800-38D) whose key is used once, drawn from a stream
that only the two share. Different sequences of L bytes get equal tags with probability at most (L / 16 + 2) / 2^128.

Verdict. Parties 1 and 2 send their tags to party 0; party 0 compares and tells all others the one answer. What parties
run, and on which inputs, must be compared before (`PartyEnd.compares`), not by party 0 alone. Why party 0 alone judges:
in a run it sends nothing, so if it is the cheater there is nothing to find; and if another party is, its first
lie makes one transcript of two honest parties differ for sure, whatever the secrets are (the argument is in
`arithmetic` and `bits`), so the answer is "no" whatever the cheater claims about its own transcript. Were verdicts on
single transcripts seen, a cheater could alter a message by d, which alters a value at party 0 by d times a secret mask,
guess that product in its own transcript, and read from the verdict whether the guess was right. For the same reason the
answer never says which transcript differed. A tag goes to the one other holder of its key only.

Group keys. Each of three members sends the two others 32 fresh bytes; the key is the hash of the three in order. All
three then compare a digest of the key (and of what else they must hold alike): different bytes are found out.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.constant_time import bytes_eq
from torch import Tensor

from private_llm.errors import ProtocolAbort, TransportError, UnsupportedOp
from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT, PassingTransport, Transport
from private_llm.protocols.ends import PartySetup, WrapLinks
from private_llm.protocols.quad.client import MASK_GROUPS, TAG_BYTES, as_bytes, as_tensor
from private_llm.protocols.trio.division import TrioParty
from private_llm.ring.prg import Seed

_AT_ONCE = 1 << 30  # bytes that the cipher takes in one call

GROUPS = (*MASK_GROUPS, (0, 1, 2))  # who shares a key: of masks, and last of permutations that party 3 must not know

_TRANSCRIPTS: dict[int, tuple[int, ...]] = {0: (1, 2), 1: (0,), 2: (0,), 3: ()}
"""With whom each party records what both must hold."""

_PARTIES = 4


class TranscriptMac:
    """One end of the running tag of two parties: 16 bytes, whatever is absorbed. Sends nothing itself."""

    def __init__(self, pair: Seed) -> None:
        self._keys = pair.stream("view")
        self._begin()

    def _begin(self) -> None:
        key = self._keys.words(2).numpy().tobytes()
        self._tag = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()

    def absorb(self, payload: Tensor) -> None:
        """Add the bytes of an integer tensor, in the order of its elements. A meta tensor has none."""
        if payload.is_meta or not payload.numel():
            return
        data = payload.cpu().contiguous().numpy().data.cast("B")
        for start in range(0, len(data), _AT_ONCE):
            self._tag.authenticate_additional_data(data[start : start + _AT_ONCE])

    def close(self) -> bytes:
        """The tag (16 bytes) of everything since the last close, and of its length; the next key begins."""
        self._tag.finalize()
        tag = self._tag.tag
        self._begin()
        return tag


def same(theirs: Sequence[Tensor], mine: Sequence[bytes]) -> bool:
    """Whether all received tags equal our own; meta tensors do."""
    equal = [tag.is_meta or bytes_eq(as_bytes(tag), own) for tag, own in zip(theirs, mine, strict=True)]
    return all(equal)


def meet_groups(transport: Transport, party: int, held: Sequence[Seed]) -> list[Seed | None]:
    """One fresh seed for each of `GROUPS` (None: this party is not in it).

    held: what each of its first groups also holds, as many as there are. 96 bytes to each other member of each group.
    Raises ProtocolAbort if members hold different keys.
    """
    mine = [group for group in GROUPS if party in group]
    met = [(number, other) for number, group in enumerate(mine) for other in group if other != party]
    shares = [secrets.token_bytes(32) for _ in mine]
    for number, other in met:
        transport.send(other, "group key", as_tensor(shares[number]))
    made = {}
    for group, share in zip(mine, shares, strict=True):
        parts = [share if p == party else as_bytes(transport.recv(p, "group key", (32,), torch.uint8)) for p in group]
        made[group] = Seed(hashlib.blake2b(b"".join(parts), digest_size=32, person=b"pllm-group").digest())
    extras = [key.raw() for key in held] + [b""] * (len(mine) - len(held))
    sums = [
        hashlib.blake2b(made[group].raw() + extra, digest_size=64, person=b"pllm-group-sum").digest()
        for group, extra in zip(mine, extras, strict=True)
    ]
    for number, other in met:
        transport.send(other, "group digest", as_tensor(sums[number]))
    for number, other in met:
        if not bytes_eq(as_bytes(transport.recv(other, "group digest", (64,), torch.uint8)), sums[number]):
            raise ProtocolAbort("parties hold different keys: one of them, or the client, breaks the rules")
    return [made.get(group) for group in GROUPS]


def _group_seeds(setup: PartySetup) -> list[Seed | None]:
    if setup.counting:
        zero = Seed(bytes(32))
        return [zero if setup.party in group else None for group in GROUPS]
    met = meet_groups(setup.transport, setup.party, setup.input_keys)
    cipher = next(iter(setup.pair_seeds.values())).cipher
    return [group and Seed(group.raw(), cipher) for group in met]


class Member(int):
    """The address of a party itself, where its bare number would mean a role.

    A type of its own and no range of numbers: every number from 4 on may be a node's, who must never get what is
    meant for a party, nor a party what is meant for a node.
    """

    def __new__(cls, party: int) -> Member:
        """Raises TransportError for a number that is no party's."""
        if not 0 <= party < _PARTIES:
            raise TransportError(f"member: got {party}; want a party of quad, 0 to {_PARTIES - 1}")
        return super().__new__(cls, party)


def _at(address: int) -> int:
    """The endpoint of an address: of role 0 it is party 3, the helper that speaks."""
    if isinstance(address, Member):
        return int(address)
    if 0 <= address < 3:
        return address or 3
    if not _PARTIES <= address <= CLIENT:
        raise TransportError(
            f"address: got {address}; want a role (0 to 2), a member, or an endpoint from {_PARTIES} to {CLIENT}"
        )
    return address


class MemberTransport(PassingTransport):
    """`inner`, whose ledger it shares, addressed by role. `transcripts`: this party's ends, by the other party.

    What is sent comes from main memory, because tags are computed there. Every method raises TransportError for a
    number that is neither a role nor an endpoint without one.
    """

    def __init__(self, inner: Transport, party: int, transcripts: dict[int, TranscriptMac]) -> None:
        super().__init__(inner, at=_at)
        self._party, self._transcripts = party, transcripts

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """Send and book under the number of the receiving party; party 0 only absorbs what role 0 sends."""
        if self._party == 0 and to == 2 and not isinstance(to, Member):
            self._transcripts[2].absorb(payload)
        else:
            self._inner.send(_at(to), tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        payload = self._inner._recv(_at(frm), tag, shape, dtype)
        if frm == 0 and not isinstance(frm, Member):
            self._transcripts[0].absorb(payload)
        return payload


class QuadParty(TrioParty):
    """Trio's code in its role, with records. A lie shows when `verify` compares them, before anything is opened."""

    name = "quad"
    same_inputs = True
    can_repeat = False
    compares = True

    def __init__(self, setup: PartySetup) -> None:
        """The parties first agree on a seed for each three of them."""
        party, self._links = setup.party, setup.transport
        first, second, joint, data = _group_seeds(setup)
        self._transcripts = {other: TranscriptMac(setup.pair_seeds[other]) for other in _TRANSCRIPTS[party]}
        self._deviation = False
        self._digests: list[str] = []
        self._received = ""
        helper = {1: first, 2: second, 0: first if party == 1 else second}
        masks = {role: seed for role, seed in helper.items() if seed is not None}
        links = MemberTransport(setup.transport, party, self._transcripts)
        super().__init__(replace(setup, transport=links, pair_seeds=masks))
        self._order_stream = None if data is None else data.stream("quad permutations")
        if joint is not None:
            self._seeds.append(joint)
            self._streams.append(joint.stream("trio masks"))

    @contextmanager
    def section(self, label: str, links: WrapLinks = lambda transport: transport) -> Iterator[None]:
        """As Trio's, with `links` below the roles, so that what comes from a store is recorded; party 3 is ahead.

        Raises UnsupportedOp for parties that compute on other devices.
        """
        if not isinstance(self.transport, MemberTransport):
            raise UnsupportedOp("preprocess under quad computes on the CPU; leave out device and device_map")
        with super().section(label, lambda _: MemberTransport(links(self._links), self.party, self._transcripts)):
            yield

    def take_digests(self) -> list[str]:
        """Party 3, ahead: digests (32 bytes, hexadecimal) of the masks of what will be opened, for the client alone."""
        taken, self._digests = self._digests, []
        return taken

    def take_inputs(self) -> str:
        """As the interface says: at parties 0, 1 and 2."""
        taken, self._received = self._received, ""
        return taken

    def _joint(self, count: int) -> Tensor:
        """Ring elements of the stream of parties 1, 2 and 3."""
        return self._draw(count, -1)

    def _joint_words(self, count: int) -> Tensor:
        return self._draw_words(count, -1)

    def _tell(self, tag: str, payload: Tensor) -> None:
        """Parties 1 and 2, who both know it, to party 0: party 2 sends, party 1 records."""
        if self.party == 2:
            self.transport.send(Member(0), tag, payload)
        else:
            self._transcripts[0].absorb(payload)

    def _told(self, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Party 0: what party 2 tells, recorded with party 1."""
        payload = self.transport.recv(Member(2), tag, shape, dtype)
        self._transcripts[1].absorb(payload)
        return payload

    def _tell_piece(self, tag: str, payload: Tensor) -> None:
        """Party 3's piece to party 0: it enters a recorded value with coefficient 1, so nothing else is recorded."""
        self.transport.send(Member(0), tag, payload)

    def _piece(self, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.transport.recv(Member(3), tag, shape, dtype)

    def _confirm(self, value: Tensor) -> None:
        """Record a value that parties 0, 1 and 2 must hold alike."""
        for transcript in self._transcripts.values():
            transcript.absorb(value)

    def verify(self) -> None:
        """Compare all records since the last call: 16 bytes each from parties 1 and 2, one byte to each; 2 rounds.

        Every honest party raises if any party has deviated, then and at every later call: what was computed stays
        wrong, though later records may agree.
        """
        if self._deviation:
            raise ProtocolAbort("a party deviated earlier in this session; nothing more is opened; start a new session")
        if self.runs_ahead and self.party == 3:
            return  # it runs ahead, sees no data and opens nothing
        if self.party == 0:
            tags = [self.transport.recv(Member(other), "verify", (TAG_BYTES,), torch.uint8) for other in (1, 2)]
            honest = same(tags, [self._transcripts[other].close() for other in (1, 2)])
            for other in (1, 2) if self.runs_ahead else (1, 2, 3):
                self.transport.send(Member(other), "verify", as_tensor(bytes([honest])))
        else:
            for transcript in self._transcripts.values():
                self.transport.send(Member(0), "verify", as_tensor(transcript.close()))
            for _ in range(2):
                self.ledger.add_round("verify")
            answer = self.transport.recv(Member(0), "verify", (1,), torch.uint8)
            honest = answer.is_meta or as_bytes(answer) == b"\1"
        if not honest:
            self._deviation = True
            raise ProtocolAbort(
                "a party deviated from the protocol; nothing was opened; end the session and find out why"
            )

    @staticmethod
    def verify_price() -> Cost:
        """Two tags of 16 bytes to party 0, one verdict of 1 byte to each other; 2 rounds, whatever was computed."""
        return Cost({(1, 0): TAG_BYTES, (2, 0): TAG_BYTES, (0, 1): 1, (0, 2): 1, (0, 3): 1}, 2)
