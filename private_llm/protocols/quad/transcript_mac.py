"""What two parties must agree upon, as one running tag; the keys of groups of three; the verdict.

The transcript of (0, i), i = 1, 2, is all bytes that parties 0 and i must both hold, in order. Each absorbs its own
copy into a GMAC tag (a polynomial over GF(2^128), NIST SP 800-38D) whose key is used once, drawn from a stream that
only the two share. Different sequences of L bytes get equal tags with probability at most (L / 16 + 2) / 2^128, for
whoever lacks the key.

Verdict: parties 1 and 2 send their tags to party 0; party 0 compares and tells all others the one answer. What parties
run, and on which inputs, must be compared before (`PartyEnd.compares`), not by party 0 alone. Why party 0 alone judges:
in a run it sends nothing, so if it is the cheater there is nothing to find; and if another party is, its first
lie makes one transcript of two honest parties differ for sure, whatever the secrets are (the argument is in
`arithmetic` and `bits`), so the answer is "no" whatever the cheater claims about its own transcript. Were verdicts on
single transcripts seen, a cheater could alter a message by d, which alters a value at party 0 by d times a secret mask,
guess that product in its own transcript, and read from the verdict whether the guess was right. For the same reason the
answer never says which transcript differed. A tag goes to the one other holder of its key only.

Group keys. Each of three members sends the two others 32 fresh bytes; the key is the hash of the three in order. All
three then compare a digest of the key (and of what else the group must hold alike): whoever sent different bytes to
two members is found out.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.constant_time import bytes_eq
from torch import Tensor

from private_llm.errors import ProtocolAbort
from private_llm.net.transport import Transport
from private_llm.ring.prg import Seed

TAG_BYTES = 16

_AT_ONCE = 1 << 30
"""Bytes that the cipher takes in one call."""

MASK_GROUPS = ((0, 1, 3), (0, 2, 3), (1, 2, 3))
"""Who shares the streams of masks a1, a2 and u."""

GROUPS = (*MASK_GROUPS, (0, 1, 2))
"""Who shares a key: those of masks, and last those of permutations that party 3 must not know."""


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


def as_bytes(payload: Tensor) -> bytes:
    """The bytes of a uint8 tensor that came over a link."""
    return payload.cpu().numpy().tobytes()


def as_tensor(data: bytes) -> Tensor:
    """Bytes to be sent, as uint8 [n]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
    shares = [secrets.token_bytes(32) for _ in mine]
    for group, share in zip(mine, shares, strict=True):
        for other in _others(group, party):
            transport.send(other, "group key", as_tensor(share))
    made = {}
    for group, share in zip(mine, shares, strict=True):
        parts = [share if p == party else as_bytes(transport.recv(p, "group key", (32,), torch.uint8)) for p in group]
        made[group] = Seed(hashlib.blake2b(b"".join(parts), digest_size=32, person=b"pllm-group").digest())
    extras = [key.raw() for key in held] + [b""] * (len(mine) - len(held))
    sums = [
        hashlib.blake2b(made[group].raw() + extra, digest_size=64, person=b"pllm-group-sum").digest()
        for group, extra in zip(mine, extras, strict=True)
    ]
    for group, checksum in zip(mine, sums, strict=True):
        for other in _others(group, party):
            transport.send(other, "group digest", as_tensor(checksum))
    for group, checksum in zip(mine, sums, strict=True):
        for other in _others(group, party):
            if not bytes_eq(as_bytes(transport.recv(other, "group digest", (64,), torch.uint8)), checksum):
                raise ProtocolAbort("parties hold different keys: one of them, or the client, breaks the rules")
    return [made.get(group) for group in GROUPS]


def _others(group: Sequence[int], party: int) -> list[int]:
    return [p for p in group if p != party]
