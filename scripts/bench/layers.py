"""Works on one transformer layer: HuggingFace's own module at the parties, with random weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bench.work import Shape, Work
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from functools import partial

import numpy as np

from bench.whole import WholeWork

if TYPE_CHECKING:
    from private_llm_hf import ForwardPlan

Adapt = Callable[[dict[str, Tensor]], dict[str, Tensor]]
LayerForward = Callable[[nn.Module, Sequence[Tensor], Any, Tensor | None], Tensor]


def opt_layer(shape: Shape) -> Work:
    """A pre-norm ReLU decoder layer without a cache; batch x tokens x hidden x heads x feed-forward."""
    batch, tokens, hidden = shape[:3]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    return layer_work(
        "opt-layer", shape, "OPTModel", opt_config(shape), ((batch, tokens, hidden),), causal, _opt_forward
    )


def opt_decode(shape: Shape) -> Work:
    """One new token through the same layer over a cache; batch x cached tokens x hidden x heads x feed-forward."""
    return decode_work("opt-decode", shape, opt_config(shape))


def decode_work(name: str, shape: Shape, config: dict[str, Any], adapt: Adapt | None = None) -> Work:
    """One new token through an OPT layer of `config` over a cache. adapt: changes its random weights."""
    batch, cached, hidden, heads, _ = shape
    past = (batch, heads, cached, hidden // heads)
    return layer_work(name, shape, "OPTModel", config, ((batch, 1, hidden), past, past), None, _opt_forward, adapt)


def bert_layer(shape: Shape) -> Work:
    """A post-norm GELU encoder layer; batch x tokens x hidden x heads x feed-forward."""
    batch, tokens, hidden, heads, wide = shape
    config = {
        "model_type": "bert", "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": wide,
        "num_hidden_layers": 1, "vocab_size": 4, "max_position_embeddings": 2, "hidden_act": "gelu",
    }  # fmt: skip
    return layer_work("bert-layer", shape, "BertModel", config, ((batch, tokens, hidden),), None, _bert_forward)


def opt_config(shape: Shape) -> dict[str, Any]:
    """Of an OPT with one layer; batch x tokens x hidden x heads x feed-forward."""
    _, _, hidden, heads, wide = shape
    return {
        "model_type": "opt", "hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": wide,
        "num_hidden_layers": 1, "vocab_size": 4, "max_position_embeddings": 2, "word_embed_proj_dim": hidden,
        "pad_token_id": 1, "activation_function": "relu",
    }  # fmt: skip


def _opt_forward(model: nn.Module, values: Sequence[Tensor], cache: Any, mask: Tensor | None) -> Tensor:  # noqa: ANN401
    from private_llm_hf.transformers_versions import CACHE

    layer = model.get_submodule("decoder.layers.0")
    if len(values) > 1:
        cache.update(values[1], values[2], 0)
    out: Tensor = layer(values[0], attention_mask=mask, **{CACHE: cache if len(values) > 1 else None})
    return out


def _bert_forward(model: nn.Module, values: Sequence[Tensor], cache: Any, mask: Tensor | None) -> Tensor:  # noqa: ANN401
    out: Tensor = model.get_submodule("encoder.layer.0")(values[0], attention_mask=mask)
    return out


def layer_work(
    name: str, shape: Shape, class_name: str, config: dict[str, Any], inputs: tuple[Shape, ...], mask: Tensor | None,
    forward: LayerForward, adapt: Adapt | None = None,
) -> Work:  # fmt: skip
    """A work: `forward` on the one-layer model of `config`, its weights secret. The truth uses no predictors."""
    from private_llm_hf.party.model import build_party_model, empty_model

    shapes = {key: tuple(value.shape) for key, value in empty_model(config, class_name).named_parameters()}

    def prepare(session: Session, weights: Mapping[str, Fixed]) -> Callable[[Session, Sequence[Fixed]], Fixed]:
        model = build_party_model(config, class_name, dict(weights), session)

        def run(_: Session, values: Sequence[Fixed]) -> Fixed:
            wrapped = [SecretTensor(value) for value in values]
            out = forward(model, wrapped, model.new_cache(), mask)
            if not isinstance(out, SecretTensor):
                raise TypeError(f"{name}: the layer returned {type(out).__name__}")
            return out.to_fixed()

        return run

    def truth(values: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        from transformers import DynamicCache

        own = {key: value for key, value in weights.items() if "_predictor." not in key}
        return forward(_plaintext(config, class_name, own), values, DynamicCache(), mask)

    return Work(name, shape, inputs, prepare, truth, (1.0,), weights=shapes, adapt=adapt)


def _plaintext(config: Mapping[str, Any], class_name: str, weights: Mapping[str, Tensor]) -> "PreTrainedModel":
    """The same model in float64 with PyTorch's own attention."""
    import transformers

    values = dict(config)
    settings = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    settings._attn_implementation = "sdpa"
    model: PreTrainedModel = getattr(transformers, class_name)(settings).double().eval()
    model.load_state_dict(dict(weights), strict=True)
    return model


# -- Networks of images as users run them: a plain `nn.Sequential`, patched, on a batch of images ---------------------
def network(name: str, shape: Shape) -> WholeWork:
    """LeNet-5, AlexNet and VGG-16 in CIFAR shape, or ResNet-50 and VGG-16 in ImageNet shape, all pools averages.

    shape: batch x channels x height x width, for ImageNet x filters of the first layer. Random weights of variance
    2 / fan-in, which keeps activations in the range of trained networks.
    """
    from private_llm_hf.vision import networks

    taken, width = shape[:4], shape[4] if len(shape) > 4 else 64
    makers: dict[str, Callable[[], nn.Module]] = {
        "lenet": networks.lenet5, "alexnet": networks.alexnet, "vgg16": networks.vgg16,
        "resnet50": partial(networks.resnet50, width=width),
        "vgg16-imagenet": partial(networks.vgg16_imagenet, width=width, size=taken[-1], pool=nn.AvgPool2d),
    }  # fmt: skip
    make = makers[name]

    def build() -> nn.Module:
        with torch.device("meta"):
            model = make()
        random = np.random.default_rng(3)
        made = {
            key: torch.from_numpy(random.normal(*_normal(key, value), tuple(value.shape)).astype(np.float32))
            for key, value in model.named_parameters()
        }
        made |= {  # a batch norm's running mean 0 and variance 1
            key: torch.full_like(value, float(key.endswith("running_var")), device="cpu")
            for key, value in model.named_buffers()
        }
        model.load_state_dict(made, assign=True)
        return model.eval()

    images = torch.from_numpy(np.random.default_rng(4).normal(0.0, 1.0, taken).astype(np.float32))

    def call(model: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a private model
        return model(images), images

    def truth(model: Any, asked: Tensor) -> Tensor:  # noqa: ANN401 - the plaintext model
        logits: Tensor = model(asked.double())
        return logits

    def plan() -> "ForwardPlan":
        from private_llm_hf import ForwardPlan

        return ForwardPlan({"pixel_values": taken})

    return WholeWork(name, shape, build, call, truth, plan)


def _normal(name: str, weight: Tensor) -> tuple[float, float]:
    """Mean and deviation of a weight. Gains of norms are below 1, so that sums over residual blocks stay small."""
    if weight.ndim > 1:
        return 0.0, (2.0 / weight[0].numel()) ** 0.5
    return (0.7 if name.endswith("weight") else 0.0), 0.1
