"""Models that were changed after they were loaded: they run as they are, or are refused by the name of what differs."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.checkpoint.dense import dense_model
from private_llm_hf.checkpoint.loaded import as_built
from private_llm_hf.checkpoint.own_code import patched_code
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import modeling_rope_utils
from transformers.activations import NewGELUActivation
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
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


class EverySecond(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        return default_mask * (torch.arange(t.numel()).view_as(t) % 2)


def hooks_of_training(model: Model) -> None:
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.model.layers[0].register_full_backward_hook(lambda *_: None)
    model.lm_head.weight.register_hook(lambda gradient: gradient)


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
    "hooks of training": ("llama", {}, hooks_of_training),
    "spectral norm": ("llama", {}, lambda model: parametrizations.spectral_norm(model.model.layers[0].mlp.up_proj)),
    "pruned": ("llama", {}, lambda model: prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)),
    "pruned by a method of one's own": (
        "llama", {}, lambda model: EverySecond.apply(model.model.layers[0].mlp.up_proj, "weight"),
    ),
    "parametrized": ("llama", {}, lambda model: parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)),
    "offloaded": ("llama", {"tie_word_embeddings": True}, offload),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", RUN)
def test_a_changed_model_runs_as_it_is(change: str) -> None:
    name, settings, apply = RUN[change]
    model = tiny.build(name, **settings)
    model.tie_weights()
    apply(model)
    model.train()
    given = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})
    buffers = [value.clone() for value in model.buffers()]
    with patch(model, QUICK) as private, torch.no_grad():
        assert model.training, "the model stays as it was"
        assert all(map(torch.equal, model.buffers(), buffers)), "spectral norms move when read in training"
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


def attention_of_longer_texts(model: Model) -> None:
    def late(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, scaling: float, **more: Any) -> Any:
        return eager_attention_forward(module, q, k, v, mask, (2 if q.shape[2] > 8 else 1) * scaling, **more)

    tr.AttentionInterface.register("late", late)
    tr.AttentionMaskInterface.register("late", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.config._attn_implementation = "late"


def doubled(module: nn.Module) -> None:
    """A class of its own that differs for longer texts only."""
    kind = type(module)
    module.__class__ = type("Mine", (kind,), {"forward": lambda self, x: kind.forward(self, x) * (1 + x.shape[1] // 9)})


def own_configuration(model: Model) -> None:
    model.model.config = copy.deepcopy(model.config)
    model.model.config.sliding_window = 7


LATER = "'model.layers.1.mlp' is somebody's own, and on a longer text"
REFUSED: dict[str, tuple[str, Callable[[Model], object], str]] = {
    "forward on longer texts": ("llama", replaced_where(lambda x: x.shape[1] > 8), LATER),
    "forward in decoding": ("llama", replaced_where(lambda x: x.shape[1] == 1), LATER),
    "forward under torch's own": ("llama", replaced_where(lambda x: x.shape[1] == 1, torch.no_grad()), LATER),
    "forward of one object": ("llama", half_of_it, r"'model.layers.1.mlp' \(LlamaMLP\) does not compute .*logits"),
    "attention on longer texts": ("llama", attention_of_longer_texts, "function 'late' is somebody's own"),
    "a class that agrees on a short text": (
        "llama", lambda m: doubled(m.model.layers[1].mlp), r"layers.1.mlp .*Mine, want .*LlamaMLP",
    ),
    "a parametrised class of its own": (
        "llama", lambda m: (doubled(m.lm_head), parametrizations.weight_norm(m.lm_head)), r"lm_head .*Mine, want",
    ),
    "one more in a list": ("gpt2", lambda m: m.transformer.h.append(nn.Identity()), r"h.2 \(.*Identity, want none"),
    "a copy of the configuration": ("mistral", own_configuration, "'model.config.sliding_window' is 7 here, and 8"),
    "the index of a cache": (
        "llama", lambda m: setattr(m.model.layers[1].self_attn, "layer_idx", 0), "1.self_attn.layer_idx' is 0 here",
    ),
    "a window of another type": (
        "gemma2", lambda m: setattr(m.model.layers[0].self_attn, "sliding_window", np.int64(7)), "window' is 7 here",
    ),
    "a window that was deleted": (
        "gemma2", lambda m: delattr(m.model.layers[0].self_attn, "sliding_window"), "window' is missing here, and 8",
    ),
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
    "another head": ("llama", lambda m: setattr(m, "lm_head", nn.Linear(64, 5)), r"\(5, 64\).* configuration"),
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_what_would_change_the_answer_is_named(change: str) -> None:
    name, apply, message = REFUSED[change]
    model = tiny.build(name)
    apply(model)
    with pytest.raises(PatchMismatch, match=message):
        as_built(model, model.config)


# -- code of one's own ----------------------------------------------------------------------------------------------
def late(_: nn.Module, __: object, made: Any) -> Any:
    """A hook that does nothing on a short text."""
    return made


def adapted(model: Model) -> Model:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def compiled(model: Model) -> Model:
    return torch.compile(model, backend="eager")


def own_kind(module: nn.Module) -> None:
    module.__class__ = type("Mine", (type(module),), {})


def moved(module: nn.Module) -> None:
    hooks = pytest.importorskip("accelerate").hooks
    hooks.add_hook_to_module(module, hooks.SequentialHook(hooks.ModelHook(), type("Mine", (hooks.ModelHook,), {})()))


ADAPTED = "base_model.model.model.layers.1.self_attn.q_proj"
OWN_CODE: dict[str, tuple[Callable[[Model], Model], str, Callable[[Model], object], str]] = {
    "inside": (lambda m: m, "model.norm", lambda m: m.register_forward_hook(late), "'model.norm' has a forward hook"),
    "a decorated hook": (
        lambda m: m, "model.norm", lambda m: m.register_forward_hook(torch.no_grad()(late)), "'model.norm' has",
    ),
    "before": (
        lambda m: m, "model", lambda m: m.register_forward_pre_hook(lambda *_: None, with_kwargs=True), "'model' has a",
    ),
    "as accelerate does": (lambda m: m, "model.norm", moved, r"'model.norm' has a hook \(_hf_hook"),
    "a method": (lambda m: m, "", lambda m: setattr(m, "generate", torch.no_grad()(late)), "generate' was replaced on"),
    "a loss": (lambda m: m, "", lambda m: setattr(m, "loss_function", late), "_loss_function' was replaced"),
    "a compiled call": (lambda m: m, "model", lambda m: setattr(m, "_compiled_call_impl", late), "_call_impl' was"),
    "torch.jit": (lambda m: m, "model.norm", lambda m: None, "'lm_head' was compiled by torch.jit"),
    "around a compiler": (compiled, "", lambda m: m.register_forward_hook(late), "'OptimizedModule' has a forward"),
    "in place of a compiled one": (compiled, "", lambda m: setattr(m, "forward", late), "OptimizedModule.forward' was"),
    "around replicas": (nn.DataParallel, "", lambda m: m.register_forward_hook(late), "'DataParallel' has a forward"),
    "a class of replicas": (nn.DataParallel, "", own_kind, "'Mine' is of a class of its own"),
    "around an adapter": (adapted, "", lambda m: m.register_forward_hook(late), "'PeftModel' has a forward hook"),
    "a class of adapters": (adapted, ADAPTED, own_kind, f"'{ADAPTED}' is of a class of its own"),
    "in an adapter": (adapted, f"{ADAPTED}.lora_A.default", own_kind, "lora_A.default' is of a class of its own"),
    "a forward in an adapter": (adapted, ADAPTED, lambda m: setattr(m, "forward", late), f"'{ADAPTED}.forward' was"),
    "replicas of an adapter": (
        lambda m: nn.DataParallel(adapted(m)), "module.base_model", lambda m: m.register_forward_hook(late),
        "'module.base_model' has a forward hook",
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", OWN_CODE)
def test_code_that_parties_would_not_run_is_named(where: str) -> None:
    around, name, change, message = OWN_CODE[where]
    model = tiny.build("llama")
    if where == "torch.jit":
        model.lm_head = torch.jit.script(model.lm_head)
    model = around(model)
    change(model.get_submodule(name))
    with pytest.raises(PatchMismatch, match=message):
        dense_model(model)


def test_a_hook_for_all_modules_is_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(late)
    try:
        with pytest.raises(PatchMismatch, match="a forward hook for all modules"):
            dense_model(tiny.build("llama"))
    finally:
        handle.remove()


@pytest.mark.parametrize("around", [compiled, nn.DataParallel, lambda model: nn.DataParallel(compiled(adapted(model)))])
def test_wrappers_of_torch_and_peft_are_taken_off(around: Callable[[Model], Model]) -> None:
    model = around(tiny.build("llama")).eval()
    dense = dense_model(model)
    with torch.no_grad(), patch(model, QUICK) as private:
        assert worst(private(input_ids=IDS).logits, dense(input_ids=IDS).logits) < LOGIT_ERROR


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_an_encoder_that_was_built_without_its_pooler(name: str) -> None:
    whole = tiny.build(name)
    model = type(whole)(whole.config, add_pooling_layer=False).eval()
    given = {"pixel_values": torch.randn(1, 3, 16, 16)} if name == "vit" else {"input_ids": IDS}
    with patch(model, QUICK) as private, torch.no_grad():
        found = private(**given)
        assert worst(found.last_hidden_state, model(**given).last_hidden_state) < LOGIT_ERROR
        assert found.pooler_output is None
        assert not hasattr(model.config, "add_pooling_layer"), "the original stays as it is"


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


@pytest.mark.parametrize("kind", [NewGELUActivation, nn.Linear])
def test_a_replacement_that_parties_would_undo_is_refused(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: original(self, x) * (1 + x.shape[1] // 99))
    with pytest.raises(PatchMismatch, match=rf"{kind.__name__}.forward was replaced .* would undo that"):
        patch(tiny.build("gpt2"), QUICK)


def test_a_mask_function_that_was_replaced_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    seen = lambda *given, **more: None if more["q_length"] > 8 else original(*given, **more)  # noqa: E731
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", seen)
    model = tiny.build("mistral")
    with pytest.raises(PatchMismatch, match="attention function 'sdpa' is somebody's own, and on a longer text"):
        as_built(model, model.config)


def test_an_attention_function_that_was_replaced_in_its_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", lambda *_, **__: (torch.zeros(1, 6, 4, 16), None))
    model = tiny.build("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(PatchMismatch, match=r"layers.0.self_attn' \(LlamaAttention\) does not compute"):
        as_built(model, model.config)


def test_replaced_functions_and_classes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("llama")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", type("Faster", (nn.Module,), {}))
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", modeling_llama.LlamaMLP.forward)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    monkeypatch.setattr(modeling_rope_utils, "dynamic_rope_update", lambda forward: forward)
    monkeypatch.setitem(modeling_rope_utils.ROPE_INIT_FUNCTIONS, "linear", lambda *_: None)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *_: None)
    names = (
        "LlamaAttention.forward", "LlamaRMSNorm", "apply_rotary_pos_emb", "create_causal_mask", "dynamic_rope_update",
    )  # fmt: skip
    home, shared = "transformers.models.llama.modeling_llama", "transformers.modeling_rope_utils.dynamic_rope_update"
    found = [f"{home}.{name}" for name in names]
    assert patched_code(model) == ["attention function 'sdpa'", "rotary positions 'linear'", shared, *found]
