"""One suite for all protocols and rings: results against integer arithmetic, cost against its formula."""

from __future__ import annotations

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT, MetaTransport
from private_llm.protocols.prices import Prices
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import protocol_names, protocol_spec
from private_llm.protocols.registry import trio_prices as trio_cost
from private_llm.protocols.session import client_end
from private_llm.protocols.share import Share
from private_llm.ring.ring import Ring
from tests.protocols.edge_prices import index_price, lookup_price
from tests.protocols.parties import Run, ring_values, run_ring

PROTOCOLS = protocol_names()
RINGS = [64, 32]
SIZES = [1, 64, 1001]
every = pytest.mark.parametrize(("protocol", "ring"), [(p, r) for p in PROTOCOLS for r in RINGS])


def prices(protocol: str) -> Prices:
    """The formulas of a protocol (of `plain`, which sends nothing, any will do)."""
    return protocol_spec(protocol).cost or trio_cost


def config(protocol: str, ring: int, **more: object) -> PrivateConfig:
    frac = 12 if ring == 32 else 18
    return PrivateConfig.from_dict(
        {"protocol": protocol, "ring": ring, "frac_bits": frac, "insecure": protocol == "plain", **more}
    )


def check(run: Run, expected: torch.Tensor, price: Cost, protocol: str, slack: int = 0) -> None:
    """`slack` units above the floor are allowed (truncation: 1 in trio and quad, 0 in plain)."""
    off = run.result.long() - expected.long()
    assert int(off.min()) >= 0
    assert int(off.max()) <= (slack if protocol != "plain" else 0)
    wanted = price if protocol != "plain" else Cost()
    assert {k: v for k, v in run.cost.sent.items() if v} == {k: v for k, v in wanted.sent.items() if v}
    assert run.cost.rounds == wanted.rounds


@every
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 12, 17])
def test_mul(protocol: str, ring: int, n: int, shift: int) -> None:
    cost = prices(protocol)
    x = ring_values(ring, (n,), ring // 2 - 2, 1)
    y = ring_values(ring, (n,), ring // 2 - 2, 2)
    run = run_ring(config(protocol, ring), [x, y], lambda p, a, b: p.mul(a, b, shift), (n,))
    check(run, (x * y) >> shift, cost.product(Ring(ring), n, shift), protocol, slack=1 if shift else 0)


@every
def test_mul_wraps_over_the_whole_ring_without_shift(protocol: str, ring: int) -> None:
    x, y = ring_values(ring, (77,), ring, 1), ring_values(ring, (77,), ring, 2)
    run = run_ring(config(protocol, ring), [x, y], lambda p, a, b: p.mul(a, b), (77,))
    assert torch.equal(run.result, x * y)


@every
def test_mul_broadcasts(protocol: str, ring: int) -> None:
    x, y = ring_values(ring, (2, 5, 1), 10), ring_values(ring, (3,), 10)
    run = run_ring(config(protocol, ring), [x, y], lambda p, a, b: p.mul(a, b), (2, 5, 3))
    assert torch.equal(run.result, x * y)


@every
def test_truncation_at_the_limits_of_its_range_never_wraps(protocol: str, ring: int) -> None:
    """|z| just below 2^(ring-2), the whole promised range, 4,000 times: at most one unit off, always."""
    cost = prices(protocol)
    n, shift = 4000, 5
    x = ring_values(ring, (n,), ring - 2, 3)
    x[10:1000] = (1 << (ring - 2)) - 1
    x[1000:2000] = -(1 << (ring - 2)) + 1
    run = run_ring(config(protocol, ring), [x], lambda p, a: p.truncate(a, shift), (n,))
    check(run, x >> shift, cost.truncate(Ring(ring), n, shift), protocol, slack=1)


@every
@pytest.mark.parametrize("shift", [0, 9])
def test_matmul_batched_with_odd_sizes(protocol: str, ring: int, shift: int) -> None:
    cost = prices(protocol)
    x, y = ring_values(ring, (2, 7, 33), 11, 1), ring_values(ring, (33, 5), 11, 2)
    run = run_ring(config(protocol, ring), [x, y], lambda p, a, b: p.matmul(a, b, shift), (2, 7, 5))
    check(run, (x @ y) >> shift, cost.product(Ring(ring), 70, shift), protocol, slack=1 if shift else 0)


@every
def test_matmul_sends_selected_outputs_only(protocol: str, ring: int) -> None:
    cost = prices(protocol)
    x, y = ring_values(ring, (4, 9), 11, 1), ring_values(ring, (9, 6), 11, 2)
    select = torch.tensor([0, 7, 23, 5])
    run = run_ring(config(protocol, ring), [x, y], lambda p, a, b: p.matmul(a, b, 4, select), (4,))
    check(run, ((x @ y).view(-1)[select]) >> 4, cost.product(Ring(ring), 4, 4), protocol, slack=1)


@every
@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("shift", [0, 7])
def test_poly_in_one_step(protocol: str, ring: int, degree: int, shift: int) -> None:
    cost = prices(protocol)
    x = ring_values(ring, (130,), 9 if ring == 32 else 19)
    c = [-11, 7, -3, 5][: degree + 1]
    expected = sum(k * x**i for i, k in enumerate(c)) >> shift
    run = run_ring(config(protocol, ring), [x], lambda p, a: p.poly(a, c, shift), (130,))
    check(run, expected, cost.poly(Ring(ring), 130, degree, shift), protocol, slack=1 if shift else 0)


@every
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("adder", ["prefix", "ripple"])
def test_sign_bits_of_extremes_and_thresholds(protocol: str, ring: int, n: int, adder: str) -> None:
    cost = prices(protocol)
    x = ring_values(ring, (n,), ring - 1, 5)
    offsets = [0, 12345, -(1 << (ring - 3))]

    def program(p: object, a: Share) -> Share:
        return p.inject(p.msb(a, offsets), None, [0] * 3, [1, 2, 4])  # type: ignore[attr-defined]

    expected = sum((1 << k) * ((x + c) < 0).long() for k, c in enumerate(offsets))
    comparison = cost.msb(n, ring, 3) if adder == "prefix" else cost.msb_ripple(n, ring, 3)
    run = run_ring(config(protocol, ring, adder=adder), [x], program, (n,))
    check(run, expected, comparison + cost.inject(Ring(ring), n, 3, 0, 0), protocol)


@every
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 12, 21, 31])
def test_sign_bits_within_a_promised_range(protocol: str, ring: int, bits: int) -> None:
    cost = prices(protocol)
    x = ring_values(ring, (200,), bits, 6)
    expected = (x < 0).long()
    program = lambda p, a: p.inject(p.msb(a, [0], bits=bits), None, [0], [1])  # noqa: E731
    run = run_ring(config(protocol, ring), [x], program, (200,))
    check(run, expected, cost.msb(200, bits) + cost.inject(Ring(ring), 200, 1, 0, 0), protocol)


