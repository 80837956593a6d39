from __future__ import annotations

import math

import pytest
from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig

from private_llm.errors import ConfigError


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 0}, {"rank": 2.0}, {"rank": True}, {"block": 0}, {"threshold": math.nan}, {"threshold": math.inf},
        {"threshold": "0"}, {"kind": "neurons"}, {"hidden": "gelu"}, {"target_recall": 0.0}, {"target_recall": 1.0},
        {"budget": 0.0}, {"budget": 1.5}, {"budget": math.nan}, {"tolerance": 0.0}, {"tolerance": 1.0},
        {"kind": "heads", "block": 2},
    ],
    ids=str,
)  # fmt: skip
def test_bad_predictor_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(reversed(bad))}: got"):
        PredictorConfig(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"epochs": -1}, {"batch": 0}, {"patience": 0}, {"seed": -1}, {"rate": 0.0}, {"rate": math.nan},
        {"decay": -0.1}, {"validation": 0.0}, {"validation": 1.0}, {"most_rows": 1},
    ],
    ids=str,
)  # fmt: skip
def test_bad_training_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}: got"):
        TrainingConfig(**bad)


def test_settings_survive_json_and_unknown_keys_do_not() -> None:
    made = PredictorConfig(rank=7, threshold=-0.5, block=4, budget=1.0)
    assert PredictorConfig.from_dict(made.to_dict()) == made
    with pytest.raises(ConfigError, match=r"unknown key.*ranks"):
        PredictorConfig.from_dict({"ranks": 3})
    assert TrainingConfig.from_dict({"decay": 0.0, "epochs": 0}) == TrainingConfig(decay=0.0, epochs=0)
