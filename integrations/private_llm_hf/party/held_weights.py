"""A party's weights where they are already: in its share file, or in a model that it built before."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from private_llm.protocols.session import Session
from private_llm.ranges import Ranges
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.offload import Offloaded
from private_llm_hf.checkpoint.share_files import ShareFile

Weights = dict[str, Fixed | Tensor | Offloaded]
"""By the model's own parameter names."""


def weights_of_file(session: Session, share_file: ShareFile) -> Weights:
    """The weights of a share file for a session; each is read when it is needed. Local."""
    ranges = Ranges(share_file.description.ranges)
    return {
        name: Offloaded(shape, functools.partial(_from_file, session, share_file, name, ranges))
        for name, shape in share_file.shapes.items()
    }


def weights_of_model(session: Session, model: PreTrainedModel, offloaded: Mapping[str, Offloaded]) -> Weights:
    """The shares of a model that was built for another session: the same memory or file, used in this one. Local.

    offloaded: its weights as they were before it was built, if some of them stay on disk.
    """
    found = dict(model.named_parameters())
    if any(value.is_meta for value in found.values()):
        return {n: Offloaded(v.shape, functools.partial(_again, session, v)) for n, v in offloaded.items()}
    return {name: used_in(session, value) for name, value in found.items()}


def used_in(session: Session, value: Fixed | Tensor) -> Fixed | Tensor:
    """A weight of another session's model, or a public one, for this session; nothing is copied."""
    if isinstance(value, SecretTensor):
        value = value.raw
    return Fixed(session, value.share, value.frac) if isinstance(value, Fixed) else value.detach()


def _from_file(session: Session, share_file: ShareFile, name: str, ranges: Ranges) -> Fixed:
    return Fixed(session, share_file.weight(name, session.known.seeds), ranges.frac_of_weight(name, session.frac))


def _again(session: Session, value: Offloaded) -> Fixed | Tensor:
    return used_in(session, value.read())
