"""One party of Quad: its streams, what it tells party 0, what it records, and the verification of the records.

Party 0 runs behind the others: it receives, recomputes and records, and sends nothing before `verify`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from private_llm.errors import ProtocolAbort, UnsupportedOp
from private_llm.net.transport import Transport
from private_llm.protocols.adder import DEFAULT_ADDER, Adder
from private_llm.protocols.exponential import Exponential
from private_llm.protocols.party_end import Links
from private_llm.protocols.piecewise import Pieces
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.quad.roles import Member, RoleTransport
from private_llm.protocols.quad.transcript_mac import TAG_BYTES, TranscriptMac, as_bytes, as_tensor, same
from private_llm.protocols.share import BitShare, Share
from private_llm.protocols.trio.party import Trio
from private_llm.protocols.waves import Waves
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import Ring

_TRANSCRIPTS: dict[int, tuple[int, ...]] = {0: (1, 2), 1: (0,), 2: (0,), 3: ()}
"""With whom each party records what both must hold."""


class QuadRecords(Trio):
    """Trio's code in its role, with records."""

    name = "quad"
    has_exponentials = has_waves = has_narrow = can_repeat = False
    compares = True

    def __init__(
        self, party: int, transport: Transport, ring: Ring, pair_seeds: dict[int, Seed],
        group_seeds: Sequence[Seed | None], input_keys: Sequence[Seed], adder: Adder = DEFAULT_ADDER,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self._transcripts = {other: TranscriptMac(pair_seeds[other]) for other in _TRANSCRIPTS[party]}
        self._deviation = False
        self._digests: list[str] = []
        self._received = ""
        first, second, joint, data = group_seeds
        helper = {1: first, 2: second, 0: first if party == 1 else second}
        masks = {role: seed for role, seed in helper.items() if seed is not None}
        self._links = transport
        super().__init__(
            party, RoleTransport(transport, party, self._transcripts), ring, masks, input_keys, adder, device
        )
        self.has_keys = False
        self._order_stream = None if data is None else data.stream("quad permutations")
        if joint is not None:
            self._seeds.append(joint)
            self._streams.append(joint.stream("trio masks"))

    def piecewise(self, x: Share, pieces: Pieces) -> list[Share]:
        """Refused with UnsupportedOp, as by every protocol without comparison keys: nobody could check the helper's."""
        return Protocol.piecewise(self, x, pieces)

    def exponential(self, x: Share, keep: BitShare, plan: Exponential) -> Share:
        """Refused with UnsupportedOp: quad takes products for exponentials, which it can check."""
        return Protocol.exponential(self, x, keep, plan)

    def relu_minus_waves(self, x: Share, negative: BitShare, angle: Share, plan: Waves) -> Share:
        """Refused with UnsupportedOp: quad takes products for waves, which it can check."""
        return Protocol.relu_minus_waves(self, x, negative, angle, plan)

    @property
    def mask_streams(self) -> Sequence[Prg]:
        """None: every message is also recorded for the check of the others."""
        return ()

    @cached_property
    def role(self) -> int:
        """Parties 0 and 3 help, 1 and 2 evaluate."""
        return self.party % 3

    @contextmanager
    def section(self, label: str, links: Links = lambda transport: transport) -> Iterator[None]:
        """As Trio's, with `links` below the roles, so that what comes from a store is recorded; party 3 is ahead.

        Raises UnsupportedOp for parties that compute on other devices, ProtocolAbort for a label that was used before.
        """
        if not isinstance(self.transport, RoleTransport):
            raise UnsupportedOp("preprocess under quad computes on the CPU; leave out device and device_map")
        with super().section(label, lambda _: RoleTransport(links(self._links), self.party, self._transcripts)):
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

        Raises ProtocolAbort at every honest party if any party has deviated, then and at every later call: what was
        computed stays wrong, though later records may agree.
        """
        if self._deviation:
            raise ProtocolAbort("a party deviated earlier in this session; nothing more is opened; start a new session")
        if self._apart and self.party == 3:
            return  # it runs ahead, sees no data and opens nothing
        if self.party == 0:
            tags = [self.transport.recv(Member(other), "verify", (TAG_BYTES,), torch.uint8) for other in (1, 2)]
            honest = same(tags, [self._transcripts[other].close() for other in (1, 2)])
            for other in (1, 2) if self._apart else (1, 2, 3):
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
