"""Blocks with predictors of their activity: what of them is public, and how they come into a model.

The facts are part of the model's configuration (`private_sparsity`, as quantised checkpoints have a
`quantization_config`), so that the digest of a model, share files and the client's folder hold them. The predictors'
weights are ordinary secret weights, of a module beside the first layer of each block.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.errors import ConfigError, PatchMismatch, refuse_unknown
from private_llm.nn.predicted import ActivityPredictor, FreshActivation, SparseFeedForward, SparseHeads
from private_llm.protocols.session import Session
from private_llm.sparsity_config import CometConfig
from private_llm_hf.models.attention import SPARSE

KEY = "private_sparsity"
"""The attribute of a configuration that holds the facts."""

PREDICTOR = "_predictor"
"""Follows the name of a block's first layer in that of its predictor."""

_MOST = 1 << 24


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
        """The name of the module that holds the predictor."""
        return self.name + PREDICTOR

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "readers": list(self.readers)}

    @classmethod
    def from_dict(cls, values: object) -> SparseBlock:
        """Raises PatchMismatch for anything but what `to_dict` gives, with sizes that a model may have."""
        if not isinstance(values, Mapping):
            raise PatchMismatch(f"{KEY}: got {type(values).__name__}; want an object for each block")
        names = [item.name for item in fields(cls)]
        try:
            refuse_unknown(values, names, f"{KEY}: ")
            made = cls(**{**values, "readers": tuple(values["readers"])})
        except (ConfigError, KeyError, TypeError) as error:
            raise PatchMismatch(f"{KEY}: not as this version writes it ({error})") from None
        sizes = (made.width, made.units, made.block, made.rank, made.budget)
        texts = (made.name, made.writer, *made.readers, *([] if made.activation is None else [made.activation]))
        fit = all(type(size) is int and 0 < size <= _MOST for size in sizes) and all(type(t) is str for t in texts)
        if not fit or made.budget > made.units or made.kind not in ("ffn", "heads") or not made.readers:
            raise PatchMismatch(f"{KEY}: block {str(made.name)[:80]!r} has sizes or names that no model has")
        if made.hidden not in ("linear", "relu"):
            raise PatchMismatch(f"{KEY}: hidden: got {str(made.hidden)[:80]!r}; want 'linear' or 'relu'")
        return made


def sparse_blocks(config: PretrainedConfig) -> tuple[SparseBlock, ...]:
    """The blocks with predictors of a model of this configuration, none without predictors. Raises PatchMismatch."""
    held = getattr(config, KEY, None)
    if held is None:
        return ()
    if not isinstance(held, Mapping) or not isinstance(held.get("blocks"), list):
        raise PatchMismatch(f"{KEY}: not as this version writes it; share the model again")
    return tuple(SparseBlock.from_dict(values) for values in held["blocks"])


def attach_predictors(model: PreTrainedModel) -> None:
    """Add the modules of the predictors that the model's configuration names, on the meta device.

    Raises PatchMismatch for blocks that the model does not have.
    """
    for block in sparse_blocks(model.config):
        _check(model, block)
        parent, _, own = block.predictor.rpartition(".")
        with torch.device("meta"):
            predictor = ActivityPredictor(block.width, block.rank, block.units, block.hidden)
        predictor.requires_grad_(False)
        model.get_submodule(parent).add_module(own, predictor)


def check_sparsity(model: PreTrainedModel, config: CometConfig | None, protocol_hides: bool = True) -> None:
    """Raise ConfigError unless a model has predictors if and only if sparsity is wanted, and of the wanted kinds."""
    kinds = {block.kind for block in sparse_blocks(model.config)}
    if config is None and kinds:
        raise ConfigError("the model was shared with predictors of its activity; want sparsity=CometConfig()")
    if config is not None and not kinds & set(config.kinds):
        wanted = " or ".join("neurons" if kind == "ffn" else "heads" for kind in config.kinds)
        raise ConfigError(
            f"sparsity: the model has no predictors of {wanted}; want CometConfig(predictors='folder'), as written by "
            "scripts/train_predictors.py"
            + ("" if config.orders == "kept" or not config.heads else "; heads are left out with orders='kept' only")
        )


