"""Checkpoints that are not plain weights: GGUF, quantised, adapters. They run, or one sentence says why not."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import (
    AutoPrivateModel,
    AutoPrivateModelForCausalLM,
    AutoPrivateModelForSequenceClassification,
    patch,
)
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.share_files import ShareFile, share_path
from private_llm_hf.party.node import NodeCheckpoint
from torch import Tensor, nn
from transformers.utils import is_peft_available

from private_llm.errors import ConfigError, PatchMismatch
from private_llm.ranges import Ranges
from tests.hf import tiny
from tests.hf.checkpoint.gguf_file import write_gguf
from tests.hf.compare import GREEDY, LOGIT_ERROR, shares_of, worst
from tests.hf.conftest import PLAIN, TRIO

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(tiny.build("llama"), folder / "tiny.Q4_1.gguf")
    return folder


def reference(folder: Path) -> tr.PreTrainedModel:
    return tr.AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.Q4_1.gguf", dtype=torch.float32).eval()


# -- GGUF ---------------------------------------------------------------------------------------------------------
def test_a_gguf_file_generates_as_in_plaintext(gguf_folder: Path) -> None:
    plain = reference(gguf_folder)
    tokenizer = tr.AutoTokenizer.from_pretrained(gguf_folder, gguf_file="tiny.Q4_1.gguf")
    prompt = tokenizer("cabxyz", return_tensors="pt")
    source = str(gguf_folder)
    with AutoPrivateModelForCausalLM.from_pretrained(source, PLAIN, gguf_file="tiny.Q4_1.gguf") as private:
        assert worst(private(**prompt).logits, plain(**prompt).logits) < LOGIT_ERROR
        assert torch.equal(private.generate(**prompt, **GREEDY), plain.generate(**prompt, **GREEDY))
        assert not hasattr(private.config, "quantization_config")
    with torch.no_grad():
        assert worst(plain(**prompt).logits, tiny.build("llama")(**prompt).logits) > 10 * LOGIT_ERROR, "4 bits show"


def test_a_model_from_a_gguf_file_can_be_patched(gguf_folder: Path) -> None:
    plain = tr.AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file="tiny.Q4_1.gguf")
    with patch(plain, PLAIN) as private:
        assert worst(private(input_ids=IDS).logits, plain(input_ids=IDS).logits) < LOGIT_ERROR
        assert not hasattr(private.config, "quantization_config")
    assert hasattr(plain.config, "quantization_config"), "the original stays as it is"


@pytest.mark.parametrize("family", ["opt", "llama", "qwen2", "gemma", "bert", "t5", "ctrl"])
def test_a_tokenizer_that_transformers_makes_up_is_none(tmp_path: Path, family: str) -> None:
    """Whatever a user writes would be an unknown word to it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert Checkpoint(str(tmp_path)).tokenizer() is None


def test_a_gguf_file_is_shared_with_its_tokenizer(gguf_folder: Path, tmp_path: Path) -> None:
    share_checkpoint(str(gguf_folder), tmp_path, TRIO, gguf_file="tiny.Q4_1.gguf")
    masked, mask = (shares_of(ShareFile.open(share_path(tmp_path, p), TRIO, p)) for p in (1, 0))
    plain, description = (
        reference(gguf_folder).state_dict(),
        ShareFile.open(share_path(tmp_path, 1), TRIO, 1).description,
    )
    norms = {f"{layer}.weight": f"{norm}.weight" for norm, layers in description.folded.items() for layer in layers}
    assert plain.keys() - masked.keys() == set(norms.values())
    for name in masked:
        value = masked[name].parts[0] - mask[name].parts[1]
        weight = plain[name] * (plain[norms[name]] if name in norms else 1)
        frac = Ranges(description.ranges).frac_of_weight(name, 18)
        assert torch.equal(value, torch.round(weight.double() * 2**frac).to(torch.int64))
    client = tmp_path / "client"
    assert "quantization_config" not in json.loads((client / "config.json").read_text())
    tokenizer = tr.AutoTokenizer.from_pretrained(client)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "cab"}], tokenize=False)
    assert asked == "cab"
    want = tr.AutoTokenizer.from_pretrained(gguf_folder, gguf_file="tiny.Q4_1.gguf")("cabxyz")["input_ids"]
    assert tokenizer("cabxyz")["input_ids"] == want


