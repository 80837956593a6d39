"""Real tensors between nodes: their bytes, because links carry integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.net.transport import Transport
from private_llm.token_sharding.nodes.facts import AttentionCall
from private_llm.token_sharding.plans import ShardingPlan

_LARGE = 1 << 16
"""Bytes from which a copy costs more than a message of its own."""

Expected = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor in a message."""


def number_type(plan: ShardingPlan) -> torch.dtype:
    """How rows and partial results travel; log-sum-exps always have 32 bits, their exponentials are weights."""
    return torch.float16 if plan.wire == "float16" else torch.float32


def partial_bytes(plan: ShardingPlan, call: AttentionCall) -> int:
    """Bytes of one row's partial result from one AttnNode: masked, or its result and a log-sum-exp for each head."""
    if plan.masked:
        return call.heads * (call.value_dim + 1) * torch.int64.itemsize
    return call.heads * (call.value_dim * number_type(plan).itemsize + torch.float32.itemsize)


def send_floats(
    transport: Transport, to: int | Sequence[int], tag: str, tensors: Sequence[Tensor], dtype: torch.dtype | None = None
) -> None:
    """Send real tensors, small ones as one message, large ones apart, each made once, to one endpoint or several.

    dtype: what the numbers travel as; None: each tensor as it is, wider types first. Large tensors that lie as they
    travel are not copied: their memory must not change afterwards.
    """
    with transport.ledger.timing("serialising"):
        sizes = [tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in tensors]
        messages = [_packed([tensors[index] for index in group], dtype) for group in _messages(sizes)]
    for endpoint in [to] if isinstance(to, int) else to:
        for message in messages:
            transport.send(endpoint, tag, message)


def recv_floats(transport: Transport, frm: int, tag: str, expected: Sequence[Expected]) -> list[Tensor]:
    """What `send_floats` sent, as float32, in the order sent."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in expected]
    found: dict[int, Tensor] = {}
    for group in _messages(sizes):
        found.update(zip(group, _received(transport, frm, tag, [expected[index] for index in group]), strict=True))
    return [found[index] for index in range(len(expected))]


def _messages(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors share a message: each large one goes alone, the small ones together."""
    together = [index for index, size in enumerate(sizes) if size < _LARGE]
    return [*([index] for index, size in enumerate(sizes) if size >= _LARGE), *([together] if together else [])]


def _received(transport: Transport, frm: int, tag: str, expected: Sequence[Expected]) -> list[Tensor]:
    """The tensors of one message."""
    kinds = [dtype for _, dtype in expected]
    counts = [math.prod(shape) for shape, _ in expected]
    sizes = [count * dtype.itemsize for count, dtype in zip(counts, kinds, strict=True)]
    joined = transport.recv(frm, tag, (sum(sizes),), torch.uint8)
    with transport.ledger.timing("serialising"):
        parts: Sequence[Tensor]
        if len(set(kinds)) == 1:
            parts = joined.view(kinds[0]).split_with_sizes(counts)
        else:
            parts = [part.view(dtype) for part, dtype in zip(joined.split_with_sizes(sizes), kinds, strict=True)]
        return [_unfolded(part, shape) for part, (shape, _) in zip(parts, expected, strict=True)]


def _packed(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Few operations, because a decode step's messages are small: tensors of one type are joined before anything else.

    Four-dimensional tensors [B, heads, n, D] travel as [B, n, heads, D], the order in which models make them.
    """
    flat = [(tensor.transpose(1, 2) if tensor.dim() == 4 else tensor).reshape(-1) for tensor in tensors]
    if len({part.dtype for part in flat}) == 1:
        joined = flat[0] if len(flat) == 1 and flat[0].nbytes >= _LARGE else torch.cat(flat)
        return (joined if dtype is None else joined.to(dtype)).view(torch.uint8)
    return torch.cat([(part if dtype is None else part.to(dtype)).contiguous().view(torch.uint8) for part in flat])


def _unfolded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a message as float32 in its own shape."""
    if len(shape) == 4:
        batch, heads, rows, size = shape
        part = part.view(batch, rows, heads, size).transpose(1, 2)
    else:
        part = part.view(shape)
    return part if part.dtype == torch.float32 else part.float()
