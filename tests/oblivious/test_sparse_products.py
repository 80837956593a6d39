"""SOMM and SIMM: right under every protocol, priced by what is wanted, and optimal as Theorems 1 and 2 say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.net.ledger import Cost
from private_llm.oblivious.sparse_products import (
    SparseInput,
    SparseOutput,
    components,
    sparse_input_product,
    sparse_output_product,
    strips,
)
from private_llm.protocols.registry import dealer_prices as dealer_cost
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.ring.ring import RING64
from private_llm.tensor.fixed import Fixed
from tests.harness import TRIO, run_meta, run_parties
from tests.protocols.test_suite import prices

PROTOCOLS = protocol_names()
every = pytest.mark.parametrize("protocol", PROTOCOLS)
DENSITIES = (0.0, 0.1, 0.5, 1.0)


def config(protocol: str, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "insecure": protocol == "plain", **more})


def pattern(height: int, width: int, density: float, seed: int = 0) -> Tensor:
    return torch.rand((height, width), generator=torch.Generator().manual_seed(seed)) < density


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def sent(cost: Cost) -> dict[tuple[int, int], int]:
    return {link: count for link, count in cost.sent.items() if count}


@every
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("turned", [False, True])
def test_wanted_outputs_are_those_of_the_whole_product(protocol: str, density: float, turned: bool) -> None:
    x, y, wanted = values(7, 33), values(33, 9, seed=1), pattern(7, 9, density)
    y = y.mT.contiguous().mT if turned else y
    run = run_parties(config(protocol), lambda _, a, b: sparse_output_product(a, b, wanted), [x, y])
    assert torch.allclose(run.value, (x @ y)[wanted], atol=1e-3)
    price = prices(protocol).product(RING64, int(wanted.sum()), TRIO.frac_bits)
    if density and protocol != "plain":
        assert (sent(run.cost), run.cost.rounds) == (sent(price), price.rounds)
    else:
        assert not sent(run.cost)


@every
@pytest.mark.parametrize("density", DENSITIES)
def test_entries_that_are_zero_change_nothing(protocol: str, density: float) -> None:
    active = pattern(5, 40, density)
    active[3] = False  # a row without entries
    x, y = values(5, 40) * active, values(40, 6, seed=1)
    run = run_parties(config(protocol), lambda _, a, b: sparse_input_product(a, b, active), [x[active], y])
    assert torch.allclose(run.value, x @ y, atol=1e-3)
    assert not run.value[3].any()
    price = prices(protocol).product(RING64, int(active.any(1).sum()) * 6, TRIO.frac_bits)
    assert sent(run.cost) == (sent(price) if density and protocol != "plain" else {})


@pytest.mark.parametrize("density", [0.1, 0.6])
def test_where_operands_are_masked_again_each_takes_part_once(density: float) -> None:
    """Theorems 1 and 2 on the wire: rows and columns, or entries and rows, that take part, once each way."""
    remasking = config("dealer", matmul="remask")
    x, y, wanted = values(7, 33), values(33, 9, seed=1), pattern(7, 9, density)
    run = run_parties(remasking, lambda _, a, b: sparse_output_product(a, b, wanted), [x, y])
    sides = (int(wanted.any(1).sum()) * 33, int(wanted.any(0).sum()) * 33)
    price = dealer_cost.remask(RING64, *sides) + dealer_cost.product(RING64, int(wanted.sum()), TRIO.frac_bits)
    assert (sent(run.cost), run.cost.rounds) == (sent(price), price.rounds)
    active = pattern(5, 40, density)
    run = run_parties(
        remasking, lambda _, a, b: sparse_input_product(a, b, active), [values(5, 40)[active], values(40, 6)]
    )
    sides = (int(active.sum()), int(active.any(0).sum()) * 6)
    price = dealer_cost.remask(RING64, *sides)
    price += dealer_cost.product(RING64, int(active.any(1).sum()) * 6, TRIO.frac_bits)
    assert sent(run.cost) == sent(price)


def partitions(edges: Sequence[tuple[int, int]]) -> Iterator[list[list[tuple[int, int]]]]:
    """Every way to split edges into groups."""
    if not edges:
        yield []
        return
    first, rest = edges[0], edges[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for number, group in enumerate(smaller):
            yield [*smaller[:number], [first, *group], *smaller[number + 1 :]]


def cost_of(groups: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, int]:
    """Rows and columns that are masked, and dot products."""
    sides = [(len({row for row, _ in group}), len({column for _, column in group})) for group in groups]
    return sum(a + b for a, b in sides), sum(a * b for a, b in sides)


graphs = st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=7)


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_theorem_1_components_are_the_cheapest_blocks(edges: set[tuple[int, int]]) -> None:
    wanted = torch.zeros(4, 4, dtype=torch.bool)
    for edge in edges:
        wanted[edge] = True
    blocks = components(wanted)
    found = sum(len(b.rows) + len(b.columns) for b in blocks), sum(len(b.rows) * len(b.columns) for b in blocks)
    assert found == min(map(cost_of, partitions(sorted(edges))))
    assert SparseOutput(blocks, len(edges)).macs((4, 11), (11, 4)) == 11 * found[1]
    assert sorted(torch.cat([block.places for block in blocks]).tolist()) == list(range(len(edges)))


@given(graphs)
@settings(max_examples=60, deadline=None)
def test_theorem_2_every_entry_and_every_line_takes_part_once(edges: set[tuple[int, int]]) -> None:
    """Against every way to group the entries of x: masked are a group's entries and the lines of y that it meets."""
    active = torch.zeros(4, 4, dtype=torch.bool)
    for edge in edges:
        active[edge] = True
    width, found = 3, strips(active)
    masked = sum(len(strip.places.view(-1)) + len(strip.lines) * width for strip in found)
    best = min(
        sum(len(group) + len({column for _, column in group}) * width for group in groups)
        for groups in partitions(sorted(edges))
    )
    assert masked == best
    assert SparseInput(found, 4).macs((len(edges),), (4, width)) == len(edges) * width
    assert sum(strip.places.numel() for strip in found) == len(edges)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_forms_are_exact_in_the_ring(height: int, inner: int, width: int, density: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randint(-(1 << 63), (1 << 63) - 1, shape, generator=generator)
        for shape in ((height, inner), (inner, width))
    )
    wanted = pattern(height, width, density, seed)
    form = SparseOutput(components(wanted), int(wanted.sum()))
    assert torch.equal(form.product(x, y), (x @ y)[wanted])
    assert torch.equal(form.pair(x, y, x + 1, y), (x @ y + (x + 1) @ y)[wanted])
    active = pattern(height, inner, density, seed)
    sparse = SparseInput(strips(active), height)
    assert torch.equal(sparse.product(x[active], y), (x * active) @ y)
    assert torch.equal(sparse.pair(x[active], y, x[active], 2 * y), 3 * ((x * active) @ y))


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_narrowed_forms_take_what_they_read_and_nothing_else(
    height: int, inner: int, width: int, density: float, seed: int
) -> None:
    x, y = (torch.randint(-9, 9, shape, dtype=torch.int64) for shape in ((height, inner), (inner, width)))
    wanted, active = pattern(height, width, density, seed), pattern(height, inner, density, seed)
    whole = SparseOutput(components(wanted), int(wanted.sum()))
    form, take = whole.narrowed()
    assert torch.equal(take(y), y[:, wanted.any(0)])
    assert torch.equal(form.product(x, take(y)), whole.product(x, y))
    lines = SparseInput(strips(active), height)
    form, take = lines.narrowed()
    assert torch.equal(take(y), y[active.any(0)])
    assert torch.equal(form.product(x[active], take(y)), lines.product(x[active], y))


