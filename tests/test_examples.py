"""Every file of examples/ runs as it stands there, and what it prints is right."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from private_llm_cli.commands.plot import load_pyplot
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MODEL = str(resources.files("private_llm_hf") / "demo_model")


def printed(out: str, label: str) -> str:
    """What follows a label on its line."""
    (found,) = re.findall(rf"^{re.escape(label)} *(.*)$", out, re.MULTILINE)
    return str(found)


def text_is_that_of_the_plaintext_model(out: str) -> None:
    assert printed(out, "private:") == printed(out, "plaintext:")
    assert len(printed(out, "private:")) > len("The history of the city begins with")
    assert "0 rounds" not in printed(out, "cost:").split(", ")


def likenesses_are_those_of_the_plaintext_model(out: str) -> None:
    rows = [[float(number) for number in re.findall(r"0\.\d+", line)] for line in out.splitlines()]
    (alike, alike_private), (other, other_private) = [row for row in rows if row]
    assert abs(alike - alike_private) <= 2e-3
    assert abs(other - other_private) <= 2e-3
    assert alike_private > other_private + 0.02, "the two sentences with the same words"


def digits_are_read(out: str) -> None:
    right, count = map(int, printed(out, "right:").split(" of "))
    assert count == 40
    assert right >= 38
    assert printed(out, "labels:") == "0 5 0 5 0 5 0 5 8 3 ..."


def networks_agree(out: str) -> None:
    for protocol in ("trio", "quad", "dealer"):
        error = float(printed(out, f"{protocol}: largest error").split(",")[0])
        assert 0 < error < 1e-3, "fixed point is near, not equal"


def files_hold_shares(out: str) -> None:
    assert int(printed(out, "calibrated").split()[0]) > 50
    size = [int(printed(out, f"party{index}.safetensors:").split(" kB")[0]) for index in range(3)]
    assert size[0] < 100, "party 0 gets seeds"
    assert size[1] == size[2] > 5.9e6 * 8 / 1e3 * 0.9, "one element of 8 bytes a weight"
    assert out.count("mode 600") == 3
    client = printed(out, "client:").split()
    assert "tokenizer.json" in client
    assert not [name for name in client if name.endswith((".safetensors", ".bin"))]


def hosts_answer(out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    plain = AutoModelForCausalLM.from_pretrained(MODEL).float().eval()
    made = plain.generate(**tokenizer("The history of", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(made[0], skip_special_tokens=True) in out.splitlines()


def chat_streams_the_plaintext_text(out: str) -> None:
    assert len(printed(out, "answer:")) > 10
    assert float(printed(out, "cost:").split()[0]) > 1


def chain_answers(out: str) -> None:
    assert len(out.split()) > 5


def vectors_tell_sentences_apart(out: str) -> None:
    assert len(re.findall(r"\d\.\d+", out)) >= 2


def scores_are_those_of_the_plaintext_model(out: str) -> None:
    rows = re.findall(r"^(\w+) (\w+): +private (\S+), plaintext (\S+)$", out, re.MULTILINE)
    assert [(task, measure) for task, measure, *_ in rows] == [
        ("private_next_word", "perplexity"), ("private_next_word", "acc"), ("private_which_word", "acc"),
        ("private_write_on", "exact_match"),
    ]  # fmt: skip
    assert float(rows[0][2]) == pytest.approx(float(rows[0][3]), rel=5e-3)
    for _, _, private, plain in rows[1:]:
        assert float(private) == float(plain) > 0


def drafts_save_rounds_and_change_nothing(out: str) -> None:
    found = {name: printed(out, name).split(" rounds: ") for name in ("alone:", "drafts:", "hidden:")}
    assert len({text for _, text in found.values()}) == 1
    assert int(found["drafts:"][0]) < 0.8 * int(found["alone:"][0])


CHECKS: dict[str, Callable[[str], None]] = {
    "chat_langchain": chain_answers,
    "chat_openai": chat_streams_the_plaintext_text,
    "classify_images": digits_are_read,
    "compare_sentences": likenesses_are_those_of_the_plaintext_model,
    "embed_openai": vectors_tell_sentences_apart,
    "evaluate_lm_eval": scores_are_those_of_the_plaintext_model,
    "generate_text": text_is_that_of_the_plaintext_model,
    "generate_with_drafts": drafts_save_rounds_and_change_nothing,
    "own_network": networks_agree,
    "share_to_files": files_hold_shares,
    "three_hosts": hosts_answer,
}


def test_every_example_is_checked() -> None:
    assert {path.stem for path in EXAMPLES} == set(CHECKS)


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(example)])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'integrations'}")  # for parties in processes
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runpy.run_path(str(example), run_name="__main__")
    CHECKS[example.stem](capfd.readouterr().out)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_explains_itself(example: Path) -> None:
    text = example.read_text()
    assert text.startswith('"""')
    assert f"python examples/{example.name}" in text
    index = (ROOT / "docs" / "README.md").read_text()
    assert f"examples/{example.name}" in index


# -- the notebook -----------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_the_notebook_prints_what_stands_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code cells in order, in one namespace; pictures are drawn, and small in the file."""
    pyplot, drawn = load_pyplot(), []
    monkeypatch.setattr(pyplot, "show", lambda: drawn.append(pyplot.gcf().axes[0].get_xlabel()) or pyplot.close())
    path = ROOT / "examples" / "private_model.ipynb"
    namespace: dict[str, object] = {}
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), namespace)
            kept = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
            assert [capsys.readouterr().out] == kept
    assert drawn == ["MB over all links", ""]
    assert path.stat().st_size < 60_000
    assert path.name in (ROOT / "docs" / "README.md").read_text()
