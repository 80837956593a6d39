"""Other systems' GELU and softmax: how a plug-in brings them, what is refused, and what a model computes then."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from private_llm import approximations
from private_llm.approx.activations import gelu
from private_llm.approx.softmax import softmax, softmax_ragged
from private_llm.approximations import Approximations, emulated, register_approximations, warn_of_functions
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, NeedsDistillation
from private_llm.exact.ragged_rows import Rows
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.tensor.fixed import Fixed
from private_llm.token_sharding import ShardingPlan
from tests.harness import PLAIN, run_parties


def _twice(x: Fixed, *_: object) -> Fixed:
    return x + x


TOY = Approximations("toy", _twice, _twice, _twice, lambda _: nullcontext(), distilled="softmax", squares=True)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximations, "_TABLE", {})
    register_approximations(TOY)


def test_gelu_and_softmax_are_those_that_a_run_names() -> None:
    config, x = replace(PLAIN, approximations="toy"), torch.randn(15, dtype=torch.float64)
    for function in (gelu, softmax, lambda a: softmax_ragged(a, Rows((5,) * 3))):
        value = run_parties(config, lambda _, a, f=function: f(a), [x]).value
        assert float((value - 2 * x).abs().max()) <= 2.0**-16
    assert config.agreement() != PLAIN.agreement()


def test_a_name_that_no_plug_in_registered_tells_where_it_is() -> None:
    where = r"got 'puma'; want one of 'ours', 'toy', or .*scripts/studies/rivals.*private-llm --plugin rivals"
    with pytest.raises(ConfigError, match=where):
        PrivateConfig(approximations="puma")
    for name in ("ours", "toy"):
        with pytest.raises(ConfigError, match="registered already"):
            register_approximations(replace(TOY, name=name))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="32-bit ring"):
        PrivateConfig(ring=32, frac_bits=12, approximations="toy")
    with pytest.raises(ConfigError, match="in the clear"):
        PrivateConfig(protocol="cascade", approximations="toy")
    with pytest.raises(ConfigError, match="in the clear"):
        PrivateConfig(split=1, plan=ShardingPlan(8, 8, 2), weights="public", approximations="toy")
    with pytest.raises(ConfigError, match="softmax squares scores"):
        PrivateConfig(approximations="toy", kv_cache=MPCacheConfig(drop=False))


def test_what_a_user_is_told() -> None:
    told = "Model: approximations='toy' computes other functions instead of softmax"
    with pytest.warns(NeedsDistillation, match=told):
        warn_of_functions("Model", "toy")
    warn_of_functions("Model", "ours")
    with emulated("ours"), emulated("toy"):
        pass
