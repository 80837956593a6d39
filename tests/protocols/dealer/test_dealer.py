"""What `dealer` has besides Trio's shares: a dealer that receives nothing of data, one-hot lookups, fresh masks."""

from __future__ import annotations

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, ProtocolAbort
from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import dealer_prices as dealer_cost
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import client_end, meta_session
from private_llm.protocols.share import Share
from private_llm.ring.ring import Ring
from tests.protocols.edge_prices import index_price
from tests.protocols.parties import ring_values, run_ring
from tests.protocols.test_uniform import CHI_SQUARE_255, N, Tap, chi_square, program
from tests.recording import RecordingTransport

RINGS = [64, 32]


def config(matmul: str = "masked", ring: int = 64) -> PrivateConfig:
    return PrivateConfig.from_dict(
        {"protocol": "dealer", "matmul": matmul, "ring": ring, "frac_bits": 18 if ring == 64 else 12}
    )


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("shift", [0, 9])
def test_remasked_products_and_their_price(ring: int, shift: int) -> None:
    x, y = ring_values(ring, (2, 7, 33), 11, 1), ring_values(ring, (33, 5), 11, 2)
    run = run_ring(config("remask", ring), [x, y], lambda p, a, b: p.matmul(a, b, shift), (2, 7, 5))
    off = run.result.long() - ((x.long() @ y.long()) >> shift)
    assert 0 <= int(off.min()) <= int(off.max()) <= bool(shift)
    assert run.cost == dealer_cost.remask(Ring(ring), 2 * 7 * 33, 33 * 5) + cost.product(Ring(ring), 70, shift)


@pytest.mark.parametrize("ring", RINGS)
def test_remasked_elementwise_products_broadcast(ring: int) -> None:
    x, y = ring_values(ring, (2, 5, 1), 10), ring_values(ring, (3,), 10, 2)
    run = run_ring(config("remask", ring), [x, y], lambda p, a, b: p.mul(a, b), (2, 5, 3))
    assert torch.equal(run.result, x * y)
    assert run.cost == dealer_cost.remask(Ring(ring), 10, 3) + cost.product(Ring(ring), 30, 0)


def test_a_square_masks_its_operand_once() -> None:
    x = ring_values(64, (50,), 20)
    run = run_ring(config("remask"), [x], lambda p, a: p.mul(a, a, 5), (50,))
    assert run.cost == dealer_cost.remask(Ring(64), 50) + cost.product(Ring(64), 50, 5)


def test_the_same_operand_is_masked_anew_each_time() -> None:
    """Four products of the same two operands: eight different openings at each party, whatever is opened."""
    tap = Tap()
    x = torch.zeros(64, dtype=torch.int64)

    def squares(p: Protocol, a: Share, b: Share) -> Share:
        for _ in range(4):
            out = p.mul(a, b)
        return out

    run_ring(config("remask"), [x, x], squares, (64,), wrap=tap)
    for party in (1, 2):
        opened = [m.payload for m in tap.recorders[party].messages if m.direction == "sent" and m.tag == "remask"]
        assert len(opened) == 4
        halves = [half.numpy().tobytes() for message in opened if message is not None for half in message.split(64)]
        assert len(set(halves)) == 8


@pytest.mark.parametrize("matmul", ["masked", "remask"])
@pytest.mark.parametrize("secret", ["zeros", "structured"])
def test_every_party_receives_uniform_bytes_and_the_dealer_none(matmul: str, secret: str) -> None:
    values = torch.zeros(N, dtype=torch.int64) if secret == "zeros" else torch.arange(N, dtype=torch.int64) << 8
    tap = Tap()
    run_ring(config(matmul), [values, values], program, (N,), wrap=tap)
    assert tap.received[0] == []
    for party in (1, 2):
        messages = tap.received[party]
        assert len(messages) == len(set(messages))
        assert max(chi_square(message) for message in messages if len(message) >= 8192) < CHI_SQUARE_255


