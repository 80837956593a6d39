"""Models and settings that cannot work: each gets an error that says what came and what is wanted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import (
    AutoPrivateModel,
    AutoPrivateModelForCausalLM,
    FixedCounts,
    GeneratePlan,
    PrivateConfig,
    SpeculationConfig,
    patch,
)
from private_llm_hf.checkpoint.model_spec import accepted_class
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, DomainError, PatchMismatch
from private_llm.ranges import Ranges
from tests.hf import tiny
from tests.hf.client.test_bad_input import nothing_was_sent, opt
from tests.hf.conftest import PLAIN

__all__ = ["nothing_was_sent", "opt"]  # fixtures


# -- models and settings ------------------------------------------------------------------------------------
def test_a_kind_of_model_that_is_not_run(tmp_path: Path) -> None:
    model = tr.ViTMAEModel(tr.ViTMAEConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32))
    with pytest.raises(PatchMismatch, match="architecture 'vit_mae' is of a kind that is not run; want a model that"):
        patch(model, PLAIN)


def test_operations_without_a_rule_are_listed(tmp_path: Path) -> None:
    config = tr.XLNetConfig(vocab_size=64, d_model=16, n_layer=2, n_head=2, d_inner=32)
    model = tr.XLNetLMHeadModel(config)
    message = r"no private rule for 2 module\(s\) or operation.*layer.0.rel_attn \(XLNetRelativeAttention\): .*einsum"
    with pytest.raises(PatchMismatch, match=message):
        patch(model, PLAIN)
    model.save_pretrained(tmp_path)
    with pytest.raises(PatchMismatch, match=message):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN)


@pytest.mark.parametrize("name", ["auto_map", "backbone", "use_timm_backbone"])
def test_a_party_builds_nothing_that_loads_something(name: str) -> None:
    settings = {**tiny.build("opt").config.to_dict(), "text_config": {name: {"AutoModel": "somewhere--code.Model"}}}
    with pytest.raises(PatchMismatch, match=f"{name!r} lets a model load code or another model"):
        accepted_class("OPTForCausalLM", settings)


def test_modules_without_a_rule_are_listed() -> None:
    model = tiny.build("opt", activation_function="mish")
    with pytest.raises(PatchMismatch, match=r"layers.0.activation_fn \(MishActivation\).*layers.1.activation_fn"):
        patch(model, PLAIN)


def test_patch_wants_a_module_or_a_model_of_transformers() -> None:
    with pytest.raises(PatchMismatch, match=r"got dict; want a transformers model or a torch\.nn\.Module"):
        patch({}, PLAIN)

    class OPTForCausalLM(tr.OPTForCausalLM):
        pass

    with pytest.raises(PatchMismatch, match="not a model class of transformers"):
        patch(OPTForCausalLM(tiny.build("opt").config), PLAIN)


def test_weights_the_ring_cannot_hold() -> None:
    model = tiny.build("opt")
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.bias[3] = float("nan")
    with pytest.raises(DomainError, match=r"'model.decoder.layers.0.fc1.bias': 1 of 96 values are NaN"):
        patch(model, PLAIN)


def test_a_task_without_a_class(tmp_path: Path) -> None:
    tiny.build("bert").save_pretrained(tmp_path)
    tr.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(PatchMismatch, match="AutoModelForCausalLM has no class for 'vit' models"):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: [x], DomainError, "images: got list; want a floating-point tensor"),
        (lambda x: x.numpy(), DomainError, "images: got ndarray; want"),
        (lambda x: x.to(torch.uint8), DomainError, r"images: got torch.uint8, .*; want"),
        (lambda x: x[:0], DomainError, r"images: got .*shape \(0, 1, 8, 8\)"),
        (lambda x: x[:, :, :5], DomainError, r"images of shape \(2, 1, 5, 8\) do not fit Network"),
        (lambda x: x * float("nan"), DomainError, "images: got NaN or infinite"),
        (lambda x: x.to("meta"), DomainError, "images: got a tensor on device meta"),
    ],
)
def test_images_to_calibrate_on(change: Any, error: type[Exception], message: str) -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 3))
    with pytest.raises(error, match=message):
        patch(network.eval(), PLAIN, images=change(torch.ones(2, 1, 8, 8)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"images": torch.ones(1, 3, 16, 16)}, "images: got them for OPTForCausalLM, which reads tokens"),
        ({"images": torch.ones(1, 3, 16, 16), "ranges": Ranges()}, "images, ranges: got both"),
        ({"ranges": {}}, "ranges: got dict; want Ranges"),
        ({"mesh": "local"}, "mesh, start: got 'local'"),
        ({"start": 3}, "mesh, start: got None and 3"),
    ],
)
def test_arguments_of_patch(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        patch(tiny.build("opt"), PLAIN, **given)


def test_networks_of_nothing_but_functions() -> None:
    with patch(torch.nn.ReLU(), PLAIN, images=-torch.ones(1, 4)) as private:
        assert private(-torch.ones(1, 4)).abs().max() == 0
    with pytest.raises(PatchMismatch, match="want one tensor, made by the last step"):
        patch(torch.nn.Sequential(), PLAIN)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrivateConfig(frac_bits="18"), "frac_bits: got '18'; want a whole number"),
        (lambda: PrivateConfig(ring=64.0), "ring: got 64.0; want one of 64, 32"),
        (lambda: PrivateConfig(guard=3), "guard: got 3; want True or False"),
        (lambda: PrivateConfig(timeout_s=float("nan")), "timeout_s: got nan; want a finite number"),
        (lambda: PrivateConfig(protocol=None), "protocol: got None; want a text"),
        (lambda: PrivateConfig(hosts=3), "hosts: got 3; want a list, each a text"),
        (lambda: PrivateConfig(hosts=("a:1", "b:1", "a:1")), "hosts: got 'a:1' 2 times; want one address for each"),
        (lambda: PrivateConfig(plugins=3), "plugins: got 3; want a list"),
        (lambda: PrivateConfig(tls=3), "tls: got 3; want a TLSConfig or None"),
        (lambda: PrivateConfig.from_dict(None), "settings: got NoneType; want a mapping"),
        (lambda: PrivateConfig.from_dict({1: 2}), r"unknown key\(s\) 1"),
        (lambda: SpeculationConfig(paths="2"), "SpeculationConfig.paths: got '2'; want a whole number"),
        (lambda: SpeculationConfig(draft=3), "draft: got 3; want a text or a PreTrainedModel"),
        (lambda: SpeculationConfig(fixed_counts=3), "fixed_counts: got 3; want a FixedCounts or None"),
        (lambda: FixedCounts(advance=2.5), "FixedCounts.advance: got 2.5; want a whole number"),
    ],
)
def test_settings_of_another_type(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_plans_of_another_type(opt: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"preprocess: GeneratePlan\.prompt: got '3'; want a whole number"):
        opt.preprocess(GeneratePlan(prompt="3", new_tokens=2))


def test_a_class_of_the_users_own_loads_as_its_base() -> None:
    class Mine(AutoPrivateModel):
        """Somebody's subclass."""

    assert Mine.auto_class is AutoPrivateModel.auto_class


