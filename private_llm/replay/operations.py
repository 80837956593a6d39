"""What is known of an operation of PyTorch before it is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tensors_of(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, which may be lists of them."""
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_of(each)


UNFORESEEN = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
"""Marks of operations whose result has another shape, or is drawn anew, each time."""


def all_written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:  # noqa: ANN401
    """The tensors that an operation writes to."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs.get(argument.name) if argument.kwarg_only else args[number])
    return list(tensors_of(found))


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:  # noqa: ANN401
    """The tensor that an operation writes to; None if its result is a new one."""
    return next(iter(all_written_by(func, args, kwargs)), None)
