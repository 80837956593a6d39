"""Real tensors between nodes: their bytes, because links carry integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.net.transport import Transport
from private_llm.sharding import ShardingPlan

Expected = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor in a message."""


def number_type(plan: ShardingPlan) -> torch.dtype:
    """How rows and partial results travel; log-sum-exps always have 32 bits, their exponentials are weights."""
    return torch.float16 if plan.wire == "float16" else torch.float32


def send_floats(
    transport: Transport, to: int | Sequence[int], tag: str, tensors: Sequence[Tensor], dtype: torch.dtype | None = None
) -> None:
    """Send real tensors as one message, made once, to one endpoint or several.

    dtype: what the numbers travel as; None: each tensor as it is, wider types first.
    """
    with transport.ledger.timing("serialising"):
        message = _packed(tensors, dtype)
    for endpoint in [to] if isinstance(to, int) else to:
        transport.send(endpoint, tag, message)


def recv_floats(transport: Transport, frm: int, tag: str, expected: Sequence[Expected]) -> list[Tensor]:
    """The tensors of one message as float32, in the order sent."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in expected]
    joined = transport.recv(frm, tag, (sum(sizes),), torch.uint8)
    with transport.ledger.timing("serialising"):
        parts = zip(joined.split(sizes), expected, strict=True)
        return [part.view(dtype).view(shape).float() for part, (shape, dtype) in parts]


def _packed(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Layout, number type and place in the message change in one copy."""
    types = [dtype or tensor.dtype for tensor in tensors]
    sizes = [tensor.numel() * kind.itemsize for tensor, kind in zip(tensors, types, strict=True)]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    for part, kind, tensor in zip(message.split(sizes), types, tensors, strict=True):
        part.view(kind).view(tensor.shape).copy_(tensor)
    return message
