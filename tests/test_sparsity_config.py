from __future__ import annotations

from typing import Any

import pytest

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.sparsity_config import CometConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"orders": "old"}, "orders: got 'old'; want one of 'fresh', 'kept'"),
        ({"levels": 1}, "levels: got 1"),
        ({"neurons": 1}, "neurons: got 1; want True or False"),
        ({"neurons": False, "heads": False}, "neither neurons nor heads"),
        ({"neuron_budget": 0.0}, "want a share above 0 and at most 1"),
        ({"neuron_budget": 1.5}, "want a share above 0 and at most 1"),
        ({"head_budget": float("nan")}, "head_budget: got nan; want a finite number or None"),
        ({"head_budget": True}, "head_budget: got True; want a finite number or None"),
        ({"head_budget": 0.5, "levels": "open", "orders": "kept"}, "leave the budget out"),
        ({"levels": "open"}, "levels='open' goes with orders='kept'; got 'fresh'"),
        ({"levels": "noisy", "orders": "kept"}, "levels='noisy' goes with orders='fresh'"),
        ({"levels": "noisy", "epsilon": 0}, "epsilon: got 0"),
        ({"delta": float("nan")}, "delta: got nan"),
        ({"positions": 0, "orders": "kept"}, "positions: got 0"),
        ({"positions": 5}, "want orders='kept'"),
        ({"predictors": 3}, "predictors: got 3; want a text or None"),
        ({"predictor": "x"}, "predictor"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CometConfig.from_dict(values)


def test_it_survives_json_and_parties_agree_on_all_but_the_folder() -> None:
    config = PrivateConfig(sparsity=CometConfig("a", orders="kept", neuron_budget=0.5))
    assert PrivateConfig.from_dict(config.to_dict()) == config
    for other, same in (
        (CometConfig("b", orders="kept"), True),
        (CometConfig("a", orders="fresh", neuron_budget=0.5), False),
        (CometConfig("a", orders="kept", levels="open"), False),
        (CometConfig("a", orders="kept", positions=512), True),
        (None, False),
    ):
        assert (PrivateConfig(sparsity=other).agreement() == config.agreement()) is same


def test_other_settings_that_exclude_it_are_named() -> None:
    with pytest.raises(ConfigError, match="want CometConfig"):
        PrivateConfig(sparsity="folder")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sharding plan"):
        PrivateConfig(protocol="cascade", sparsity=CometConfig("a"))
