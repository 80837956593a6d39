"""LongBench as lm-eval has it, prompts and metrics included, answered by a private model under a cache policy."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import lm_eval
import pytest
import transformers as tr
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from private_llm_hf import PrivateConfig, SlidingWindow, patch

TASK = "longbench_hotpotqa"
DEMO = str(resources.files("private_llm_hf") / "demo_model")
RECORDS = [
    {"question": "Who wrote it?", "context": "The history of the city. " * 12, "answers": ["the city"]},
    {"question": "When was it built?", "context": "The river runs to the sea. " * 9, "answers": ["a sea"]},
]


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    """lm-eval's own task, with records of a file for those of the hub."""
    path = tmp_path / "hotpotqa.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    (original,) = resources.files("lm_eval").glob("tasks/longbench/hotpotqa.yaml")
    kwargs = {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path / "cache")}
    given = {"include": str(original), "task": TASK, "dataset_path": "json", "dataset_name": None}
    (tmp_path / "task.yaml").write_text(json.dumps(given | {"dataset_kwargs": kwargs}))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.mark.filterwarnings("ignore:Using slow pure-python SequenceMatcher")
def test_a_private_model_under_a_policy_takes_longbench(tasks: TaskManager) -> None:
    tokenizer = tr.AutoTokenizer.from_pretrained(DEMO)
    plain = tr.AutoModelForCausalLM.from_pretrained(DEMO)

    def answers(model: object) -> tuple[list[str], list[float]]:
        scored = lm_eval.simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer), tasks=[TASK], task_manager=tasks,
            gen_kwargs="max_gen_toks=5", bootstrap_iters=0,
        )["samples"][TASK]  # fmt: skip
        return [sample["filtered_resps"][0] for sample in scored], [sample["score"] for sample in scored]

    want, scores = answers(plain)
    with patch(plain, PrivateConfig(protocol="plain", insecure=True, kv_cache=SlidingWindow(1000))) as same:
        assert answers(same) == (want, scores)
    with patch(plain, PrivateConfig(protocol="plain", insecure=True, kv_cache=SlidingWindow(16))) as other:
        assert answers(other)[0] != want, "the policy decides what the answers are made of"
