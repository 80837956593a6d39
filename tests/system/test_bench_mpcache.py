"""scripts/studies/bench_mpcache.py: rows beside a full cache, whole layers, pictures, and impossible options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_mpcache import app
from mpcache_rows import LENGTHS, MODELS, POLICIES, Case, cases
from typer.testing import CliRunner

from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import Level

SMALL = MPCacheConfig.paper(gamma=0.5, least=16, recent=3, levels=(Level(8, 0.5), Level(4, 0.5)))


def test_the_script_prints_rows_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "mpcache.png"
    options = ["--tiny", "--repeat", "1", "--json", "--protocol", "trio", "--plot", str(path)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    step, layer, alone = (json.loads(line) for line in result.stdout.splitlines())
    assert (step["kind"], layer["kind"], alone["kind"]) == ("step", "layer", "alone")
    assert 0 < alone["bytes"] < layer["full_bytes"]
    assert step["ratio_bytes"] == step["full_bytes"] / step["bytes"] > 1
    assert step["ratio_seconds"] == step["full_seconds"]["median"] / step["seconds"]["median"]
    assert step["full_held_bytes"] == 2 * step["held_bytes"]
    assert path.stat().st_size > 0


def test_a_whole_layer_is_its_attention_and_more() -> None:
    """What a policy saves of a layer's token is what it saves of the attention part."""
    layer = Case("layer", "", "llama-2", "trio", 64, SMALL, tiny=True).run(1)
    part = Case("step", "", "llama-2", "trio", 64, SMALL, tiny=True).run(1)
    assert layer["full_bytes"] > part["full_bytes"]
    first, full = (sum(part[ops].values()) for ops in ("ops", "full_ops"))
    assert layer["full_bytes"] - layer["bytes"] == pytest.approx(full - first, rel=0.03)
    assert layer["prompt_bytes"] - layer["full_prompt_bytes"] == pytest.approx(part["evicting_bytes"], rel=0.1)
    assert layer["prefill_overhead"] == layer["prompt_bytes"] / layer["full_prompt_bytes"] - 1


def test_every_model_length_and_policy_has_a_row() -> None:
    made = list(cases())
    steps = {(case.model, case.tokens, case.label) for case in made if case.kind == "step" and case.protocol == "trio"}
    assert steps == {(model, tokens, label) for model in MODELS for tokens in LENGTHS for label in POLICIES}
    assert {case.kind for case in made} == {"step", "ablation", "hierarchy", "gather", "memory", "layer", "alone"}
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--bandwidth", "0"], "a positive bandwidth"), (["--repeat", "0"], "at least 1"),
     (["--protocol", "plain"], "one of trio, dealer, quad"), (["--plot", "x.txt"], "a name that ends in")],
)  # fmt: skip
def test_impossible_options_raise(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, options)
    assert result.exit_code != 0
    assert says in str(result.exception or result.output)
