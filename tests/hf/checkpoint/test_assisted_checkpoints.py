"""Protocol "assisted" reads the checkpoints that others read: sharded, tied, of other types, GGUF, FP8, adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tr
from private_llm_hf import AutoPrivateModelForCausalLM, patch

from private_llm.errors import ConfigError, DomainError, PatchMismatch
from tests.hf import tiny
from tests.hf.checkpoint.gguf_file import write_gguf
from tests.hf.checkpoint.test_checkpoints import IDS, fp8, packed
from tests.hf.compare import GREEDY, worst
from tests.hf.test_assisted import ASSISTED, ERROR

Model = tr.PreTrainedModel
GGUF = {"gguf_file": "tiny.gguf"}


def _agree(private: Model, plain: Model) -> None:
    with torch.no_grad():
        assert private.lm_head.weight.is_meta
        assert not hasattr(private.config, "quantization_config")
        assert worst(private(IDS).logits, plain(IDS).logits.float()) < ERROR
        assert torch.equal(private.generate(IDS, **GREEDY), plain.generate(IDS, **GREEDY))


def _sharded(folder: Path) -> Model:
    plain = tiny.build("llama")
    plain.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return plain


def _tied(folder: Path) -> Model:
    plain = tiny.build("llama", tie_word_embeddings=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    return plain


def _typed(dtype: torch.dtype) -> Callable[[Path], Model]:
    def save(folder: Path) -> Model:
        tiny.build("llama").to(dtype).save_pretrained(folder)
        return tr.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return save


def _pickled(folder: Path) -> Model:
    plain = tiny.build("llama")
    plain.config.save_pretrained(folder)
    torch.save(plain.state_dict(), folder / "pytorch_model.bin")
    return plain


def _fp8(folder: Path) -> Model:
    meant, plain = fp8(folder), tiny.build("llama")
    plain.load_state_dict(meant, strict=False)
    return plain


def _gguf(folder: Path) -> Model:
    write_gguf(tiny.build("llama"), folder / GGUF["gguf_file"])
    return tr.AutoModelForCausalLM.from_pretrained(folder, **GGUF, dtype=torch.float32).eval()


def _adapted(folder: Path, *modules: str, tied: bool = False) -> Model:
    peft = pytest.importorskip("peft", reason="adapters need peft: pip install peft")
    base = tiny.build("llama", tie_word_embeddings=tied)
    base.tie_weights()
    base.save_pretrained(folder / "base")
    settings = peft.LoraConfig(r=4, target_modules=list(modules), init_lora_weights=False, task_type="CAUSAL_LM")
    adapted: Model = peft.get_peft_model(base, settings).eval()
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")  # type: ignore[index]
    adapted.save_pretrained(folder)
    return adapted


def _lora(folder: Path) -> Model:
    return _adapted(folder, "q_proj", "down_proj")


def _lora_of_a_tied_head(folder: Path) -> Model:
    return _adapted(folder, "lm_head", tied=True)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    ("save", "more"),
    [
        (_sharded, {}), (_tied, {}), (_pickled, {}), (_fp8, {}), (_gguf, GGUF), (_lora, {}), (_lora_of_a_tied_head, {}),
        *((_typed(dtype), {}) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    ],
)  # fmt: skip
def test_checkpoints(save: Callable[[Path], Model], more: dict[str, str], tmp_path: Path) -> None:
    plain = save(tmp_path)
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), ASSISTED, **more) as private:
        _agree(private, plain)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("save", [_tied, _gguf, _lora, _lora_of_a_tied_head])
def test_models_in_memory(save: Callable[[Path], Model], tmp_path: Path) -> None:
    plain = save(tmp_path)
    before = plain(IDS).logits.detach()
    with patch(plain, ASSISTED) as private:
        _agree(private, plain)
    assert torch.equal(plain(IDS).logits, before), "the original stays as it is"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_in_memory_of_other_types(dtype: torch.dtype) -> None:
    """Computed in float32, from weights with the accuracy of the type."""
    given = tiny.build("llama").to(dtype)
    with patch(given, ASSISTED) as private:
        _agree(private, tiny.build("llama").to(dtype).float())
    assert given.dtype is dtype


def test_weights_of_a_class_of_their_own_are_unpacked() -> None:
    plain = tiny.build("llama")
    given = packed(unpacks=True)
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight.copy_(given.model.layers[0].mlp.up_proj.weight.dequantize())
    with patch(given, ASSISTED) as private:
        _agree(private, plain)
    with pytest.raises(PatchMismatch, match="got a Packed"):
        patch(packed(unpacks=False), ASSISTED)


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    plain = tiny.build("llama")
    plain.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    plain.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantised: gptq"):
        AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), ASSISTED)
    plain = tiny.build("llama").half()
    with torch.no_grad():
        plain.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(DomainError, match=r"weight of 'lm_head': got values that are not finite"):
        patch(plain, ASSISTED)
