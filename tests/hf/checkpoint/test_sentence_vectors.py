"""Vectors follow the files that sentence-transformers wrote, compared with its own `encode`; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.sentence_vectors import SentenceVectors, sentence_vectors
from transformers import AutoModel, BertModel

from private_llm.errors import ConfigError
from tests.gateway.small_gateway import tokenizer
from tests.hf import tiny

TEXTS = ["The history of the city", "Once upon a time there was a king who had a horse", "I"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tiny.build("bert", vocab_size=4096).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def ours(folder: Path) -> np.ndarray:
    """By the files, over the plaintext model's hidden states."""
    vectors, model, tokens = sentence_vectors(folder), AutoModel.from_pretrained(folder), tokenizer()
    rows = [tokens(vectors.text(text))["input_ids"] for text in TEXTS]
    length = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    with torch.no_grad():
        made = vectors.of(model.eval()(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
    assert made.shape == (len(TEXTS), vectors.size(64))
    return made.numpy()


@pytest.mark.parametrize(
    ("pooling", "unit", "more"),
    [
        ("cls", True, {}),
        ("mean", False, {}),
        ("lasttoken", True, {"truncate_dim": 24}),
        ("max", False, {"prompts": {"query": "Query: ", "text": ""}, "default_prompt_name": "query"}),
        (("mean_sqrt_len_tokens", "weightedmean"), True, {"prompts": {"query": "Query: "}}),
    ],
)
def test_vectors_are_those_of_sentence_transformers(
    plain: Path, pooling: Any, unit: bool, more: dict[str, Any], tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers")
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    layers = [parts.Transformer(str(plain)), parts.Pooling(64, pooling), *([parts.Normalize()] if unit else [])]
    theirs = library.SentenceTransformer(modules=layers, device="cpu", **more)
    theirs.save(str(tmp_path / "written"))
    assert np.abs(ours(tmp_path / "written") - theirs.encode(TEXTS)).max() < 1e-5
    kept = tmp_path / "client"  # the user of share files has them, too
    kept.mkdir()
    source = Checkpoint(str(tmp_path / "written"))
    source.write_client_folder(kept, source.config(), BertModel)
    assert sentence_vectors(kept) == sentence_vectors(tmp_path / "written")
    assert {path.suffix for path in kept.rglob("*")} <= {".json", "", ".txt"}, "no weights"


def write(folder: Path, plain: Path, changes: dict[str, object]) -> Path:
    """A folder in the older form, with some files changed."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files: dict[str, object] = {
        "modules.json": [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds],
        "1_Pooling/config.json": {"word_embedding_dimension": 64, "pooling_mode_cls_token": True},
        "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": True},
        **changes,
    }
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_the_older_form_and_none(plain: Path, tmp_path: Path) -> None:
    assert sentence_vectors(plain) == sentence_vectors("no/such-model") == SentenceVectors()
    assert sentence_vectors(write(tmp_path, plain, {})) == SentenceVectors(("cls",), lower=True, longest=16)
    assert SentenceVectors(lower=True, prompt="Query: ").text("A B") == "query: a b"


LAYERS = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules.json": [*LAYERS, {"path": "2_Dense", "type": "a.Dense"}]}, "got Transformer, Pooling, Dense; want"),
        (
            {"modules.json": [{"path": "0", "type": "a.Transformer"}, LAYERS[1]]},
            "want Transformer in the folder itself",
        ),
        ({"modules.json": "{"}, "modules.json: cannot be read as JSON"),
        ({"modules.json": {"a": 1}}, "want a list of modules"),
        ({"1_Pooling/config.json": {"pooling_mode": "best"}}, "pooling_mode: unknown key.*best"),
        ({"1_Pooling/config.json": {"pooling_mode_new": True}}, "pooling: unknown key.*pooling_mode_new"),
        ({"1_Pooling/config.json": [1]}, "got list; want an object"),
        ({"sentence_bert_config.json": {"max_seq_length": "long"}}, "max_seq_length: got 'long'"),
        ({"sentence_bert_config.json": {"transformer_task": "fill-mask"}}, "'transformer_task' is 'fill-mask'"),
        ({"config_sentence_transformers.json": {"default_prompt_name": "a", "prompts": {}}}, "want one of"),
        (
            {
                "config_sentence_transformers.json": {"default_prompt_name": "a", "prompts": {"a": "Find: "}},
                "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False},
            },
            "include_prompt is false",
        ),
    ],
)
def test_what_is_not_followed_is_refused(plain: Path, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        sentence_vectors(write(tmp_path, plain, changes))
