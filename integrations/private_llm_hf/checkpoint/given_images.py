"""Images as a user gives them: whether they can be calibrated on, and go through a model's layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import ConfigError, DomainError
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.client.inputs import check_pixels, check_values
from private_llm_hf.models.architectures import architecture


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
