"""A checkpoint is streamed: every weight once, bit for bit, one at a time; whatever does not fit is refused."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import transformers as tr
from private_llm_hf.checkpoint.weights import (
    Collector,
    WeightList,
    encode_weight,
    skeleton,
    stream_checkpoint,
    stream_loaded,
)
from transformers import core_model_loading

from private_llm.errors import DomainError, PatchMismatch
from private_llm.ring.ring import RING64
from tests.hf import tiny


def streamed(cls: type[tr.PreTrainedModel], folder: Path, config: tr.PretrainedConfig) -> dict[str, torch.Tensor]:
    wanted = WeightList.of(skeleton(cls, config))
    got: dict[str, torch.Tensor] = {}

    def sink(name: str, tensor: torch.Tensor) -> None:
        assert name not in got, f"{name} came twice"
        got[name] = tensor.clone()

    stream_checkpoint(cls, str(folder), config, wanted, sink)
    assert set(got) == set(wanted.shapes)
    return got


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "t5", "bert", "bloom"])
@pytest.mark.parametrize("sharded", [False, True])
def test_stream_equals_state_dict(name: str, sharded: bool, tmp_path: Path) -> None:
    model = tiny.build(name)
    model.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    got = streamed(type(model), tmp_path, model.config)
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in got.items())
    distinct = {value.data_ptr() for value in model.parameters()}
    assert len(got) == len(distinct)


def test_bin_checkpoints_and_base_models_are_read_by_transformers_own_loader(tmp_path: Path) -> None:
    model = tiny.build("opt")
    model.config.save_pretrained(tmp_path)
    torch.save(model.model.state_dict(), tmp_path / "pytorch_model.bin")  # names without the head's prefix
    got = streamed(type(model), tmp_path, model.config)
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in got.items())


def test_half_precision_stays_exact(tmp_path: Path) -> None:
    model = tiny.build("llama").half()
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in streamed(type(model), tmp_path, model.config).items())


def test_a_head_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    model = tiny.build("bert")
    model.save_pretrained(tmp_path)
    with pytest.raises(PatchMismatch, match=r"lacks 2 weight\(s\): classifier.bias, classifier.weight"):
        streamed(tr.BertForSequenceClassification, tmp_path, model.config)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    model = tiny.build("llama")
    model.save_pretrained(tmp_path)
    model.config.tie_word_embeddings = True
    with pytest.raises(PatchMismatch, match=r"ties 'model.embed_tokens.weight' to|ties 'lm_head.weight' to"):
        streamed(type(model), tmp_path, model.config)


def test_a_wrong_shape_is_refused() -> None:
    model = tiny.build("opt")
    wanted = WeightList.of(model)
    collector = Collector(wanted, lambda name, tensor: None)
    with pytest.raises(PatchMismatch, match=r"got shape \(3,\); want \(96, 64\)"):
        collector.take("model.decoder.layers.0.fc1.weight", torch.zeros(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**50])
def test_weights_the_ring_cannot_hold_are_named(bad: float, tmp_path: Path) -> None:
    model = tiny.build("opt")
    with torch.no_grad():
        model.model.decoder.layers[1].fc2.weight[3, 4] = bad
    model.save_pretrained(tmp_path)

    def sink(name: str, tensor: torch.Tensor) -> None:
        encode_weight(name, tensor, RING64, 18)

    wanted = WeightList.of(model)
    for stream in (
        lambda: stream_loaded(model, wanted, sink),
        lambda: stream_checkpoint(type(model), str(tmp_path), model.config, wanted, sink),
    ):
        with pytest.raises(DomainError, match=r"weight 'model.decoder.layers.1.fc2.weight'"):
            stream()


def test_nothing_is_read_after_a_weight_that_was_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = tiny.build("opt"), list[object]()
    model.save_pretrained(tmp_path)
    original = core_model_loading._materialize_copy

    def counted(*args: object, **given: object) -> torch.Tensor:
        read.append(args)
        return original(*args, **given)

    def sink(name: str, tensor: torch.Tensor) -> None:
        raise DomainError(f"not {name}")

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counted)
    with pytest.raises(DomainError, match=r"not (lm_head|model)"):
        stream_checkpoint(type(model), str(tmp_path), model.config, WeightList.of(model), sink)
    assert len(read) == 1
    streamed(type(model), tmp_path, model.config)


def test_a_checkpoint_is_never_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tensors that transformers has read, only the one at hand is alive when it reaches the sink."""
    model = tiny.build("opt")
    model.save_pretrained(tmp_path)
    read: list[weakref.ref[torch.Tensor]] = []
    original = core_model_loading._materialize_copy

    def watched(*args: object, **kwargs: object) -> torch.Tensor:
        made = original(*args, **kwargs)
        read.append(weakref.ref(made))
        return made

    monkeypatch.setattr(core_model_loading, "_materialize_copy", watched)
    alive: list[int] = []

    def sink(name: str, tensor: torch.Tensor) -> None:
        alive.append(sum(ref() is not None for ref in read))

    stream_checkpoint(type(model), str(tmp_path), model.config, WeightList.of(model), sink)
    assert len(read) == len(alive) > 30
    assert max(alive) == 1
