"""Calibration runs: which models are calibrated, and on what: text and tokens of every kind, or pictures of noise."""

import functools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from private_llm.approximations import emulated
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, LowPrecision, TightRange
from private_llm.protocol_facts import ASSISTED, CASCADE
from private_llm.ranges import REACH, UNKNOWN, Ranges
from private_llm.ring.ring import Ring
from private_llm_hf.checkpoint.calibration import ranges_of, warn_of_small_rows, watching
from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.folds import fold_norms
from private_llm_hf.checkpoint.model_spec import folds_norms
from private_llm_hf.checkpoint.norm_readers import norm_readers, with_readers
from private_llm_hf.checkpoint.sample_inputs import check_images, evaluating, fitting_inputs, pictures, text_arguments
from private_llm_hf.checkpoint.weights import AS_GIVEN, skeleton
from private_llm_hf.models.architectures import architecture
from private_llm_hf.models.inputs import max_positions
from private_llm_hf.vision.network import Network

LENGTH = 128  # tokens of a row

ROWS = 2  # rows of text

_PRIME = 7919

_LARGEST, _SMALLEST = 32, 8  # tokens with the largest and smallest rows of embeddings that are tried, whatever the text


def calibrate(model: nn.Module, config: PrivateConfig, batches: Sequence[Callable[[nn.Module], object]]) -> Ranges:
    """The ranges of a plaintext model in eval mode, which each of `batches` calls once. Raises DomainError naming a
    module whose values fit no fixed-point format, before anything was sent.
    """
    if any(not bool(torch.isfinite(value).all()) for value in model.parameters()):
        return UNKNOWN  # sharing names the weight
    with watching(model) as largest:
        for batch in batches:
            batch(model)
            largest.forget()
    warn_of_small_rows(largest, config)
    ranges = with_fine_weights(model, ranges_of(largest, config), config, largest.folded)
    return with_readers(ranges, largest.readers, config)


def can_calibrate(config: PretrainedConfig, private_config: PrivateConfig) -> bool:
    """Whether calibration is wanted and has something to say: models of images, and of text in the 64-bit ring."""
    if not private_config.calibrate or private_config.protocol in (CASCADE, ASSISTED):
        return False
    return private_config.ring == 64 or architecture(config).kind == "vision"


def checkpoint_ranges(
    checkpoint: Checkpoint, model_class: type[PreTrainedModel], config: PretrainedConfig,
    private_config: PrivateConfig, text: str | None = None, images: Tensor | None = None,
) -> Ranges:  # fmt: skip
    """Calibrate a checkpoint on `text` (default: the bundled one); nothing is known of what cannot be calibrated.
    images: for models of images, instead of pictures of noise. The whole plaintext model is in memory meanwhile.
    """
    if not can_calibrate(config, private_config):
        return UNKNOWN
    if images is not None:
        images = check_images(model_class, config, images)
    return _calibrated(checkpoint.load(model_class, config), private_config, checkpoint.tokenizer, text, images)


def loaded_ranges(model: nn.Module, private_config: PrivateConfig, images: Tensor | None = None) -> Ranges:
    """Calibrate a model in memory: on the bundled text, if its folder has a tokenizer, and tokens of every kind; one of
    images on `images`, or on pictures of noise of the shape that it states.
    """
    if not isinstance(model, PreTrainedModel) or not can_calibrate(model.config, private_config):
        return UNKNOWN

    def tokenizer() -> PreTrainedTokenizerBase | None:
        """In the folder that the model was loaded from."""
        folder = str(getattr(model.config, "_name_or_path", "") or "")
        if not folder or not Path(folder).is_dir():
            return None
        found = Checkpoint(folder, local_files_only=True).tokenizer()
        return found if found is not None and len(found) <= model.get_input_embeddings().weight.shape[0] else None

    with AS_GIVEN, evaluating(model):
        return _calibrated(model, private_config, tokenizer, None, images)


