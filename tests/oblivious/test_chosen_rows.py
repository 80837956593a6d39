"""Marked rows brought together, taken and put back: against plain indexing, and what it sends to the byte."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.oblivious.chosen_rows import (
    ChosenRows,
    compact,
    number_bits,
    one_hot_cost,
    one_hot_rows,
    shuffled_cost,
    shuffled_rows,
)
from private_llm.oblivious.topk import largest_bits
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed, arithmetic
from private_llm.tensor.range_check import verdict
from tests.harness import TRIO, run_meta, run_parties
from tests.oblivious.prices import compaction_cost
from tests.protocols.test_suite import prices

every = pytest.mark.parametrize("protocol", protocol_names())
SHAPES = [(1, 1, 1), (1, 5, 5), (3, 7, 2), (2, 64, 16), (5, 130, 1), (4, 33, 32)]


def config(protocol: str, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "insecure": protocol == "plain", **more})


def marks_of(blocks: int, rows: int, kept: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.zeros(blocks, rows, dtype=torch.float64)
    for block in range(blocks):
        made[block, torch.randperm(rows, generator=generator)[:kept]] = 1
    return made


def rows_of(blocks: int, rows: int, width: int) -> Tensor:
    return torch.arange(1.0, blocks * rows * width + 1, dtype=torch.float64).view(blocks, rows, width) - 10


@every
@pytest.mark.parametrize(("blocks", "rows", "kept"), SHAPES)
def test_marked_rows_keep_their_order(protocol: str, blocks: int, rows: int, kept: int) -> None:
    marks, x = marks_of(blocks, rows, kept), rows_of(blocks, rows, 3)

    def program(session: Session, m: Fixed, v: Fixed) -> list[Fixed]:
        made = compact(m, kept)
        return [made.take(v), made.take(v.scale_int(2))]

    taken, twice = run_parties(config(protocol), program, [marks, x], [0, 18]).values
    want = torch.stack([block[mark > 0] for block, mark in zip(x, marks, strict=True)])
    assert torch.equal(taken, want)
    assert torch.equal(twice, 2 * want)


def choice(way: str, marks: Fixed, kept: int) -> ChosenRows:
    if way == "one-hot":
        return one_hot_rows(marks, kept)
    return shuffled_rows(marks, marks.proto.invert((marks).less_than([1.0])), kept)


@every
@pytest.mark.parametrize("way", ["one-hot", "shuffled"])
@pytest.mark.parametrize(("blocks", "rows", "kept"), SHAPES)
def test_chosen_rows_are_taken_and_put_back(protocol: str, way: str, blocks: int, rows: int, kept: int) -> None:
    marks, x = marks_of(blocks, rows, kept, 1), rows_of(blocks, rows, 2)

    def program(session: Session, m: Fixed, v: Fixed) -> list[Fixed]:
        made = choice(way, m, kept)
        taken = made.take(v)
        return [taken, made.put_back(taken.scale_int(3)), made.take(v, frac=4)]

    taken, back, coarse = run_parties(config(protocol), program, [marks, x], [0, 18]).values
    wanted = [block[mark > 0] for block, mark in zip(x, marks, strict=True)]
    for got, want in zip(taken, wanted, strict=True):
        assert sorted(map(tuple, got.tolist())) == sorted(map(tuple, want.tolist()))
    assert way == "shuffled" or torch.equal(taken, torch.stack(wanted))
    assert torch.equal(back, 3 * x * marks[..., None])
    assert (coarse - taken).abs().max() <= 1 / 16


@pytest.mark.parametrize(("marked", "wrong"), [(3, 0.0), (2, 1.0), (5, 1.0), (7, 1.0)])
def test_marks_of_another_number_are_told(marked: int, wrong: float) -> None:
    """Five marks where three stay are numbered 1 to 5 in three bits; in two the last would count as a first one."""

    def program(session: Session, m: Fixed) -> Fixed:
        compact(m, 3)
        return verdict(session) or m.view(lambda part: part[0, :1] * 0)

    assert run_parties(TRIO, program, [marks_of(1, 9, marked)], [0]).value.tolist() == [wrong]


def test_what_is_opened_does_not_depend_on_the_marks() -> None:
    """Two of three rows: each of the six arrangements is opened equally often for any marks."""
    for seed in (0, 3):
        seen: Counter[tuple[int, ...]] = Counter()

        def program(session: Session, m: Fixed, seen: Counter[tuple[int, ...]] = seen) -> Fixed:
            for _ in range(300):
                places = compact(m, 2).places
                if session.party == 1:
                    seen[tuple(places.view(-1).tolist())] += 1
            return m

        run_parties(TRIO, program, [marks_of(1, 3, 2, seed)], [0])
        assert len(seen) == 6
        assert 20 < min(seen.values()) <= max(seen.values()) < 85  # 50 each; 5 deviations


@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
@pytest.mark.parametrize(("blocks", "rows", "kept"), [(1, 40, 9), (3, 64, 64), (2, 100, 33)])
def test_costs_are_those_of_the_formulas(protocol: str, blocks: int, rows: int, kept: int) -> None:
    made, asked = config(protocol), prices(protocol)

    def compaction(session: Session, m: Fixed) -> Fixed:
        compact(m, kept)
        return m

    def one_hot(session: Session, m: Fixed) -> Fixed:
        return one_hot_rows(m, kept).matrix

    def shuffled(session: Session, m: Fixed) -> Fixed:
        bits = m.proto.invert(m.less_than([1.0]))
        session.protocol.ledger.reset()
        shuffled_rows(m, bits, kept)
        return m

    for program, want in (
        (compaction, compaction_cost(asked, Ring(64), blocks, rows, kept)),
        (one_hot, one_hot_cost(asked, Ring(64), blocks, rows, kept)),
        (shuffled, shuffled_cost(asked, blocks, rows)),
    ):
        assert run_parties(made, program, [marks_of(blocks, rows, kept)], [0]).cost == want
        if protocol != "quad":
            assert run_meta(made, program, [(blocks, rows)], [0]) == want


def test_bits_of_numbers() -> None:
    numbers = torch.arange(100, dtype=torch.float64)

    def program(session: Session, x: Fixed) -> list[Fixed]:
        bits = number_bits(x, 7)
        return [arithmetic(session, bits.row(row), [1.0], 0) for row in range(7)]

    for protocol in protocol_names():
        got = run_parties(config(protocol), program, [numbers], [0]).values
        want = (numbers.long()[None] >> torch.arange(7)[:, None]) & 1
        assert torch.equal(torch.stack(got).long(), want)


@pytest.mark.parametrize("surplus", [-1, 1, 2])
def test_another_number_of_marks_is_noticed(surplus: int) -> None:
    """Three of eight, whose ranks just fit two bits."""

    def program(session: Session, m: Fixed) -> Fixed:
        compact(m, 3)
        assert session.checks.ranked_wrong
        return m

    run_parties(TRIO, program, [marks_of(1, 8, 3 + surplus)], [0])


def test_other_shapes_are_refused() -> None:
    for shape, kept in (((4,), 1), ((2, 4), 0), ((2, 4), 5)):
        with pytest.raises(DomainError, match=r"compact: got marks .* want \[blocks, rows\], 1 to rows"):
            run_parties(config("plain"), lambda session, m, k=kept: compact(m, k) and m, [torch.ones(shape)], [0])


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("protocol", ["trio", "dealer", "quad"])
@pytest.mark.parametrize("shuffled", [True, False])
def test_marks_of_values_beyond_their_range_make_the_verdict_of_the_call(
    protocol: str, shuffled: bool, guard: bool
) -> None:
    """Pairs of values that wrap around have no order. Rows are moved all the same, of another call none is harmed."""

    def choose(session: Session, x: Fixed) -> Fixed:
        bits = largest_bits(x, 3, "pairs", bits=session.frac + 4)  # for values below 8
        marks = arithmetic(session, bits, [1.0], 0).view(lambda part: part[:8].view(1, 8))
        if shuffled:
            shuffled_rows(marks, bits, 3)
        else:
            assert compact(marks, 3).take(marks.view(lambda part: part.view(1, 8, 1))).shape == (1, 3, 1)
        found = verdict(session)
        assert found is not None
        assert verdict(session) is None
        return found

    x = torch.tensor([[0.0, 6, 12, 18, 24, 30, 2, 4]], dtype=torch.float64)
    assert run_parties(config(protocol, guard=guard), choose, [x]).value.tolist() == [1.0]
