"""Attack on opened patterns: which neuron stands at which position of a secret order that is used again.

Comet opens patterns of active neurons in a secret order (section 4.2) and keeps that order, as its weights are shuffled
ahead of time (section 5). Patterns in one order are linked: the bits of one position, pattern after pattern, are those
of one neuron. Who sees the openings, can compute the model and had some inputs run that it knows compares columns:

1. a position is the neuron whose column it shares, if no other position and no other neuron has that column;
2. from then on each opened pattern is read at the identified positions, whatever its input was;
3. of two texts that might have been run, the one is told whose activity fits there.

An input is one position of a text, one pattern. With a fresh order for each pattern, columns say nothing; what remains
is how many neurons are active, which tells inputs apart as well, unless that count is a public constant.

Who may see openings, and what each kind of order reveals: `private_llm/threat/computing.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.errors import DomainError

UNKNOWN = -1
"""In place of a neuron, for positions that are not identified."""


def match_positions(known: Tensor, opened: Tensor, slack: int = 0) -> Tensor:
    """The neuron at each position of an order, UNKNOWN where columns do not tell: int64 [n].

    known: activity of the inputs that the attacker knows, bool [inputs, n]; opened: the patterns that were opened for
    them, row by row. A position and a neuron match if each is the other's only nearest column, with at most `slack`
    bits between them: what the parties compute may differ from the plaintext model close to zero. n^2 floats of memory.
    Raises DomainError for other shapes.
    """
    _refuse_other_shapes("match_positions", known, opened)
    seen, true = opened.float(), known.float()
    apart = seen.sum(0)[:, None] + true.sum(0) - 2 * seen.T @ true  # [positions, neurons]
    neuron, distance = _only_nearest(apart)
    position, _ = _only_nearest(apart.T)
    places = torch.arange(len(neuron))
    mutual = (neuron != UNKNOWN) & (position[neuron.clamp(min=0)] == places) & (distance <= slack)
    return torch.where(mutual, neuron, UNKNOWN)


def read_patterns(places: Tensor, opened: Tensor, otherwise: Tensor) -> Tensor:
    """Activity of unknown inputs, bool [inputs, n], from what was opened for them.

    places: as of `match_positions`. otherwise: bool [n], the guess for neurons that no position was found for.
    """
    found = places != UNKNOWN
    read = otherwise.expand(opened.shape).clone()
    read[:, places[found]] = opened[:, found]
    return read


def pattern_differences(places: Tensor, opened: Tensor, candidates: Sequence[Tensor]) -> list[int]:
    """Bits at identified positions in which each candidate's activity, bool [inputs, n], differs from what was opened.

    Raises DomainError for a candidate of another shape.
    """
    found = places != UNKNOWN
    for candidate in candidates:
        _refuse_other_shapes("pattern_differences", candidate, opened)
    return [int((candidate[:, places[found]] != opened[:, found]).sum()) for candidate in candidates]


def count_differences(opened: Tensor, candidates: Sequence[Tensor]) -> list[int]:
    """By how much the numbers of active neurons of each candidate differ from those opened, summed over inputs.

    Needs no order. Raises DomainError for a candidate of another shape.
    """
    for candidate in candidates:
        _refuse_other_shapes("count_differences", candidate, opened)
    return [int((candidate.sum(1) - opened.sum(1)).abs().sum()) for candidate in candidates]


def told(differences: Sequence[int]) -> int | None:
    """The candidate with the least difference; None if several have it, which leaves a guess among them."""
    least = min(differences)
    return differences.index(least) if differences.count(least) == 1 else None


def within_budget(before: Tensor, budget: int) -> Tensor:
    """The `budget` neurons of each input with the largest values before the activation: bool [inputs, n].

    What is opened if the number of computed neurons is a public constant: the same count for every input.
    """
    chosen = before.topk(budget, dim=1).indices
    return torch.zeros(before.shape, dtype=torch.bool, device=before.device).scatter_(1, chosen, True)


def _only_nearest(apart: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the column with the least distance, UNKNOWN if another has it too, and that distance."""
    distance, nearest = apart.min(1)
    return torch.where((apart == distance[:, None]).sum(1) == 1, nearest, UNKNOWN), distance


def _refuse_other_shapes(name: str, activity: Tensor, opened: Tensor) -> None:
    if activity.shape != opened.shape or opened.dim() != 2:
        raise DomainError(
            f"{name}: got activity {tuple(activity.shape)} and opened {tuple(opened.shape)}; want both [inputs, n]"
        )
