"""Where bytes are adds up to what a run costs, and a shape's borrowed ranges are those that were measured, by depth."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from private_llm_hf.models import smollm2
from private_llm_hf.tools.cost_places import places_of_prompt, places_of_token
from private_llm_hf.tools.estimate import Estimate, estimate, named_shape
from private_llm_hf.tools.ranges_by_depth import ranges_by_depth

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.ranges import Ranges, layer_of
from tests.cli.test_cli import Run, rows
from tests.hf import tiny

ROOT = Path(__file__).resolve().parents[3]
BUNDLED = ROOT / "integrations" / "private_llm_hf" / "data" / "smollm2-ranges.json"


def small(new: int) -> Estimate:
    model = tiny.build("llama")
    return estimate(type(model), model.config, PrivateConfig(), 5, new)


def test_places_add_up_to_the_prompt_and_to_the_whole() -> None:
    found = small(4)
    assert found.prompt is not None
    prompt, token = places_of_prompt(found), places_of_token(found, 4)
    assert sum(place.bytes for place in prompt) == found.prompt.costs.bytes_total
    later = found.costs.bytes_total - found.prompt.costs.bytes_total
    assert 3 * sum(place.bytes for place in token) == pytest.approx(later, abs=3 * len(token))
    assert len({(place.module, place.operation) for place in token}) == len(token)
    assert token == sorted(token, key=lambda place: -place.bytes)
    sent: dict[tuple[str, str], int] = {}
    for ledger in found.prompt.costs.ledgers:
        for (scope, operation, _), count in ledger.sent.items():
            sent[layer_of(scope), operation] = sent.get((layer_of(scope), operation), 0) + count
    assert {(place.module, place.operation): place.bytes for place in prompt if place.bytes} == {
        place: count for place, count in sent.items() if count
    }


def test_one_forward_has_no_further_token() -> None:
    found = small(0)
    assert places_of_token(found, 0) == []
    assert sum(place.bytes for place in places_of_prompt(found)) == found.costs.bytes_total


def test_the_table_names_what_sent_most_first_and_sums_up_the_rest(run: Run) -> None:
    words = ("estimate", "opt-125m", "--seq", "4", "--new", "2", "--gmacs", "1")
    table = run(*words, "--operations")
    assert "where a further token's bytes are" in table
    assert "others" in table
    assert "100.0%" not in table
    found = rows(run, *words, "--operations")[0]["operations"]
    assert [place["bytes"] for place in found["token"]] == sorted((p["bytes"] for p in found["token"]), reverse=True)
    assert "operations" not in rows(run, *words)[0]


def measured() -> Ranges:
    return Ranges.from_json(BUNDLED.read_text("utf-8"))


def test_a_shape_takes_the_ranges_of_its_depth_wider_where_rows_are() -> None:
    found, source = named_shape("llama-7b"), measured().modules
    assert found is not None
    made = ranges_by_depth(*found).modules
    first, last = (f"model.layers.{number}.mlp.gate_proj" for number in (0, 31))
    assert made[first]["output"] == source[first]["output"] + 1
    assert made[last]["output"] == source["model.layers.29.mlp.gate_proj"]["output"] + 1
    assert made["model.layers.15.input_layernorm"] == {"square": 27, "gain": 0, "frac": 11}  # 27 + 12 + 2 * 11 <= 61
    assert {name for name in made if ".layers." not in name} == {"model.norm", "lm_head"}


def test_a_shape_of_another_layout_has_none() -> None:
    found = named_shape("opt-125m")
    assert found is not None
    with pytest.raises(ConfigError, match=r"OPTForCausalLM lacks .* want a shape of LLaMA's layout"):
        ranges_by_depth(*found)


@pytest.mark.real_model
def test_the_bundled_ranges_are_those_of_smollm2(run: Run, tmp_path: Path) -> None:
    lacking = smollm2.missing()
    if lacking is not None:
        pytest.skip(lacking)
    run("calibrate", str(smollm2.folder()), "--out", str(tmp_path / "ranges.json"))
    found = json.loads((tmp_path / "ranges.json").read_text("utf-8"))["modules"]
    assert found == measured().to_dict()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    return importlib.import_module("make_bytes")


def test_every_byte_of_a_model_is_of_one_kind(script: Any) -> None:
    prompt, token = script.Model("opt-125m", False).places()
    for places in (prompt, token):
        assert script.by_kind(places).total() == sum(place.bytes for place in places)


@pytest.mark.full
def test_the_page_has_what_the_estimator_counts(script: Any) -> None:
    assert f"<!-- bytes -->\n{script.table(script.MODELS)}\n<!-- /bytes -->" in script.PAGE.read_text("utf-8")
