"""The command line with checkpoints that are not plain weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tr

from tests.hf import tiny
from tests.hf.checkpoint.gguf_file import write_gguf

Run = Callable[..., str]
FILE = "tiny.Q4_1.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    write_gguf(tiny.build("llama"), made / FILE)
    return made


def test_generate_reads_a_gguf_file(run: Run, folder: Path) -> None:
    options = ("--gguf-file", FILE, "--prompt", "cabxyz", "--max-new-tokens", "4", "--json")
    (line,) = run("generate", str(folder), *options).splitlines()
    tokenizer = tr.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    plain = tr.AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    prompt = tokenizer("cabxyz", return_tensors="pt")
    want = plain.generate(**prompt, max_new_tokens=4, do_sample=False)[0]
    assert json.loads(line)["private_text"] == tokenizer.decode(want, skip_special_tokens=True)


def test_share_reads_a_gguf_file(run: Run, folder: Path, tmp_path: Path) -> None:
    how = ("--gguf-file", FILE, "--out", str(tmp_path), "--prg", "chacha20", "--json")
    (line,) = run("share", str(folder), *how).splitlines()
    assert len(json.loads(line)["files"]) == 3
    assert b"share file 3" in (tmp_path / "party0.safetensors").read_bytes(), "the format of masks by ChaCha20"
    tokenizer = tr.AutoTokenizer.from_pretrained(tmp_path / "client")
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("command", ["generate", "share"])
def test_a_gguf_file_that_is_not_there(run: Run, folder: Path, tmp_path: Path, command: str) -> None:
    more = ("--prompt", "a") if command == "generate" else ("--out", str(tmp_path / "out"))
    text = run(command, str(folder), "--gguf-file", "other.gguf", *more, code=2)
    assert "other.gguf" in text
    assert "Traceback" not in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["generate", "share"])
def test_a_gguf_file_instead_of_its_folder(run: Run, folder: Path, tmp_path: Path, command: str) -> None:
    more = ("--prompt", "a") if command == "generate" else ("--out", str(tmp_path / "out"))
    text = run(command, str(folder / FILE), *more, code=2)
    assert f"gguf_file='{FILE}' (--gguf-file)" in text


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_without_a_tokenizer(run: Run, tmp_path: Path, family: str) -> None:
    """For Gemma transformers makes up one that reads any text as unknown words."""
    model, out = tmp_path / "model", str(tmp_path / "shares")
    tiny.build(family).save_pretrained(model)
    text = run("generate", str(model), "--prompt", "a", code=2)
    assert "there is no vocabulary; save the model's tokenizer beside the weights" in text
    shared = " ".join(run("share", str(model), "--out", out).split())
    assert "(configuration, no weights; the checkpoint has no tokenizer" in shared


def test_the_folder_around_the_users_folder_is_told_from_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    text = " ".join(run("generate", str(tmp_path), "--prompt", "a", code=2).split())
    assert f"it is what `share` wrote; users name its folder {tmp_path / 'client'}" in text
