"""What stands for a cluster's keys: against loops, for every kind, level and protocol."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.kv_cache.clusters import representatives
from private_llm.kv_cache.policies.policy import Level, Selection
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.range_check import verdict
from tests.harness import run_meta, run_parties
from tests.kv_cache import slow_choices
from tests.tensor.secrets import noise

every = pytest.mark.parametrize("protocol", protocol_names())
ROUNDING = 2.0**-15
"""Products and means: a few units of 2^-18."""
EXTREME = 5 * 2.0**-10 + ROUNDING
"""An entry up to 2^-10 short wins each of at most 5 rounds."""
UNIT = 5e-3
"""The reciprocal root, and 2^-6 that is added to squares of 4 and more."""


def config(protocol: str) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "insecure": protocol == "plain"})


def made(protocol: str, selection: Selection, keys: Tensor, mass: Tensor | None = None) -> list[Tensor]:
    def program(session: Session, k: Fixed, *m: Fixed) -> list[Fixed]:
        return representatives(k, selection, m[0] if m else None)

    return run_parties(config(protocol), program, [keys] if mass is None else [keys, mass]).values


def check(got: list[Tensor], selection: Selection, keys: Tensor, mass: Tensor | None, error: float) -> None:
    for mine, level in zip(got, selection.levels, strict=True):
        want = slow_choices.clusters(keys, selection, level.size, mass)
        assert mine.shape == want.shape
        assert (mine - want).abs().max() <= error


@every
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (5,), (7, 1), (8, 4, 2), (12, 6, 3), (9, 3, 1), (16,)])
def test_extremes(protocol: str, sizes: tuple[int, ...]) -> None:
    """Odd sizes have a bye; those of larger clusters come from those of smaller ones."""
    selection = Selection(tuple(Level(size, 0.5) for size in sizes), "extremes", 0.6)
    keys = noise(2, 2, 2 * sizes[0], 3, seed=sizes[0], scale=20)
    check(made(protocol, selection, keys), selection, keys, None, EXTREME)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 0.5, 1 / 3])
def test_weights_of_extremes(alpha: float) -> None:
    selection = Selection((Level(6, 0.5), Level(3, 0.5)), "extremes", alpha)
    keys = noise(1, 2, 12, 5, scale=300)
    check(made("plain", selection, keys), selection, keys, None, 0.01)


@every
@pytest.mark.parametrize("value", [0.0, -1.0, 2.0**17, -(2.0**17)])
def test_equal_keys_stand_for_themselves(protocol: str, value: float) -> None:
    selection = Selection((Level(4, 0.5), Level(2, 0.5)), "extremes", 0.6)
    keys = torch.full((1, 1, 8, 2), value, dtype=torch.float64)
    check(made(protocol, selection, keys), selection, keys, None, ROUNDING)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_extremes_of_large_keys_of_both_signs(alpha: float) -> None:
    """Of the last four columns winners of a first round are as far apart as keys can be."""
    selection = Selection((Level(5, 0.5),), "extremes", alpha)
    keys = noise(1, 1, 10, 8, scale=2.0**16).clamp(-(2.0**18), 2.0**18)
    keys[:, :, ::2, 4:], keys[:, :, 1::2, 4:] = 1 - 2.0**20, 2.0**20 - 1
    check(made("trio", selection, keys), selection, keys, None, EXTREME)


@every
@pytest.mark.parametrize("sizes", [(3,), (8, 4, 1)])
@pytest.mark.parametrize(("represent", "error"), [("mean", ROUNDING), ("unit", UNIT)])
def test_means_and_directions(protocol: str, represent: str, error: float, sizes: tuple[int, ...]) -> None:
    selection = Selection(tuple(Level(size, 0.5) for size in sizes), represent)  # type: ignore[arg-type]
    keys = noise(2, 1, 2 * sizes[0], 6, seed=1, scale=4)
    check(made(protocol, selection, keys), selection, keys, None, error)


def test_the_direction_of_nothing_is_nothing() -> None:
    """Keys of padding may be zero."""
    (got,) = made("trio", Selection((Level(2, 0.5),), "unit"), torch.zeros(1, 1, 4, 3, dtype=torch.float64))
    assert got.abs().max() <= ROUNDING


@pytest.mark.parametrize(("norm", "wrong"), [(1.0, 0), (1400.0, 0), (2900.0, 1), (8000.0, 1), (1e6, 1)])
def test_a_norm_beyond_the_root_is_told(norm: float, wrong: int) -> None:
    """Up to 2^11.4 on the average of some entries the direction is right; a larger norm ends the call."""
    keys = torch.nn.functional.normalize(noise(1, 1, 4, 16, seed=3), dim=-1)
    keys[:, :, 1] *= norm

    def program(session: Session, k: Fixed) -> list[Fixed]:
        (made,), found = representatives(k, Selection((Level(1, 0.5),), "unit"), None), verdict(session)
        return [made, *([] if found is None else [found])]

    got, told = run_parties(config("trio"), program, [keys]).values
    assert int(told) == wrong
    assert wrong or (got - torch.nn.functional.normalize(keys, dim=-1)).abs().max() <= UNIT + 0.02


@every
@pytest.mark.parametrize(("size", "heavy"), [(4, 2), (5, 1), (3, 3), (2, 4), (1, 1)])
def test_heavy_keys(protocol: str, size: int, heavy: int) -> None:
    selection = Selection((Level(size, 0.5),), "heavy", heavy=heavy)
    keys, mass = noise(2, 2, 3 * size, 4, scale=4), noise(2, 2, 3 * size, seed=1).abs()
    check(made(protocol, selection, keys, mass), selection, keys, mass, ROUNDING)
    none = torch.zeros_like(mass)
    check(made(protocol, selection, keys), selection, keys, none, ROUNDING)
    check(made(protocol, selection, keys, none), selection, keys, none, ROUNDING)  # of equal ones the first


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("represent", ["extremes", "mean", "heavy", "unit"])
def test_shapes_alone_say_what_is_sent(protocol: str, represent: str) -> None:
    selection = Selection((Level(6, 0.5),), represent, heavy=2)  # type: ignore[arg-type]
    inputs = [noise(2, 2, 12, 3), noise(2, 2, 12, seed=1).abs()]

    def program(session: Session, k: Fixed, m: Fixed) -> list[Fixed]:
        return representatives(k, selection, m)

    cost = run_parties(config(protocol), program, inputs).cost
    assert run_meta(config(protocol), program, [x.shape for x in inputs]) == cost
    other = [-7 * x for x in inputs[:1]] + [torch.zeros_like(inputs[1])]
    assert run_parties(config(protocol), program, other).cost == cost
