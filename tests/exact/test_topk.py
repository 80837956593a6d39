"""Which entries are among the k largest: exact on ties and extremes; every pair is compared once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.exact.ranks import Groups, among_largest, among_largest_of_groups
from tests.harness import PLAIN, TRIO, run_meta, run_parties

every = pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])


def chosen(x: Tensor, k: int) -> Tensor:
    """Stable: of equal entries the first."""
    order = x.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return torch.zeros(x.shape, dtype=torch.int64).scatter_(-1, order, 1)


@every
@pytest.mark.parametrize(("width", "k"), [(1, 1), (2, 1), (3, 2), (8, 2), (8, 8), (9, 1), (17, 5), (64, 8)])
def test_zeros_and_ones_are_exact(config: PrivateConfig, width: int, k: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-3, 4, (2, 5, width), generator=generator).double()  # ties abound
    x[0, 0], x[1, 0], x[0, 1] = 2.0**20 - 1, -(2.0**20) + 1, torch.arange(width).double() * 2.0**-18
    found = run_parties(config, lambda _, a: among_largest(a, k), [x])
    assert torch.equal(found.elements[0].view(x.shape).long(), chosen(x, k))


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_beyond_the_row_is_refused(k: int) -> None:
    with pytest.raises(DomainError, match=f"got k={k}; want 1 to 4"):
        run_meta(TRIO, lambda _, a: among_largest(a, k), [(3, 4)])


def test_the_cost_is_that_of_all_pairs_and_does_not_depend_on_k() -> None:
    few, many = (run_meta(TRIO, lambda _, a, k=k: among_largest(a, k), [(128, 16)]) for k in (1, 8))
    assert few == many
    narrow = run_meta(TRIO, lambda _, a: among_largest(a, 2), [(128, 8)])
    assert (few.rounds, few.total) == (8, 128 * 3600)
    assert (narrow.rounds, narrow.total) == (7, 128 * 933.5)


def test_nothing_is_sent_where_all_are_chosen() -> None:
    assert run_meta(TRIO, lambda _, a: among_largest(a, 4), [(3, 4)]).total == 0


# -- the best groups only ---------------------------------------------------------------------------------------------
def chosen_of_groups(x: Tensor, k: int, groups: Groups) -> Tensor:
    parts = x.unflatten(-1, (groups.count, -1))
    sums = parts.sort(dim=-1, descending=True)[0][..., : groups.best].sum(-1)
    kept = chosen(sums, groups.kept).bool().unsqueeze(-1)
    return chosen(parts.masked_fill(~kept, -(2.0**40)).flatten(-2), k)


@every
@pytest.mark.parametrize(
    ("width", "k", "groups"),
    [(8, 2, Groups(4, 2, 2)), (8, 3, Groups(4, 2, 1)), (12, 4, Groups(3, 1, 2)), (12, 5, Groups(3, 2, 4)),
     (16, 1, Groups(2, 1, 1)), (6, 2, Groups(6, 3, 1)), (8, 2, Groups(2, 2, 1)), (8, 4, Groups(2, 1, 3))],
)  # fmt: skip
def test_only_the_best_groups_are_chosen_from(config: PrivateConfig, width: int, k: int, groups: Groups) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-3, 4, (3, 7, width), generator=generator).double()
    x[0, 0], x[1, 0] = -(2.0**17), torch.arange(width).double() * 2.0**-18
    found = run_parties(config, lambda _, a: among_largest_of_groups(a, k, groups), [x])
    assert torch.equal(found.elements[0].view(x.shape).long(), chosen_of_groups(x, k, groups))


@pytest.mark.parametrize(
    ("k", "groups", "message"),
    [(2, Groups(3, 1, 1), "equal size"), (2, Groups(4, 5, 1), "equal size"), (2, Groups(4, 2, 3), "equal size"),
     (5, Groups(4, 2, 2), "got k=5; want 1 to 4"), (0, Groups(4, 2, 2), "got k=0; want 1 to 4")],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused(k: int, groups: Groups, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        run_meta(TRIO, lambda _, a: among_largest_of_groups(a, k, groups), [(3, 8)])


def test_groups_add_little_to_the_pairs() -> None:
    plain = run_meta(TRIO, lambda _, a: among_largest(a, 8), [(1, 64)])
    grouped = run_meta(TRIO, lambda _, a: among_largest_of_groups(a, 8, Groups(8, 4, 2)), [(1, 64)])
    assert grouped.total < 1.15 * plain.total
    assert grouped.rounds > plain.rounds
