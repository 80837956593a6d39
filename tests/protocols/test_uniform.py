"""What each party receives, from other parties and from the client, is uniform whatever the secrets are, and no mask
serves twice. (Keys of point functions: test_client_messages.py.)"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.session import Session, _meet
from private_llm.protocols.share import BitWidths, Share
from private_llm.ring.prg import Prg, Seed
from tests.protocols.parties import run_ring
from tests.recording import RecordingTransport
from tests.session import run_session

N = 4096
CHI_SQUARE_255 = 448.0
"""Bound of a chi-square statistic with 255 degrees of freedom at p = 1e-12; a run tests some thousands."""
SETUP = ("hello", "cipher key", "input key", "group key", "group digest", "index", "verify", "permutation")
"""Messages that carry keys, digests, verdicts and the dealer's orders, not values."""
RECEIVERS = {"trio": (1, 2), "dealer": (1, 2), "quad": (0, 1, 2)}
"""Who receives values, from other parties or from the client: Trio's party 0 and Quad's party 3 only send."""
every = pytest.mark.parametrize("protocol", list(RECEIVERS))


class Tap:
    """One recorder per party; `received` is what the other endpoints sent it after the agreement on keys."""

    def __init__(self) -> None:
        self.recorders: dict[int, RecordingTransport] = {}

    def __call__(self, transport: Transport) -> Transport:
        self.recorders[transport.me] = RecordingTransport(transport, payloads=True)
        return self.recorders[transport.me]

    @property
    def received(self) -> dict[int, list[bytes]]:
        """Payloads by receiving party, in order."""
        return {party: [*self._of(party, lambda peer, tag: tag not in SETUP)] for party in self.recorders}

    def from_client(self, party: int, tag: str) -> list[bytes]:
        """Payloads that the client sent to a party under one tag, in order."""
        return [*self._of(party, lambda peer, got: peer == CLIENT and got == tag)]

    def _of(self, party: int, wanted: Callable[[int, str], bool]) -> Iterator[bytes]:
        for message in self.recorders[party].messages:
            if message.direction == "received" and wanted(message.peer, message.tag) and message.payload is not None:
                yield message.payload.numpy().tobytes()


def program(p: Protocol, x: Share, y: Share) -> Share:
    product = p.mul(x, y, 18)
    matrix = product.map(lambda part: part.view(64, 64))
    square = p.matmul(matrix, matrix, 18).map(lambda part: part.reshape(-1))
    short = p.matmul(matrix, matrix, 18, widths=BitWidths(64, 46)).map(lambda part: part.reshape(-1))
    square = p.add(square, p.inject(p.msb(short, bits=44), None, [0], [1]))
    less = p.mul(square, p.mul(square, square, 18, BitWidths(60, 50)), 20, BitWidths(50, 40))
    square = p.add(square, p.truncate(less, 3, BitWidths(40, 60)))
    bits = p.msb(square, [0, 1 << 18])
    relu = p.inject(bits, square, [1, 0], [0, 1], 3)
    widths = p.inject(bits, square, [1, 0], [0, 1], low=37)
    return p.add(p.poly(p.truncate(relu, 2), [1, 2, 3, 4], 1), widths)


def gates(p: Protocol, x: Share, y: Share) -> Share:
    return p.inject(p.and_(p.a2b(x).row(3), p.msb(y, [0, 1], 6).row(1)), y, [5], [1])


def orders(p: Protocol, x: Share, y: Share) -> Share:
    """Rows and bits moved and put back, in an order that nobody knows."""
    order = p.permutation(N)
    some = p.shuffle(y, order, places=torch.arange(0, N, 2))
    y = p.add(y, some.map(lambda part: torch.cat([part, part])))
    x = p.shuffle(p.add(p.shuffle(x, order), p.shuffle(y, order)), order, undo=True)
    y = p.inject(p.shuffle_bits(p.a2b(y), order).bits, None, [0] * 64, [1] * 64)
    return p.add(x, y)


def chi_square(data: bytes) -> float:
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    expected = len(data) / 256
    return float(((counts - expected) ** 2 / expected).sum())


def assert_unrelated(pairs: Iterable[tuple[bytes, bytes]]) -> None:
    """Of each pair neither XOR nor difference says anything, as it would if one mask were in both."""
    seen = 0
    for one, other in pairs:
        size = min(len(one), len(other))
        if size < 8192:
            continue
        a, b = (np.frombuffer(each[:size], dtype=np.int64) for each in (one, other))
        for related in (a ^ b, a - b, a + b):
            assert chi_square(related.tobytes()) < CHI_SQUARE_255
        seen += 1
    assert seen


