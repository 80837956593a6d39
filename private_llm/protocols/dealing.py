"""How a model owner hands out shares of many tensors with little to send or store: masks are seeds.

For trio, [x] = x + a1 + a2 as in `trio.client`: party 0 gets the two mask seeds and nothing per tensor, party 1 the
first seed and x + a2, party 2 the second seed and x + a1. A mask is the stream of its seed under the tensor's label,
so a label must not be used twice with one dealer. One party alone sees uniform numbers (AES-CTR), as with
`session.deal`, which this equals bit for bit up to the choice of masks.
"""

from __future__ import annotations

from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ShareFileError
from private_llm.protocols.share import Share
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring

_TRIO_KEYS = {0: (0, 1), 1: (0,), 2: (1,)}
"""Which of the two mask seeds each party of trio holds."""


def keys_held(config: PrivateConfig, party: int) -> int:
    """How many mask seeds a party receives."""
    return len(_TRIO_KEYS[party]) if config.protocol == "trio" else 0


class Dealer:
    """The owner's end: one per set of shares."""

    def __init__(self, config: PrivateConfig) -> None:
        self._config = config
        self._ring = Ring(config.ring)
        self._masks = [Seed.fresh(), Seed.fresh()] if config.protocol == "trio" else []

    def keys(self, party: int) -> list[Seed]:
        """The seeds that `party` receives, once."""
        return [self._masks[k] for k in _TRIO_KEYS[party]] if self._masks else []

    def deal(self, elements: Tensor, label: str) -> list[Tensor | None]:
        """What each party receives for one tensor of ring elements (None: nothing, its seeds suffice)."""
        if self._config.protocol == "plain":
            return [elements]
        a1, a2 = (_mask(seed, label, tuple(elements.shape), self._ring) for seed in self._masks)
        return [None, elements + a2, elements + a1]


def assemble(
    config: PrivateConfig, party: int, keys: list[Seed], received: Tensor | None, shape: tuple[int, ...], label: str
) -> Share:
    """A party's share of one tensor, from its seeds and what it received.

    Raises ShareFileError if keys or the received tensor do not fit the party.
    """
    ring = Ring(config.ring)
    if config.protocol == "plain":
        return Share((_present(received, shape, label),))
    if len(keys) != keys_held(config, party):
        raise ShareFileError(f"mask seeds: got {len(keys)}; want {keys_held(config, party)} for party {party}")
    masks = tuple(_mask(seed, label, shape, ring) for seed in keys)
    if party == 0:
        if received is not None:
            raise ShareFileError(f"'{label}': party 0 holds masks only, but a masked tensor came with them")
        return Share(masks)
    return Share((_present(received, shape, label), *masks))


def _mask(seed: Seed, label: str, shape: tuple[int, ...], ring: Ring) -> Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return seed.stream(f"weight/{label}").elements(count, ring).view(shape)


def _present(received: Tensor | None, shape: tuple[int, ...], label: str) -> Tensor:
    if received is None or tuple(received.shape) != shape:
        got = None if received is None else tuple(received.shape)
        raise ShareFileError(f"'{label}': got {got}; want a share of shape {shape}")
    return received
