"""Real tensors between nodes: bits of float32 as int32, because links carry integers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.net.transport import Transport


def send_floats(transport: Transport, to: int, tag: str, tensors: Sequence[Tensor]) -> None:
    """Send float32 tensors as one message: 4 bytes a number."""
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    transport.send(to, tag, joined.view(torch.int32))


def recv_floats(transport: Transport, frm: int, tag: str, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The tensors of one message, in the order sent."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    joined = transport.recv(frm, tag, (sum(sizes),), torch.int32).view(torch.float32)
    return [part.view(shape) for part, shape in zip(joined.split(sizes), shapes, strict=True)]
