"""Models that were changed after they were loaded: they run as they are, or are refused by the name of what differs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.checkpoint.loaded import as_built
from private_llm_hf.models.patched_code import patched_code
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, eager_attention_forward

from private_llm.errors import PatchMismatch
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst

IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89]])
QUICK = PrivateConfig(protocol="plain", insecure=True, timeout_s=60, calibrate=False)
Model = Any  # modules are attributes


def untie(model: Model) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn(128, 64) * 0.1)


def observe(model: Model) -> None:
    """The same function around the original one."""
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: original(x)


def first_layers(model: Model) -> None:
    model.model.layers = model.model.layers[:1]


def offload(model: Model) -> None:
    pytest.importorskip("accelerate").cpu_offload(model, torch.device("cpu"))


RUN: dict[str, tuple[str, dict[str, object], Callable[[Model], object]]] = {
    "resized": ("llama", {}, lambda model: model.resize_token_embeddings(141)),
    "resized, tied": ("gemma2", {"tie_word_embeddings": True}, lambda model: model.resize_token_embeddings(97)),
    "resized, two stacks": ("t5", {}, lambda model: model.resize_token_embeddings(141)),
    "padding token": ("opt", {}, lambda model: setattr(model.config, "pad_token_id", 3)),
    "untied by hand": ("llama", {"tie_word_embeddings": True}, untie),
    "fewer layers": ("llama", {}, first_layers),
    "layers left out by the configuration": ("llama", {}, lambda model: setattr(model.config, "num_hidden_layers", 1)),
    "observed": ("llama", {}, observe),
    "compiled inside": ("llama", {}, lambda model: setattr(model, "model", torch.compile(model.model))),
    "same activation": ("llama", {}, lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.SiLU())),
    "pruned": ("llama", {}, lambda model: prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)),
    "parametrized": ("llama", {}, lambda model: parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)),
    "offloaded": ("llama", {"tie_word_embeddings": True}, offload),
}  # fmt: skip


@pytest.mark.parametrize("change", RUN)
def test_a_changed_model_runs_as_it_is(change: str) -> None:
    name, settings, apply = RUN[change]
    model = tiny.build(name, **settings)
    model.tie_weights()
    apply(model)
    model.train()
    given = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})
    with patch(model, QUICK) as private, torch.no_grad():
        assert model.training, "the model stays as it was"
        assert worst(private(**given).logits, model.eval()(**given).logits) < LOGIT_ERROR


def half_of_it(model: Model) -> None:
    layer = model.model.layers[1].mlp
    layer.forward = types.MethodType(lambda self, x: self.down_proj(self.up_proj(x)), layer)


def replaced_where(when: Callable[[torch.Tensor], bool], around: Callable[[Any], Any] = lambda made: made) -> Any:
    """A forward that differs only for some shapes."""

    def apply(model: Model) -> None:
        layer = model.model.layers[1].mlp
        original = layer.forward
        made = functools.wraps(original)(lambda x: original(x) * (2 if when(x) else 1))
        layer.forward = around(made)

    return apply


def own_attention(model: Model) -> None:
    def sharper(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, scaling: float, **more: Any) -> Any:
        return eager_attention_forward(module, q, k, v, mask, 2 * scaling, **more)

    tr.AttentionInterface.register("sharper", sharper)
    model.config._attn_implementation = "sharper"


LATER = "'model.layers.1.mlp' was replaced on this one object, and on a longer text"
REFUSED: dict[str, tuple[str, Callable[[Model], object], str]] = {
    "forward on longer texts": ("llama", replaced_where(lambda x: x.shape[1] > 8), LATER),
    "forward in decoding": ("llama", replaced_where(lambda x: x.shape[1] == 1), LATER),
    "forward under torch's own": ("llama", replaced_where(lambda x: x.shape[1] == 1, torch.no_grad()), LATER),
    "forward of one object": ("llama", half_of_it, r"'model.layers.1.mlp' \(LlamaMLP\) does not compute .*logits"),
    "attention function": ("llama", own_attention, r"'model.layers.0.self_attn' \(LlamaAttention\) does not compute"),
    "frequencies": ("llama", lambda m: m.model.rotary_emb.inv_freq.mul_(2), r"buffer 'model.rotary_emb.inv_freq'"),
    "segments": ("bert", lambda m: m.embeddings.token_type_ids.add_(1), "buffer 'embeddings.token_type_ids'"),
    "positions": ("bert", lambda m: m.embeddings.position_ids.add_(1), "buffer 'embeddings.position_ids'"),
    "an int for a float": (
        "llama", lambda m: setattr(m.model.layers[1].self_attn, "scaling", 1), "scaling' is 1 here, and 0.25",
    ),
    "a configuration set too late": (
        "llama", lambda m: setattr(m.config, "rope_parameters", {"rope_type": "default", "rope_theta": 100.0}),
        "buffer 'model.rotary_emb.inv_freq'",
    ),
    "eps": ("bert", lambda m: setattr(m.embeddings.LayerNorm, "eps", 1e-3), "LayerNorm.eps' is 0.001 here, and 1e-12"),
    "another activation": (
        "gpt2", lambda m: setattr(m.transformer.h[0].mlp, "act", nn.GELU()), "mlp.act .*GELU, want .*NewGELU",
    ),
    "positions counted from another token": (
        "roberta", lambda m: setattr(m.config, "pad_token_id", 3), r"'embeddings' \(RobertaEmbeddings\)",
    ),
    "a table of its own for the encoder": (
        "t5", lambda m: setattr(m.encoder, "embed_tokens", nn.Embedding(128, 64)), "ties 'encoder.embed_tokens.weight'",
    ),
    "a method of one object": ("llama", lambda m: setattr(m, "generate", lambda *_: 5), r"generate' was replaced on"),
    "another head": ("llama", lambda m: setattr(m, "lm_head", nn.Linear(64, 5)), r"\(5, 64\).* configuration"),
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_what_would_change_the_answer_is_named(change: str) -> None:
    name, apply, message = REFUSED[change]
    model = tiny.build(name)
    apply(model)
    with pytest.raises(PatchMismatch, match=message):
        as_built(model, model.config)


def test_weights_are_not_copied() -> None:
    model = tiny.build("llama")
    built = as_built(model, model.config)
    assert built.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


# -- replaced for all models of a class -----------------------------------------------------------------------------
def test_replaced_code_is_tried_in_threads_and_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformers.models.llama.modeling_llama.LlamaMLP.forward"
    assert [patched_code(tiny.build(name)) for name in ("llama", "gpt2", "t5", "vit")] == [[], [], [], []]
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    model = tiny.build("llama")
    with pytest.raises(PatchMismatch, match=rf"1 part\(s\) of transformers or torch were replaced .*{name}"):
        patch(model, PrivateConfig(party_mode="processes", calibrate=False))
    with patch(model, QUICK) as private, torch.no_grad():
        assert worst(private(input_ids=IDS).logits, model(input_ids=IDS).logits) < LOGIT_ERROR


def test_a_replacement_that_a_handler_would_undo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NewGELUActivation, "forward", lambda self, x: 2 * x)
    with pytest.raises(PatchMismatch, match="its private result would be wrong"):
        patch(tiny.build("gpt2"), QUICK)


def test_replaced_functions_and_classes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("llama")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", type("Faster", (nn.Module,), {}))
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", modeling_llama.LlamaMLP.forward)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *_: None)
    names = ("LlamaAttention.forward", "LlamaRMSNorm", "apply_rotary_pos_emb")
    home = "transformers.models.llama.modeling_llama"
    assert patched_code(model) == ["attention function 'sdpa'", *(f"{home}.{name}" for name in names)]
