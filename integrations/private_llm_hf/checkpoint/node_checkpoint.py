"""A public model that a CompNode reads from its own disk, and digests by which all endpoints see that they agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor

from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.protocols.weight_sharing import pieces
from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.model_spec import ModelSpec, describe, model_class
from private_llm_hf.wire.answers import NodeModel
from private_llm_hf.wire.commands import Description


class WeightsDigest:
    """A sink for weights that keeps SHA-256 of their names, shapes and float32 values, in whatever order they come."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        """One weight."""
        made = hashlib.sha256(json.dumps([name, list(tensor.shape)]).encode())
        for piece in pieces(tensor.detach()):  # in pieces: a half-precision tensor needs no second copy
            made.update(piece.to("cpu", torch.float32).contiguous().numpy().data)
        self._parts[name] = made.digest()

    def text(self) -> str:
        """Over all weights so far."""
        return hashlib.sha256(b"".join(self._parts[name] for name in sorted(self._parts))).hexdigest()


@dataclass(frozen=True)
class NodeCheckpoint:
    """A checkpoint in a node's memory. weights: float32. digest: `WeightsDigest` of them."""

    description: Description
    weights: dict[str, Tensor]
    digest: str

    @classmethod
    def open(cls, source: str) -> NodeCheckpoint:
        """Read a model folder or hub id, as the class that its configuration names.

        Raises ConfigError if there is no such checkpoint, PatchMismatch if weights are missing or do not fit.
        """
        try:
            checkpoint = Checkpoint(source, {}, {})
            config, _ = checkpoint.config()
            names = getattr(config, "architectures", None) or []
            if len(names) != 1:
                raise ConfigError(f"model {source!r}: its configuration names the classes {names}; want one")
            found = model_class(names[0])
            weights: dict[str, Tensor] = {}
            digest = WeightsDigest()

            def sink(name: str, tensor: Tensor) -> None:
                digest(name, tensor)
                weights[name] = tensor.to("cpu", torch.float32, copy=True)  # what is streamed may be a mapped file

            spec = ModelSpec.of(found, config)
            checkpoint.stream(found, config, spec.source, spec.folding(sink))
        except PrivateLLMError:
            raise
        except (OSError, ValueError, SafetensorError) as error:  # transformers' and safetensors' own
            raise ConfigError(f"model {source!r}: {str(error).splitlines()[0]}") from None
        return cls(describe(found, config), weights, digest.text())


def claim(checkpoint: NodeCheckpoint | None) -> NodeModel:
    """What a CompNode says of the model that it holds."""
    if checkpoint is None:
        return NodeModel(None, None, None)
    return NodeModel(checkpoint.description.model, checkpoint.description.class_, checkpoint.digest)


def agreed(answers: Mapping[str, NodeModel]) -> NodeModel:
    """What all CompNodes hold, from the `claim` of each. Raises ConfigError that names one with something else."""
    (first, want), *others = answers.items()
    for name, found in others:
        if None in (found.model, want.model) and found != want:
            empty, full = (name, first) if found.model is None else (first, name)
            raise ConfigError(f"{empty} holds no model, and {full} does; start all CompNodes with --model, or none")
        if found.model != want.model:
            raise ConfigError(
                f"{name} holds another model than {first}: a {found.class_}, not this {want.class_} or not of this "
                "configuration; start all CompNodes with one checkpoint"
            )
        if found.weights != want.weights:
            raise ConfigError(f"{name} holds other weights than {first}; start all CompNodes with one checkpoint")
    return want


def check_stored(stored: NodeModel, description: Description, mine: Callable[[], str | None]) -> None:
    """Raises ConfigError unless nodes hold the model of the client, and the weights if it has some (their digest)."""
    if stored.model != description.model:
        raise ConfigError(
            f"the CompNodes hold another model: a {stored.class_}, not this {description.class_} or not of this "
            "configuration; start them with its checkpoint, or load the model they hold"
        )
    own = mine()
    if own is not None and own != stored.weights:
        raise ConfigError(
            "the CompNodes hold other weights than the client; load their checkpoint, or its configuration alone"
        )
