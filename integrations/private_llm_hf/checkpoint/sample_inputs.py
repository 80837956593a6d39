"""Small plaintext inputs that a model of any kind takes: token ids, and pictures of noise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import ConfigError, DomainError
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.client.inputs import check_pixels, check_values
from private_llm_hf.models.architectures import architecture
from private_llm_hf.vision.network import Network, NetworkConfig, image_shape

SPAN = 2.5
"""Largest value of the pictures of noise: white, normalised by the usual means and deviations, is 2.2 to 2.7."""
_LENGTH = 6
_LONG = 512
_SPARE = 4
"""Positions that are left for generated tokens, and for numbers of positions that begin after the padding token's."""
_SIDE = 32
"""Pixels of images, where any size goes."""
_SIDES = (_SIDE, 28, 224, 64, 96, 128, 256, 299, 16, 8)
"""Usual ones, for networks that may take one size only."""
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
    """Rough inputs [4, ...] of a network that does not say what it takes, of the first usual size that it runs on.

    None if no size is right. The network computes on each that is tried, in plaintext.
    """
    weighted = (module for module in network.modules() if getattr(module, "weight", None) is not None)
    first = next(weighted, None)
    if isinstance(first, nn.Linear):
        shapes: list[tuple[int, ...]] = [(first.in_features,)]
    elif isinstance(first, nn.Conv2d):
        shapes = [(first.in_channels, side, side) for side in _SIDES]
    else:
        return None
    random = np.random.default_rng(_SEED)
    for shape in shapes:
        rough = torch.from_numpy(random.uniform(-SPAN, SPAN, (4, *shape))).float()
        try:
            with torch.no_grad():
                network(rough[:1])
        except (RuntimeError, ValueError):  # PyTorch's, for sizes that do not fit
            continue
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
    """The shape of what a model makes of images of this shape, tried without values.

    Raises DomainError, which names the argument, for images that cannot go through the layers.
    """
    try:
        with torch.no_grad():
            made = skeleton(model_class, config)(torch.empty(tuple(shape), device="meta"), return_dict=True)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise DomainError(
            f"{name}: images of shape {tuple(shape)} do not fit {model_class.__name__}: {error}"
        ) from None
    return tuple(made[0].shape)


def check_images(model_class: type[PreTrainedModel], config: PretrainedConfig, images: object) -> Tensor:
    """`images=` as given for calibration: a floating-point batch of the model's shape.

    Raises ConfigError for a model that reads none, DomainError for another type, shape or value.
    """
    if architecture(config).kind != "vision":
        raise ConfigError(f"images: got them for {model_class.__name__}, which reads tokens; leave them out")
    check_values("images", images)
    checked = check_pixels("images", images, config)
    if not bool(torch.isfinite(checked).all()):
        raise DomainError("images: got NaN or infinite values; want images as the model's processor makes them")
    output_shape(model_class, config, checked.shape, "images")
    return checked