def test_settings() -> None:
    with pytest.raises(ConfigError, match="got dict; want a PrivateConfig"):
        patch(tiny.build("opt"), {"protocol": "plain"})
    for make in (lambda **values: PrivateConfig.from_dict(values), PrivateConfig):
        with pytest.raises(ConfigError, match=r"unknown key\(s\) rings \(did you mean ring\?\)"):
            make(rings=64)
    with pytest.raises(ConfigError, match=r"reveal: got 'token' for .*; want a model that generates"):
        patch(tiny.build("bert"), PrivateConfig(protocol="plain", insecure=True, reveal="token"))
    with pytest.raises(ConfigError, match="AutoPrivateModel is not instantiated"):
        AutoPrivateModel()


def test_unknown_loading_arguments(tmp_path: Path) -> None:
    tiny.build("opt").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown argument\(s\) devise_map"):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN, devise_map="auto")
    with pytest.raises(ConfigError, match=r"privat_config for from_pretrained \(did you mean private_config\?\)"):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), privat_config=PLAIN)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load_in_8bit": True}, "load_in_8bit has no meaning .* quantising them saves nothing; leave it out$"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config has no meaning"),
        ({"config": PLAIN}, r"config: got a PrivateConfig; want it as second argument"),
        ({"config": "folder"}, "config: got str; want a configuration of transformers"),
        ({"ranges": 3}, "ranges: got int; want Ranges"),
        ({"max_memory": {}}, r"max_memory belongs in PrivateConfig\("),
    ],
)
def test_arguments_of_other_loaders_say_what_to_do(checkpoint: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), PLAIN, **given)