@every
@pytest.mark.parametrize("secret", ["zeros", "ones", "structured"])
@pytest.mark.parametrize("work", [program, gates, orders])
def test_every_party_receives_uniform_bytes(
    work: Callable[[Protocol, Share, Share], Share], secret: str, protocol: str
) -> None:
    values = {
        "zeros": torch.zeros(N, dtype=torch.int64),
        "ones": torch.full((N,), 1 << 18, dtype=torch.int64),
        "structured": torch.arange(N, dtype=torch.int64) << 8,
    }[secret]
    tap = Tap()
    config = PrivateConfig.from_dict({"protocol": protocol, "adder": "ripple" if work is gates else "prefix"})
    run_ring(config, [values, values], work, (N,), wrap=tap)
    for party, messages in tap.received.items():
        if party not in RECEIVERS[protocol]:
            assert messages == []
            continue
        assert len(messages) == len(set(messages))
        assert max(chi_square(message) for message in messages if len(message) >= 8192) < CHI_SQUARE_255
        assert chi_square(b"".join(messages)) < CHI_SQUARE_255
        assert_unrelated(itertools.combinations(messages, 2))


GROUPS = {"trio": ((0, 1), (0, 2)), "dealer": ((0, 1), (0, 2)), "quad": ((0, 1, 3), (0, 2, 3), (1, 2, 3))}
"""Who shares each stream of masks; every endpoint lists its streams in this order."""


def received_by(receiver: int, protocol: str, values: Tensor, work: Callable[..., Share]) -> list[bytes]:
    """What a party receives when all streams that it shares hand out the same masks as in the last call."""
    config = PrivateConfig.from_dict({"protocol": protocol, "adder": "ripple" if work is gates else "prefix"})
    tap = Tap()

    def fixed(streams: list[Prg], groups: Sequence[int], purpose: str) -> list[Prg]:
        known = [receiver in GROUPS[protocol][group] for group in groups]
        made = (Seed(bytes(31) + bytes([group])).stream(purpose) for group in groups)
        return [new if same else old for old, new, same in zip(streams, made, known, strict=True)]

    def at_party(session: Session, transport: Transport) -> None:
        p = session.protocol
        mine = [number for number, members in enumerate(GROUPS[protocol]) if p.party in members]
        p._streams = fixed(p._streams, mine, "masks")  # type: ignore[attr-defined]
        p._inputs = fixed(p._inputs, mine, "inputs")  # type: ignore[attr-defined]
        for own in ("_mutual", "_order_stream"):  # of sub-permutations that every receiver knows
            if getattr(p, own, None) is not None:
                setattr(p, own, Seed(bytes(31) + b"o").stream("orders"))
        shares = [p.receive_input(tuple(values.shape)) for _ in range(2)]
        p.reveal_to_client(work(p, *shares))

    def at_client(client: ClientEnd) -> None:
        everything = range(len(GROUPS[protocol]))
        client._masks = fixed(client._masks, everything, "inputs")  # type: ignore[union-attr]
        for _ in range(2):
            client.share(values)
        client.open(tuple(values.shape))

    run_session(config, at_party, at_client, wrap=tap)
    return tap.received[receiver]


@pytest.mark.parametrize(("protocol", "receiver"), [(p, r) for p, hearers in RECEIVERS.items() for r in hearers])
@pytest.mark.parametrize("work", [program, gates, orders])
def test_what_a_party_receives_is_masked_by_what_it_lacks(
    work: Callable[..., Share], protocol: str, receiver: int
) -> None:
    """Two runs with the same secrets and the same masks as far as the receiver knows them: what arrives in one says
    nothing about what arrives in the other, so nothing is hidden by masks of the receiver's own."""
    values = torch.arange(N, dtype=torch.int64) << 8
    first, second = (received_by(receiver, protocol, values, work) for _ in range(2))
    assert [len(message) for message in first] == [len(message) for message in second]
    for one, other in zip(first, second, strict=True):
        assert one != other
        if len(one) >= 8192:  # nor is one the other in a secret order
            values_of = [np.sort(np.frombuffer(message, np.int64)) for message in (one, other)]
            assert not np.array_equal(*values_of)
        if len(one) >= 8192:
            apart = np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)
            assert chi_square(apart.tobytes()) < CHI_SQUARE_255
    apart = np.frombuffer(b"".join(first), np.uint8) ^ np.frombuffer(b"".join(second), np.uint8)
    assert chi_square(apart.tobytes()) < CHI_SQUARE_255


def test_quad_talks_over_five_links() -> None:
    """Party 3 only sends; party 0 only receives."""
    values = torch.zeros(N, dtype=torch.int64)
    run = run_ring(PrivateConfig(protocol="quad"), [values, values], program, (N,))
    assert set(run.cost.sent) == {(3, 2), (3, 0), (2, 0), (1, 2), (2, 1)}