def make_sparse(model: PreTrainedModel, session: Session) -> None:
    """Let blocks with predictors compute foretold units only, as the session's configuration says. Local."""
    config = session.config.sparsity
    check_sparsity(model, config)
    if config is None:
        return
    for block in sparse_blocks(model.config):
        if block.kind in config.kinds:
            _make_sparse(model, block, config, session)


def _make_sparse(model: PreTrainedModel, block: SparseBlock, config: CometConfig, session: Session) -> None:
    predictor, first = model.get_submodule(block.predictor), model.get_submodule(block.name)
    if not isinstance(predictor, ActivityPredictor):
        raise PatchMismatch(f"'{block.predictor}' is a {type(predictor).__name__}; want the block's predictor")
    predictor.name, predictor.expected = block.predictor, block.budget
    for name in (*block.readers, block.writer):  # what they cost depends on it
        vars(model.get_submodule(name))["private_llm_units"] = (block.units, block.block, block.budget)
    budget, ledger = None if config.levels == "open" else block.budget, session.protocol.ledger
    if config.orders == "fresh":
        activation = model.get_submodule(block.activation or "")
        fresh = FreshActivation(predictor, activation, block.block, block.budget)
        first.forward = _before(fresh, first)
        activation.forward = fresh.run
        return
    readers = [model.get_submodule(name) for name in block.readers]
    path = block.name.rpartition(".")[0]
    name = f"{path}.{'+'.join(reader.rpartition('.')[2] for reader in block.readers)}".lstrip(".")
    sparse: SparseHeads | SparseFeedForward
    if block.kind == "heads":
        sparse = SparseHeads(predictor, readers, block.units, budget, name, ledger)
        vars(model.get_submodule(path))[SPARSE] = sparse
    else:
        writer = model.get_submodule(block.writer)
        sparse = SparseFeedForward(predictor, readers, writer, block.block, budget, name, ledger)
        writer.forward = sparse.write
    for index, reader in enumerate(readers):
        reader.forward = functools.partial(sparse.read, index)


def _before(told: FreshActivation, first: nn.Module) -> Any:  # noqa: ANN401 - a module's forward
    inner = first.forward

    def run(x: torch.Tensor) -> torch.Tensor:
        told.foretell(x)
        made: torch.Tensor = inner(x)
        return made

    return run


def _check(model: PreTrainedModel, block: SparseBlock) -> None:
    layers = dict(model.named_modules())
    names = (*block.readers, block.writer, *([] if block.activation is None else [block.activation]))
    missing = [name for name in names if name not in layers]
    if missing or block.name != block.readers[0] or block.predictor in layers:
        raise PatchMismatch(f"{KEY}: {type(model).__name__} has no block '{block.name}' ({', '.join(missing)[:200]})")
    for name in (*block.readers, block.writer):
        if not isinstance(layers[name], nn.Linear | Conv1D):
            raise PatchMismatch(f"{KEY}: '{name}' is a {type(layers[name]).__name__}; want a linear layer")
    neurons = block.units * block.block
    widths = {name: layer_sizes(layers[name]) for name in (*block.readers, block.writer)}
    ffn = block.kind == "ffn"
    fits = widths[block.name][0] == block.width and (widths[block.writer][0] == neurons or not ffn)
    if not fits or (ffn and any(widths[name][1] != neurons for name in block.readers)):
        raise PatchMismatch(f"{KEY}: block '{block.name}' is of other sizes in this {type(model).__name__}")


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer of PyTorch or transformers."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape  # type: ignore[misc]
    return int(inputs), int(outputs)
