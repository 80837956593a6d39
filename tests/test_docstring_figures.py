"""Figures in docstrings are those of the price formulas, or measured without data: bytes over all links and rounds."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from private_llm.approx.activations import exp, wide_exp
from private_llm.approx.normalise import reciprocal, rsqrt
from private_llm.approx.softmax import softmax
from private_llm.exact.comparisons import absolute, clamp, coarse_bits, hardtanh, relu, sign_bits
from private_llm.exact.maximum import argmax, larger, maximum
from private_llm.exact.ranks import among_largest
from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT
from private_llm.protocols.exact import ExactTruncation
from private_llm.protocols.prices import Prices
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import dealer_prices as dealer
from private_llm.protocols.registry import quad_prices as quad_cost
from private_llm.protocols.registry import trio_prices as trio
from private_llm.protocols.share import BitShare
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed, arithmetic
from tests.harness import TRIO, run_meta
from tests.protocols.edge_prices import lookup_price, reveal_price

R, N, F = Ring(64), 64_000, 18


def docstring(function: object) -> str:
    return " ".join((function.__doc__ or "").split())


def figures(text: str) -> list[str]:
    return re.findall(r"(?<![\w.^])\d+(?:\.\d+)?(?![\w.]*\d)", text)


def states(text: str, value: float) -> bool:
    """Whether a figure of a text is this value, rounded to the digits that it shows."""
    return any(abs(float(each) - value) <= 0.5 * 10.0 ** -len(each.partition(".")[2]) + 1e-9 for each in figures(text))


# -- the interfaces, against the formulas --------------------------------------------------------------------------

FORMULAS: list[tuple[Callable[..., object], list[Cost]]] = [
    (Protocol.truncate, [trio.truncate(R, N, F), quad_cost.truncate(R, N, F)]),
    (Protocol.mul, [p.product(R, N, s) for p in (trio, dealer, quad_cost) for s in (F, 0)]),
    (Protocol.poly, [p.poly(R, N, degree, F) for p in (trio, quad_cost) for degree in (2, 3)]),
    (Protocol.msb, [p.msb(N, bits) for p in (trio, quad_cost) for bits in (64, 39)] + [trio.msb_ripple(N, 64)]),
    (Protocol.inject, [p.inject(R, N, 1, weighted, 0) for p in (trio, quad_cost) for weighted in (1, 0)]),
    (Protocol.a2b, [trio.a2b(R, N), quad_cost.a2b(R, N)]),
    (Protocol.lookup, [lookup_price(p, R, N, 1, public) for p in ("trio", "quad") for public in (False, True)]),
    (Protocol.permutation, [dealer.permutation(N)]),
    (
        Protocol.shuffle,
        [p.shuffle(R, N, undo) for p in (trio, dealer) for undo in (False, True)]
        + [p.shuffle(R, moved, left=left) for p in (trio, dealer) for moved, left in ((N, 0), (0, N))],
    ),
    (Protocol.reveal, [reveal_price("trio", R, N)]),
    (Protocol.receive_input, [Cost({(CLIENT, 1): 8 * N})]),
]


@pytest.mark.parametrize(("method", "costs"), FORMULAS, ids=lambda value: getattr(value, "__name__", ""))
def test_interfaces_state_the_prices_of_their_formulas(method: Callable[..., object], costs: list[Cost]) -> None:
    doc = docstring(method)
    for cost in costs:
        assert states(doc, cost.total / N), f"{cost.total / N} bytes are not in: {doc}"
        assert not cost.rounds or states(doc, cost.rounds), f"{cost.rounds} rounds are not in: {doc}"


def test_bits_of_a_gate_and_what_quad_adds_once() -> None:
    for protocol, bits in ((trio, 3), (quad_cost, 5)):
        assert protocol.gate(N).total * 8 / N == bits
        assert states(docstring(Protocol.and_), bits)
    assert states(docstring(Protocol.verify), quad_cost.verify().total)
    shuffled = quad_cost.shuffle(R, N)
    assert states(docstring(Protocol.shuffle), shuffled.total // N)
    assert states(docstring(Protocol.shuffle), shuffled.total % N)
    opened = quad_cost.open_shuffled(N).total - quad_cost.verify().total
    assert states(docstring(Protocol.open_shuffled), opened * 8 // N)
    assert states(docstring(Protocol.open_shuffled), opened - 4 * N // 8)
    revealed = reveal_price("quad", R, N).total - quad_cost.verify().total
    assert states(docstring(Protocol.reveal), revealed - 16 * N)


# -- what is computed with them, measured --------------------------------------------------------------------------


def bits(made: Callable[[Fixed], BitShare]) -> Callable[[Fixed], Fixed]:
    """A comparison as a function that returns a secret, which costs nothing more."""

    def run(x: Fixed) -> Fixed:
        made(x)
        return x

    return run


POINTWISE: list[tuple[Callable[..., object], Callable[[Fixed], Fixed]]] = [
    (exp, exp), (wide_exp, wide_exp), (relu, relu), (absolute, absolute), (hardtanh, lambda x: hardtanh(x, -1.0, 1.0)),
    (clamp, lambda x: clamp(x, 0.0, None)), (clamp, lambda x: clamp(x, 0.0, 6.0)),
    (larger, lambda x: larger(x, x, coarse=False)), (larger, lambda x: larger(x, x, coarse=True)),
    (reciprocal, lambda x: reciprocal(x, 1.0, 64.0)), (rsqrt, lambda x: rsqrt(x, 1.0, 64.0)),
    (sign_bits, bits(lambda x: sign_bits(x, [0.0]))),
    (coarse_bits, bits(lambda x: coarse_bits(x, [0.0]))), (Fixed.less_than, bits(lambda x: x.less_than([0.0]))),
    (Fixed.scale, lambda x: x.scale(0.3)), (Fixed.mul, lambda x: x.mul(x)), (Fixed.mul, lambda x: x.mul(x, frac=36)),
    (Fixed.poly, lambda x: x.poly([0.1, 0.2, 0.3])), (Fixed.poly, lambda x: x.poly([0.1, 0.2, 0.3, 0.4])),
]  # fmt: skip


@pytest.mark.parametrize(("documented", "run"), POINTWISE, ids=lambda value: getattr(value, "__name__", ""))
def test_functions_state_what_they_cost_under_trio(
    documented: Callable[..., object], run: Callable[[Fixed], Fixed]
) -> None:
    cost = run_meta(TRIO, lambda _, x: run(x), [(N,)])
    doc = docstring(documented)
    assert states(doc, cost.total / N), f"{cost.total / N} bytes are not in: {doc}"
    assert states(doc, cost.rounds), f"{cost.rounds} rounds are not in: {doc}"


def test_softmax_states_what_an_entry_costs() -> None:
    cost = run_meta(TRIO, lambda _, x: softmax(x), [(500, 128)])
    assert states(docstring(softmax), cost.total / (500 * 128))


def test_tournaments_state_what_a_pair_and_an_entry_cost() -> None:
    for coarse in (False, True):
        cost = run_meta(TRIO, lambda _, x: maximum(x, coarse), [(500, 128)])  # noqa: B023 - run at once
        assert states(docstring(maximum), cost.total / (500 * 127))
    chosen = run_meta(TRIO, lambda _, x: argmax(x), [(1, 50_272)])
    assert states(docstring(argmax), chosen.total / 50_272)
    assert states(docstring(argmax), chosen.rounds)


@pytest.mark.parametrize("prices", [trio, quad_cost], ids=["trio", "quad"])
def test_exact_truncation_states_what_it_costs(prices: Prices) -> None:
    divided = prices.truncate(R, N, F) + prices.msb(N, F + 1) + prices.inject(R, N, 1, 0, 0)
    for method, cost in (
        (ExactTruncation.truncate, divided),
        (ExactTruncation.mul, prices.product(R, N, 0) + divided),
    ):
        assert states(docstring(method), cost.total / N)
        assert states(docstring(method), cost.rounds)


@pytest.mark.parametrize("width", [8, 16])
def test_among_largest_states_its_rows(width: int) -> None:
    cost = run_meta(TRIO, lambda _, x: among_largest(x, 2), [(640, width)])
    assert states(docstring(among_largest), cost.total / 640)
    assert states(docstring(among_largest), cost.rounds)


@pytest.mark.parametrize("rows", [1, 3])
def test_bits_to_numbers_cost_16_bytes_and_8_a_row(rows: int) -> None:
    compared, whole = (
        run_meta(TRIO, run, [(N,)])
        for run in (
            lambda _, x: bits(lambda y: y.less_than([0.0] * rows))(x),
            lambda session, x: arithmetic(session, x.less_than([0.0] * rows), [1.0] * rows, 0),
        )
    )
    assert (whole.total - compared.total) / N == 16 + 8 * rows
    assert {"16", "8"} <= {*figures(docstring(arithmetic))}


def test_a_wrong_figure_is_found() -> None:
    assert states("30.75 bytes an output, 2 rounds", 30.75)
    assert states("24.1 bytes", 24.125)
    assert states("275 bytes", 274.5)
    assert not states("24.2 bytes", 24.125)
    assert not states("244 bytes for |x| < 2^20", 242.5)
    assert not states("2^20", 20)
