"""One secret bit that moves several secrets: their products with it by a single injection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.exact.maximum import concatenated
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed


def whole_words(x: Fixed) -> Fixed:
    """x, flattened, with zeros up to a multiple of 64: all lanes of its bits are then shared. Local."""
    spare = -x.numel() % 64
    return x.view(lambda part: torch.nn.functional.pad(part.reshape(-1), (0, spare)))


def times(bits: BitShare, moved: Sequence[Fixed]) -> list[Fixed]:
    """Each of several secrets of one shape times the same bits, which cover their `whole_words`: one injection.

    1 round, 32 bytes an element (trio, 64-bit ring). Fractional bits stay as they are.
    """
    shape, count, lanes = moved[0].shape, moved[0].numel(), bits.count
    if len(moved) == 1:
        bits = BitShare(bits.parts, count)
        made = moved[0].proto.inject(bits, moved[0].share, [1], [0])
        return [moved[0].with_share(made.map(lambda part: part.reshape(shape)))]
    copies = BitShare(tuple(torch.cat([part] * len(moved), 1) for part in bits.parts), lanes * len(moved))
    flat = concatenated([whole_words(each) for each in moved], 0)
    made = flat.proto.inject(copies, flat.share, [1], [0])

    def taken(part: Tensor, at: int) -> Tensor:
        return part[at : at + count].reshape(shape)

    return [
        each.with_share(made.map(lambda part, at=at: taken(part, at)))  # type: ignore[misc]
        for each, at in zip(moved, range(0, lanes * len(moved), lanes), strict=True)
    ]
