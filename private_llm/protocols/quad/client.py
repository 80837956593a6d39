"""Quad's edges: how a client shares inputs and opens outputs, and how a model owner splits weights.

A secret x has three masks: a1 from a key of client and parties 0, 1, 3, a2 of parties 0, 2, 3, u of parties 1, 2, 3.
Inputs: the client sends V = x + a1 + a2 + u to parties 0, 1 and 2; each takes off the two masks that it knows.
Outputs: party 1 sends X = x + a, party 0 sends a = a1 + a2; party 2 and party 3, who know the same, send digests. One
liar among them makes a digest differ from its tensor, and the client raises ProtocolAbort.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence

import torch
from cryptography.hazmat.primitives.constant_time import bytes_eq
from torch import Tensor

from private_llm.errors import ProtocolAbort
from private_llm.net.transport import Transport
from private_llm.protocols.share import Share
from private_llm.protocols.trio.client import TrioClient
from private_llm.ring.ring import Ring

DIGEST_BYTES = 32
TAG_BYTES = 16

MASK_GROUPS = ((0, 1, 3), (0, 2, 3), (1, 2, 3))  # who shares the streams of masks a1, a2 and u


class QuadClient(TrioClient):
    """The client's end: 32 bytes of key to each of the three holders of each mask at the start."""

    mask_holders = MASK_GROUPS
    key_holders = (((0, 0), (1, 0), (3, 1), (5, 0)), ((0, 1), (2, 0), (4, 1), (5, 1)), ((1, 1), (2, 1), (4, 1), (5, 1)),
                   ((0, 0), (1, 0), (3, 0), (4, 0)))  # fmt: skip
    """Of the pairs for a1, a2, x (main run), a, u, V (mirror), see `QuadArithmetic.lookup`."""

    def __init__(self, transport: Transport, ring: Ring) -> None:
        super().__init__(transport, ring)
        self._digests: deque[bytes] = deque()

    def take_digests(self, digests: Sequence[str]) -> None:
        """Party 3's digests for what preprocessed calls will open."""
        try:
            self._digests = deque(bytes.fromhex(each) for each in digests)
        except ValueError:
            raise ProtocolAbort("party 3 sent a malformed digest; end the session and find out why") from None

    def share(self, elements: Tensor) -> None:
        """1 element to each of parties 0, 1 and 2."""
        a1, a2, u = (mask.elements(elements.numel(), self.ring).view(elements.shape) for mask in self._masks)
        value = (elements + a1 + a2 + u).contiguous()
        for party in (0, 1, 2):
            self.transport.send(party, "input", value)

    def open(self, shape: tuple[int, ...]) -> Tensor:
        """Both differences, each vouched for by another party's digest."""
        return open_quad(self.transport, self.ring, shape, self._kept_digest if self._apart else None)

    def _kept_digest(self) -> bytes:
        """Party 3's next digest, from when it ran ahead."""
        if not self._digests:
            raise ProtocolAbort("party 3 gave too few digests when it ran ahead; do not use this session")
        return self._digests.popleft()


def open_quad(
    transport: Transport, ring: Ring, shape: tuple[int, ...], ahead: Callable[[], bytes] | None = None
) -> Tensor:
    """Ring elements of `shape` revealed to this endpoint. Raises ProtocolAbort for a lie. ahead: an earlier digest."""
    opened = []
    for sender, witness in ((1, 2), (0, 3)):
        value = transport.recv(sender, "reveal", shape, ring.dtype)
        expected = ahead() if ahead is not None and witness == 3 else _digest_of(transport, witness)
        if not bytes_eq(expected, digest(value)):
            raise ProtocolAbort("parties opened different results: one of them deviates; do not use this session")
        opened.append(value)
    return opened[0] - opened[1]


def _digest_of(transport: Transport, party: int) -> bytes:
    sent = transport.recv(party, "reveal digest", (DIGEST_BYTES,), torch.uint8)
    return bytes(DIGEST_BYTES) if sent.is_meta else as_bytes(sent)


def as_bytes(payload: Tensor) -> bytes:
    """The bytes of a uint8 tensor that came over a link."""
    return payload.cpu().numpy().tobytes()


def as_tensor(data: bytes) -> Tensor:
    """Bytes to be sent, as uint8 [n]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def digest(value: Tensor) -> bytes:
    """32 bytes that stand for a tensor: BLAKE2b of its elements, in order. Zeros for a meta tensor."""
    if value.is_meta:
        return bytes(DIGEST_BYTES)
    data = value.cpu().contiguous().numpy()
    return hashlib.blake2b(data.reshape(-1).view("u1").data, digest_size=DIGEST_BYTES, person=b"pllm-reveal").digest()


def unmask(party: int, value: Tensor, masks: Sequence[Tensor]) -> Share:
    """A share from V and the two masks that party 0, 1 or 2 knows, in the order a1, a2, u."""
    part = value - masks[0]
    part -= masks[1]
    return share_of(party, masks, part)


def share_of(party: int, masks: Sequence[Tensor], part: Tensor) -> Share:
    """The share of party 0, 1 or 2 from its two masks and x plus the mask that it lacks."""
    return Share((*masks, part) if party == 0 else (part, *masks))
