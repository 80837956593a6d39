"""How a model owner hands out shares of many tensors with little to send or store: masks are seeds.

A tensor is masked by the sum of two masks (three for quad, see `trio.client` and `quad.client`). A party gets the seeds
of the masks that it may know, and x + the one mask that it lacks; whoever may know all masks gets nothing per tensor.
A mask is the stream of its seed under the tensor's label, so a label must not be used twice with one dealer. One party
alone sees uniform numbers (AES-CTR or ChaCha20), as with `deal`, which this equals bit for bit up to the choice of
masks. Kernels of GPUs make masks of ChaCha20 piece by piece, those of CPUs masks of AES (`mask_cipher`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ShareFileError
from private_llm.protocols.registry import ProtocolSpec, protocol_spec
from private_llm.protocols.share import Share
from private_llm.ring.prg import CIPHERS, Prg, Seed
from private_llm.ring.ring import Ring

KEY_BYTES = 33  # of a mask's seed as it is sent
PIECE = 1 << 19  # elements dealt at a time (4 MB of 64 bits); whole cipher blocks, so that pieces continue one stream


def keys_held(config: PrivateConfig, party: int) -> int:
    """How many mask seeds (32 bytes each) a party receives. Raises ConfigError for an unknown protocol."""
    return len(protocol_spec(config.protocol).masks_of(party))


def sends_parts(config: PrivateConfig, party: int) -> bool:
    """Whether a party receives something for every tensor, one element each, besides its seeds."""
    return protocol_spec(config.protocol).receives_values(party)


def mask_cipher(config: PrivateConfig) -> str:
    """The cipher of masks of weights: `prg` where it names one; "auto": ChaCha20 with shares on GPUs, else AES."""
    if config.prg in CIPHERS:
        return config.prg
    places = [config.device, *(config.device_map.values() if isinstance(config.device_map, Mapping) else ())]
    return "chacha20" if any(str(place).startswith("cuda") for place in places) else "aes"


def packed_key(seed: Seed) -> Tensor:
    """A mask's seed as it is sent: its cipher's number, then its bytes; uint8 [KEY_BYTES]."""
    return torch.frombuffer(bytearray([CIPHERS.index(seed.cipher), *seed.raw()]), dtype=torch.uint8)


def unpacked_key(raw: Tensor) -> Seed:
    """The inverse of `packed_key`. Raises ShareFileError for the number of no cipher."""
    number, *key = raw.tolist()
    if number >= len(CIPHERS):
        raise ShareFileError(f"weight key: got cipher number {number}; want one of 0 to {len(CIPHERS) - 1}")
    return Seed(bytes(key), CIPHERS[number])


class Dealer:
    """The owner's end: one per set of shares. Nothing is sent from here. Raises ConfigError for an unknown protocol."""

    def __init__(self, config: PrivateConfig, cipher: str | None = None) -> None:
        """cipher: of the masks, default: as `mask_cipher` says."""
        self._spec, self._ring = protocol_spec(config.protocol), Ring(config.ring)
        self._masks = [Seed.fresh(cipher or mask_cipher(config)) for _ in self._spec.mask_holders]

    def keys(self, party: int) -> list[Seed]:
        """The seeds that `party` receives, once: 32 bytes for each mask that it knows (none under plain)."""
        return [self._masks[k] for k in self._spec.masks_of(party)]

    def begin(self, label: str) -> WeightSharing:
        """Start with the tensor called `label`; a label must not be used twice."""
        return WeightSharing(self._spec, self._ring, [seed.stream(_label(label)) for seed in self._masks])


class WeightSharing:
    """One tensor on its way into shares, piece by piece, so that a large one needs little memory. Local."""

    def __init__(self, spec: ProtocolSpec, ring: Ring, masks: list[Prg]) -> None:
        self._spec, self._ring, self._masks = spec, ring, masks

    def deal(self, piece: Tensor) -> list[Tensor | None]:
        """What each party gets for elements [n] (None: its seeds suffice). All pieces but the last: PIECE elements."""
        masks = [mask.elements(piece.numel(), self._ring) for mask in self._masks]
        return [_received(self._spec, party, piece, masks) for party in range(self._spec.facts.parties)]


