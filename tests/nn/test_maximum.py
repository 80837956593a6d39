"""Maxima, their indices, and batch norms by running statistics: rules on secret tensors, in both rings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import private_llm.nn  # noqa: F401 - registers the rules
from private_llm.errors import UnsupportedOp
from private_llm.protocols.session import Session
from tests.tensor.secrets import noise, opened, plain_session, secret

SESSIONS = [plain_session(), plain_session(ring=32, frac_bits=11)]
both = pytest.mark.parametrize("session", SESSIONS, ids=["64", "32"])


def _same(got: Tensor, want: Tensor) -> None:
    assert torch.equal(opened(got), want.double())


@both
def test_maxima_and_their_places_are_exact(session: Session) -> None:
    x = noise(3, 5, 7, scale=4.0)
    x[0, 0, 2] = x[0, 0, 5] = 40.0  # the first of equals wins
    s = secret(session, x)
    for dim in (0, 1, -1):
        for keep in (False, True):
            _same(s.argmax(dim, keepdim=keep), x.argmax(dim, keepdim=keep))
            _same(torch.amax(s, dim, keep), x.amax(dim, keep))
            found, want = torch.max(s, dim, keepdim=keep), x.max(dim, keepdim=keep)
            _same(found.values, want.values)
            _same(found.indices, want.indices)
    _same(torch.argmax(s), x.argmax())
    _same(torch.argmax(s, keepdim=True), x.argmax(keepdim=True))
    _same(s.max(), x.max())


def test_what_has_no_rule() -> None:
    s = secret(SESSIONS[0], noise(3, 4))
    with pytest.raises(UnsupportedOp, match="two tensors"):
        torch.max(s, s)
    with pytest.raises(UnsupportedOp, match="dimensions"):
        s.amax((0, 1))


@both
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (4, 3), (2, 3, 6)])
@pytest.mark.parametrize("hidden", ["none", "affine", "all"])
def test_batch_norm(session: Session, shape: tuple[int, ...], hidden: str) -> None:
    """Factor and shift are off by half a unit (public) or two (secret), the product by one."""
    x, mean = noise(*shape), noise(3, seed=1)
    var, weight, bias = noise(3, seed=2).abs() + 0.5, noise(3, seed=3), noise(3, seed=4)
    want = F.batch_norm(x, mean, var, weight, bias)
    w, b = (weight, bias) if hidden == "none" else (secret(session, weight), secret(session, bias))
    m = secret(session, mean) if hidden == "all" else mean
    got = F.batch_norm(secret(session, x), m, var, w, b)
    unit = 2.0**-session.frac
    bound = (2 * x.abs().max() + 2 * mean.abs().max() + 4) * unit
    assert (opened(got.to_fixed()) - want).abs().max() <= bound  # type: ignore[attr-defined]
    assert not torch.equal(want, F.batch_norm(x, mean, var))
    plain = F.batch_norm(secret(session, x), mean, var)
    assert (opened(plain.to_fixed()) - F.batch_norm(x, mean, var)).abs().max() <= bound  # type: ignore[attr-defined]


def test_batch_norm_needs_public_running_statistics() -> None:
    x, ones = secret(SESSIONS[0], noise(2, 3)), torch.ones(3)
    with pytest.raises(UnsupportedOp, match=r"model.eval\(\)"):
        F.batch_norm(x, ones, ones, training=True)
    with pytest.raises(UnsupportedOp, match=r"model.eval\(\)"):
        F.batch_norm(x, None, None)
    with pytest.raises(UnsupportedOp, match="secret variance; fold"):
        F.batch_norm(x, ones, secret(SESSIONS[0], ones.double()))
