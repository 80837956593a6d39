"""The k largest without opening anything: exact by all methods, priced to the byte, and the same messages always."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.net.ledger import Cost
from private_llm.net.transport import Transport
from private_llm.oblivious import counting, digit_search, sort_network
from private_llm.oblivious.digit_search import SearchPlan
from private_llm.oblivious.sort_network import Order
from private_llm.oblivious.topk import (
    Method,
    by_pairs,
    cost,
    largest,
    largest_bits,
    largest_values,
    method_for,
    pairs_cost,
)
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.registry import Pricing, protocol_names
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed
from tests.harness import PLAIN, TRIO, run_meta, run_parties
from tests.recording import RecordingTransport
from tests.session import run_session
from tests.tensor.secrets import fixed, opened, plain_session

METHODS: tuple[Method, ...] = ("pairs", "network", "search")
PROTOCOLS = protocol_names()
every_method = pytest.mark.parametrize("method", METHODS)
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
SHAPES = [((1,), 1), ((4, 2), 1), ((3, 7), 2), ((2, 2, 33), 32), ((130,), 64), ((65, 5), 3)]


def config(protocol: str, ring: int = 64, **more: object) -> PrivateConfig:
    frac = 12 if ring == 32 else 18
    return PrivateConfig.from_dict(
        {"protocol": protocol, "ring": ring, "frac_bits": frac, "insecure": protocol == "plain", **more}
    )


def comparators(width: int, start: int, stop: int) -> int:
    return sum(len(first) for first, _ in sort_network.network(width, start, stop).layers)


def first_places(row: Sequence[float], k: int) -> list[int]:
    """Places of the k largest, largest first, and of equals the first one first."""
    return sorted(range(len(row)), key=lambda place: (-row[place], place))[:k]


def chosen(x: Tensor, k: int) -> Tensor:
    """Zeros and ones, by plain sorting."""
    made = torch.zeros(x.shape, dtype=torch.int64).view(-1, x.shape[-1])
    for number, row in enumerate(x.reshape(-1, x.shape[-1]).tolist()):
        made[number, first_places(row, k)] = 1
    return made.view(x.shape)


def values(shape: Sequence[int], seed: int = 0, largest: float = 2.0**20 - 1) -> Tensor:
    """Ties everywhere; rows of equals, of extremes and of neighbouring units among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, tuple(shape), generator=generator).double()
    flat = x.view(-1, shape[-1])
    for number, row in enumerate([largest, -largest, 0.0]):
        flat[number::5] = torch.where(
            torch.rand(flat[number::5].shape, generator=generator) < 0.5, row, flat[number::5]
        )
    flat[-1] = 3.0 if len(flat) > 1 else flat[-1]
    return x


def sent(cost: Cost) -> tuple[dict[tuple[int, int], int], int]:
    return {link: count for link, count in cost.sent.items() if count}, cost.rounds


