"""Blocks with predictors of their activity: what of them is public, and how they come into a model.

The facts are part of the model's configuration (`private_sparsity`, as quantised checkpoints have a
`quantization_config`), so that the digest of a model, share files and the client's folder hold them. The predictors'
weights are ordinary secret weights, of a module beside the first layer of each block.
"""

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PatchMismatch, refuse_unknown
from private_llm.nn.predicted import ActivityPredictor, FreshActivation, SparseFeedForward, SparseHeads
from private_llm.oblivious.level_noise import LevelNoise
from private_llm.protocols.session import Session
from private_llm.sparsity_config import CometConfig
from private_llm.typed_settings import check_types, settings_of

SPARSE = "private_llm_sparse_heads"  # attribute of an attention module whose heads are predicted

KEY = "private_sparsity"  # the attribute of a configuration that holds the facts

PREDICTOR = "_predictor"  # follows the name of a block's first layer in that of its predictor

_MOST = 1 << 24
_LISTED = re.compile(r"\.(\d+)$")
_SHOWN = 80
_MOST_BLOCKS, _MOST_READERS = 1 << 12, 8


@dataclass(frozen=True)
class SparseBlock:
    """One block's public facts. Names are those of modules.

    name: of the first reader. units: blocks of `block` neurons, or heads. rank, hidden: of the predictor. budget: units
    that a position opens (all of them: no limit). readers, writer: the layers before and after the units. activation:
    of neurons, None for heads.
    """

    name: str
    kind: Literal["ffn", "heads"]
    width: int
    units: int
    block: int
    rank: int
    hidden: Literal["linear", "relu"]
    budget: int
    readers: tuple[str, ...]
    writer: str
    activation: str | None

    @property
    def predictor(self) -> str:
        """The name of the module that holds the predictor: beside the first reader, or beside the list it lies in."""
        beside = self.name
        while _LISTED.search(beside):
            beside = _LISTED.sub(r"_\1", beside)
        return beside + PREDICTOR

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "readers": list(self.readers)}

    @classmethod
    def from_dict(cls, values: Any) -> "SparseBlock":  # noqa: ANN401 - a JSON value
        """Raises PatchMismatch for anything but what `to_dict` gives, with sizes that a model may have."""
        try:
            refuse_unknown(values, settings_of(cls))
            made = cls(**{**values, "readers": tuple(values["readers"])})
            check_types(made)
        except (ConfigError, KeyError, TypeError) as error:
            raise _malformed(error) from None
        sizes = (made.width, made.units, made.block, made.rank, made.budget)
        whole = (made.kind == "ffn") == (made.activation is not None) and (made.kind == "ffn" or made.block == 1)
        whole = whole and all(0 < size <= _MOST for size in sizes) and 0 < len(made.readers) <= _MOST_READERS
        if not whole or made.budget > made.units or made.rank > made.width:
            raise PatchMismatch(f"{KEY}: block {made.name[:_SHOWN]!r} has sizes or names out of range; share it again")
        return made


def _malformed(why: object = "share the model again") -> PatchMismatch:
    return PatchMismatch(f"{KEY}: not as this version writes it ({str(why)[:_SHOWN]})")


def sparse_blocks(config: PretrainedConfig) -> tuple[SparseBlock, ...]:
    """The blocks with predictors of a model of this configuration, none without predictors. Raises PatchMismatch."""
    held = getattr(config, KEY, None)
    if held is None:
        return ()
    fits = isinstance(held, Mapping) and set(held) == {"blocks", "settings"} and isinstance(held["blocks"], list)
    if not fits or len(held["blocks"]) > _MOST_BLOCKS:
        raise _malformed()
    shared_settings(config)
    return tuple(SparseBlock.from_dict(values) for values in held["blocks"])


def shared_settings(config: object) -> CometConfig | None:
    """What the owner chose when a model of this configuration (also as a mapping) was shared. Raises PatchMismatch."""
    held = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if held is None:
        return None
    chosen = held.get("settings") if isinstance(held, Mapping) else None
    if not isinstance(chosen, Mapping):
        raise _malformed()
    try:
        return CometConfig.from_dict(chosen)
    except (ConfigError, TypeError) as error:
        raise _malformed(error) from None


def adopted(config: PrivateConfig, model: object) -> PrivateConfig:
    """The settings of an endpoint, with the owner's own choice of sparsity where it made none."""
    settings = shared_settings(model) if config.sparsity is None else None
    return config if settings is None else replace(config, sparsity=settings)


def facts_of(settings: CometConfig, blocks: Collection[SparseBlock]) -> dict[str, Any]:
    """The facts of a configuration: all blocks, and what the owner chose when he ordered their units."""
    return {"blocks": [block.to_dict() for block in blocks], "settings": settings.agreed()}


def attach_predictors(model: PreTrainedModel) -> None:
    """Add a configuration's predictors, on the meta device. Raises PatchMismatch for blocks that the model lacks."""
    taken: set[str] = set()
    for block in sparse_blocks(model.config):
        _check(model, block, taken)
        parent, _, own = block.predictor.rpartition(".")
        with torch.device("meta"):
            predictor = ActivityPredictor(block.width, block.rank, block.units, block.hidden)
        predictor.requires_grad_(False)
        model.get_submodule(parent).add_module(own, predictor)


