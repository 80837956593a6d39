"""Oblivious shuffles under every protocol: what comes out, what it costs, who may see it, and who knows the order."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from private_llm.errors import DomainError, ProtocolAbort, UnsupportedOp
from private_llm.net.ledger import Cost
from private_llm.net.transport import Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.protocols.share import (
    BitShare,
    Permutation,
    Share,
    ShuffledBits,
    drawn,
    inverse,
    known,
    packed,
    unpacked,
)
from private_llm.ring.ring import Ring
from tests.protocols.parties import Run, ring_values, run_ring
from tests.protocols.test_suite import config, prices
from tests.protocols.test_uniform import Tap
from tests.session import run_session

PROTOCOLS = protocol_names()
SECRET = [name for name in PROTOCOLS if name != "plain"]
every = pytest.mark.parametrize("protocol", PROTOCOLS)


def assert_cost(run: Run, price: Cost, protocol: str) -> None:
    wanted = price if protocol != "plain" else Cost()
    assert {k: v for k, v in run.cost.sent.items() if v} == {k: v for k, v in wanted.sent.items() if v}
    assert run.cost.rounds == wanted.rounds


@every
@pytest.mark.parametrize("ring", [64, 32])
@pytest.mark.parametrize("shape", [(1,), (64,), (101,), (9, 5), (33, 2, 3), (4, 0)])
def test_a_shuffle_moves_rows_and_undoing_it_puts_them_back(protocol: str, ring: int, shape: tuple[int, ...]) -> None:
    cost, x, size = prices(protocol), ring_values(ring, shape, ring, 7), shape[0]

    def program(p: Protocol, a: Share) -> Share:
        order = p.permutation(size)
        moved = p.shuffle(a, order)
        back = p.shuffle(moved, order, undo=True)
        return Share(tuple(torch.stack(parts) for parts in zip(moved.parts, back.parts, strict=True)))

    run = run_ring(config(protocol, ring), [x], program, (2, *shape))
    moved, back = run.result
    assert torch.equal(back, x)
    assert sorted(moved.reshape(size, -1).tolist()) == sorted(x.reshape(size, -1).tolist())
    price = cost.permutation(size)
    for undo in (False, True):
        price += cost.shuffle(Ring(ring), x.numel(), undo)
    assert_cost(run, price, protocol)


@every
@pytest.mark.parametrize("places", [[4], [0, 8, 3], list(range(9))])
def test_places_of_a_shuffle_are_those_rows_of_it(protocol: str, places: list[int]) -> None:
    cost, x, wanted = prices(protocol), ring_values(64, (9, 5), 3, 7), torch.tensor(places)

    def program(p: Protocol, a: Share) -> Share:
        order = p.permutation(9)
        some, every = p.shuffle(a, order, places=wanted), p.shuffle(a, order)
        return Share(tuple(torch.cat(parts) for parts in zip(some.parts, every.parts, strict=True)))

    run = run_ring(config(protocol, 64), [x], program, (len(places) + 9, 5))
    some, every = run.result.split([len(places), 9])
    assert torch.equal(some, every[wanted])
    assert sorted(every.tolist()) == sorted(x.tolist())
    price = cost.permutation(9) + cost.shuffle(Ring(64), 45, left=5 * len(places)) + cost.shuffle(Ring(64), 45)
    assert_cost(run, price, protocol)


@every
def test_places_are_on_the_way_there(protocol: str) -> None:
    def program(p: Protocol, a: Share) -> Share:
        return p.shuffle(a, p.permutation(4), undo=True, places=torch.tensor([1]))

    with pytest.raises(DomainError, match="got places"):
        run_ring(config(protocol, 64), [ring_values(64, (4,), 20, 1)], program, (1,))


@every
@pytest.mark.parametrize(
    "places",
    [torch.tensor([4]), torch.tensor([-1]), torch.tensor([[1]]), torch.tensor([True]), torch.tensor([1.0])],
    ids=str,
)
def test_places_that_are_none(protocol: str, places: Tensor) -> None:
    with pytest.raises(DomainError, match="want int64"):
        run_ring(
            config(protocol, 64), [ring_values(64, (4,), 20, 1)],
            lambda p, a: p.shuffle(a, p.permutation(4), places=places), (1,),
        )  # fmt: skip


@every
def test_two_values_move_alike_and_two_orders_differ(protocol: str) -> None:
    x = ring_values(64, (200,), 60, 1)

    def program(p: Protocol, a: Share) -> Share:
        one, other = (p.permutation(200) for _ in range(2))
        moved = [p.shuffle(a, one), p.shuffle(p.add(a, a), one), p.shuffle(a, other)]
        return Share(tuple(torch.stack(parts) for parts in zip(*(m.parts for m in moved), strict=True)))

    first, doubled, other = run_ring(config(protocol, 64), [x], program, (3, 200)).result
    assert torch.equal(doubled, first * 2)
    assert not torch.equal(other, first)
    assert not torch.equal(first, x)


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_the_helping_party_lacks_a_part_of_an_order(protocol: str) -> None:
    _, orders, _ = opened_by_all(protocol, ring_values(64, (200,), 60, 1))
    one, other = (known(orders[party].parts[-1]) for party in (1, 2))
    assert torch.equal(one, other)
    assert sorted(one.tolist()) == list(range(200))
    assert one.tolist() != list(range(200))
    assert not any(part is not None and torch.equal(part, one) for part in orders[0].parts)


def opened_by_all(
    protocol: str, x: Tensor, rows: int = 1, reuse: bool = False, times: int = 1
) -> tuple[dict[int, list[Any]], dict[int, Permutation], Tensor]:
    """What every party sees of the signs of x (in `rows` vectors), its order, and the signs after the move."""
    seen: dict[int, list[Any]] = {}
    orders: dict[int, Permutation] = {}
    count = x.numel() // rows

    def at_party(session: Session, transport: Transport) -> None:
        p = session.protocol
        share = p.receive_input(tuple(x.shape))
        bits = p.msb(share)
        parts = tuple(packed(unpacked(part, x.numel()).view(rows, count)) for part in bits.parts)
        orders[p.party] = order = p.permutation(count, reuse=reuse)
        seen[p.party] = [p.open_shuffled(p.shuffle_bits(BitShare(parts, count), order)) for _ in range(times)]
        p.reveal_to_client(p.shuffle(p.inject(BitShare(parts, count).row(0), None, [0], [1]), order))

    def at_client(client: ClientEnd) -> Tensor:
        client.share(x)
        return client.open((count,))

    return seen, orders, run_session(config(protocol, 64), at_party, at_client)


@every
@pytest.mark.parametrize("count", [1, 64, 130])
def test_shuffled_bits_open_in_their_order_to_all(protocol: str, count: int) -> None:
    seen, _, moved = opened_by_all(protocol, x := ring_values(64, (count,), 60, 5))
    assert int(moved.sum()) == int((x < 0).sum())
    for (bits,) in seen.values():
        assert torch.equal(bits, moved.bool().view(1, count))


@pytest.mark.parametrize("protocol", SECRET)
def test_nobody_holds_the_whole_order(protocol: str) -> None:
    """The order, computed from all parts, cannot be had from the parts of one party."""
    _, orders, _ = opened_by_all(protocol, ring_values(64, (50,), 60, 5))
    for party, order in orders.items():
        held = [part is not None for part in order.parts]
        if protocol == "dealer":  # tau1, rho1, tau2, rho2, last: one of each pair says nothing
            assert held == [party != 2, party != 2, party != 1, party != 1, party != 0]
        elif protocol == "trio":
            assert held == [party != 2, party != 1, party != 0]
        else:
            assert held == [party != lacking for lacking in range(4)]


@every
def test_a_second_opening_in_one_order_is_refused_unless_it_is_declared(protocol: str) -> None:
    x = ring_values(64, (64,), 60, 5)
    with pytest.raises(ProtocolAbort, match="links them"):
        opened_by_all(protocol, x, times=2)
    with pytest.raises(ProtocolAbort, match="links them"):
        opened_by_all(protocol, x, rows=2)
    seen, _, _ = opened_by_all(protocol, x, rows=2, reuse=True, times=2)
    assert torch.equal(*seen[max(seen)])


@every
def test_costs_of_bits(protocol: str) -> None:
    for count in (64, 130):
        run, words = bit_run(protocol, count)
        cost = prices(protocol)
        price = cost.msb(count, 64) + cost.permutation(count) + cost.shuffle_bits(count, 1)
        assert_cost(run, price + cost.open_shuffled(count, 1), protocol)
        assert words == (count + 63) // 64


def bit_run(protocol: str, count: int) -> tuple[Run, int]:
    words = []

    def program(p: Protocol, a: Share) -> Share:
        shuffled = p.shuffle_bits(p.msb(a), p.permutation(count))
        words.append(shuffled.bits.parts[0].shape[1])
        p.open_shuffled(shuffled)
        return a

    return run_ring(config(protocol, 64), [ring_values(64, (count,), 60, 2)], program, (count,)), words[0]


@every
def test_wrong_sizes_are_refused(protocol: str) -> None:
    def sized(size: int, moved: int) -> Any:
        return lambda p, a: p.shuffle(Share(tuple(part[:moved] for part in a.parts)), p.permutation(size))

    for size, moved, message in ((0, 4, "size 0"), (4, 3, r"rows \(3,\)"), (3, 4, r"rows \(4,\)")):
        with pytest.raises(DomainError, match=message):
            run_ring(config(protocol, 64), [ring_values(64, (4,), 20, 1)], sized(size, moved), (4,))


@pytest.mark.parametrize("protocol", SECRET)
@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_nothing_that_a_party_receives_is_what_it_holds_in_another_order(protocol: str, undo: bool, some: bool) -> None:
    """A component that travelled without a mask would tell its receiver the order by comparison."""
    if some and undo:
        return
    size, tap, held = 500, Tap(), {}
    x = ring_values(64, (size,), 60, 3)
    places = torch.arange(size).flip(0) if some else None

    def program(p: Protocol, a: Share) -> Share:
        order = p.permutation(size)
        sums = [sum(chosen[1:], chosen[0]) for r in (1, 2, 3) for chosen in itertools.combinations(a.parts, r)]
        held[p.party] = [value for part in sums for value in (part, part + x, part - x)]
        return p.shuffle(a, order, undo, places)

    run_ring(config(protocol, 64), [x], program, (size,), wrap=tap)
    for party, messages in tap.received.items():
        values = {tuple(sorted(part.tolist())) for part in held[party]}
        for message in messages:
            got = np.frombuffer(message, np.int64)
            for piece in np.split(got, len(got) // size) if len(got) % size == 0 else []:
                assert tuple(sorted(piece.tolist())) not in values or tap.from_client(party, "input") == [message]


def test_permutations_are_uniform() -> None:
    """All 24 orders of four elements, 4,800 times: chi-square with 23 degrees of freedom at p = 1e-9 is 88."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (4800, 4), generator=generator)
    counts = Counter(tuple(drawn(row).tolist()) for row in words)
    assert len(counts) == 24
    assert sum((n - 200) ** 2 / 200 for n in counts.values()) < 88


