"""Trio's piecewise polynomials in one round, by comparison keys that party 0 makes for its masks.

The evaluators know M = x + a, party 0 knows a. With s = -a and w = `bits`, [x + c < 0] is bit w-1 of M + c + s:

    [x + c < 0] = top(M + c) ^ u,   u = top(s) ^ carry,   carry = [lower(M + c) + lower(s) >= 2^(w-1)]

and the carry is [~lower(M + c) < lower(s)]: a comparison of what the evaluators know with what party 0 knows. Its key
has alpha = lower(s) and beta = +-(1, a, a^2), minus where top(s) is set; party 0 shares top(s) (1, a, a^2) besides. So
the evaluators have additive shares of u a^j for every threshold, from one key, and without a message between them:

    [x + c < 0] a^j = u a^j,  or where top(M + c) is set  a^j - u a^j
    x^i [x + c < 0] = sum_j binomial(i, j) M^(i-j) (-1)^j a^j [x + c < 0]

One finish turns the sum of all pieces into a share: 1 round, 2 with a shift, in whose first round what is not divided
goes along. Party 0 sends each evaluator the key (`ring.comparison_keys`), whose roots come from their common streams,
and party 2 the shared powers. Source: Boyle et al. 2021, section 3 (DReLU by a comparison key), with Trio's masks in
place of a dealer's. Leakage: none to a single party, as long as AES is a good cipher; the receivers' views are
pseudorandom keys. Party 0 tells the evaluators a fresh seed of the cipher's keys when the session begins
(`agree_on_ciphers`); what that leaves of the cipher's security is in the header of `ring.comparison_keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.backends.cpu.comparison_keys import add_steps
from private_llm.kernels.trace_hook import as_array
from private_llm.net.ledger import Cost
from private_llm.net.transport import Transport
from private_llm.protocols.adder import DEFAULT_ADDER, Adder
from private_llm.protocols.party_end import Links
from private_llm.protocols.piecewise import Pieces, PiecesShape
from private_llm.protocols.share import Share
from private_llm.protocols.trio import cost
from private_llm.protocols.trio.shuffle import TrioShuffles
from private_llm.ring import comparison_keys
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring

Array = np.ndarray[Any, Any]


class TrioPiecewise(TrioShuffles):
    """Trio's arithmetic and shuffles, and piecewise polynomials."""

    def __init__(
        self, party: int, transport: Transport, ring: Ring, pair_seeds: dict[int, Seed], input_keys: Sequence[Seed],
        adder: Adder = DEFAULT_ADDER, device: str = "cpu", comparing: Seed | None = None,
    ) -> None:  # fmt: skip
        """comparing: what the parties derive the ciphers of comparison keys from; None: they take none."""
        super().__init__(party, transport, ring, pair_seeds, input_keys, device)
        self.adder = adder
        self.has_keys = adder.may_take_keys and comparing is not None
        self._ciphers = None if comparing is None else comparison_keys.Ciphers(comparing)

    @contextmanager
    def section(self, label: str, links: Links = lambda transport: transport) -> Iterator[None]:
        """As `TrioArithmetic.section`; ciphers are apart, too."""
        kept = self._ciphers
        with super().section(label, links):
            self._ciphers = None if kept is None else kept.apart(label)
            try:
                yield
            finally:
                self._ciphers = kept

    def _next_ciphers(self, count: int) -> comparison_keys.CipherSet:
        """Those of the next keys. Raises UnsupportedOp where the parties agreed on none."""
        if self._ciphers is None:
            raise UnsupportedOp("piecewise: these parties take no comparison keys; want adder='keys' or 'auto'")
        return self._ciphers.take(count)

    def takes_keys(self, count: int, shape: PiecesShape, other: Callable[..., Cost], *facts: Hashable) -> bool:
        """As the interface says, by bytes, rounds and the cipher's work of whoever has most of it."""
        return self.has_keys and _takes_keys(self.adder, self.ring, count, shape, other, facts)

    def key_seconds(self, count: int, shape: PiecesShape) -> float | None:
        """As the interface says."""
        return _key_seconds(self.adder, self.ring, count, shape) if self.has_keys else None

    def piecewise(self, x: Share, pieces: Pieces) -> list[Share]:
        """As the interface says: see the module header. Bytes: `trio/cost.py`."""
        shape = pieces.shape
        if not 2 <= shape.bits <= self.ring.bits or not 0 <= shape.low <= shape.bits - 2:
            raise DomainError(
                f"piecewise: got bits={shape.bits}, low={shape.low}; want 2 to {self.ring.bits}, and 0 to bits - 2"
            )
        flat, found = x.map(lambda part: part.reshape(-1)), []
        for at in range(0, max(1, x.numel()), _KEYS):  # party 0 makes keys while the others use those before
            part = Share(tuple(each[at : at + _KEYS] for each in flat.parts))
            if self.role == 0:
                self._send_keys(part, shape)
            else:
                found.append(self._pieces(part, pieces))
        piece = torch.cat(found, 1) if found else None
        made: dict[int, Share] = {}
        for shift, outputs, along in shape.finishes:
            size = torch.Size((len(outputs), *x.shape))
            some = None if piece is None else piece[list(outputs)]
            if along:
                beside = None if piece is None else piece[list(along)]
                share, other = self._finish_along(size, some, shift, beside, torch.Size((len(along), *x.shape)))
                made |= _rows(along, other)
            else:
                share = self._finish("piecewise", size, some, shift, helped=False)
            made |= _rows(outputs, share)
        return [made[output] for output in range(shape.outputs)]

    def _finish_along(
        self, size: torch.Size, piece: Tensor | None, shift: int, along: Tensor | None, shape: torch.Size
    ) -> tuple[Share, Share]:
        """Shares of the outputs that are divided by 2^shift, and of those of `shape` that are not, in 2 rounds."""
        mask = self._draw(shape.numel())
        if along is None:
            other = Share((mask.view(shape), self._draw(shape.numel(), 1).view(shape)))
            return self._finish_shifted("piecewise", size, piece, shift)[0], other
        masked = along.reshape(-1) + mask
        share, opened = self._finish_shifted("piecewise", size, piece, shift, masked)
        return share, Share(((masked + opened[-1] - mask).view(shape), mask.view(shape)))

    def _send_keys(self, x: Share, shape: PiecesShape) -> None:
        """Party 0: make keys for its masks, and send them."""
        count, words = x.numel(), shape.words
        key_words = comparison_keys.key_words(shape.levels, words)
        more = words + (words > 2)
        if x.parts[0].is_meta:
            message = torch.empty((count, key_words), dtype=torch.int64, device="meta")
            self.transport.send(1, "piecewise", message)
            self.transport.send(2, "piecewise", message)
            self.transport.send(2, "piecewise", torch.empty((more, count), dtype=torch.int64, device="meta"))
            return
        mask = _unsigned(x.parts[0] + x.parts[1]).reshape(-1)
        lower, top = _split(np.uint64(0) - mask, shape)
        powers = np.stack([mask**j for j in range(words)])
        beta = np.where(top == 1, np.uint64(0) - powers, powers)
        first, second = self._streams
        keys = comparison_keys.make_keys(
            lower, np.ascontiguousarray(beta.T), shape.levels, first, second, self._next_ciphers(count)
        )
        shared = np.concatenate([top * powers, powers[2:]]) - self._shared(more, count)
        message = _signed(keys)
        self.transport.send(1, "piecewise", message)
        self.transport.send(2, "piecewise", message)
        self.transport.send(2, "piecewise", _signed(shared))

    def _shared(self, rows: int, count: int) -> Array:
        """What parties 0 and 1 draw as the first share of rows of words."""
        return _unsigned(self._streams[0].words(rows * count)).reshape(rows, count)

    def _pieces(self, x: Share, pieces: Pieces) -> Tensor:
        """An evaluator's additive pieces of all outputs: [outputs, count]."""
        shape, count, words = pieces.shape, x.numel(), pieces.shape.words
        key_words = comparison_keys.key_words(shape.levels, words)
        more, device = words + (words > 2), x.parts[0].device
        meta, first = x.parts[0].is_meta, self.role == 1
        root = ciphers = None
        if not meta:
            ciphers, root = self._next_ciphers(count), comparison_keys.roots(self._streams[0], count)
        key = self.transport.recv(0, "piecewise", (count, key_words), torch.int64)
        if not first:
            received = self.transport.recv(0, "piecewise", (more, count), torch.int64)
        if root is None or ciphers is None:
            return torch.empty((shape.outputs, count), dtype=self.ring.dtype, device="meta")
        shared = self._shared(more, count) if first else _unsigned(received)
        powers = np.stack(
            [np.full(count, int(first), dtype=np.uint64), _unsigned(x.parts[1]).reshape(-1), *shared[words:]]
        )
        masked, key_of = _unsigned(x.parts[0] + x.parts[1]).reshape(-1), _unsigned(key)
        offsets, steps, rest = pieces.arrays
        sums = np.einsum("ow,jn->owjn", rest, powers)
        step = max(1, _POINTS // max(1, len(offsets)))
        for at in range(0, count, step):
            some = slice(at, at + step)
            lower, top = _split(masked[some] + offsets[:, None], shape)
            values = comparison_keys.evaluate(
                self.role - 1, root[some], key_of[some], ~lower, shape.levels, words, ciphers, pieces.ways
            )
            add_steps(
                values, top, np.ascontiguousarray(shared[:words, some]), np.ascontiguousarray(powers[:, some]), steps,
                sums, at,
            )  # fmt: skip
        return _signed(_polynomial(sums, masked)).to(self.ring.dtype).to(device)


def agree_on_ciphers(transport: Transport, party: int) -> Seed:
    """A fresh seed for the ciphers of comparison keys, at the start of a session: 32 bytes from party 0 to 1 and 2."""
    if party:
        return Seed(transport.recv(0, "cipher key", (32,), torch.uint8).cpu().numpy().tobytes())
    seed = Seed.fresh()
    for evaluator in (1, 2):
        transport.send(evaluator, "cipher key", torch.frombuffer(bytearray(seed.raw()), dtype=torch.uint8))
    return seed


@lru_cache(maxsize=4096)
def _takes_keys(
    adder: Adder, ring: Ring, count: int, shape: PiecesShape, other: Callable[..., Cost], facts: tuple[Hashable, ...]
) -> bool:
    blocks = _blocks(count, shape)
    return adder.takes_keys(lambda: cost.piecewise(ring, count, shape), lambda: other(cost, *facts), blocks)


@lru_cache(maxsize=4096)
def _key_seconds(adder: Adder, ring: Ring, count: int, shape: PiecesShape) -> float | None:
    return adder.key_seconds(cost.piecewise(ring, count, shape), _blocks(count, shape))


def _blocks(count: int, shape: PiecesShape) -> int:
    """Of the cipher, each by itself: a key costs the helping party twice what one way costs an evaluator."""
    ways = -(-shape.thresholds // _SHARED)
    return count * max(2, ways) * comparison_keys.cipher_blocks(shape.levels, shape.words)


def _rows(outputs: Sequence[int], share: Share) -> dict[int, Share]:
    """The shares of several outputs, one for each row."""
    return dict(zip(outputs, (Share(parts) for parts in zip(*share.parts, strict=True)), strict=True))


def _polynomial(total: Array, masked: Array) -> Array:
    """Shares of sum_i c_i (M - a)^i from those of c_i a^j, total [outputs, i, j, n]: [outputs, n]."""
    value = total[:, 0, 0] + masked * total[:, 1, 0] - total[:, 1, 1]
    if total.shape[1] > 2:
        value += masked * masked * total[:, 2, 0] - np.uint64(2) * masked * total[:, 2, 1] + total[:, 2, 2]
    made: Array = value
    return made


def _split(values: Array, shape: PiecesShape) -> tuple[Array, Array]:
    """The compared lower bits, and the top one."""
    lower = (values >> np.uint64(shape.low)) & np.uint64((1 << shape.levels) - 1)
    return lower, (values >> np.uint64(shape.bits - 1)) & np.uint64(1)


def _unsigned(values: Tensor) -> Array:
    """Ring elements or words as uint64; those of a smaller ring are widened."""
    array: Array = as_array(values)
    return array.view(np.uint64) if array.dtype == np.int64 else array.view(np.uint32).astype(np.uint64)


def _signed(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int64))


_SHARED = 3
"""Thresholds that take as long as one way by itself: most of their ways' first half is one (measured 3.3 for SiLU)."""

_KEYS = 1 << 15
"""Elements whose keys are held, and sent, at once: 28 to 90 MB."""

_POINTS = 1 << 16
"""Elements times thresholds that are evaluated at once."""
