"""A public model that a CompNode reads from its own disk, and digests by which all endpoints see that they agree."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig

from private_llm.errors import ConfigError
from private_llm.protocols.dealing import pieces
from private_llm_hf.layout import Layout, describe, model_class
from private_llm_hf.weights import stream_checkpoint
from private_llm_hf.wire import Message


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
class HeldModel:
    """A checkpoint in a node's memory. weights: float32. digest: `WeightsDigest` of them."""

    source: str
    description: Message
    weights: dict[str, Tensor]
    digest: str

    @classmethod
    def open(cls, source: str, device: torch.device) -> HeldModel:
        """Read a model folder or hub id, as the class that its configuration names.

        Raises ConfigError if there is no such checkpoint, PatchMismatch if weights are missing or do not fit.
        """
        try:
            config = AutoConfig.from_pretrained(source)
            names = getattr(config, "architectures", None) or []
            if len(names) != 1:
                raise ConfigError(f"model {source!r}: its configuration names the classes {names}; want one")
            found = model_class(names[0])
            weights: dict[str, Tensor] = {}
            digest = WeightsDigest()

            def sink(name: str, tensor: Tensor) -> None:
                digest(name, tensor)
                weights[name] = tensor.to(device, torch.float32, copy=True)  # what is streamed may be a mapped file

            layout = Layout.of(found, config)
            stream_checkpoint(found, source, config, layout.source, layout.folding(sink))
        except OSError as error:
            raise ConfigError(f"model {source!r}: {str(error).splitlines()[0]}") from None
        return cls(source, describe(found, config), weights, digest.text())
