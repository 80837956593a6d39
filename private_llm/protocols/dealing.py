"""How a model owner hands out shares of many tensors with little to send or store: masks are seeds.

A tensor is masked by the sum of two masks (three for quad, see `trio.client` and `quad.client`). A party gets the seeds
of the masks that it may know, and x + the one mask that it lacks; whoever may know all masks gets nothing per tensor.
A mask is the stream of its seed under the tensor's label, so a label must not be used twice with one dealer. One party
alone sees uniform numbers (AES-CTR), as with `session.deal`, which this equals bit for bit up to the choice of masks.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ShareFileError
from private_llm.protocols.share import Share, cleartext
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import Ring

PIECE = 1 << 19
"""Elements dealt at a time (4 MB of 64 bits); whole cipher blocks, so that pieces continue one stream."""

_TRIO = ((0, 1), (0,), (1,))
_HELD: dict[str, tuple[tuple[int, ...], ...]] = {
    "plain": ((),), "trio": _TRIO, "dealer": _TRIO, "quad": ((0, 1), (0, 2), (1, 2), (0, 1, 2)),
}  # fmt: skip
"""Which mask seeds each party holds."""


def _masks(config: PrivateConfig) -> int:
    """How many masks a tensor has."""
    return max(map(len, _HELD[config.protocol]))


def keys_held(config: PrivateConfig, party: int) -> int:
    """How many mask seeds a party receives."""
    return len(_HELD[config.protocol][party])


def sends_parts(config: PrivateConfig, party: int) -> bool:
    """Whether a party receives something for every tensor, besides its seeds."""
    return config.protocol == "plain" or keys_held(config, party) < _masks(config)


class Dealer:
    """The owner's end: one per set of shares."""

    def __init__(self, config: PrivateConfig) -> None:
        self._config = config
        self._masks = [Seed.fresh() for _ in range(_masks(config))]

    def keys(self, party: int) -> list[Seed]:
        """The seeds that `party` receives, once."""
        return [self._masks[k] for k in _HELD[self._config.protocol][party]]

    def begin(self, label: str) -> Dealing:
        """Start with the tensor called `label`."""
        return Dealing(self._config, [seed.stream(_label(label)) for seed in self._masks])


class Dealing:
    """One tensor on its way into shares, piece by piece, so that a large one needs little memory."""

    def __init__(self, config: PrivateConfig, masks: list[Prg]) -> None:
        self._ring, self._held, self._masks = Ring(config.ring), _HELD[config.protocol], masks

    def deal(self, piece: Tensor) -> list[Tensor | None]:
        """What each party receives for the next elements [n] (None: nothing, its seeds suffice).

        Every piece but the last has PIECE elements.
        """
        if not self._masks:
            return [piece]
        masks = {k: mask.elements(piece.numel(), self._ring) for k, mask in enumerate(self._masks)}
        lacking = [masks.keys() - held for held in self._held]
        return [piece + masks[min(lacks)] if lacks else None for lacks in lacking]


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in order as 1-D views of PIECE elements; at least one, maybe empty."""
    flat = tensor.reshape(-1)
    yield flat[:PIECE]
    for start in range(PIECE, flat.numel(), PIECE):
        yield flat[start : start + PIECE]


def assemble(
    config: PrivateConfig, party: int, keys: list[Seed], received: Tensor | None, shape: tuple[int, ...], label: str
) -> Share:
    """A party's share of one tensor, from its seeds and what it received.

    Raises ShareFileError if keys or the received tensor do not fit the party.
    """
    ring = Ring(config.ring)
    if config.protocol == "plain":
        return cleartext(_present(received, shape, label), config.debug_ranges)
    if len(keys) != keys_held(config, party):
        raise ShareFileError(f"mask seeds: got {len(keys)}; want {keys_held(config, party)} for party {party}")
    masks = tuple(_mask(seed, label, shape, ring) for seed in keys)
    if not sends_parts(config, party):
        if received is not None:
            raise ShareFileError(f"'{label}': party {party} holds masks only, but a masked tensor came with them")
        return Share(masks)
    part = _present(received, shape, label)
    return Share((*masks, part) if config.protocol == "quad" and party == 0 else (part, *masks))


def _mask(seed: Seed, label: str, shape: tuple[int, ...], ring: Ring) -> Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return seed.stream(_label(label)).elements(count, ring).view(shape)


def _label(label: str) -> str:
    return f"weight/{label}"


def _present(received: Tensor | None, shape: tuple[int, ...], label: str) -> Tensor:
    if received is None or tuple(received.shape) != shape:
        got = None if received is None else tuple(received.shape)
        raise ShareFileError(f"'{label}': got {got}; want a share of shape {shape}")
    return received