def test_orders_of_sessions_differ_and_every_sub_permutation_matters() -> None:
    x = torch.arange(6)
    seen = Counter()
    for _ in range(40):
        result = run_ring(config("trio", 64), [x], lambda p, a: p.shuffle(a, p.permutation(6)), (6,))
        seen[tuple(result.result.tolist())] += 1
    assert max(seen.values()) <= 3


def test_bits_survive_packing() -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (1, 8, 63, 64, 65, 200):
        bits = torch.randint(0, 2, (3, count), generator=generator, dtype=torch.uint8)
        assert torch.equal(unpacked(packed(bits), count), bits)
    p = drawn(torch.randint(-(1 << 60), 1 << 60, (9,), generator=generator))
    assert torch.equal(p[inverse(p)], torch.arange(9))


def test_a_permutation_shows_and_stores_nothing() -> None:
    order = Permutation(3, (torch.tensor([2, 0, 1]),))
    assert "tensor" not in repr(order)
    assert "tensor" not in repr(ShuffledBits(BitShare((torch.zeros(1, 1, dtype=torch.int64),), 3), order))
    with pytest.raises(TypeError, match="not serialised"):
        order.__reduce_ex__(2)


def test_a_shuffle_while_the_helper_of_quad_runs_ahead_is_refused() -> None:
    def program(p: Protocol, a: Share) -> Share:
        order = p.permutation(4)
        with p.section("ahead"):
            return p.shuffle(a, order)

    with pytest.raises(UnsupportedOp, match="no store at party 1"):
        run_ring(config("quad", 64), [ring_values(64, (4,), 20, 1)], program, (4,))