@every
@pytest.mark.parametrize("adder", ["prefix", "ripple"])
@pytest.mark.parametrize(("bits", "low"), [(2, 0), (12, 1), (21, 8), (21, 19), (31, 11)])
def test_sign_bits_without_the_low_positions(protocol: str, ring: int, bits: int, low: int, adder: str) -> None:
    """Exact outside 0 <= x < 2^low; inside, the others say either (its carry is missing), plain the truth."""
    cost = prices(protocol)
    x = torch.cat([ring_values(ring, (400,), bits, 6), ring_values(ring, (400,), low + 1, 7).abs().clamp(max=1 << low)])
    x = x.clamp(min=(1 << low) - (1 << (bits - 1)))
    x[:3] = torch.tensor([-1, min(1 << low, (1 << (bits - 1)) - 1), (1 << low) - (1 << (bits - 1))])
    program = lambda p, a: p.inject(p.msb(a, [0], bits=bits, low=low), None, [0], [1])  # noqa: E731
    run = run_ring(config(protocol, ring, adder=adder), [x], program, (800,))
    sure = (x < 0) | (x >= 1 << low) if protocol != "plain" else torch.ones_like(x, dtype=torch.bool)
    assert torch.equal(run.result[sure].long(), (x < 0).long()[sure])
    assert torch.equal(run.result.long() >> 1, torch.zeros(800, dtype=torch.long))
    if protocol != "plain":
        comparison = cost.msb(800, bits, low=low) if adder == "prefix" else cost.msb_ripple(800, bits, low=low)
        assert run.cost == comparison + cost.inject(Ring(ring), 800, 1, 0, 0)


@every
@pytest.mark.parametrize("shift", [0, 6])
def test_inject_sums_weighted_bits(protocol: str, ring: int, shift: int) -> None:
    cost = prices(protocol)
    n = 321
    x = ring_values(ring, (n,), ring - 8, 7)
    per_element = ring_values(ring, (n,), 5, 8)

    def program(p: object, a: Share) -> Share:
        bits = p.msb(a, [0, 99])  # type: ignore[attr-defined]
        return p.inject(bits, a, [3, 0], [7, per_element], shift)  # type: ignore[attr-defined]

    below, near = (x < 0).long(), ((x + 99) < 0).long()
    expected = (below * (3 * x.long() + 7) + near * per_element.long()) >> shift
    price = cost.msb(n, ring, 2) + cost.inject(Ring(ring), n, 2, 1, shift)
    check(run_ring(config(protocol, ring), [x], program, (n,)), expected, price, protocol, slack=1 if shift else 0)


