"""A short product says how many of its bits are right, and what needs the whole ring refuses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from private_llm.approx.gelu import gelu
from private_llm.approx.silu import silu
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.exact.comparisons import coarse_bits
from private_llm.exact.maximum import concatenated
from private_llm.exact.ragged_rows import Rows
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor

SESSION = meta_session(PrivateConfig(), 1)


def held(*shape: int) -> Fixed:
    return Fixed(SESSION, Share(tuple(torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))), 18)


def short() -> Fixed:
    return held(4, 4).matmul(held(4, 4), short=True)


REFUSED: dict[str, Callable[[Fixed], object]] = {
    "a product": lambda x: x.mul(held(4, 4)), "a product from the right": lambda x: held(4, 4).mul(x),
    "a matrix product": lambda x: x.matmul(held(4, 4)), "its right operand": lambda x: held(4, 4).matmul(x, short=True),
    "a constant": lambda x: x.scale(0.3), "a polynomial": lambda x: x.poly([1.0, 2.0, 3.0]),
    "a truncation": lambda x: x.at(10), "a long comparison": lambda x: x.below([0.0], bits=47),
    "a comparison of all bits": lambda x: x.below([0.0]), "a tensor of a model": SecretTensor,
    "a choice with fractional weights": lambda x: x.choose(held(4, 4).below([0.0]), [0.5], [0.0], weight_bits=4),
    "a sum with a whole one": lambda x: (held(4, 4) + x).mul(x),
    "a row of both": lambda x: concatenated([held(4, 4), x], -1).mul(held(4, 8)),
    "one entry more a row": lambda x: _appended(x).at(3),
    "SiLU": silu, "GELU": gelu,
    "a stack": lambda x: held(4, 4).stack(x).at(3),
}  # fmt: skip


def _appended(x: Fixed) -> Fixed:
    flat, rows = x.view(lambda part: part.reshape(-1)), Rows((16,))
    return rows.append(held(16), flat.view(lambda part: part[:1]))


@pytest.mark.parametrize("step", REFUSED)
def test_what_needs_the_whole_ring_refuses_a_short_product(step: str) -> None:
    with pytest.raises(DomainError, match="lowest 46 bits"):
        REFUSED[step](short())
    REFUSED[step](held(4, 4))


def test_its_width_goes_along_with_what_is_made_of_it() -> None:
    x = short()
    assert x.width == 46
    assert (x + 1.0).width == (held(4, 4) - x).width == x.scale_int(3).width == 46
    assert x.view(torch.t).sum(0).width == 46
    assert x.finer(28).width == 56
    assert x.finer(36).width is None, "what is right in its lowest bits is whole once these are the highest"
    assert held(4, 4).matmul(held(4, 4), frac=36, short=True).width is None
    assert coarse_bits(x, [0.0], extra=1).count == 16