def test_the_path_of_a_gguf_file_is_not_its_folder(gguf_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"want its folder '.*' and gguf_file='tiny.Q4_1.gguf'"):
        AutoPrivateModelForCausalLM.from_pretrained(str(gguf_folder / "tiny.Q4_1.gguf"), PLAIN)


def test_a_gguf_file_that_is_not_there(gguf_folder: Path) -> None:
    with pytest.raises(OSError, match=r"other\.gguf"):
        AutoPrivateModelForCausalLM.from_pretrained(str(gguf_folder), PLAIN, gguf_file="other.gguf")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(PatchMismatch, match=r"with gguf_file='x\.gguf': transformers cannot make plain weights of it"):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN, gguf_file="x.gguf")


def test_gguf_without_its_package(gguf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.modeling_gguf_pytorch_utils.is_gguf_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"a package is missing to read it: gguf \(pip install 'private-llm\[gguf\]'\)"
    ):
        AutoPrivateModelForCausalLM.from_pretrained(str(gguf_folder), PLAIN, gguf_file="tiny.Q4_1.gguf")


# -- quantised ----------------------------------------------------------------------------------------------------
def fp8(folder: Path) -> dict[str, Tensor]:
    """A checkpoint in blocks of 8-bit floats with a scale each; returns the values that it stands for."""
    from safetensors.torch import load_file, save_file

    model = tiny.build("llama")
    model.save_pretrained(folder)
    stored, meant = load_file(folder / "model.safetensors"), {}
    for name, value in list(stored.items()):
        if name.endswith("proj.weight"):
            scale = value.abs().max() / 400
            stored[name] = (value / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
            meant[name] = stored[name].float() * scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return meant


def test_an_fp8_checkpoint_is_unpacked(tmp_path: Path) -> None:
    meant = fp8(tmp_path)
    plain = tiny.build("llama")
    plain.load_state_dict(meant, strict=False)
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN) as private:
        assert worst(private(input_ids=IDS).logits, plain(input_ids=IDS).logits) < LOGIT_ERROR
        assert not hasattr(private.config, "quantization_config")
    held = NodeCheckpoint.open(str(tmp_path))
    assert all(torch.equal(held.weights[name], value) for name, value in meant.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantised: gptq\): a package is missing to read it: .*optimum"),
        ({"quant_method": "hqq"}, r"quantised: hqq\): a package is missing to read it: .*HQQ"),
    ],
)
def test_what_cannot_be_unpacked_is_one_sentence(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    known = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, "quantization_config": settings}))
    for entry in (
        AutoPrivateModelForCausalLM.from_pretrained,
        lambda s, c: share_checkpoint(s, tmp_path / "out", c),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            entry(str(tmp_path), PLAIN)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_dynamic_int8_is_refused_by_the_names_of_its_layers() -> None:
    quantised = torch.ao.quantization.quantize_dynamic(tiny.build("llama"), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(
        PatchMismatch, match=r"15 module\(s\).*q_proj \(torch\.ao.*dynamic.*want torch\.nn.*and 10 more"
    ):
        patch(quantised, PLAIN)


def test_a_replaced_activation_is_refused() -> None:
    """The parties would build the class's own, and answer wrongly."""
    model = tiny.build("llama")
    model.model.layers[1].mlp.act_fn = nn.GELU()
    with pytest.raises(
        PatchMismatch, match=r"layers\.1\.mlp\.act_fn \(torch.*GELU, want .*SiLUActivation\); the parties"
    ):
        patch(model, PLAIN)


class Packed(Tensor):
    """A weight in a class of its own, as torchao's are: int8 and a scale, a float outside."""

    @staticmethod
    def __new__(cls, value: Tensor, unpacks: bool = True) -> Packed:
        return Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)

    def __init__(self, value: Tensor, unpacks: bool = True) -> None:
        self.scale = value.abs().max() / 127
        self.small = (value / self.scale).round().to(torch.int8)
        self.unpacks = unpacks

    def dequantize(self) -> Tensor:
        return self.small.float() * self.scale if self.unpacks else self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"Packed: {func}")


