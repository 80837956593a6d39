"""`scripts/long_context/kv_budget.py`: the budget it names was measured, and other commands read its setting."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from long_context.kv_budget import commands, prompt_length, setting_of
from private_llm_cli.app import main
from private_llm_cli.kv_cache import kv_cache_of

from private_llm.config import PrivateConfig
from private_llm.kv_cache.policies import POLICIES
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import CachePolicy, Level

Run = Callable[..., str]
OTHER = MPCacheConfig(gamma=0.3, levels=(Level(8, 0.25), Level(2, 0.5)), every=9, observed=0.2, drop=False)

BUDGET = partial(main, commands)


@pytest.mark.parametrize("policy", [*(kind() for kind in POLICIES.values()), OTHER, MPCacheConfig(levels=())])
def test_a_setting_is_read_as_the_policy_that_it_names(policy: CachePolicy) -> None:
    assert PrivateConfig.from_dict(kv_cache_of(setting_of(policy))).kv_cache == policy


def test_the_budget_found_keeps_the_loss_that_was_asked_for(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("He was there when the show began, and she was not there. " * 60)
    asked = ("--text", str(text), "--prompt", "120", "--continuation", "16", "--count", "4")
    line = json.loads(run(*asked, "--loss", "0.2", "--json", begin=BUDGET))
    chosen = [row for row in line["tried"] if row["kv_cache"] == line["kv_cache"]]
    assert line["tokens"] == 60
    assert all(1 - row["agreement"] <= 0.2 for row in chosen)
    assert chosen or line["kv_cache"] == "keep-all"
    shown = run(*asked, "--loss", "0.2", begin=BUDGET)
    assert line["kv_cache"] in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--loss", "0.001"), "cannot show a loss"),
        (("--loss", "-1"), "want 0 or more"),
        (("--loss", "2"), "below 1"),
        (("--prompt", "509"), "want at most 512 together"),
        (("--count", "0"), "want 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(run: Run, options: tuple[str, str], message: str) -> None:
    small = ("--prompt", "100", "--continuation", "4", "--count", "2")
    said = run(*small, *options, code=2, begin=BUDGET)
    assert message in " ".join(said.split())


@pytest.mark.parametrize(
    ("wanted", "positions", "length"), [(None, None, 1024), (None, 2048, 1024), (None, 512, 480), (480, 512, 480)]
)
def test_a_prompt_leaves_room_to_go_on(wanted: int | None, positions: int | None, length: int) -> None:
    assert prompt_length(wanted, 32, positions) == length
