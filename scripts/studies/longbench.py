"""LongBench for those who have it: its English records as prompts, with our own wording of the questions.

Source: Bai et al., *LongBench* (ACL 2024). Fields of a record, lengths of answers, metrics, and the way too long
prompts lose their middle are those of the benchmark; the templates ask for the same answers in other words. lm-eval has
LongBench, too, for models behind the gateway: it reads the hub, and its metrics need three more packages
(`lm_eval[longbench]`). This loader reads files, and its prompts suit a model in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from long_tasks import frame_of
from private_llm_hf.tools.texts import token_ids
from text_metrics import classification, retrieval, rouge_l, token_f1

from private_llm.errors import ConfigError

HUB_NAME = "THUDM/LongBench"
_ARCHIVE = "data.zip"
_HOW_TO_GET = (
    f"download https://huggingface.co/datasets/{HUB_NAME}/resolve/main/{_ARCHIVE}, and name the archive, or the folder "
    "into which you unpacked its *.jsonl files"
)

Metric = Callable[[str, str, tuple[str, ...]], float]
"""Of a generated text, one right answer and the names of all classes."""


@dataclass(frozen=True)
class Dataset:
    """One part of LongBench.

    template: the prompt, with places for {context} and {input}. new_tokens: how many to generate at most. metric: from
    0 to 1. chat: ask in a user's turn if there is a chat template; not where the context is a row of solved examples,
    and there only the first line of what is generated counts.
    """

    template: str
    new_tokens: int
    metric: Metric
    chat: bool = True


@dataclass(frozen=True)
class BenchPrompt:
    """One record as a prompt.

    ids: its tokens, [S]. answers: the right ones, any of which will do. classes: names of all classes, for a
    classification. dataset: a key of `DATASETS`. tokens: of the prompt before its middle was left out.
    """

    ids: tuple[int, ...]
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    dataset: str
    tokens: int


def load_longbench(
    dataset: str,
    tokenizer: Any,  # noqa: ANN401 - transformers is not typed
    length: int,
    source: str | Path = HUB_NAME,
    count: int | None = None,
) -> list[BenchPrompt]:
    """The first `count` records (default: all) as prompts of at most `length` tokens; longer ones lose their middle.

    source: a folder with `<dataset>.jsonl`, LongBench's archive `data.zip`, or a name on the hub, whose archive
    `datasets` then downloads. Raises ConfigError for an unknown dataset, a length below 2, missing data and records
    without LongBench's fields, and if `datasets` is not installed.
    """
    if dataset not in DATASETS:
        raise ConfigError(f"dataset: got {dataset!r}; want one of {', '.join(DATASETS)}")
    if length < 2:
        raise ConfigError(f"length: got {length}; want 2 or more tokens")
    rows = _rows(dataset, source)
    chosen = rows if count is None else rows.select(range(min(count, len(rows))))
    return [_prompt(dataset, tokenizer, length, row) for row in chosen]


def score(prompt: BenchPrompt, text: str) -> float:
    """The best score of a generated text (without special tokens) over the right answers, from 0 to 1."""
    kind = DATASETS[prompt.dataset]
    found = text if kind.chat else text.lstrip("\n").split("\n")[0]
    return max((kind.metric(found, answer, prompt.classes) for answer in prompt.answers), default=0.0)


def without_middle(ids: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The first and the last half of `length` tokens, if there are more."""
    if len(ids) <= length:
        return ids
    return ids[: length // 2] + ids[len(ids) - (length - length // 2) :]


def _prompt(dataset: str, tokenizer: Any, length: int, row: dict[str, Any]) -> BenchPrompt:  # noqa: ANN401
    """Raises ConfigError for a record without LongBench's fields, and a length that the chat template fills alone."""
    missing = [field for field in ("context", "input", "answers") if row.get(field) is None]
    if missing:
        raise ConfigError(f"{dataset}.jsonl: a record lacks {', '.join(missing)}; {_HOW_TO_GET}")
    kind = DATASETS[dataset]
    frame = frame_of(tokenizer, kind.chat)
    room = length - len(frame)
    if room < 2:
        raise ConfigError(f"length: {length} tokens, of which the chat template takes {len(frame)}; want more")
    ids = token_ids(tokenizer, kind.template.format(context=row["context"], input=row["input"]))
    return BenchPrompt(
        ids=(*frame.before, *without_middle(ids, room), *frame.after),
        answers=tuple(row["answers"]),
        classes=tuple(row.get("all_classes") or ()),
        dataset=dataset,
        tokens=len(ids) + len(frame),
    )


def _rows(dataset: str, source: str | Path) -> Any:  # noqa: ANN401 - a datasets.Dataset
    """Records of one dataset, in the file's order. Raises ConfigError for missing data."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("LongBench is read by `datasets`: pip install 'private-llm[train]'") from None
    name = f"{dataset}.jsonl"
    try:
        folder = _folder(source, datasets.DownloadManager())
        found = next((file for file in (folder / name, folder / "data" / name) if file.is_file()), None)
        if found is None:
            raise FileNotFoundError("not there")
        return datasets.load_dataset("json", data_files=str(found), split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"LongBench: {source} gave no {name} ({error}); {_HOW_TO_GET}") from error


def _folder(source: str | Path, downloads: Any) -> Path:  # noqa: ANN401 - a datasets.DownloadManager
    """Where the files lie; an archive is unpacked in the cache of `datasets`. Raises OSError if it is not reached."""
    place = Path(source)
    if place.is_dir():
        return place
    if place.is_file():
        return Path(downloads.extract(str(place)))
    if place.is_absolute() or str(source).count("/") != 1:
        raise FileNotFoundError("neither a file nor a folder")
    return Path(downloads.download_and_extract(f"https://huggingface.co/datasets/{source}/resolve/main/{_ARCHIVE}"))


def _f1(found: str, truth: str, classes: tuple[str, ...]) -> float:
    return token_f1(found, truth)


def _rouge(found: str, truth: str, classes: tuple[str, ...]) -> float:
    return rouge_l(found, truth)


def _retrieval(found: str, truth: str, classes: tuple[str, ...]) -> float:
    return retrieval(found, truth)


def _questions(material: str, answer: str) -> str:
    """A template that asks a question about `material` and describes the `answer` wanted, before and after it."""
    order = f"Use the {material} to answer the question. {answer}"
    return f"{order}\n\n{{context}}\n\n{order}\n\nQuestion: {{input}}\nAnswer:"


_SHORT = "Write the answer alone, in a few words."
_PASSAGES = _questions("passages below", _SHORT)

DATASETS: dict[str, Dataset] = {
    "hotpotqa": Dataset(_PASSAGES, 32, _f1),
    "2wikimqa": Dataset(_PASSAGES, 32, _f1),
    "musique": Dataset(_PASSAGES, 32, _f1),
    "narrativeqa": Dataset(_questions("story below", "Be as brief as you can: one phrase, no reasons."), 128, _f1),
    "qasper": Dataset(
        _questions(
            "paper below",
            "Be as brief as you can: one phrase or sentence, no reasons. A question that the paper leaves open is "
            '"unanswerable"; one that asks whether something is so gets "yes", "no" or "unanswerable".',
        ),
        128,
        _f1,
    ),
    "multifieldqa_en": Dataset(_questions("text below", _SHORT), 64, _f1),
    "triviaqa": Dataset(
        "Each passage is followed by a question and its short answer. Give the last answer in the same way.\n\n"
        "{context}\n\n{input}",
        32,
        _f1,
        chat=False,
    ),
    "trec": Dataset(
        "Each question is followed by its type. Give the type of the last one.\n\n{context}\n{input}",
        64,
        classification,
        chat=False,
    ),
    "samsum": Dataset(
        "Each dialogue is followed by a summary of a sentence or two. Summarise the last one in the same way.\n\n"
        "{context}\n\n{input}",
        128,
        _rouge,
        chat=False,
    ),
    "gov_report": Dataset(
        "Read this report of a government agency and write a summary of it, one page long.\n\n{context}\n\n"
        "Now write the summary of the report.\n\nSummary:",
        512,
        _rouge,
    ),
    "passage_retrieval_en": Dataset(
        "Below are 30 numbered paragraphs, and then a summary of one of them. Which one is it of?\n\n{context}\n\n"
        'Summary: {input}\n\nAnswer in the form "Paragraph 1", with the number of that paragraph.\n\nAnswer:',
        32,
        _retrieval,
    ),
}
"""By LongBench's names."""