def test_arguments_that_change_nothing_are_taken(checkpoint: Path) -> None:
    quick = replace(PLAIN, calibrate=False)
    options = {"low_cpu_mem_usage": True, "load_in_8bit": False, "quantization_config": None}
    with AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), quick, **options) as private:
        assert private.num_parameters() > 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./no/such/folder", "no such folder"), ("", "an empty name"), (None, "got NoneType as source"),
        ("no-such-model", "no such folder here; as a hub id: "), (__file__, "it is a file"),
    ],
)  # fmt: skip
def test_a_source_that_is_not_there(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoPrivateModelForCausalLM.from_pretrained(source, PLAIN)


SHARD, INDEX = "model-00002-of-00004.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content"),
    [(SHARD, b""), (SHARD, b"<html>"), (SHARD, slice(3000)), (SHARD, None), (INDEX, b"{}"), (INDEX, slice(300))],
)
def test_a_file_of_weights_that_is_not_whole_is_named(tmp_path: Path, name: str, content: bytes | slice | None) -> None:
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    file = tmp_path / name
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(whole[content] if isinstance(content, slice) else content)
    with pytest.raises(ConfigError, match=f"checkpoint file '{file}' .*cannot be read: .*copy or download it again"):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), replace(PLAIN, calibrate=False))


def test_attention_of_another_machine_does_not_matter(tmp_path: Path) -> None:
    """FlashAttention has no package here, and parties would not use it, nor a function of somebody's own."""
    model = tiny.build("llama")
    model.save_pretrained(tmp_path)
    quick = replace(PLAIN, calibrate=False)
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), quick, attn_implementation="flash_attention_2"):
        pass
    with pytest.raises(ConfigError, match="attn_implementation: got 'mine'; parties compute attention as transformers"):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), quick, attn_implementation="mine")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(PatchMismatch, match=r"a package is missing .*set_attn_implementation\('sdpa'\)"):
        patch(model, quick)


def test_inputs_that_cannot_be_shared() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0}
    whisper = tr.WhisperConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=64, **heads)
    for model, message in (
        (tr.BertForMultipleChoice(tr.BertConfig(**small)), "several texts a row; .*num_labels=1"),
        (tr.BertForPreTraining(tr.BertConfig(**small)), "two heads at once"),
        (tr.WhisperForConditionalGeneration(whisper), "reads input_features .*sound"),
        (tr.CLIPModel(tr.CLIPConfig(text_config=small, vision_config=small)), "texts and images at once"),
    ):
        with pytest.raises(PatchMismatch, match=message):
            patch(model, PLAIN)


def test_a_model_inside_a_module_is_named() -> None:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = tiny.build("bert"), torch.nn.Linear(64, 2)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(input_ids).last_hidden_state[:, 0])

    with pytest.raises(PatchMismatch, match=r"around a BertModel; patch that one \(private = patch\(model.encoder\)"):
        patch(Classifier(), PLAIN)