def rows_of(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() // shape[-1]


@pytest.mark.sampled(4)
@every_protocol
@every_method
@pytest.mark.parametrize("ring", [64, 32])
def test_exact_and_priced_to_the_byte(protocol: str, method: Method, ring: int) -> None:
    setting = config(protocol, ring)
    pricing = Pricing.of(setting)
    bits = 39 if ring == 64 else 31
    for shape, k in SHAPES:
        x = values(shape, len(shape), 2.0**20 - 1 if ring == 64 else 2.0**18 - 1)
        run = run_parties(setting, lambda _, a, k=k: largest(a, k, method), [x])
        assert torch.equal(run.elements[0].long(), chosen(x, k)), shape
        price = cost(pricing, rows_of(shape), shape[-1], k, bits, method) + pricing.numbers(x.numel())
        assert sent(run.cost) == (sent(price) if protocol != "plain" else ({}, 0)), shape


@every_method
@pytest.mark.parametrize("adder", [{"adder": "ripple"}, {"bandwidth_mbit": 50.0, "latency_ms": 0.1}])
def test_the_price_knows_the_adder(method: Method, adder: dict[str, object]) -> None:
    for protocol in ("trio", "quad", "dealer"):
        setting = config(protocol, **adder)
        for shape, k in [((3, 20), 4), ((150, 5), 3)]:
            price = cost(Pricing.of(setting), rows_of(shape), shape[-1], k, 39, method)
            run = run_parties(
                setting, lambda _, a, k=k: _first(a, largest_bits(a, k, method)), [torch.zeros(shape).double()]
            )
            assert sent(run.cost) == sent(price)


def _first(x: Fixed, _: object) -> Fixed:
    return x


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Ring elements below 2^(bits - 1) in few different values, k and bits."""
    bits = draw(st.integers(2, 40))
    limit = (1 << (bits - 1)) - 1
    few = draw(st.lists(st.one_of(st.integers(-limit, limit), st.sampled_from([limit, -limit, 0])), min_size=1,
                        max_size=5))  # fmt: skip
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    picked = draw(st.lists(st.sampled_from(few), min_size=rows * width, max_size=rows * width))
    return torch.tensor(picked, dtype=torch.int64).view(rows, width), draw(st.integers(1, width)), bits


@given(problems(), st.sampled_from(METHODS), st.sampled_from(["plain", "plain", "trio"]))
@settings(max_examples=120, deadline=None)
def test_any_rows_any_k_any_bits(problem: tuple[Tensor, int, int], method: Method, protocol: str) -> None:
    x, k, bits = problem
    run = run_parties(config(protocol), lambda _, a: largest(a, k, method, bits), [x.double()], [0])
    assert torch.equal(run.elements[0].long(), chosen(x, k))


@given(problems(), st.integers(1, 4), st.integers(0, 5), st.sampled_from([1, 2, 8, 64]))
@settings(max_examples=60, deadline=None)
def test_every_plan_of_the_search_finds_the_same(
    problem: tuple[Tensor, int, int], digit: int, depth: int, folds: int
) -> None:
    x, k, bits = problem
    rows, width = x.shape
    plan = SearchPlan(rows, width, -(-bits // digit) * digit, digit, depth, folds)
    if k == width:
        return

    def program(session: Session, a: Fixed) -> Fixed:
        found = digit_search.largest_bits(a, k, plan)
        return a.with_share(a.proto.inject(found, None, [0], [1]), 0)

    run = run_parties(PLAIN, program, [x.double()], [0])
    assert torch.equal(run.elements[0].long().view(x.shape), chosen(x, k))
    if bits < 8:
        meta = run_meta(TRIO, program, [(rows, width)], [0])
        price = digit_search.plan_cost(Pricing.of(TRIO), plan) + Pricing.of(TRIO).numbers(x.numel())
        assert sent(meta) == sent(price)


@given(problems(), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_pairs_are_counted_alike_at_every_depth(problem: tuple[Tensor, int, int], depth: int) -> None:
    x, k, bits = problem
    rows, width = x.shape
    if k == width:
        return

    def program(session: Session, a: Fixed) -> Fixed:
        found = by_pairs(a, k, bits, depth)
        return a.with_share(a.proto.inject(found, None, [0], [1]), 0)

    run = run_parties(PLAIN, program, [x.double()], [0])
    assert torch.equal(run.elements[0].long().view(x.shape), chosen(x, k))
    if bits < 10:
        meta = run_meta(TRIO, program, [(rows, width)], [0])
        price = pairs_cost(Pricing.of(TRIO), rows, width, bits, depth) + Pricing.of(TRIO).numbers(x.numel())
        assert sent(meta) == sent(price)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_values_are_sorted_and_stay_with_their_indices(problem: tuple[Tensor, int, int]) -> None:
    x, k, bits = problem
    for ring in (64, 32):
        if bits >= ring:
            continue
        run = run_parties(config("plain", ring), lambda _, a: largest_values(a, k, bits), [x.double()], [0])
        found = [first_places(row, k) for row in x.tolist()]
        assert run.elements[1].tolist() == found
        assert torch.equal(run.elements[0].long(), x.gather(1, torch.tensor(found)))


@every_protocol
@pytest.mark.parametrize(("ring", "shape", "k"), [(64, (3, 19), 4), (32, (3, 19), 4), (64, (2, 3, 8), 8)])
def test_values_are_priced_to_the_byte(protocol: str, ring: int, shape: tuple[int, ...], k: int) -> None:
    setting = config(protocol, ring)
    x = values(shape, 3, 2.0**18 - 1)
    run = run_parties(setting, lambda _, a: largest_values(a, k), [x])
    flat = x.view(-1, shape[-1])
    found = [first_places(row, k) for row in flat.tolist()]
    assert run.elements[1].view(-1, k).tolist() == found
    assert run.elements[1].shape == (*shape[:-1], k)
    assert torch.equal(run.values[0].view(-1, k), flat.gather(1, torch.tensor(found)))
    order = sort_network.Order(shape[-1], 39 if ring == 64 else 31, ring)
    price = sort_network.sort_cost(Pricing.of(setting), order, rows_of(shape), 0, k, moved=True)
    assert sent(run.cost) == (sent(price) if protocol != "plain" else ({}, 0))


@every_method
@pytest.mark.parametrize("ring", [64, 32])
def test_debug_sessions_find_no_wrap(method: Method, ring: int) -> None:
    session = plain_session(debug_ranges=True, ring=ring, frac_bits=18 if ring == 64 else 12)
    x = values((4, 21), 7, 2.0**20 - 1 if ring == 64 else 2.0**18 - 1)
    assert torch.equal(opened(largest(fixed(session, x), 6, method)).long(), chosen(x, 6))


def test_the_docstring_states_what_it_costs() -> None:
    said = largest_bits.__doc__ or ""
    pricing = Pricing.of(TRIO)
    for rows, width, k, method in [(32, 64, 16, "pairs"), (32, 2048, 512, "network"), (32, 2048, 512, "search")]:
        price = cost(pricing, rows, width, k, 39, method)  # type: ignore[arg-type]
        assert f"{round(price.total / rows / width)} bytes an entry and {price.rounds} rounds" in " ".join(said.split())


# -- what is sent -----------------------------------------------------------------------------------------------------
def outlines(setting: PrivateConfig, x: Tensor, k: int, method: Method) -> list[object]:
    """Of each party: what it sent and received, without payloads."""
    wrapped: list[RecordingTransport] = []
    found: dict[int, object] = {}
    lock = threading.Lock()

    def wrap(transport: Transport) -> Transport:
        made = RecordingTransport(transport)
        with lock:
            wrapped.append(made)
        return made

    def at_party(session: Session, transport: Transport) -> None:
        secret = Fixed(session, session.protocol.receive_input(tuple(x.shape)), session.frac)
        mine = next(each for each in wrapped if each is transport)
        before = len(mine.messages)
        largest_bits(secret, k, method)
        largest_values(secret, 2)
        found[session.party] = mine.outline[before:]

    def at_client(client: ClientEnd) -> None:
        client.share(client.ring.encode(x, setting.frac_bits))

    run_session(setting, at_party, at_client, wrap)
    return [found[party] for party in sorted(found)]


@every_method
@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "plain"])
def test_messages_are_those_of_the_shape_and_nothing_is_opened(protocol: str, method: Method) -> None:
    shape = (2, 37)
    inputs = [values(shape, 1), torch.zeros(shape), torch.full(shape, -(2.0**20) + 1), torch.randn(shape).double()]
    seen = [outlines(config(protocol), x.double(), 5, method) for x in inputs]
    assert all(each == seen[0] for each in seen)
    tags = {message[2] for party in seen[0] for message in party}  # type: ignore[attr-defined]
    assert tags - {"and"} == {"msb", "inject"} | ({"a2b"} if method == "search" else set())
    assert method != "network" or "and" not in tags


# -- errors, and what costs nothing -----------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_beyond_the_row_is_refused(k: int) -> None:
    for fn in (largest_bits, largest_values):
        with pytest.raises(DomainError, match=f"got k={k}; want 1 to 4"):
            run_meta(TRIO, lambda _, a, fn=fn: _first(a, fn(a, k)), [(3, 4)])


@pytest.mark.parametrize("bits", [1, 64])
def test_bits_that_the_ring_cannot_compare_are_refused(bits: int) -> None:
    with pytest.raises(DomainError, match=f"got bits={bits}; want 2 to 63"):
        run_meta(TRIO, lambda _, a: largest(a, 1, bits=bits), [(3, 4)])


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(DomainError, match="got method='quick'; want one of auto, pairs, network, search"):
        run_meta(TRIO, lambda _, a: largest(a, 1, "quick"), [(3, 4)])  # type: ignore[arg-type]


def test_bits_of_all_entries_and_of_no_rows_are_local() -> None:
    for shape, k in [((3, 4), 4), ((0, 4), 2)]:
        assert run_meta(TRIO, lambda _, a, k=k: _first(a, largest_bits(a, k)), [shape]).total == 0
        run = run_parties(TRIO, lambda _, a, k=k: largest(a, k), [torch.zeros(shape)])
        assert torch.equal(run.elements[0], torch.ones(shape, dtype=torch.int64))
    run = run_parties(TRIO, lambda _, a: largest_values(a, 2), [torch.zeros(0, 4)])
    assert [tuple(made.shape) for made in run.values] == [(0, 2), (0, 2)]


# -- the choice -------------------------------------------------------------------------------------------------------
def test_the_cheapest_method_runs() -> None:
    pricing = Pricing.of(TRIO)
    for rows, width in [(1, 16), (32, 64), (4, 1024)]:
        found = method_for(pricing, rows, width, width // 4, 39)
        seconds = {m: pricing.seconds(cost(pricing, rows, width, width // 4, 39, m)) for m in METHODS}
        assert seconds[found] == min(seconds.values())
        meta = run_meta(TRIO, lambda _, a, k=width // 4: _first(a, largest_bits(a, k)), [(rows, width)])
        assert sent(meta) == sent(cost(pricing, rows, width, width // 4, 39))


def test_the_network_decides_about_the_method() -> None:
    """Few entries: pairs. Many: a search, by few bytes where bandwidth is scarce, by few rounds where latency is."""
    slow, far = (Pricing.of(config("trio", bandwidth_mbit=b, latency_ms=ms)) for b, ms in [(10.0, 0.05), (1e3, 5.0)])
    assert method_for(Pricing.of(TRIO), 1, 16, 4, 39) == "pairs"
    assert [method_for(each, 8, 4096, 1024, 39) for each in (slow, far)] == ["search", "search"]
    few_bytes, few_rounds = (digit_search.plan_for(each, 8, 4096, 39) for each in (slow, far))
    assert few_bytes.digit < few_rounds.digit
    assert few_bytes.depth > few_rounds.depth
    assert method_for(slow, 1, 2048, 1, 39) == "network"  # a tournament


# -- the network's plan -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", range(1, 10))
def test_the_cut_network_sorts_what_is_wanted(width: int) -> None:
    """All rows of zeros and ones, which is enough for a network."""
    rows = torch.cartesian_prod(*[torch.tensor([0, 1])] * width).view(-1, width)
    for start in range(width):
        for stop in range(start + 1, width + 1):
            x, plan = rows.clone(), sort_network.network(width, start, stop)
            for first, second in plan.layers:
                assert not set(first.tolist()) & set(second.tolist())
                low, high = torch.minimum(x[:, first], x[:, second]), torch.maximum(x[:, first], x[:, second])
                x[:, first], x[:, second] = high, low
            assert torch.equal(x[:, plan.wanted], rows.sort(1, descending=True)[0][:, start:stop])


def test_the_network_has_batchers_size_and_a_tournaments_for_one() -> None:
    sizes = [comparators(n, 0, n) for n in (1, 2, 4, 8, 16, 1024)]
    assert sizes == [0, 1, 5, 19, 63, 24063]
    assert [comparators(n, 0, 1) for n in (2, 7, 64, 100)] == [1, 6, 63, 99]
    assert [comparators(n, n - 1, n) for n in (2, 7, 64, 100)] == [1, 6, 63, 99]
    assert comparators(1024, 0, 8) == 4972
    # one place, from either end: what merely lies before or behind it is not sorted
    assert [comparators(1024, n, n + 1) for n in (7, 1016)] == [4967, 4967]


def test_value_and_index_are_one_number_where_they_fit() -> None:
    assert Order(2048, 39, 64).joined
    assert Order(8, 28, 32).joined
    assert not Order(8, 29, 32).joined
    narrow, wide = Order(8, 31, 32), Order(8, 39, 64)
    pricing = Pricing.of(TRIO)
    assert wide.cost(pricing, 64) == pricing.comparison(64, 43)
    assert narrow.cost(pricing, 64).rounds > wide.cost(pricing, 64).rounds


# -- counting ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 63, 64])
def test_bits_of_a_column_are_added_up(rows: int) -> None:
    x = torch.randint(0, 2, (rows, 64), generator=torch.Generator().manual_seed(rows)).double()
    for depth in (0, 1, 3, 9):

        def program(session: Session, a: Fixed, depth: int = depth) -> Fixed:
            bits = a.proto.invert(a.less_than([1.0]))
            rows_of_bits = BitShare(tuple(part.view(rows, 1) for part in bits.parts), 64)
            return counting.column_sums(a, rows_of_bits, depth)

        run = run_parties(TRIO, program, [x], [0])
        assert torch.equal(run.value, x.sum(0))
        price = Pricing.of(TRIO).comparison(rows * 64, 64) + counting.cost(Pricing.of(TRIO), rows, 64, depth)
        assert sent(run.cost) == sent(price)


def test_a_tree_keeps_what_bits_stand_for() -> None:
    assert counting.tree(64, 0) == ((), (64,))
    assert counting.tree(7, 9) == (((2,), (1, 0), (0, 1)), (1, 1, 1))
    assert sum(counting.tree(64, 7)[1]) == 9
    for rows in range(1, 65):
        for depth in range(9):
            steps, left = counting.tree(rows, depth)
            assert len(steps) <= depth
            assert sum(many << weight for weight, many in enumerate(left)) >= rows
            gates = sum(map(sum, steps))
            assert sum(left) == rows - gates  # three bits become two


# -- the search's plan ------------------------------------------------------------------------------------------------
@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from([1, 2, 4, 64]))
@settings(max_examples=60, deadline=None)
def test_entries_come_back_from_their_lanes(rows: int, width: int, folds: int) -> None:
    plan = SearchPlan(rows, width, 8, 1, 0, folds)
    x = torch.randint(0, 2, (rows, width), dtype=torch.uint8)
    spread = plan.spread(x)
    assert spread.shape == (plan.size,)
    assert int(spread.sum()) == int(x.sum())
    words = digit_search.packed(spread.view(1, -1))
    assert torch.equal(digit_search.unpacked(plan.gather(words), rows * width).view(rows, width), x)
    per_row = torch.randint(0, 2, (2 * rows,), dtype=torch.uint8)
    repeated = digit_search.unpacked(plan.repeat(digit_search.packed(per_row.view(1, -1)), 2), plan.size)
    for vector in range(2):
        want = plan.spread(per_row.view(2, rows, 1)[vector].expand(rows, plan.folds * plan.across)[:, :width])
        real = plan.spread(torch.ones(rows, width, dtype=torch.uint8)).bool()
        assert torch.equal(repeated[vector][real], want[real])


def test_pairs_fit_memory_however_far_the_parties() -> None:
    """At 10 Gbit/s and 50 ms the pairs of 32 rows of 4096 would take least time, and 15 GB at each party."""
    far = Pricing.of(config("trio", bandwidth_mbit=1e4, latency_ms=50.0))
    by_pairs = [width for width in (64, 512, 4096) if method_for(far, 32, width, width // 4, 30) == "pairs"]
    assert by_pairs == [64, 512]
    assert far.seconds(cost(far, 32, 4096, 1024, 30, "pairs")) < far.seconds(cost(far, 32, 4096, 1024, 30))