def test_party_zero_is_the_only_one_that_party_two_hears_in_preprocessing() -> None:
    tap = Tap()
    values = torch.zeros(N, dtype=torch.int64)
    run = run_ring(PrivateConfig(), [values, values], program, (N,), wrap=tap)
    assert set(run.cost.sent) == {(0, 2), (1, 2), (2, 1)}


@every
def test_two_runs_of_the_same_secrets_share_no_message(protocol: str) -> None:
    """Fresh keys per session: a replayed mask would reveal differences of secrets."""
    values = torch.full((N,), 5, dtype=torch.int64)
    first, second = Tap(), Tap()
    for tap in (first, second):
        run_ring(PrivateConfig.from_dict({"protocol": protocol}), [values, values], program, (N,), wrap=tap)
    for party in RECEIVERS[protocol]:
        assert first.received[party]
        assert not set(first.received[party]) & set(second.received[party])
        assert_unrelated(itertools.product(first.received[party], second.received[party]))


@pytest.mark.parametrize("poor", ["0", "1"])
def test_one_end_with_entropy_is_enough_for_both(poor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was copied draws the same bytes again: the seeds that it shares with others are fresh anyway."""
    found: dict[str, list[bytes]] = {"0": [], "1": []}

    def token_bytes(count: int) -> bytes:
        return bytes(count) if threading.current_thread().name == poor else os.urandom(count)

    def meet(transport: Transport) -> None:
        met = _meet(PrivateConfig(), transport, [1 - transport.me])
        found[threading.current_thread().name].append(met[1 - transport.me].raw())

    monkeypatch.setattr("private_llm.protocols.session.secrets.token_bytes", token_bytes)
    for _ in range(2):
        mesh = LocalMesh(2)
        threads = [threading.Thread(target=meet, args=(mesh.transport(me),), name=str(me)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert found["0"] == found["1"]
    assert len(set(found["0"])) == 2


def square(x: Share) -> Share:
    return x.map(lambda part: part.view(64, 64))


def in_a_section(p: Protocol, x: Share, y: Share) -> Share:
    """As a call that was planned, under another label each time."""
    with p.section(f"call {len(p._sections)}"):  # type: ignore[attr-defined]
        return p.mul(x, y)


OPERATIONS: dict[str, Callable[[Protocol, Share, Share], object]] = {
    "mul": lambda p, x, y: p.mul(x, y),
    "mul and shift": lambda p, x, y: p.mul(x, y, 18),
    "matmul": lambda p, x, y: p.matmul(square(x), square(y), 18),
    "truncate": lambda p, x, y: p.truncate(x, 18),
    "poly": lambda p, x, y: p.poly(x, [1, 2, 3, 4], 1),
    "msb": lambda p, x, y: p.msb(x, [0, 1 << 18]),
    "a2b": lambda p, x, y: p.a2b(x),
    "relu": lambda p, x, y: p.inject(p.msb(x, [0]), y, [1], [0], 3),
    "lookup": lambda p, x, y: p.lookup(p.receive_index(64, 64), square(x)),
    "in sections": in_a_section,
}


@every
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_is_repeated_has_masks_of_its_own(protocol: str, operation: str) -> None:
    """The same operands twice: a mask that came back would leave a relation between the messages of both times."""

    tap = Tap()
    values = torch.arange(N, dtype=torch.int64) << 8

    def at_party(session: Session, transport: Transport) -> None:
        x, y = (session.protocol.receive_input((N,)) for _ in range(2))
        for _ in range(2):
            OPERATIONS[operation](session.protocol, x, y)
        session.protocol.reveal_to_client(x)

    def at_client(client: ClientEnd) -> None:
        for _ in range(2):
            client.share(values)
        for _ in range(2 if operation == "lookup" else 0):
            client.share_index(torch.zeros(64, dtype=torch.int64), 64)
        client.open((N,))

    run_session(PrivateConfig.from_dict({"protocol": protocol}), at_party, at_client, wrap=tap)
    for party in RECEIVERS[protocol]:
        heard = tap.received[party][2:]  # behind the two inputs
        first, second = heard[: len(heard) // 2], heard[len(heard) // 2 :]
        assert [len(message) for message in first] == [len(message) for message in second]
        assert_unrelated([(b"".join(first), b"".join(second))])


def test_shares_of_a_party_say_nothing_about_the_value() -> None:
    """Each component of each dealt share is uniform, for a constant secret."""
    from private_llm.protocols.weight_sharing import deal

    secret = torch.full((1 << 15,), 12345, dtype=torch.int64)
    shares = deal(PrivateConfig(), secret, Seed.fresh(), "weight")
    for share in shares:
        for part in share.parts:
            assert chi_square(part.numpy().tobytes()) < CHI_SQUARE_255
    (_, a2), (masked, a1) = shares[0].parts, shares[1].parts
    assert torch.equal(masked - a2, secret)
    assert torch.equal(shares[2].parts[0] - a1, secret)
