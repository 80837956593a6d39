"""LongBench from a folder, an archive or the hub: prompts, scores, and what is said when the data are missing."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pytest
from longbench import DATASETS, BenchPrompt, load_longbench, score, without_middle
from private_llm_hf.tools.texts import token_ids

from private_llm.errors import ConfigError
from tests.long_context.tokenizers_of_kinds import TEMPLATE, bare, demo

ROWS = [
    {"input": "Who wrote it?", "context": "A book. " * 100, "answers": ["Ann", "Ann Lee"], "all_classes": None},
    {"input": "When?", "context": "In May.", "answers": ["May"], "all_classes": None},
]
NAMES = (
    "hotpotqa 2wikimqa musique narrativeqa qasper multifieldqa_en triviaqa trec samsum gov_report passage_retrieval_en"
)
NEW_TOKENS = (32, 32, 32, 128, 128, 64, 32, 64, 128, 512, 32)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", str(tmp_path / "extracted"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "bench"
    made.mkdir()
    (made / "hotpotqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return made


def test_datasets_are_those_of_the_benchmark() -> None:
    assert list(DATASETS) == NAMES.split()
    assert tuple(kind.new_tokens for kind in DATASETS.values()) == NEW_TOKENS
    assert {name for name, kind in DATASETS.items() if not kind.chat} == {"triviaqa", "trec", "samsum"}
    for name, kind in DATASETS.items():
        text = kind.template.format(context="<context>", input="<input>")
        assert text.count("<context>") == 1
        assert text.count("<input>") == (name != "gov_report")


def test_a_folder_gives_prompts(folder: Path) -> None:
    first, second = load_longbench("hotpotqa", bare(), 4000, folder)
    text = bare().decode(second.ids)
    assert text.endswith("\n\nIn May.\n\n" + text.split("\n\n")[0] + "\n\nQuestion: When?\nAnswer:")
    assert second == BenchPrompt(token_ids(bare(), text), ("May",), (), "hotpotqa", len(text))
    assert first.answers == ("Ann", "Ann Lee")
    assert [prompt.answers for prompt in load_longbench("hotpotqa", bare(), 4000, folder, count=1)] == [first.answers]


def test_an_archive_gives_the_same(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.write(folder / "hotpotqa.jsonl", "data/hotpotqa.jsonl")
    assert load_longbench("hotpotqa", bare(), 300, archive) == load_longbench("hotpotqa", bare(), 300, folder)
    with pytest.raises(ConfigError, match=r"data.zip gave no musique.jsonl \(not there\); download https://"):
        load_longbench("musique", bare(), 300, archive)


def test_a_long_prompt_loses_its_middle(folder: Path) -> None:
    assert without_middle(tuple(range(9)), 5) == (0, 1, 6, 7, 8)
    assert without_middle(tuple(range(5)), 5) == (0, 1, 2, 3, 4)
    whole, cut = (load_longbench("hotpotqa", demo(TEMPLATE), length, folder, 1)[0] for length in (4000, 101))
    assert len(cut.ids) == 101
    assert cut.tokens == whole.tokens == len(whole.ids) > 101
    before, after = 0, 0
    while cut.ids[: before + 1] == whole.ids[: before + 1]:
        before += 1
    while cut.ids[-after - 1 :] == whole.ids[-after - 1 :]:
        after += 1
    assert before + after >= 101
    assert demo().decode(cut.ids).startswith("[user] Use the passages")
    assert demo().decode(cut.ids).endswith("Answer: [end]\n[assistant]\n")


def prompt(dataset: str, *answers: str, classes: tuple[str, ...] = ()) -> BenchPrompt:
    return BenchPrompt((), answers, classes, dataset, 0)


def test_the_best_answer_counts() -> None:
    assert score(prompt("hotpotqa", "Bob", "Ann Lee"), "ann") == pytest.approx(2 / 3)
    assert score(prompt("hotpotqa"), "ann") == 0


def test_each_dataset_has_its_metric() -> None:
    assert score(prompt("gov_report", "the cat sat"), "the cat ran") == pytest.approx(2 / 3)
    assert score(prompt("trec", "City", classes=("City", "Person")), "City\nPerson") == 1
    assert score(prompt("passage_retrieval_en", "Paragraph 3"), "Paragraph 3, not 4") == 0.5


def test_of_solved_examples_only_the_first_line_counts() -> None:
    assert score(prompt("triviaqa", "Ann"), "\nAnn\nPassage: Bob") == 1
    assert score(prompt("samsum", "a b"), "a b\nDialogue: c d") == 1
    assert score(prompt("hotpotqa", "Ann"), "\nAnn\nBob") == pytest.approx(2 / 3)


def test_the_hub_is_asked_for_the_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(_: Any, url: str) -> str:
        asked.append(url)
        if "/some/" in url:
            raise ConnectionError("no network")
        return str(folder)

    monkeypatch.setattr(datasets.DownloadManager, "download_and_extract", download)
    assert load_longbench("hotpotqa", bare(), 300) == load_longbench("hotpotqa", bare(), 300, folder)
    assert asked == ["https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"]
    with pytest.raises(ConfigError, match=r"some/name gave no hotpotqa.jsonl \(no network\); download .* and name"):
        load_longbench("hotpotqa", bare(), 100, "some/name")


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bench gave no trec.jsonl \(not there\); download https://.*data.zip"):
        load_longbench("trec", bare(), 100, folder)
    with pytest.raises(ConfigError, match=r"nowhere gave no trec.jsonl \(neither a file nor a folder\); download"):
        load_longbench("trec", bare(), 100, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="got 'lcc'; want one of hotpotqa"):
        load_longbench("lcc", bare(), 100, folder)
    with pytest.raises(ConfigError, match="length: got 1;"):
        load_longbench("hotpotqa", bare(), 1, folder)
    with pytest.raises(ConfigError, match="of which the chat template takes"):
        load_longbench("hotpotqa", demo(TEMPLATE), 5, folder)
    (folder / "trec.jsonl").write_text('{"context": "c", "question": "q"}\n')
    with pytest.raises(ConfigError, match=r"trec.jsonl: a record lacks input, answers"):
        load_longbench("trec", bare(), 100, folder)
    (folder / "musique.jsonl").write_text("no json\n")
    with pytest.raises(ConfigError, match=r"gave no musique.jsonl"):
        load_longbench("musique", bare(), 100, folder)
