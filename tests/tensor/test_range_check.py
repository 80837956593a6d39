"""The check of ranges: what it sees, what it lets pass, what the client opens, and what it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.ops_matmul import linear_by
from private_llm.tensor.range_check import (
    PIECE,
    SKETCHES,
    _signs,
    require,
    verdict,
    watch,
    watch_compared,
    watch_flat,
    watch_later,
)
from private_llm.tensor.secret import SecretTensor
from tests.harness import run_meta, run_parties

PROTOCOLS = pytest.mark.parametrize("protocol", ["plain", "trio", "quad", "dealer", "trio by keys"])


def config(protocol: str, **more: object) -> PrivateConfig:
    name, _, adder = protocol.partition(" by ")
    return PrivateConfig(protocol=name, insecure=name == "plain", adder=adder or "auto", **more)  # type: ignore[arg-type]


def flag(settings: PrivateConfig, values: list[Tensor], bits: int) -> Tensor:
    def check(session: Session, *secrets: Fixed) -> Fixed:
        for secret in secrets:
            watch(secret, bits)
        found = verdict(session)
        assert found is not None
        return found

    return run_parties(settings, check, values).value


@PROTOCOLS
@pytest.mark.parametrize("shape", [(5, 64), (1, 3), (2, 3, 7), (70, 1)])
def test_values_in_their_range_pass(protocol: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert flag(config(protocol), [x, -x], 18 + 8).tolist() == [0.0]


@PROTOCOLS
@pytest.mark.parametrize("size", [2.0**9.1, -(2.0**9.1), 2.0**20, -(2.0**40), 2.0**43])
def test_one_large_entry_among_many_is_seen(protocol: str, size: float) -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[4, 17] = size
    assert flag(config(protocol), [torch.ones(2, 2), x], 18 + 8).tolist() == [1.0]


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize(("largest", "seen"), [(2.0**8.5, 0.0), (2.0**15.5, 1.0)])
def test_narrow_products_are_watched_by_the_bits_that_are_right(protocol: str, largest: float, seen: float) -> None:
    """Products of 2^53 in the ring: of 40,000 about 20 wrap with their masks, and are off by 2^28 above their bits."""
    generator = torch.Generator().manual_seed(2)
    x, y = (2.0**8.5 * (1 - 2 * torch.randint(0, 2, (200,), generator=generator)).double() for _ in range(2))
    x[17] = largest

    def check(session: Session, rows: Fixed, columns: Fixed) -> Fixed:
        scores = rows.matmul(columns, width=46)
        if scores.width != 46:
            raise ValueError(f"got width {scores.width}; want 46")
        watch_flat(scores, 18 + 23)
        found = verdict(session)
        if found is None:
            raise ValueError("nothing was watched")
        return found

    assert run_parties(config(protocol), check, [x[:, None], y[None]]).value.tolist() == [seen]


def test_entries_of_many_rows_side_by_side_are_no_row() -> None:
    """A sum of so many values that are in their range leaves it: chosen outputs are watched by their rows, and
    compared in pieces."""
    x = torch.full((1024, 256), 2.0**15)
    x[::3] *= -1

    def found(values: Tensor) -> list[float]:
        def check(session: Session, secret: Fixed) -> Fixed:
            def rows(part: Tensor) -> Tensor:
                return part.reshape(1024, 256)

            seen = []
            for how in (None, rows):
                linear_by(SecretTensor(secret), 0, lambda v, _: v.view(lambda part: part.reshape(-1)), None, how)
                seen.append(verdict(session))
            watch_compared(SecretTensor(secret.view(lambda part: part.reshape(-1))), 18 + 23, rows=True)
            seen.append(verdict(session))
            one, two, three = (each for each in seen if each is not None)
            return one.stack(two).stack(three.stack(three))

        return run_parties(config("plain"), check, [values]).value.flatten().tolist()[:3]

    assert found(x) == [1.0, 0.0, 0.0]
    x[700, 31] = 2.0**30
    assert found(x) == [1.0] * 3


def test_the_client_learns_one_bit_however_many_values_left() -> None:
    assert flag(config("trio"), [torch.full((40, 9), 3.0e6)], 18 + 8).tolist() == [1.0]


def test_no_pattern_leaves_an_entry_out() -> None:
    assert _signs(PIECE, 0, torch.int64, "cpu").unique().tolist() == [-1, 1]


@pytest.mark.parametrize("sizes", [(2.0**26, 1.0), (1.0, 2.0**26), (1.0, 1.0)])
def test_checks_that_are_put_off_are_made(sizes: tuple[float, float]) -> None:
    def check(session: Session, *secrets: Fixed) -> Fixed:
        for secret in secrets:
            watch_later(SecretTensor(secret))
        found = verdict(session)
        assert found is not None
        return found

    found = run_parties(config("plain"), check, [torch.full((2, 3), size) for size in sizes]).value
    assert found.tolist() == [float(max(sizes) > 1)]


def test_entries_that_cancel_are_seen_too() -> None:
    """Whatever the others are, one of the two signs of an entry shows: no fixed pair of entries hides for good."""
    seen = 0
    for place in range(1, 40):
        x = torch.zeros(1, 40, dtype=torch.float64)
        x[0, 0], x[0, place] = 5000.0, -5000.0
        seen += int(flag(config("plain"), [x], 18 + 8))
    assert seen >= 30  # each pair is missed with probability 1/16


def test_the_price_is_a_constant_number_of_rounds() -> None:
    def check(rows: int, tensors: int) -> Callable[..., Fixed]:
        def run(session: Session, x: Fixed) -> Fixed:
            for _ in range(tensors):
                watch(x, 30)
            found = verdict(session)
            assert found is not None
            return found

        return run

    few = run_meta(config("trio"), check(4, 1), [(4, 64)])
    many = run_meta(config("trio"), check(4, 100), [(4, 64)])
    assert 0 <= many.rounds - few.rounds <= 2  # the count of violations has some bits more
    assert many.total <= 100 * 4 * 2 * SKETCHES * 70
    assert many.rounds <= 12
    assert run_meta(config("trio by keys"), check(4, 100), [(4, 64)]).rounds == 2


def test_nothing_is_owed_without_the_guard_or_in_the_small_ring() -> None:
    def none(session: Session, x: Fixed) -> Fixed:
        watch(x)
        assert verdict(session) is None
        return x

    for settings in (config("trio", guard=False), config("trio", ring=32, frac_bits=10)):
        assert run_meta(settings, none, [(3, 4)]).total == 0


def test_require() -> None:
    require(torch.zeros(3))
    with pytest.raises(ValueError, match="a value left its range"):
        require(torch.tensor([0.0, 1.0]))


@PROTOCOLS
def test_each_row_of_a_batch_has_its_own_verdict(protocol: str) -> None:
    """Rows, short rows that share pieces, flat values of known lengths; what cannot be told apart counts for all."""
    x = torch.ones(3, 2, 5, dtype=torch.float64)

    def verdicts(bad: int | None, how: str) -> list[float]:
        values = x.clone()
        if bad is not None:
            values[bad, 1, 2] = 2.0**30

        def check(session: Session, secret: Fixed) -> Fixed:
            session.checks.batch = 3
            if how == "rows":
                watch(secret, 18 + 8)
            elif how == "pieces":
                watch(secret.view(lambda part: part.reshape(6, 5)))
            elif how == "flat":
                watch_flat(secret.view(lambda part: part.reshape(-1)[7:]), 18 + 12, (3, 10, 10))
            else:
                watch_flat(secret.view(lambda part: part.reshape(-1)), 18 + 12)
            found = verdict(session)
            assert found is not None
            return found

        return run_parties(config(protocol), check, [values]).value.tolist()

    for how in ("rows", "pieces", "flat"):
        for bad in (0, 1, 2):
            assert verdicts(bad, how) == [float(row == bad) for row in range(3)], how
    assert verdicts(None, "flat") == [0.0] * 3
    assert verdicts(1, "all") == [1.0] * 3
