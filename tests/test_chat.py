"""`demo --model smollm2` and `bench smollm2`, with a tiny model in the place of the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench.catalogue import make
from bench.measure import measure
from private_llm_cli.app import main
from private_llm_cli.commands.generate import demo_chat
from private_llm_hf.models import smollm2
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from private_llm.config import PrivateConfig

CONFIG = PrivateConfig(timeout_s=60)
LOGIT_ERROR = 4e-2
"""Of the tiny model: 14 fractional bits make rounding 16 times that of tests/hf/compare.py, its errors at most that."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.manual_seed(3)
    words = ["<unk>", "<end>", "user", "assistant", *"abcdefghijklmnopqrst"]
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=len(words), max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    fast.save_pretrained(tmp_path)
    monkeypatch.setattr(smollm2, "folder", lambda cache=None: tmp_path)
    return tmp_path


@pytest.mark.usefixtures("model")
@pytest.mark.full
def test_a_chat_in_figures(capsys: pytest.CaptureFixture[str]) -> None:
    demo_chat("a b c", CONFIG, 3, True, None)
    made = json.loads(capsys.readouterr().out)
    assert made["private_text"] == made["plain_text"] != ""
    assert made["tokens_equal"] == made["tokens"] == 3
    assert made["bytes_total"] > 0
    assert made["rounds"] > 0


@pytest.mark.usefixtures("model")
def test_a_chat_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    demo_chat("a b c", CONFIG, 3, False, None)
    lines = capsys.readouterr().out.splitlines()
    said = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert said["prompt"] == ["a", "b", "c"]
    assert said["private"] == said["plaintext"] != []
    assert said["agreement"] == ["3", "of", "3", "tokens"]
    assert "5 tokens of prompt; 3 tokens, first after" in " ".join(lines)
    assert "protects nobody" in lines[-1]


def test_a_chat_of_no_tokens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["private-llm", "demo", "--model", "smollm2", "--max-new-tokens", "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "Invalid value for '--max-new-tokens'" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.usefixtures("model")
def test_a_further_token_is_measured_apart() -> None:
    row = measure(make("smollm2", (2, 6)), CONFIG, repeat=1)
    assert row.shape == (2, 6)
    assert row.error_max <= LOGIT_ERROR
    assert row.after is not None
    assert 0 < row.after["bytes_total"] < row.bytes_total
    assert 0 < row.after["rounds"] <= row.rounds
    assert row.after["seconds"]["min"] > 0


@pytest.mark.usefixtures("model")
def test_a_prompt_after_a_prefix_costs_less_than_both() -> None:
    names: list[tuple[str, tuple[int, ...]]] = [
        ("smollm2", (1, 3)),
        ("smollm2-prefix", (1, 8, 3)),
        ("smollm2", (1, 11)),
    ]
    alone, after, both = (measure(make(*each), CONFIG, repeat=1) for each in names)
    assert alone.bytes_total < after.bytes_total < both.bytes_total
    assert after.error_max <= LOGIT_ERROR


def test_padding_stands_on_the_left(model: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    batch = smollm2.chat(tokenizer, ["a b c d", "a"])
    assert batch["attention_mask"].tolist() == [[1] * 6, [0, 0, 0, 1, 1, 1]]
    assert tokenizer.decode(batch["input_ids"][1][3:]) == "user a assistant"
