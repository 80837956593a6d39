"""Where a run's bytes and rounds are: by module, all layers together, and by the operation that sent them."""

from dataclasses import dataclass

from private_llm.ranges import layer_of
from private_llm_hf.client.costs import Costs
from private_llm_hf.tools.estimate import Estimate


@dataclass(frozen=True)
class PlaceCost:
    """What one operation of one module costs in all layers: bytes over all links, rounds of whoever waited most."""

    module: str
    operation: str
    bytes: int
    rounds: int


def places_of_prompt(found: Estimate) -> list[PlaceCost]:
    """Until the first new token, or of the one forward; what sent most first."""
    return _places(_counted((found.prompt or found).costs), {}, 1)


def places_of_token(found: Estimate, new: int) -> list[PlaceCost]:
    """Of each of `new` tokens after the first, on average, rounded; [] where there is none."""
    if found.prompt is None or new < 2:
        return []
    return _places(_counted(found.costs), _counted(found.prompt.costs), new - 1)


_Counts = dict[tuple[str, str], tuple[int, int]]


def _counted(costs: Costs) -> _Counts:
    """Bytes and rounds by module and operation."""
    return costs.sums(lambda scope, operation: (layer_of(scope), operation))


def _places(counts: _Counts, before: _Counts, times: int) -> list[PlaceCost]:
    made = []
    for place, (sent, rounds) in counts.items():
        sent_before, rounds_before = before.get(place, (0, 0))
        made.append(PlaceCost(*place, round((sent - sent_before) / times), round((rounds - rounds_before) / times)))
    there = [place for place in made if place.bytes or place.rounds]
    return sorted(there, key=lambda place: (-place.bytes, place.module, place.operation))