def packed(unpacks: bool) -> tr.PreTrainedModel:
    model = tiny.build("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(Packed(layer.weight.detach(), unpacks), requires_grad=False)
    return model


def test_weights_of_a_class_of_their_own_are_unpacked() -> None:
    model = packed(unpacks=True)
    want = copy.deepcopy(tiny.build("llama"))
    with torch.no_grad():
        want.model.layers[0].mlp.up_proj.weight.copy_(model.model.layers[0].mlp.up_proj.weight.dequantize())
    with patch(model, PLAIN) as private:
        assert worst(private(input_ids=IDS).logits, want(input_ids=IDS).logits) < LOGIT_ERROR


def test_weights_that_do_not_unpack_are_named() -> None:
    with pytest.raises(PatchMismatch, match=r"weight 'model\.layers\.0\.mlp\.up_proj\.weight': got a Packed"):
        patch(packed(unpacks=False), PLAIN)


# -- adapters -----------------------------------------------------------------------------------------------------
def test_an_adapter_without_peft_names_the_package(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(checkpoint), "peft_type": "LORA"})
    )
    is_peft_available()  # transformers remembers its first answer
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "peft"}
    sys.modules["peft"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(ConfigError, match=r"adapter of '.*'\): a package is missing to read it: peft"):
            AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN)
    finally:
        del sys.modules["peft"]
        sys.modules.update(hidden)


def test_an_adapter_that_names_no_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"an adapter .* that does not name its base model"):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN)


class Lora:
    """Real adapters, where peft is installed."""

    def __init__(self, peft: ModuleType) -> None:
        self.peft = peft

    def on(
        self, model: tr.PreTrainedModel, *names: str, task: str | None = "CAUSAL_LM", own: tuple[str, ...] = (),
        tie: bool = False,
    ) -> tr.PreTrainedModel:  # fmt: skip
        settings = self.peft.LoraConfig(
            r=4, target_modules=list(names), init_lora_weights=False, task_type=task, modules_to_save=list(own) or None,
            ensure_weight_tying=tie,
        )  # fmt: skip
        return self.peft.get_peft_model(model, settings).eval()


@pytest.fixture
def lora() -> Lora:
    return Lora(pytest.importorskip("peft", reason="adapters need peft: pip install peft"))


