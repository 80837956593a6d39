"""`topk`, `sort` and their kind on secret tensors: what PyTorch's stable sort gives, in both rings and directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import private_llm.nn  # noqa: F401 - registers the rules
from private_llm.errors import DomainError
from private_llm.protocols.session import Session
from tests.tensor.secrets import noise, opened, plain_session, secret

SESSIONS = [plain_session(), plain_session(ring=32, frac_bits=11), plain_session(debug_ranges=True)]
every = pytest.mark.parametrize("session", SESSIONS, ids=["64", "32", "debug"])


def ties(*shape: int) -> Tensor:
    """Few different values, so that a sort that is not stable shows."""
    return (noise(*shape, scale=3.0) / 4).round()


def _same(got: Tensor, want: Tensor) -> None:
    assert torch.equal(opened(got), want.double())


@every
@pytest.mark.parametrize("largest", [True, False])
def test_topk_takes_the_first_of_equals(session: Session, largest: bool) -> None:
    x = ties(3, 5, 7)
    s = secret(session, x)
    for dim in (0, 1, 2, -1, -3):
        for k in range(1, x.shape[dim] + 1):
            true = torch.sort(x, dim=dim, descending=largest, stable=True)
            for top in (s.topk(k, dim=dim, largest=largest), torch.topk(s, k, dim, largest, sorted=False)):
                _same(top.values, true.values.narrow(dim, 0, k))
                _same(top.indices, true.indices.narrow(dim, 0, k))


@every
@pytest.mark.parametrize("descending", [True, False])
def test_sort_is_stable(session: Session, descending: bool) -> None:
    for x in (ties(3, 5, 7), noise(2, 70), torch.zeros(6).double(), noise(4, 1), torch.arange(9).double()):
        s = secret(session, x)
        for dim in range(-x.ndim, x.ndim):
            true = torch.sort(x, dim=dim, descending=descending, stable=True)
            for found in (torch.sort(s, dim, descending), s.sort(stable=True, dim=dim, descending=descending)):
                _same(found.values, true.values)
                _same(found.indices, true.indices)
            _same(s.argsort(dim, descending), true.indices)
            _same(torch.argsort(s, dim=dim, descending=descending, stable=True), true.indices)
    _same(torch.msort(secret(session, ties(4, 3))), torch.msort(ties(4, 3)))


def test_the_ends_of_the_range_are_sorted() -> None:
    x = torch.tensor([2.0**20 - 1, -(2.0**20) + 1, 0.0, 2.0**20 - 1, -(2.0**-18), 2.0**-18]).double()
    for session in (SESSIONS[0], SESSIONS[2]):
        found = secret(session, x).sort()
        _same(found.values, x.sort().values)
        _same(found.indices, torch.tensor([1, 4, 2, 5, 0, 3]))


def test_what_cannot_be_sorted_is_refused() -> None:
    s = secret(SESSIONS[0], noise(3, 4))
    for k in (0, 5, -1):
        with pytest.raises(DomainError, match=rf"topk: got k={k} over dimension 1; want 1 to 4, .* \(3, 4\)"):
            s.topk(k, dim=1)
    with pytest.raises(DomainError, match="without dimensions"):
        s.sum().sort()
    with pytest.raises(DomainError, match="want 1 to 0"):
        secret(SESSIONS[0], torch.zeros(2, 0)).sort()
    with pytest.raises(IndexError):
        s.sort(dim=2)
