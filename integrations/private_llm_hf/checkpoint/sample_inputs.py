"""Small plaintext inputs that a model of any kind takes, and what two models that should be one make of them."""

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from private_llm.errors import ConfigError, DomainError
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.models.architectures import architecture
from private_llm_hf.models.inputs import check_pixels, check_values, image_shape
from private_llm_hf.vision.network import Network, NetworkConfig

SPAN = 2.5  # largest value of the pictures of noise: white, normalised by the usual means and deviations, is 2.2 to 2.7
_LENGTH = 6
_LONG = 512
_SPARE = 4  # positions left for generated tokens, and for numbers that begin after the padding token's
_SIDE = 32  # pixels of images, where any size goes
_SIDES = (_SIDE, 28, 224, 64, 96, 128, 256, 299, 16, 8)  # usual ones, for networks that may take one size only
_SEED = 7919


def sample_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Arguments of one forward: a text of six tokens, the last two padding, or two images."""
    if architecture(model.config).kind == "vision":
        return {"pixel_values": sample_pictures(model.config)}
    ids, mask = sample_tokens(model.config)
    given = {"input_ids": ids[:1]}
    if "attention_mask" in inspect.signature(type(model).forward).parameters:
        given["attention_mask"] = mask[:1].flip(1)
    if architecture(model.config).kind == "encoder-decoder" and not is_encoder_of_two(model):
        given["decoder_input_ids"] = ids[:1].flip(1)
    return given


def longer_inputs(config: PretrainedConfig, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the sample inputs a text as long as the model takes, 512 tokens at most, without padding; or one image."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or _LONG
    length = max(_LENGTH + 1, min(limit, _LONG) - _SPARE)
    return {
        name: value.repeat(1, -(-length // value.shape[1]))[:, :length] if name.endswith("input_ids") else value[:1]
        for name, value in given.items()
        if name != "attention_mask"
    }


def is_encoder_of_two(model: PreTrainedModel) -> bool:
    """Whether this class is the encoder alone of a type that has a decoder, too (T5EncoderModel)."""
    alone = "decoder_input_ids" not in inspect.signature(type(model).forward).parameters
    return architecture(model.config).kind == "encoder-decoder" and alone and not model.can_generate()


def text_arguments(config: PretrainedConfig, ids: Tensor) -> dict[str, Any]:
    """Arguments of one forward over token ids [B, S], without a cache; both stacks of an encoder-decoder read them."""
    kind = architecture(config).kind
    given: dict[str, Any] = {"input_ids": ids} if kind == "encoder" else {"input_ids": ids, "use_cache": False}
    return {**given, "decoder_input_ids": ids} if kind == "encoder-decoder" else given


def empty_inputs(config: PretrainedConfig) -> dict[str, Any]:
    """Arguments of one forward on the meta device, with eager attention: a text of two tokens, or an image."""
    if architecture(config).kind == "vision":
        return {"pixel_values": torch.zeros(1, *image_shape(config), device="meta")}
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    given = text_arguments(config, ids)
    if architecture(config).kind == "decoder":  # masks of encoders are looked into
        given["attention_mask"] = torch.ones_like(ids)
    return given


def sample_tokens(config: PretrainedConfig) -> tuple[Tensor, Tensor]:
    """Token ids [2, 6] none of which is special, and a mask that pads the first row on the left."""
    vocabulary = config.get_text_config().vocab_size
    ids = (torch.arange(2 * _LENGTH).view(2, _LENGTH) * 7 + 3) % max(vocabulary - 4, 1) + min(3, vocabulary - 1)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask


def sample_pictures(config: PretrainedConfig) -> Tensor:
    """Two images [2, C, H, W]; small ones for models that take images of any size."""
    free = architecture(config).images == "any" and not isinstance(config, NetworkConfig)
    seen = getattr(config, "vision_config", config)  # of models of images and texts
    if free and (seen is not config or not hasattr(config, "image_size")):
        channels, side = getattr(seen, "num_channels", 3), getattr(seen, "image_size", _SIDE)
        return torch.linspace(-40, 40, 2 * channels * side**2).view(2, channels, side, side).sin() * 2
    return pictures(config)[:2]


def fitting_inputs(network: Network) -> Tensor | None:
    """Rough inputs [4, ...] of the first usual size on which a network without a stated one runs, in plaintext."""
    weighted = (module for module in network.modules() if getattr(module, "weight", None) is not None)
    first, shapes = next(weighted, None), list[tuple[int, ...]]()
    if isinstance(first, nn.Linear):
        shapes = [(first.in_features,)]
    elif isinstance(first, nn.Conv2d):
        shapes = [(first.in_channels, side, side) for side in _SIDES]
    random = np.random.default_rng(_SEED)
    for shape in shapes:
        rough = torch.from_numpy(random.uniform(-SPAN, SPAN, (4, *shape))).float()
        with torch.no_grad(), contextlib.suppress(RuntimeError, ValueError):  # PyTorch's, for sizes that do not fit
            network(rough[:1])
            return rough
    return None


def pictures(config: PretrainedConfig) -> Tensor:
    """Images [4, C, H, W] from -2.5 to 2.5, the span that processors leave: rough, smooth, and of one colour each half.
    Natural images have spectra like 1 / frequency; the smooth picture has, the rough one has all alike.
    """
    channels, height, width = image_shape(config)
    random = np.random.default_rng(_SEED)
    rough = random.uniform(-SPAN, SPAN, (channels, height, width))
    across = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    across[0, 0] = np.inf
    smooth = np.fft.ifft2(np.fft.fft2(random.normal(size=(channels, height, width))) / across).real
    smooth *= SPAN / max(float(np.abs(smooth).max()), 1e-12)
    halves = np.where(np.arange(width) < width / 2, -SPAN, SPAN) * np.ones((channels, height, 1))
    return torch.from_numpy(np.stack([rough, smooth, halves, np.full_like(halves, SPAN)])).float()


# -- Images as a user gives them: whether they can be calibrated on, and go through a model's layers ------------------
def output_shape(
    model_class: type[PreTrainedModel], config: PretrainedConfig, shape: Sequence[int], name: str = "pixel_values"
) -> tuple[int, ...]:
    """The shape of what a model makes of images of `shape`, without values. Raises DomainError if they are unfit."""
    try:
        with torch.no_grad():
            made = skeleton(model_class, config)(torch.empty(tuple(shape), device="meta"), return_dict=True)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise DomainError(
            f"{name}: images of shape {tuple(shape)} do not fit {model_class.__name__}: {error}"
        ) from None
    return tuple(made[0].shape)


def check_images(model_class: type[PreTrainedModel], config: PretrainedConfig, images: object) -> Tensor:
    """Calibration's images of the model's shape. Raises ConfigError if it reads none, DomainError for others."""
    if architecture(config).kind != "vision":
        raise ConfigError(f"images: got them for {model_class.__name__}, which reads tokens; leave them out")
    check_values("images", images)
    checked = check_pixels("images", images, config)
    if not bool(torch.isfinite(checked).all()):
        raise DomainError("images: got NaN or infinite values; want images as the model's processor makes them")
    output_shape(model_class, config, checked.shape, "images")
    return checked


# -- what two models that should be one compute, and the first module in which they differ ----------------------------
EQUAL = 1e-5  # largest difference of two runs of the same code, in parts of the largest value: sums in another order


def outputs(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of one forward, where the weights lie, by name: float32, CPU; in evaluation, not compiled."""
    weights = [value for value in model.parameters() if not value.is_meta]
    device = weights[0].device if weights else torch.device("cpu")
    dtype = next((value.dtype for value in weights if value.is_floating_point()), torch.float32)
    moved = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in given.items()}
    with _running(model):
        made = model(**moved, return_dict=True)
    named = made.items() if isinstance(made, Mapping) else enumerate(tensors_in(made))
    return {str(name): _seen(value) for name, value in named if isinstance(value, Tensor)}


