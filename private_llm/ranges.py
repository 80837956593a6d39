"""What is publicly known of the sizes of a model's values: a few powers of two per module.

Calibration (the owner's plaintext model, on a text of his choice) notes them, all parties agree upon them, and
operations use them: how many fractional bits a product keeps, whether one sum of squares is enough for a norm, how long
a comparison's adder must be, and what the check of ranges demands. Exponents already contain the head room below.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from private_llm.errors import ConfigError, DomainError

HEAD_ROOM = 5  # bits between the largest value met in calibration and the stated power of two
SQUARE_HEAD_ROOM = 6  # the same for mean squares of rows, so 3 bits for the entries
REACH = 20  # where nothing is known, values are promised to stay below 2^REACH (a million)

QUANTITIES = {
    "output": "rows of the results of products and convolutions have norms below 2^output",
    "compare": "rows of arguments of ReLU, GELU and SiLU have norms below 2^compare",
    "square": "mean squares of a norm's rows stay below 2^square",
    "gain": "weights of a norm, with what is added to them for good, stay below 2^gain",
    "score": "pieces of 256 scaled scores of fused attention have norms below 2^score",
    "value": "rows of attention's values, all heads, have norms below 2^value",
    "read": "products alone read results, of a size that is below 2^read with the other factor's fractional bits",
    "frac": "results of products and their bias, or a norm's input, keep `frac` fractional bits",
    "weight": "a layer's small weights are shared with `weight` fractional bits",
}
"""What is known of a module, and what its exponent says."""

LEAST_BITS = 8  # fewest fractional bits of a result

WEIGHT_ROOM = 43  # bits that small weights and results share in a product, beside 18 fractional bits of its input

LARGEST_EXPONENT = 30  # largest exponent of results and arguments: long rows of values near 2^REACH are bounded by it

_LIMITS = {
    "output": (-60, LARGEST_EXPONENT),
    "compare": (-60, LARGEST_EXPONENT),
    "square": (-120, 63),
    "gain": (0, LARGEST_EXPONENT),
    "score": (-60, LARGEST_EXPONENT),
    "value": (-60, LARGEST_EXPONENT),
    "read": (-60, 63),
    "frac": (LEAST_BITS, 20),
    "weight": (5, 40),  # more than frac_bits, of which there are 4 or more
}
"""What an exponent of each quantity may be."""

_SMALLEST = -40


@dataclass(frozen=True)
class Ranges:
    """{module: {quantity: exponent}}, empty without calibration. Raises ConfigError for unknown or absurd entries."""

    modules: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.modules, Mapping):
            raise ConfigError(f"ranges: got {type(self.modules).__name__}; want a mapping from modules to exponents")
        for name, known in self.modules.items():
            if not isinstance(name, str) or not isinstance(known, Mapping):
                raise ConfigError("ranges: want a mapping from module names to mappings of exponents")
            for quantity, exponent in known.items():
                if quantity not in QUANTITIES:
                    raise ConfigError(f"ranges of {name!r}: got {quantity!r}; want one of {', '.join(QUANTITIES)}")
                low, high = _LIMITS[quantity]
                if type(exponent) is not int or not low <= exponent <= high:
                    raise ConfigError(
                        f"ranges of {name!r}: {quantity}={exponent!r}; want an integer from {low} to {high}"
                    )
            if "weight" in known and known["weight"] + known.get("output", REACH) > WEIGHT_ROOM:
                raise ConfigError(
                    f"ranges of {name!r}: weight={known['weight']} with output={known.get('output')}; want them to be "
                    f"{WEIGHT_ROOM} or less in sum (without `output`, it counts as {REACH})"
                )

    def of(self, module: str, quantity: str) -> int | None:
        """The exponent, or None if nothing is known. `a.q+k+v` is a group of layers that run as one product."""
        known = self.modules.get(module)
        if known is not None:
            return known.get(quantity)
        path, _, names = module.rpartition(".")
        if "+" not in names:
            return None
        found = [self.of(f"{path}.{name}" if path else name, quantity) for name in names.split("+")]
        exponents = [exponent for exponent in found if exponent is not None]
        return max(exponents) if len(exponents) == len(found) else None

    @cached_property
    def widest(self) -> Mapping[str, int]:
        """Of each quantity the largest exponent of all modules."""
        found: dict[str, int] = {}
        for known in self.modules.values():
            for quantity, exponent in known.items():
                found[quantity] = max(found.get(quantity, exponent), exponent)
        return found

    def frac_of_weight(self, name: str, default: int) -> int:
        """Fractional bits of a weight by its name: a bias has those of the product it is added to."""
        module, _, own = name.rpartition(".")
        found = self.of(module, {"bias": "frac", "weight": "weight"}.get(own, ""))
        return default if found is None else found

    def to_dict(self) -> dict[str, dict[str, int]]:
        """The inverse of the constructor, as JSON can hold it."""
        return {name: dict(known) for name, known in self.modules.items()}

    def digest(self) -> str:
        """What parties compare: equal for equal ranges."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> "Ranges":
        """Ranges from a file of `private-llm calibrate`. Raises ConfigError for anything else."""
        try:
            values: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"ranges: want the JSON of `private-llm calibrate` ({error})") from None
        return cls(values["modules"] if isinstance(values, dict) and "modules" in values else values)


def exponent(largest: float, head_room: int = HEAD_ROOM) -> int:
    """The power of two above `largest` with head room. Raises DomainError for NaN and infinities."""
    if not math.isfinite(largest):
        raise DomainError(f"calibration met the value {largest}; the plaintext model itself leaves float32")
    return max(_SMALLEST, math.ceil(math.log2(max(largest, 2.0**-60)))) + head_room


def layer_of(module: str) -> str:
    """A module's name without layer numbers, by which equal layers are shown in one line."""
    return re.sub(r"\b\d+\b", "#", module)


UNKNOWN = Ranges()  # what is known without calibration: nothing