@every
@pytest.mark.parametrize("low", [1, 23, 31, 63])
@pytest.mark.parametrize("n", [1, 321, 513])
def test_a_narrow_injection_is_right_in_its_low_bits(protocol: str, ring: int, low: int, n: int) -> None:
    cost = prices(protocol)
    x = ring_values(ring, (n,), ring - 1, 17)

    def program(p: Protocol, a: Share) -> Share:
        return p.inject(p.msb(a, [0, 99]), a, [3, 0], [7, -5], low=low)

    below, near = (x < 0).long(), ((x + 99) < 0).long()
    expected = below * (3 * x.long() + 7) - near * 5
    run = run_ring(config(protocol, ring), [x], program, (n,))
    bits = min(low, ring - 1)
    assert torch.equal(run.result.long() & ((1 << bits) - 1), expected & ((1 << bits) - 1))
    price = cost.msb(n, ring, 2) + cost.inject(Ring(ring), n, 2, 1, 0, low)
    assert run.cost == (Cost() if protocol == "plain" else price)


@every
def test_impossible_low_bits_are_refused(protocol: str, ring: int) -> None:
    x = ring_values(ring, (3,), 8)
    for low, shift in ((0, 0), (64, 0), (8, 1)):
        with pytest.raises(DomainError, match="1 to 63 low bits"):
            run_ring(
                config(protocol, ring), [x], lambda p, a, k=low, s=shift: p.inject(p.msb(a), a, [1], [0], s, k), (3,)
            )


@every
def test_nothing_in_nothing_out(protocol: str, ring: int) -> None:
    """Every primitive takes an empty tensor."""

    def program(p: Protocol, a: Share) -> Share:
        bits = p.and_(p.a2b(a).row(2), p.invert(p.msb(a, [0, 1]).row(1)))
        return p.mul(p.poly(p.truncate(p.inject(bits, a, [1], [2], 3), 1), [1, 2, 3], 2), a, 4)

    run = run_ring(config(protocol, ring), [ring_values(ring, (0,), 8)], program, (0,))
    assert run.result.shape == (0,)
    assert run.cost.total == 0


@every
def test_relu_price_per_element(protocol: str, ring: int) -> None:
    cost = prices(protocol)
    n = 6400
    x = ring_values(ring, (n,), ring - 1, 9)
    program = lambda p, a: p.inject(p.invert(p.msb(a)), a, [1], [0])  # noqa: E731
    run = run_ring(config(protocol, ring), [x], program, (n,))
    check(run, x.clamp(min=0), cost.msb(n, ring) + cost.inject(Ring(ring), n, 1, 1, 0), protocol)
    if protocol != "plain":
        limits = {64: 130, 32: 64} if protocol == "quad" else {64: 72.75, 32: 36}
        assert run.cost.total / n <= limits[ring]
        assert run.cost.rounds == 5


@every
def test_gates_and_decomposition(protocol: str, ring: int) -> None:
    cost = prices(protocol)
    n = 130
    x, y = ring_values(ring, (n,), ring, 1), ring_values(ring, (n,), ring, 2)

    def program(p: object, a: Share, b: Share) -> Share:
        both = p.and_(p.a2b(a), p.invert(p.a2b(b)))  # type: ignore[attr-defined]
        weights = [p.ring.constant(1 << i) for i in range(ring)]  # type: ignore[attr-defined]
        return p.inject(both, None, weights, weights)  # type: ignore[attr-defined]

    price = cost.a2b(Ring(ring), n).times(2) + cost.gate(n, ring) + cost.inject(Ring(ring), n, ring, 0, 0)
    check(run_ring(config(protocol, ring), [x, y], program, (n,)), x & ~y, price, protocol)


@every
@pytest.mark.parametrize("bits", [2, 31])
def test_the_lowest_bits_alone(protocol: str, ring: int, bits: int) -> None:
    n = 70
    x = ring_values(ring, (n,), ring, 3)

    def program(p: Protocol, a: Share) -> Share:
        weights = [1 << i for i in range(bits)]
        return p.inject(p.a2b(a, bits), None, weights, weights)

    price = prices(protocol).a2b(Ring(ring), n, bits) + prices(protocol).inject(Ring(ring), n, bits, 0, 0)
    check(run_ring(config(protocol, ring), [x], program, (n,)), x & ((1 << bits) - 1), price, protocol)