@pytest.mark.parametrize(("protocol", "copies"), [("trio", False), ("dealer", False), ("quad", True), ("remask", True)])
def test_only_protocols_that_change_whole_operands_copy_rows(
    protocol: str, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noted(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*operands: Tensor, **onto: Tensor) -> Tensor:
            seen.append((tuple(operands[1].shape), operands[1].is_contiguous()))
            return call(*operands, **onto)

        return run

    for name in ("ring_matmul_rows", "ring_matmul_lines"):
        monkeypatch.setattr(ops, name, noted(getattr(ops, name)))
    setting = config("dealer", matmul="remask") if protocol == "remask" else config(protocol)
    wanted = torch.zeros(1, 9, dtype=torch.bool)
    wanted[0, [2, 3, 7]] = True
    w = values(9, 33)
    run_parties(
        setting, lambda _, a, b: sparse_output_product(a, b.view(lambda part: part.mT), wanted), [values(1, 33), w]
    )
    run_parties(setting, lambda _, a, b: sparse_input_product(a, b, wanted), [values(3), w])
    if copies:
        assert {shape for shape, _ in seen} == {(3, 33)}
    else:
        assert set(seen) == {((9, 33), True)}


def test_costs_are_the_same_without_data() -> None:
    wanted, active = pattern(7, 9, 0.3), pattern(5, 40, 0.3)
    meta = run_meta(TRIO, lambda _, a, b: sparse_output_product(a, b, wanted), [(7, 33), (33, 9)])
    assert sent(meta) == sent(prices("trio").product(RING64, int(wanted.sum()), TRIO.frac_bits))
    meta = run_meta(TRIO, lambda _, a, b: sparse_input_product(a, b, active), [(int(active.sum()),), (40, 6)])
    assert sent(meta) == sent(prices("trio").product(RING64, 30, TRIO.frac_bits))


def test_other_shapes_are_refused() -> None:
    wanted = pattern(7, 9, 0.5)
    with pytest.raises(DomainError, match=r"wanted \(7, 9\); want \[M, K\]"):
        run_meta(TRIO, lambda _, a, b: sparse_output_product(a, b, wanted), [(7, 33), (33, 8)])
    with pytest.raises(DomainError, match=r"got \(3,\) entries"):
        run_meta(TRIO, lambda _, a, b: sparse_input_product(a, b, wanted), [(3,), (9, 6)])


def test_empty_products_have_the_point_that_was_asked_for() -> None:
    none = torch.zeros(3, 3, dtype=torch.bool)
    fracs: list[int] = []

    def program(_: Session, a: Fixed, b: Fixed) -> Fixed:
        fracs.append(sparse_output_product(a, b, none, 5).frac)
        fracs.append(sparse_input_product(a.view(lambda part: part.reshape(-1)[:0]), b, none, 6).frac)
        return a

    run_meta(TRIO, program, [(3, 3), (3, 3)])
    assert set(fracs[::2]) == {5}
    assert set(fracs[1::2]) == {6}
