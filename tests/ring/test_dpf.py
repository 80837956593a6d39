"""Two keys expand to shares of a one-hot row; one key alone is uniform and of public length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from private_llm.errors import DomainError
from private_llm.kernels.prg import aes
from private_llm.ring import dpf
from private_llm.ring.prg import Seed
from private_llm.ring.ring import RING32, RING64, Ring


@pytest.mark.parametrize("ring", [RING64, RING32])
@pytest.mark.parametrize("domain", [1, 2, 3, 5, 64, 129, 1000, 1024, 1025, 3073])
def test_shares_sum_to_the_one_hot_row(ring: Ring, domain: int) -> None:
    indices = torch.arange(domain) if domain < 200 else torch.tensor([0, 1, 511, 512, domain - 1])
    keys = dpf.make_keys(indices, domain, Seed.fresh().stream("t"))
    first, second = dpf.expand(keys, domain, (0, 1), ring)
    total = first + second
    assert torch.equal(total, torch.nn.functional.one_hot(indices, domain).to(ring.dtype))


@pytest.mark.parametrize("ring", [RING64, RING32])
@pytest.mark.parametrize("domain", [1, 3, 129, 3073])
def test_processors_without_aes_make_the_same(ring: Ring, domain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = dpf.make_keys(torch.tensor([0, domain // 2, domain - 1]), domain, Seed.fresh().stream("t"))
    made = dpf.expand(keys, domain, (0, 1), ring)
    monkeypatch.setattr(aes, "usable", lambda: False)
    for fast, slow in zip(made, dpf.expand(keys, domain, (0, 1), ring), strict=True):
        assert torch.equal(fast, slow)


def test_a_vocabulary_costs_280_bytes_a_key() -> None:
    keys = dpf.make_keys(torch.tensor([50256, 0]), 50257, Seed.fresh().stream("t"))
    assert keys[0].shape == (2, 35)
    first, second = dpf.expand(keys, 50257, (0, 1), RING64)
    total = first + second
    assert total.nonzero().tolist() == [[0, 50256], [1, 0]]


def test_one_key_and_its_expansion_look_uniform() -> None:
    """Chi-square of bytes, 255 degrees of freedom, p = 1e-9, for a constant index."""
    keys = dpf.make_keys(torch.full((64,), 7), 1024, Seed.fresh().stream("t"))
    for share in dpf.expand(keys, 1024, (0, 1), RING64):
        counts = np.bincount(np.frombuffer(share.numpy().tobytes(), np.uint8), minlength=256)
        expected = share.numel() * 8 / 256
        assert ((counts - expected) ** 2 / expected).sum() < 378


def test_keys_of_one_index_differ_each_time() -> None:
    prg = Seed.fresh().stream("t")
    first, second = (dpf.make_keys(torch.tensor([3]), 100, prg)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("index", [-1, 100])
def test_indices_outside_the_domain_are_refused_without_naming_them(index: int) -> None:
    with pytest.raises(DomainError, match=r"outside 0 \.\. 99") as error:
        dpf.make_keys(torch.tensor([3, index]), 100, Seed.fresh().stream("t"))
    assert str(index) not in str(error.value).replace("0 .. 99", "")
