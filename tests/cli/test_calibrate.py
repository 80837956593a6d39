"""`private-llm calibrate` and `--ranges`: from a text to shares, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

from private_llm.ranges import Ranges

Run = Callable[..., str]
DEMO = str(resources.files("private_llm_hf").joinpath("demo_model"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranges") / "ranges.json"


def test_calibrate_writes_what_share_takes(run: Run, file: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("He was there when the show began, and she was not. " * 20)
    line = json.loads(run("calibrate", DEMO, "--text", str(text), "--out", str(file), "--json"))
    assert Ranges.from_json(file.read_text()).to_dict() == line["modules"]
    assert {"output"} <= line["modules"]["model.decoder.layers.0.fc1"].keys()
    run("share", DEMO, "--ranges", str(file), "--out", str(tmp_path / "shares"))
    shown = run("calibrate", DEMO)
    assert "model.decoder.layers.#.fc1" in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"nope": {"output": 3}}', "this OPTForCausalLM lacks 1 module(s) they name, such as 'nope'"),
        ('{"lm_head": {"output": 300}}', "want an integer from"),
        ('{"hidden_size": 16}', "exponents; got "),
        ("nonsense", "JSON of `private-llm calibrate` (Expecting value: line 1 column 1 (char 0)); got "),
        (None, "No such file or directory; want what `private-llm calibrate --out` wrote"),
    ],
)
def test_other_files_are_refused(run: Run, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    said = run("share", DEMO, "--ranges", str(path), "--out", str(tmp_path / "shares"), code=2)
    assert message in " ".join(said.split())
    assert not (tmp_path / "shares" / "party0.safetensors").exists()