def _calibrated(
    model: PreTrainedModel, config: PrivateConfig, tokenizer: Callable[[], PreTrainedTokenizerBase | None],
    text: str | None, images: Tensor | None,
) -> Ranges:  # fmt: skip
    with emulated(config.approximations, model):
        if architecture(model.config).kind != "vision":
            return calibrate(model, config, batches(model, tokenizer(), text))
        if images is None:
            images = _noise(model, config)
        if images is None:
            return UNKNOWN
        return calibrate(model, config, [lambda model: model(images.to(next(model.parameters(), images)))])


def check_ranges(model: nn.Module, ranges: Ranges) -> None:
    """Raises ConfigError for ranges of modules that the model does not have."""
    strange = sorted(set(ranges.modules) - {name for name, _ in model.named_modules()})
    if strange:
        raise ConfigError(
            f"ranges: this {type(model).__name__} lacks {len(strange)} module(s) they name, such as {strange[0]!r}; "
            "calibrate this very model (private-llm calibrate)"
        )


def bundled_text() -> str:
    """The text that comes with the package: encyclopaedic sentences, prompts and verse."""
    folder = resources.files("private_llm_hf").joinpath("data")
    return "\n".join(folder.joinpath(name).read_text("utf-8") for name in ("sentences.txt", "heldout.txt"))


def batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, text: str | None = None
) -> list[Callable[[nn.Module], object]]:
    """Calls of the model: text (with a tokenizer), and tokens of every kind, those of large embeddings first. Raises
    ConfigError for a text without a tokenizer, or of less than two tokens.
    """
    if text is not None and tokenizer is None:
        raise ConfigError("calibration text: the checkpoint has no tokenizer to read it; leave the text out")
    length = min(LENGTH, max_positions(model.config.get_text_config()) or LENGTH)
    length -= min(length // 2, 4)  # some families number positions from 2, or add tokens of their own
    rows = list(_every_kind(model, length).split(length))[:ROWS]
    rows = [row.view(1, -1) for row in rows]
    if tokenizer is not None:
        ids = tokenizer(bundled_text() if text is None else text, return_tensors="pt", verbose=False)["input_ids"][0]
        if len(ids) < 2 and text is not None:
            raise ConfigError(f"calibration text: got {len(ids)} token(s); want a text of some sentences")
        ids = ids[: ROWS * length]
        rows += [row.view(1, -1) for row in ids.split(length) if len(row) > 1]
    return [functools.partial(_run, ids=row) for row in rows]


def _noise(model: PreTrainedModel, config: PrivateConfig) -> Tensor | None:
    """Pictures of noise; None for a network that does not say what it takes, if that is not needed, or not found."""
    if not isinstance(model, Network) or model.config.image_shape is not None:
        return pictures(model.config)
    if config.ring == 64:
        return None
    images = fitting_inputs(model)
    if images is None and config.guard:
        warnings.warn(
            "no usual image size fits this network, so it was not calibrated and its 32-bit ring has no range check: "
            "pass images by patch(model, config, images=some_images)", TightRange, stacklevel=6,
        )  # fmt: skip
    return images


def _every_kind(model: PreTrainedModel, length: int) -> Tensor:
    table = model.get_input_embeddings().weight
    vocabulary = table.shape[0]
    sizes = table.detach().float().norm(dim=1).cpu()
    largest = sizes.topk(min(_LARGEST, length // 2, vocabulary)).indices
    there = torch.where(sizes > 0, sizes, torch.inf)
    smallest = there.topk(min(_SMALLEST, length // 4, vocabulary), largest=False).indices
    smallest = smallest[there[smallest].isfinite()]
    return torch.cat([largest, smallest, (torch.arange(ROWS * length) * _PRIME) % vocabulary])[: ROWS * length]


def _run(model: PreTrainedModel, ids: Tensor) -> object:
    return model(**text_arguments(model.config, ids.to(next(model.parameters()).device)))


# -- fractional bits of small weights: as many as it takes that rounding does not show in them ------------------------
# What counts are weights as the parties get them: of layers that take up a norm, with the norm's weight in them.
WEIGHT_BITS = 11  # a layer's weights have a root mean square of 2^WEIGHT_BITS units: rounding is then 1e-4 of them

FOLDED_WEIGHT_BITS = 14  # of those that take up a norm: they would have had more units without it, and are most

_MOST_WEIGHT_BITS = 40

_FEW_UNITS = 128.0  # weights of a root mean square of fewer units are warned of: logits are then off by 0.01


def with_fine_weights(
    model: nn.Module, ranges: Ranges, config: PrivateConfig, folded: Collection[str] = ()
) -> Ranges:  # fmt: skip
    """`ranges`, with more fractional bits for layers whose weights are so small that rounding would show in them.

    Their root mean square is then 2^`WEIGHT_BITS` units or more, as far as the layer's results leave room in a product.
    Layers that read the same input run as one product and get the same bits. folded: convolutions whose weights will be
    others. Warns (LowPrecision) of small weights that cannot have more bits: tables, public ones.
    """
    gains = _gains(model, config)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    groups: dict[tuple[str, int], list[tuple[str, float]]] = {}
    coarse: dict[str, float] = {}
    for name, part in model.named_modules():
        if not isinstance(part, nn.Linear | nn.Conv2d | Conv1D) or name not in ranges.modules or name in folded:
            continue
        if id(part.weight) in tables or config.weights == "public":
            coarse[name] = _root_mean_square(part.weight, part.weight.numel())
            continue
        outputs = 1 if isinstance(part, Conv1D) else 0
        inputs, weight = part.weight.shape[1 - outputs], part.weight.detach()
        if name in gains:
            weight = torch.linalg.vector_norm(weight, dim=outputs, dtype=torch.float64) * gains[name]
        size = _root_mean_square(weight, part.weight.numel())
        groups.setdefault((name.rpartition(".")[0], inputs), []).append((name, size))
    modules = ranges.to_dict()
    for members in groups.values():
        sizes = [size for _, size in members]
        wanted = max(
            (
                (FOLDED_WEIGHT_BITS if name in gains else WEIGHT_BITS) - math.floor(math.log2(size))
                for name, size in members if size
            ),
            default=0,
        )  # fmt: skip
        outputs = max(modules[name].get("output", REACH) for name, _ in members)
        bits = min(wanted, Ring(config.ring).value_bits - 1 - config.frac_bits - outputs, _MOST_WEIGHT_BITS)
        if bits > config.frac_bits:
            for name, _ in members:
                modules[name]["weight"] = bits
        if bits < wanted:
            coarse |= {
                name: size * 2.0 ** (max(bits, config.frac_bits) - config.frac_bits)
                for (name, _), size in zip(members, sizes, strict=True)
            }
    few = {name: size * 2.0**config.frac_bits for name, size in coarse.items() if size > 0}
    worst = min(few, key=lambda name: few[name], default=None)
    if config.ring == 64 and worst is not None and few[worst] < _FEW_UNITS:  # 32 bits never have many
        warnings.warn(
            f"the weights of '{worst}' have a root mean square of {few[worst]:.2g} units of the last place, and cannot "
            "have more of them here: answers may differ from the plaintext model's. Scale them up and what they are "
            "multiplied with down",
            LowPrecision,
            stacklevel=6,
        )
    return Ranges(modules)


def _root_mean_square(weight: Tensor, count: int) -> float:
    """Of `count` entries; those of `weight` may be norms of several."""
    return float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64)) / math.sqrt(max(count, 1))


def _gains(model: nn.Module, config: PrivateConfig) -> dict[str, Tensor]:
    """What layers take up of the norms that they read, if they will."""
    if not isinstance(model, PreTrainedModel) or not folds_norms(config):
        return {}
    bare, found = skeleton(type(model), model.config), dict[str, Tensor]()
    for fold in fold_norms(bare, norm_readers(type(model), model.config)):
        weight = model.get_submodule(fold.norm).get_parameter("weight")
        found[fold.layer] = weight.detach().double() + fold.offset
    return found