def check_sparsity(model: PreTrainedModel, config: CometConfig | None) -> None:
    """Raise ConfigError unless a model has predictors if and only if sparsity is wanted, and of the wanted kinds. Nor
    may patterns be opened in a kept order where the owner drew none, or to a budget where he set none.
    """
    kinds = {block.kind for block in sparse_blocks(model.config)}
    chosen = shared_settings(model.config)
    if config is None:
        if kinds:
            raise ConfigError("the model was shared with predictors of its activity; want sparsity=CometConfig()")
        return
    if chosen is not None and config.orders != chosen.orders:
        raise ConfigError(
            f"sparsity: got orders={config.orders!r}; the model was shared with orders={chosen.orders!r}, so its "
            "neurons lie in another order: want the same, or share it anew"
        )
    if chosen is not None and config.levels == "budget" != chosen.levels:
        raise ConfigError(
            f"sparsity: got levels='budget'; the model was shared with levels={chosen.levels!r}, so it has no budgets: "
            "want the same, or share it anew"
        )
    if not kinds & set(config.kinds):
        wanted = " or ".join("neurons" if kind == "ffn" else "heads" for kind in config.kinds)
        raise ConfigError(
            f"sparsity: the model has no predictors of {wanted}; want CometConfig(predictors='folder'), as written by "
            "`private-llm predictors train`"
        )


def make_sparse(model: PreTrainedModel, session: Session, on_disk: Collection[str] = ()) -> None:
    """Let blocks compute predicted units only, as the configuration says. Local. on_disk: weights read at each use.
    Raises ConfigError if a sparse block has some, PatchMismatch for another module in a predictor's place.
    """
    config = session.config.sparsity
    check_sparsity(model, config)
    if config is None:
        return
    for block in sparse_blocks(model.config):
        if block.kind in config.kinds:
            used = (*block.readers, block.writer, block.predictor)
            stored = [name for name in used if any(weight.startswith(f"{name}.") for weight in on_disk)]
            if stored:
                raise ConfigError(
                    f"sparsity: device_map puts '{stored[0]}' on disk, but listed neurons are read from memory; keep "
                    "layers with predictors off the disk, or leave sparsity out"
                )
            _make_sparse(model, block, config, session)


def _make_sparse(model: PreTrainedModel, block: SparseBlock, config: CometConfig, session: Session) -> None:
    predictor, first = model.get_submodule(block.predictor), model.get_submodule(block.name)
    if not isinstance(predictor, ActivityPredictor):
        raise PatchMismatch(f"'{block.predictor}' is a {type(predictor).__name__}; want the block's predictor")
    predictor.name, predictor.expected = block.predictor, block.budget
    for name in (*block.readers, block.writer):  # what they cost depends on it
        vars(model.get_submodule(name))["private_llm_units"] = (block.units, block.block, block.budget)
    budget = None if config.levels == "open" else block.budget
    if config.orders == "fresh":
        activation = model.get_submodule(block.activation or "")
        level = LevelNoise(config.epsilon, config.delta) if config.levels == "noisy" else block.budget
        fresh = FreshActivation(predictor, activation, block.block, level)
        inner = first.forward

        def predict_first(x: torch.Tensor) -> torch.Tensor:
            fresh.predict(x)
            made: torch.Tensor = inner(x)
            return made

        first.forward, activation.forward = predict_first, fresh.run
        return
    readers, path = [model.get_submodule(name) for name in block.readers], block.name.rpartition(".")[0]
    name = f"{path}.{'+'.join(reader.rpartition('.')[2] for reader in block.readers)}".lstrip(".")
    writer = model.get_submodule(block.writer)
    sparse: SparseHeads | SparseFeedForward
    if block.kind == "heads":
        sparse = SparseHeads(predictor, readers, writer, block.units, budget, name)
        vars(model.get_submodule(path))[SPARSE] = sparse
    else:
        sparse = SparseFeedForward(predictor, readers, writer, block.block, budget, name)
    writer.forward = sparse.write
    for index, reader in enumerate(readers):
        reader.forward = functools.partial(sparse.read, index)


def _check(model: PreTrainedModel, block: SparseBlock, taken: set[str]) -> None:
    """Raise PatchMismatch unless the model has this block, of modules that are not `taken`; they are then."""
    layers = dict(model.named_modules())
    linear = (*block.readers, block.writer)
    names = (*linear, *([] if block.activation is None else [block.activation]))
    missing = [name for name in names if name not in layers]
    said = f"{KEY}: {type(model).__name__} has no block {block.name[:_SHOWN]!r}"
    if missing or block.name != block.readers[0] or block.predictor in layers:
        raise PatchMismatch(f"{said} ({', '.join(map(repr, missing))[:200]})")
    shared = sorted({name for name in names if names.count(name) > 1 or name in taken})
    if shared:
        raise PatchMismatch(f"{said} ('{shared[0]}' has two places in blocks)")
    taken.update(names)
    for name in linear:
        if not isinstance(layers[name], nn.Linear | Conv1D):
            raise PatchMismatch(f"{KEY}: '{name}' is a {type(layers[name]).__name__}; want a linear layer")
    if block.activation is not None and any(True for _ in layers[block.activation].parameters()):
        raise PatchMismatch(f"{KEY}: '{block.activation}' has weights; want an activation")
    if isinstance(layers[block.predictor.rpartition(".")[0]], nn.Sequential | nn.ModuleList | nn.ModuleDict):
        raise PatchMismatch(f"{said} (a list of modules can hold no predictor)")
    widths = [layer_sizes(layers[name]) for name in linear]
    held = [size[1] for size in widths[:-1]] + [widths[-1][0]]  # what readers give, and the writer takes
    fits = all(size == block.units * block.block for size in held)
    if block.kind == "heads":
        fits = "." in block.name and held[-1] % block.units == 0 and held[0] % block.units == 0
    if widths[0][0] != block.width or not fits:
        raise PatchMismatch(f"{KEY}: block '{block.name}' is of other sizes in this {type(model).__name__}")


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer of PyTorch or transformers."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape  # type: ignore[misc]
    return int(inputs), int(outputs)
