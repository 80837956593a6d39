"""Which neurons form a block: those that are active together, so that few blocks are active at a position.

A neuron's place in its layer means nothing to the model, so its owner may group neurons at will (as MoEfication does by
balanced clustering, Zhang et al., ACL 2022). What counts is the number of pairs of a position and a block that has an
active neuron there. Blocks are filled one after the other: each begins with the rarest neuron that is left, and takes
the one that adds the fewest positions to those at which the block is active already, until it is full. Rare neurons so
come together in blocks that are seldom active, and the neurons that are nearly always active share the last blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm_hf.sparsity.recordings import Recording

MOST_ROWS = 8192
"""Positions that decide; more change the share of active blocks by less than a hundredth."""


def grouping_of(recording: Recording, rows: Tensor, block: int) -> Tensor:
    """`group` of up to 8192 of these rows, spread evenly: int32 [neurons]."""
    count = min(len(rows), MOST_ROWS)
    chosen = rows[torch.arange(count) * len(rows) // count]
    return group(recording.read(chosen)[1], block)


def group(active: Tensor, block: int) -> Tensor:
    """A permutation of neurons, int32 [neurons], whose runs of `block` are the blocks; of bool [N, neurons].

    Depends on nothing else; ties go to the lower number. The last block has what is left. N * neurons bytes, and time
    for N * neurons times the mean number of blocks that are active at a position.
    """
    neurons = active.shape[1]
    often = active.sum(0)
    taken = len(active) + 1  # more positions than there are
    added = torch.zeros_like(often)
    used = torch.zeros(len(active), dtype=torch.bool)
    placed = torch.zeros_like(often)
    found: list[int] = []
    for number in range(neurons):
        if number % block == 0:
            added, used = often + placed, torch.zeros_like(used)
        chosen = int(added.argmin())
        found.append(chosen)
        placed[chosen] = taken
        new = active[:, chosen] & ~used
        used |= new
        added = added - active[new].sum(0)
        added[chosen] += taken
    return torch.tensor(found, dtype=torch.int32)
