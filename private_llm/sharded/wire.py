"""Real tensors between nodes: their bytes, because links carry integers only."""

from __future__ import annotations

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


def send_floats(transport: Transport, to: int, tag: str, tensors: Sequence[Tensor]) -> None:
    """Send real tensors as one message, wider types first."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    transport.send(to, tag, torch.cat(parts) if len(parts) > 1 else parts[0])


def recv_floats(transport: Transport, frm: int, tag: str, expected: Sequence[Expected]) -> list[Tensor]:
    """The tensors of one message, in the order sent."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in expected]
    joined = transport.recv(frm, tag, (sum(sizes),), torch.uint8)
    return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(joined.split(sizes), expected, strict=True)]
