"""tests/system/walk_gateway.py notices wrong answers of its clients; test_scripts_tiny.py runs the walk itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOSTS = ("127.0.1.12:7000", "127.0.1.13:7000", "127.0.1.14:7000")
RIGHT: dict[str, Any] = {
    "text": " the war", "whole": "The history of the war", "logprobs": [-1.0, -2.0, -0.5, -0.1],
    "vectors": [[1.0, 0.0], [0.6, 0.8]],
    "evaluation": {
        "scores": {
            "private_next_word": {"perplexity": 40.0, "acc": 0.5}, "private_which_word": {"acc": 1.0},
            "private_write_on": {"exact_match": 0.5},
        },
        "answers": {
            "private_next_word": [[[[-1.2, True]]], [[[-7.0, False]]]],
            "private_which_word": [[[[-1.2, True]], [[-3.0, False]]], [[[-1.0, True]], [[-2.0, False]]]],
            "private_write_on": [[["series , and"]], [["a"]]],
        },
    },
}  # fmt: skip
SEEN: dict[str, dict[str, Any]] = {
    "official_client": {
        "text": " the war", "pieces": 2, "whole": "The history of the war", "vectors": [[1.0, 0.0005], [0.6, 0.8]],
        "logprobs": [None, -1.001, -2.0, -0.5, -0.1], "refused": "404: want one of: demo",
    },
    "page": {
        "seen": [" a", " a quick", " a quick brown fox jumped"], "text": " a quick brown fox jumped over",
        "cost": ["2 tokens/s", "3 MB", "400", "1 s"], "spent": "3.0 s · stopped", "trouble": "", "complaints": [],
        "parties": [f"party {number} {host}" for number, host in enumerate(HOSTS)], "warned": True,
    },
    "evaluation": {
        "completions": RIGHT["evaluation"],
        "chats": {"answers": {"private_write_on": RIGHT["evaluation"]["answers"]["private_write_on"]}},
    },
}  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "system"))
    import walk_gateway

    return walk_gateway


@pytest.fixture
def judge(script: ModuleType, tmp_path: Path) -> Callable[[str, dict[str, Any]], list[str]]:
    def failures(client: str, seen: dict[str, Any]) -> list[str]:
        addresses = {f"party{number}": host.partition(":")[0] for number, host in enumerate(HOSTS)}
        network = sys.modules["walk_network"].Network("", addresses, ())
        walk = script.Gateways(tmp_path, network, sys.modules["walk_commands"].Commands())
        given = (walk, seen) if client == "page" else (walk, seen, RIGHT)
        getattr(script, f"judge_{client}")(*given)
        assert walk.passed + len(walk.failures) >= 5
        return [each.partition(": ")[2] for each in walk.failures]

    return failures


@pytest.mark.parametrize("client", SEEN)
def test_what_is_right_passes(judge: Callable[[str, dict[str, Any]], list[str]], client: str) -> None:
    assert judge(client, SEEN[client]) == []


@pytest.mark.parametrize(
    ("client", "path", "value", "step"),
    [
        ("official_client", "text", " the wax", "a streamed chat"),
        ("official_client", "pieces", 1, "a streamed chat"),
        ("official_client", "whole", "The history of the wax", "a completion"),
        ("official_client", "logprobs.2", -2.1, "log-probabilities"),
        ("official_client", "logprobs.0", -1.0, "log-probabilities"),
        ("official_client", "logprobs", [None, -1.0], "log-probabilities"),
        ("official_client", "logprobs", None, "log-probabilities"),
        ("official_client", "vectors.1.0", 0.61, "vectors"),
        ("official_client", "vectors", [[1.0, 0.0]], "vectors"),
        ("official_client", "refused", "", "a wrong model name"),
        ("page", "seen.1", " b quick", "an answer streams in"),
        ("page", "seen", [" a quick brown fox jumped"], "an answer streams in"),
        ("page", "cost.0", "–", "it tells what that costs"),
        ("page", "text", "", "stop ends it"),
        ("page", "trouble", "Party 1 stopped.", "stop ends it"),
        ("page", "parties.2", "party 2", "it names the three parties"),
        ("page", "warned", False, "it warns"),
        ("page", "complaints", ["Security Policy"], "no complaint"),
        ("evaluation", "completions.scores.private_next_word.perplexity", 41.0, "private_next_word perplexity"),
        ("evaluation", "completions.scores.private_which_word.acc", 0.5, "private_which_word acc"),
        ("evaluation", "completions.scores.private_write_on", {}, "private_write_on exact_match"),
        ("evaluation", "completions.answers.private_which_word.1.1.0.0", -2.2, "each likelihood"),
        ("evaluation", "completions.answers.private_next_word.0.0.0.1", False, "each likelihood"),
        ("evaluation", "completions.answers.private_write_on.1.0.0", "b", "texts by /v1/completions"),
        ("evaluation", "chats.answers.private_write_on.1.0.0", "b", "texts by /v1/chat/completions"),
    ],
)
def test_what_is_wrong_fails(
    judge: Callable[[str, dict[str, Any]], list[str]], client: str, path: str, value: object, step: str
) -> None:
    seen = json.loads(json.dumps(SEEN[client]))
    at: Any = seen
    *way, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    for key in way:
        at = at[key]
    at[last] = value
    (failed,) = judge(client, seen)
    assert failed.startswith(step)


def test_without_a_browser_the_page_is_skipped_with_a_reason(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    walk = script.Gateways(tmp_path, sys.modules["walk_network"].Network("", {}, ()), None)
    script.judge_page(walk, sys.modules["walk_users"].page({}))
    assert walk.passed == len(walk.failures) == 0
    assert "skipped the chat page: no Chromium" in capsys.readouterr().out


def test_questions_have_one_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "lm_eval_tasks"))
    import texts

    rows = texts.questions(version=1.0)["test"]
    assert len(rows) >= 15
    for row in rows:
        assert row["choices"][row["answer"]] == row["next"]
        assert len(set(row["choices"])) == 3
    assert {row["answer"] for row in rows} == {0, 1, 2}