@every
@pytest.mark.parametrize("bits", [1, 65])
def test_bits_that_the_ring_has_not(protocol: str, ring: int, bits: int) -> None:
    if protocol == "plain":
        return
    with pytest.raises(DomainError, match=rf"a2b: got bits={bits}; want 2 to {ring}"):
        run_ring(config(protocol, ring), [ring_values(ring, (3,), 3)], lambda p, a: p.a2b(a, bits), (3,))


@every
@pytest.mark.parametrize("public", [False, True])
def test_lookup_of_secret_indices(protocol: str, ring: int, public: bool) -> None:
    table = ring_values(ring, (37, 6), ring, 1)
    indices = torch.tensor([0, 36, 5, 5, 17])
    program = lambda p, t, i: p.lookup(i, table if public else t)  # noqa: E731
    run = run_ring(config(protocol, ring), [table], program, (5, 6), secret_index=(indices, 37))
    check(run, table[indices], lookup_price(protocol, Ring(ring), 5, 6, public), protocol)


@every
def test_indices_from_the_client(protocol: str, ring: int) -> None:
    transport = MetaTransport(CLIENT)
    client = client_end(config(protocol, ring), transport)
    transport.ledger.reset()
    client.share_index(torch.zeros(3, dtype=torch.int64), 37)
    assert transport.ledger.cost() == index_price(protocol, Ring(ring), 3, 37)


def test_lookup_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm.protocols.trio.arithmetic._LOOKUP_CELLS", 80)
    table, indices = ring_values(64, (37, 6), 64, 1), torch.tensor([0, 36, 5, 5, 17])
    run = run_ring(config("trio", 64), [table], lambda p, t, i: p.lookup(i, t), (5, 6), secret_index=(indices, 37))
    check(run, table[indices], lookup_price("trio", Ring(64), 5, 6), "trio")


@every
def test_public_values_and_linear_steps_are_free(protocol: str, ring: int) -> None:
    x = ring_values(ring, (3, 4), ring, 1)
    public = ring_values(ring, (4,), ring, 2)

    def program(p: object, a: Share) -> Share:
        shifted = p.add_public(p.mul_public(a, 3), public)  # type: ignore[attr-defined]
        return p.sub(p.add(shifted, p.public(public.expand(3, 4))), p.neg(a))  # type: ignore[attr-defined]

    run = run_ring(config(protocol, ring), [x], program, (3, 4))
    check(run, 3 * x + public + public + x, Cost(), protocol)


def test_a_shift_beyond_the_ring_is_refused() -> None:
    x = ring_values(64, (4,), 8)
    with pytest.raises(DomainError, match="want 0 to 61"):
        run_ring(config("trio", 64), [x, x], lambda p, a, b: p.mul(a, b, 62), (4,))


@every
@pytest.mark.parametrize("shift", [-1, 62])
def test_a_truncation_beyond_the_ring_is_refused(protocol: str, ring: int, shift: int) -> None:
    """A negative shift came with packed fields of negative size, which a kernel wrote to."""
    if protocol == "plain" and shift > 0:
        return  # its floor is exact for every shift
    with pytest.raises(DomainError, match="shift: got"):
        run_ring(config(protocol, ring), [ring_values(ring, (4,), 8)], lambda p, a: p.truncate(a, shift), (4,))


@every
@pytest.mark.parametrize("wrong", ["x", "weights", "constants", "rows"])
def test_an_injection_of_other_sizes_is_refused(protocol: str, ring: int, wrong: str) -> None:
    """Kernels read operands by the number of bits: of shorter ones they read what lies behind them."""
    three = torch.tensor([1, 2, 3], dtype=Ring(ring).dtype)

    def program(p: Protocol, a: Share) -> Share:
        x = a.map(lambda part: part[:3]) if wrong == "x" else a
        weights = [three] if wrong == "weights" else [1]
        constants = {"constants": [three], "rows": [1, 1]}.get(wrong, [1])
        return p.inject(p.msb(a), x, weights, constants)

    with pytest.raises(DomainError, match="inject: got"):
        run_ring(config(protocol, ring), [ring_values(ring, (4,), 8)], program, (4,))


def test_a_range_wider_than_the_ring_is_refused() -> None:
    x = ring_values(32, (4,), 8)
    with pytest.raises(DomainError, match="want 2 to 32"):
        run_ring(config("trio", 32), [x], lambda p, a: p.inject(p.msb(a, [0], bits=33), None, [0], [1]), (4,))
