"""What a client may announce: refused before anything is built, allocated or received."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from private_llm_hf.checkpoint.model_spec import ModelSpec, accepted_class, describe
from private_llm_hf.party import model_description
from private_llm_hf.party.model import empty_model
from private_llm_hf.party.model_description import take_described, validate_model_description
from private_llm_hf.wire.commands import Description, Weight

from private_llm.errors import PatchMismatch
from private_llm.kernels.address import memory_bytes
from tests.hf import images, tiny


def description(name: str = "opt", **changes: object) -> Description:
    model = tiny.build(name)
    made = describe(type(model), model.config)
    return replace(made, config={**made.config, **changes})


@pytest.mark.parametrize("name", tiny.ALL)
def test_what_is_announced_is_what_the_owner_sends(name: str) -> None:
    model = tiny.build(name)
    found = validate_model_description(describe(type(model), model.config), 16)
    assert found == ModelSpec.of(type(model), model.config).shared.shapes


@pytest.mark.parametrize("name", images.HF)
def test_images_whose_norms_are_folded(name: str) -> None:
    model, _ = images.build(name)
    found = validate_model_description(describe(type(model), model.config), 16)
    assert found == ModelSpec.of(type(model), model.config).shared.shapes


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("DetrModel", "detr", "architecture 'detr' is of a kind that is not run"),
        ("DetrModel", "opt", "class: got 'DetrModel'; want one of architecture 'opt'"),
        ("BertModel", "opt", "class: got 'BertModel'; want one of architecture 'opt'"),
        ("PreTrainedModel", "opt", "want one of architecture 'opt'"),
        ("OPTConfig", "opt", "want a PreTrainedModel"),
        ("__class__", "opt", "want a PreTrainedModel"),
        ("no such class", "opt", "want a PreTrainedModel"),
        (None, "opt", "want a PreTrainedModel"),
        ("OPTModel", ["opt"], "unknown architecture"),
        ("OPTModel", None, "unknown architecture"),
    ],
)
def test_classes_are_checked_before_anything_is_built(
    name: object, kind: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("something was built")

    monkeypatch.setattr("transformers.PreTrainedModel.__init__", build)
    for check in (accepted_class, lambda n, c: empty_model(c, n)):
        with pytest.raises(PatchMismatch, match=message):
            check(name, {"model_type": kind})
    with pytest.raises(PatchMismatch, match=message):
        validate_model_description(Description(name, {"model_type": kind}, "", {}), 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [None, [], "opt", 3, {}])
def test_configurations_are_objects(config: object) -> None:
    with pytest.raises(PatchMismatch, match="unknown architecture"):
        accepted_class("OPTModel", config)


@pytest.mark.parametrize(
    "settings",
    [{"attention_types": [[["global", "local"] * 40_000, 1 << 24]]}, {"attention_types": [[["global"], 1 << 24]]},
     {"num_labels": 1 << 22}],
)  # fmt: skip
def test_numbers_that_a_configuration_multiplies_into_lists(settings: dict[str, object]) -> None:
    facts = Description("GPTNeoForCausalLM", {"model_type": "gpt_neo", **settings}, "", {})
    with pytest.raises(PatchMismatch, match=r"may not (be above|list more than) 65536"):
        validate_model_description(facts, 8)


@pytest.mark.parametrize("name", ["timm_wrapper", "encoder-decoder"])
def test_a_model_that_loads_another_is_refused_inside_and_outside(name: str) -> None:
    inside = {"model_type": "gemma3n", "vision_config": {"model_type": name, "architecture": "hf-hub:somebody/else"}}
    for config, kind in ((inside, "Gemma3nForConditionalGeneration"), ({"model_type": name}, "EncoderDecoderModel")):
        with pytest.raises(PatchMismatch, match=rf"{name}' (inside is not run|is of a kind that is not run)"):
            accepted_class(kind, config)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "max_position_embeddings", "vocab_size"])
@pytest.mark.parametrize("size", [1 << 40, -(1 << 40), [[1 << 40]]])
def test_numbers_beyond_any_model(key: str, size: object) -> None:
    with pytest.raises(PatchMismatch, match=f"configuration: '{key}' may not be above"):
        validate_model_description(description(**{key: size}), 16)


def test_bases_of_rotary_embeddings_may_be_large() -> None:
    assert validate_model_description(description("llama", rope_theta=10**11), 16)


def test_too_many_layers_are_noticed_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_description, "MOST_TENSORS", 300)
    assert validate_model_description(description(), 16)
    with pytest.raises(PatchMismatch, match="more than 300 weights"):
        validate_model_description(description(num_hidden_layers=1_000_000), 16)


def test_a_model_that_no_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = description(vocab_size=1 << 24, word_embed_proj_dim=1 << 20)
    with pytest.raises(PatchMismatch, match=rf"its weights need \d+ bytes here, and this machine has {memory_bytes()}"):
        validate_model_description(huge, 16)
    with pytest.raises(PatchMismatch, match="its largest weight needs"):
        validate_model_description(huge, 16, whole=False)
    weights = tiny.build("opt").num_parameters() * 16
    monkeypatch.setattr(model_description, "memory_bytes", lambda: weights // 2)
    with pytest.raises(PatchMismatch, match="its weights need"):
        validate_model_description(description(), 16)
    assert validate_model_description(description(), 16, whole=False)


def test_buffers_beyond_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_description, "MOST_BUFFERS", 8)
    with pytest.raises(PatchMismatch, match="bytes of buffers; want at most 8"):
        validate_model_description(description("llama"), 16)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (Weight("b", (2, 3)), "the announced model lacks it"),
        (Weight("a", (2, 1 << 40)), r"got shape \[2, 1099511627776\]; want \[2, 3\]"),
        (Weight("a", (3, 2)), "want"),
        (Weight("a", ()), "want"),
    ],
)
def test_weights_that_were_not_announced(header: Weight, message: str) -> None:
    with pytest.raises(PatchMismatch, match=message):
        take_described({"a": (2, 3)}, header)


def test_a_weight_comes_once() -> None:
    wanted = {"a": (2, 3)}
    assert take_described(wanted, Weight("a", (2, 3))) == (2, 3)
    with pytest.raises(PatchMismatch, match="it came before"):
        take_described(wanted, Weight("a", (2, 3)))


def test_memory_is_that_of_the_machine() -> None:
    assert memory_bytes() > torch.zeros(1 << 20).nbytes