def test_the_client_sends_the_dealer_nothing_but_keys() -> None:
    """Also for token lookups: trio's party 0 gets keys of point functions here, the dealer does not."""
    sizes = {}
    for protocol in ("trio", "dealer"):
        recorders: dict[int, RecordingTransport] = {}

        def tap(transport: Transport, kept: dict[int, RecordingTransport] = recorders) -> Transport:
            kept[transport.me] = RecordingTransport(transport)
            return kept[transport.me]

        table, indices = ring_values(64, (37, 6), 64, 1), torch.tensor([0, 36, 5])
        run_ring(
            PrivateConfig.from_dict({"protocol": protocol}), [table], lambda p, t, i: p.lookup(i, t), (3, 6),
            wrap=tap, secret_index=(indices, 37),
        )  # fmt: skip
        heard = [m for m in recorders[0].messages if m.direction == "received" and m.peer == CLIENT]
        sizes[protocol] = [m.tag for m in heard if m.tag not in ("hello", "input key")]
    assert sizes == {"trio": ["index"], "dealer": []}


@pytest.mark.parametrize("ring", RINGS)
def test_one_hot_indices_have_the_stated_price(ring: int) -> None:
    from private_llm.net.transport import MetaTransport

    transport = MetaTransport(CLIENT)
    client = client_end(config(ring=ring), transport)
    transport.ledger.reset()
    client.share_index(torch.tensor([3, 1, 4]), 37)
    assert transport.ledger.cost() == index_price("dealer", Ring(ring), 3, 37)


@pytest.mark.parametrize("wrong", [-1, 37])
def test_an_index_outside_the_table_is_refused_before_anything_is_sent(wrong: int) -> None:
    from private_llm.net.transport import MetaTransport

    transport = MetaTransport(CLIENT)
    client = client_end(config(), transport)
    transport.ledger.reset()
    with pytest.raises(DomainError, match=r"outside 0 \.\. 36"):
        client.share_index(torch.tensor([3, wrong]), 37)
    assert transport.ledger.cost() == Cost()


@pytest.mark.parametrize("matmul", ["masked", "remask"])
def test_meta_run_equals_real_ledger(matmul: str) -> None:
    def products(p: Protocol, x: Share, y: Share) -> Share:
        square = y.map(lambda part: part.view(10, 10))
        return p.mul(p.matmul(x.map(lambda part: part.view(10, 10)), square, 4), square, 7)

    x, y = ring_values(64, (100,), 10, 1), ring_values(64, (100,), 10, 2)
    real = run_ring(config(matmul), [x, y], products, (10, 10))
    for party in range(3):
        session = meta_session(config(matmul), party)
        meta = torch.empty(100, dtype=torch.int64, device="meta")
        assert products(session.protocol, Share((meta, meta)), Share((meta, meta))).parts[1].is_meta
        assert session.protocol.ledger.sent == real.ledgers[party].sent
        assert session.protocol.ledger.rounds == real.ledgers[party].rounds


def test_masks_of_a_stretch_are_used_once() -> None:
    def again(p: Protocol, x: Share) -> Share:
        for call in (1, 2, 1):
            with p.section(f"store 1, call {call}"):  # type: ignore[attr-defined]
                x = p.mul(x, x)
        return x

    with pytest.raises(ProtocolAbort, match="masks must never repeat"):
        run_ring(config(), [ring_values(64, (4,), 8)], again, (4,))


def test_only_the_dealer_s_protocol_masks_anew() -> None:
    with pytest.raises(ConfigError, match="way of protocol='dealer'"):
        PrivateConfig(matmul="remask")


def test_the_classical_way_opens_what_crypten_opens() -> None:
    """39.3 MB for 128x768x3072 (each operand once in each direction), the figure that CrypTen reports."""
    assert dealer_cost.remask(Ring(64), 128 * 768, 768 * 3072).total == 39_321_600