def generated(model: PreTrainedModel, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `outputs`, of the two tokens that the model says after a text: the second is a step with a cache."""
    device = next((value.device for value in model.parameters() if not value.is_meta), torch.device("cpu"))
    settings = GenerationConfig(
        max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids = given["input_ids"].to(device)
    with _running(model):
        made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return {f"logits of step {step}": _seen(value) for step, value in enumerate(made.logits)}


def difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], allowed: float = EQUAL) -> str | None:
    """What differs, in words; None if nothing does. allowed: as a part of the largest value of each tensor."""
    for name in sorted(set(wanted) | set(found)):
        if name not in wanted or name not in found:
            return f"only one of the two returns {name}"
        if not _same(wanted[name], found[name], allowed):
            if wanted[name].shape != found[name].shape:
                return f"{name} has shape {tuple(wanted[name].shape)} and {tuple(found[name].shape)}"
            error = float((wanted[name] - found[name]).abs().nan_to_num(float("inf")).max())
            return f"{name} differs by {error:.3g}"
    return None


Calls = dict[str, tuple[list[Tensor], list[Tensor]]]  # inputs and outputs of modules by name, in order of their ends


def first_difference(first: Calls, second: Calls, allowed: float = EQUAL) -> str:
    """The innermost module with another output of the same first input ("": the whole model); masks may differ."""
    differing = [name for name in second if name in first and not _alike(first[name][1], second[name][1], allowed)]
    begun = (name for name in differing if _alike(first[name][0][:1], second[name][0][:1], allowed))
    return next(begun, differing[0] if differing else "")


def recorded(model: nn.Module, parts: Mapping[str, nn.Module], given: Mapping[str, Tensor]) -> Calls:
    """The first call of each of these modules in one forward of the model."""
    calls: Calls = {}

    def keep(name: str) -> Any:  # noqa: ANN401 - a hook
        def hook(module: nn.Module, args: object, kwargs: object, made: object) -> None:
            inputs, results = ([_seen(value) for value in tensors_in(each)] for each in ((args, kwargs), made))
            calls.setdefault(name, (inputs, results))

        return hook

    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            stack.callback(part.register_forward_hook(keep(name), with_kwargs=True).remove)
        outputs(model, given)
    return calls


@contextlib.contextmanager
def _running(model: nn.Module) -> Iterator[None]:
    """Without gradients and the compiler, which a process that has not loaded it has not used."""
    with torch.no_grad(), evaluating(model), contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _alike(first: list[Tensor], second: list[Tensor], allowed: float) -> bool:
    return len(first) == len(second) and all(_same(a, b, allowed) for a, b in zip(first, second, strict=True))


def _same(first: Tensor, second: Tensor, allowed: float) -> bool:
    if first.shape != second.shape:
        return False
    if first.numel() == 0:
        return True
    size = float(first[first.isfinite()].abs().max()) if bool(first.isfinite().any()) else 0.0
    return torch.allclose(first, second, rtol=0.0, atol=allowed * size, equal_nan=True)


def _seen(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32, copy=True)  # the model may go on in place


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in tuples, lists and dictionaries, in order; caches and other objects are left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