def test_an_unmerged_lora_is_merged_in_a_copy(lora: Lora) -> None:
    adapted = lora.on(tiny.build("llama"), "q_proj", "v_proj")
    with torch.no_grad():
        want = adapted(input_ids=IDS).logits
        assert worst(tiny.build("llama")(input_ids=IDS).logits, want) > 100 * LOGIT_ERROR, "the adapter matters"
    with patch(adapted, PLAIN) as private:
        assert worst(private(input_ids=IDS).logits, want) < LOGIT_ERROR
    with torch.no_grad():
        assert torch.equal(adapted(input_ids=IDS).logits, want), "the original stays as it is"
        with adapted.disable_adapter(), patch(adapted, PLAIN) as private:
            assert worst(private(input_ids=IDS).logits, adapted(input_ids=IDS).logits) < LOGIT_ERROR


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    ("name", "modules", "own", "tie"),
    [
        ("llama", ("q_proj", "embed_tokens"), (), False),
        ("llama", ("lm_head",), (), False),
        ("gpt2", ("wte",), (), False),
        ("llama", ("q_proj",), ("embed_tokens",), False),
        ("llama", ("q_proj", "embed_tokens"), (), True),
    ],
)
def test_an_adapter_of_a_tied_weight_changes_that_one_only(
    lora: Lora, tmp_path: Path, name: str, modules: tuple[str, ...], own: tuple[str, ...], tie: bool
) -> None:
    base = tiny.build(name, tie_word_embeddings=True)
    base.tie_weights()
    base.save_pretrained(tmp_path / "base")
    adapted = lora.on(base, *modules, own=own, tie=tie)
    for value_name, value in adapted.named_parameters():
        if "modules_to_save" in value_name:
            value.data.add_(torch.randn_like(value) * 0.1)
        elif "lora_embedding" in value_name:  # of peft's size, logits go into hundreds
            value.data.mul_(0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    quick = dataclasses.replace(PLAIN, calibrate=False)
    with torch.no_grad():
        want = adapted(input_ids=IDS).logits
        with patch(adapted, quick) as private:
            assert worst(private(input_ids=IDS).logits, want) < LOGIT_ERROR
        with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path / "adapter"), quick) as private:
            assert worst(private(input_ids=IDS).logits, want) < LOGIT_ERROR


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
def test_an_adapter_of_a_larger_vocabulary(lora: Lora, tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path / "base")
    base = tiny.build("llama")
    base.resize_token_embeddings(141)
    adapted = lora.on(base, "q_proj")
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[3, 140, 7]])
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path / "adapter"), PLAIN) as private, torch.no_grad():
        assert private.config.vocab_size == 141
        assert worst(private(input_ids=ids).logits, adapted(input_ids=ids).logits) < LOGIT_ERROR


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
def test_an_adapter_that_merges_into_something_else_is_named(lora: Lora, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm_hf.checkpoint.dense._separate", lambda model: None)
    base = tiny.build("llama", tie_word_embeddings=True)
    base.tie_weights()
    with pytest.raises(PatchMismatch, match="with its adapter merged, 'lm_head' computes something else"):
        patch(lora.on(base, "embed_tokens"), PLAIN)


def test_an_adapter_that_transformers_added(lora: Lora) -> None:
    model = tiny.build("llama")
    model.add_adapter(lora.peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.eval()
    with torch.no_grad(), patch(model, PLAIN) as private:
        assert worst(private(input_ids=IDS).logits, model(input_ids=IDS).logits) < LOGIT_ERROR
    model.disable_adapters()
    with torch.no_grad(), patch(model, PLAIN) as private:
        assert worst(private(input_ids=IDS).logits, model(input_ids=IDS).logits) < LOGIT_ERROR


def test_an_adapter_checkpoint_with_its_own_head(lora: Lora, tmp_path: Path) -> None:
    tiny.build("bert").save_pretrained(tmp_path / "base")
    adapted = lora.on(tiny.build("bert", tr.BertForSequenceClassification), "query", task="SEQ_CLS")
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    source = str(tmp_path / "adapter")
    with torch.no_grad(), AutoPrivateModelForSequenceClassification.from_pretrained(source, PLAIN) as private:
        assert private(input_ids=IDS).logits.shape == (1, 2)
    headless = lora.on(tiny.build("bert", tr.BertForSequenceClassification), "query", task=None)
    headless.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    headless.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        PatchMismatch, match=r"lacks 2 weight\(s\) of BertForSequenceClassification: classifier.*AutoPri"
    ):
        AutoPrivateModelForSequenceClassification.from_pretrained(source, PLAIN)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_adapter_of_another_class_is_refused(lora: Lora, tmp_path: Path) -> None:
    """peft goes on with adapters that it made up, and says so in a warning only."""
    tiny.build("bert").save_pretrained(tmp_path / "base")
    adapted = lora.on(tiny.build("bert"), "query", task=None)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    source = str(tmp_path / "adapter")
    with pytest.raises(PatchMismatch, match=r"cannot make plain weights of it .*missing adapter keys"):
        AutoPrivateModelForSequenceClassification.from_pretrained(source, PLAIN)
    with torch.no_grad(), AutoPrivateModel.from_pretrained(source, PLAIN) as private:
        want = adapted(input_ids=IDS).last_hidden_state
        assert worst(private(input_ids=IDS).last_hidden_state, want) < LOGIT_ERROR


def test_prompt_tuning_cannot_be_merged(lora: Lora) -> None:
    tuned = lora.peft.get_peft_model(
        tiny.build("llama"), lora.peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(PatchMismatch, match="cannot be merged into its weights"):
        patch(tuned, PLAIN)


# -- dtypes -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["auto", torch.bfloat16, "float16", "torch.float32", None])
def test_a_dtype_changes_nothing(name: str, value: object) -> None:
    assert Checkpoint("nowhere", **{name: value})._settings == {}


@pytest.mark.parametrize("value", ["automatic", torch.int8, "load", 16])
def test_what_is_no_dtype(checkpoint: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"torch_dtype: got .*; want 'auto' or a floating-point dtype"):
        AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), PLAIN, torch_dtype=value)


def test_a_model_with_a_dtype_is_as_exact_as_without(checkpoint: Path) -> None:
    plain = tiny.build("llama")
    for value in ("auto", torch.float16):
        with AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), PLAIN, torch_dtype=value) as private:
            assert private.dtype == torch.float32
            assert worst(private(input_ids=IDS).logits, plain(input_ids=IDS).logits) < LOGIT_ERROR