def deal(config: PrivateConfig, elements: Tensor, seed: Seed, label: str) -> list[Share]:
    """A share of ring elements for each party, masks from `seed` under `label` (use each once). Local."""
    spec, ring = protocol_spec(config.protocol), Ring(config.ring)
    if elements.is_meta:
        masks = [torch.empty_like(elements) for _ in spec.mask_holders]
    else:
        streams = [seed.stream(f"{label}/mask {number}") for number in range(1, len(spec.mask_holders) + 1)]
        masks = [stream.elements(elements.numel(), ring).view(elements.shape) for stream in streams]
    shares = []
    for party in range(spec.facts.parties):
        held = tuple(masks[k] for k in spec.masks_of(party))
        part = _received(spec, party, elements, masks)
        shares.append(Share(held) if part is None else spec.hold(config, party, held, part))
    return shares


def _received(spec: ProtocolSpec, party: int, elements: Tensor, masks: list[Tensor]) -> Tensor | None:
    """The elements plus the masks that a party lacks; None if it lacks none."""
    lacking = [mask for number, mask in enumerate(masks) if number not in spec.masks_of(party)]
    return sum(lacking, elements) if spec.receives_values(party) else None


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in order as 1-D views of PIECE elements; at least one, maybe empty."""
    flat = tensor.reshape(-1)
    yield flat[:PIECE]
    for start in range(PIECE, flat.numel(), PIECE):
        yield flat[start : start + PIECE]


def bytes_at_rest(config: PrivateConfig, party: int, shape: tuple[int, ...], seeds: bool) -> int:
    """What a party's share of a secret weight of `shape` takes in memory between uses.

    One element for each part of the share (trio, dealer: 2, quad: 3, plain: 1); with `seeds`, and from two dimensions
    on, one for what the party received, so none where seeds suffice. Raises ConfigError for an unknown protocol.
    """
    kept = 0 if seeds and _drawn(shape) else keys_held(config, party)
    return (kept + sends_parts(config, party)) * math.prod(shape) * Ring(config.ring).bytes


def _drawn(shape: tuple[int, ...]) -> bool:
    """Whether a mask is worth being made for each use: biases and the like are small, and used as often."""
    return len(shape) > 1


def assemble(
    config: PrivateConfig, party: int, keys: list[Seed], received: Tensor | None, shape: tuple[int, ...], label: str,
    seeds: bool = False,
) -> Share:  # fmt: skip
    """A party's share of one tensor of `shape`, from its seeds and what it received (None: nothing). Local.

    seeds: masks of two dimensions and more stay seeds, and are made whenever they are read (`SeededTensor`). Raises
    ShareFileError if keys or the received tensor do not fit the party, or its shape is another.
    """
    spec, ring = protocol_spec(config.protocol), Ring(config.ring)
    if len(keys) != keys_held(config, party):
        raise ShareFileError(f"mask seeds: got {len(keys)}; want {keys_held(config, party)} for party {party}")
    made = Seed.drawn if seeds and _drawn(shape) else _mask
    masks = tuple(made(seed, _label(label), shape, ring) for seed in keys)
    if not sends_parts(config, party):
        if received is not None:
            raise ShareFileError(f"'{label}': party {party} holds masks only, but a masked tensor came with them")
        return Share(masks)
    if received is None or tuple(received.shape) != shape:
        got = None if received is None else tuple(received.shape)
        raise ShareFileError(f"'{label}': got {got}; want a share of shape {shape}")
    return spec.hold(config, party, masks, received)


def _mask(seed: Seed, label: str, shape: tuple[int, ...], ring: Ring) -> Tensor:
    return seed.stream(label).elements(math.prod(shape), ring).view(shape)


def _label(label: str) -> str:
    return f"weight/{label}"
