"""Pseudorandom streams for shares: AES-128 in counter mode or ChaCha20, one key per pair of parties and purpose.

A `Seed` (32 bytes of OS entropy) never leaves the parties that share it. A stream key is
BLAKE2b(key=seed, person="pllm-prg", label), so two labels give independent streams. A stream hands out
consecutive blocks and cannot be rewound: no (key, counter) pair is used twice. Known-answer tests
pin key derivation and stream (tests/ring/test_prg.py).

A stream is the same bytes wherever a party computes. AES is made in main memory and copied to a GPU; ChaCha20 is
made on the GPU that needs it. Which of them a session uses is agreed by all parties.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from private_llm.errors import ConfigError, DomainError
from private_llm.forks import Origin, forked, process
from private_llm.kernels import ops
from private_llm.kernels.seeded_tensor import (
    ChaChaKey,
    KeyStream,
    SeededTensor,
    StreamKey,
    StreamSlice,
    few_words,
    makes_fast,
)
from private_llm.kernels.trace_hook import this_thread, traced_by
from private_llm.ring.ring import Ring

CIPHERS = ("aes", "chacha20")


class Seed:
    """32 secret bytes and the cipher of their streams, "aes" or "chacha20"; `repr` never shows the bytes.

    Raises ConfigError for another length or cipher; pickling raises TypeError. In a fork of the process that made it,
    whatever is asked of it raises ProtocolAbort.
    """

    __slots__ = ("_origin", "_raw", "cipher")

    def __init__(self, raw: bytes, cipher: str = "aes") -> None:
        if len(raw) != 32:
            raise ConfigError(f"seed: got {len(raw)} bytes; want 32")
        if cipher not in CIPHERS:
            raise ConfigError(f"prg: got {cipher!r}; want 'aes' or 'chacha20'")
        self._raw, self.cipher, self._origin = bytes(raw), cipher, Origin()

    @classmethod
    def fresh(cls, cipher: str = "aes") -> Seed:
        """A new seed from the operating system's entropy."""
        return cls(secrets.token_bytes(32), cipher)

    def derive(self, label: str) -> Seed:
        """An independent seed for `label` (domain separation)."""
        raw = hashlib.blake2b(label.encode(), key=self.raw(), digest_size=32, person=b"pllm-seed").digest()
        return Seed(raw, self.cipher)

    def stream(self, label: str) -> Prg:
        """The stream of this seed for `label`, from its beginning: the same label gives the same bytes again."""
        size, made = (16, Prg) if self.cipher == "aes" else (32, ChaCha)
        return made(self._key(label, size))

    def first_words(self, label: str, count: int) -> Tensor:
        """What `stream(label).words(count)` gives in main memory, for who needs few of a label and no more, sooner."""
        few = few_words(self._key(label, 16), count) if self.cipher == "aes" else None
        return self.stream(label).words(count) if few is None else few

    def drawn(self, label: str, shape: Sequence[int], ring: Ring) -> SeededTensor:
        """The first elements of the stream for `label` as a tensor that is made whenever it is read. Local."""
        key = StreamKey(self._key(label, 16)) if self.cipher == "aes" else ChaChaKey(self._key(label, 32))
        lines, *line = shape
        return SeededTensor([StreamSlice(key, 0, lines)], line, ring.dtype)

    def _key(self, label: str, size: int) -> bytes:
        return hashlib.blake2b(label.encode(), key=self.raw(), digest_size=size, person=b"pllm-prg").digest()

    def raw(self) -> bytes:
        """The bytes, for key exchanges or a holder's share file. Raises ProtocolAbort in a fork of its process."""
        self._origin.demand("this seed")
        return self._raw

    def __repr__(self) -> str:
        return "Seed(<secret>)"

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a Seed is not serialised by pickle; use raw() over an authenticated channel")


class Prg:
    """An AES-128-CTR stream of elements and packed words: this package's kernel, or OpenSSL. Not thread-safe."""

    __slots__ = ("_block", "_forks", "_host", "_stream")
    block = 16  # bytes: a draw takes whole blocks

    def __init__(self, key: bytes) -> None:
        self._block, self._forks = 0, process.forks
        self._host, self._stream = KeyStream(key), StreamKey(key) if makes_fast() else None

    def _take(self, size: int) -> int:
        """The first block of the next `size` bytes. Raises ProtocolAbort in a fork of the process that made this."""
        if self._forks != process.forks:
            raise forked("this stream")
        first, self._block = self._block, self._block - (-size // self.block)
        return first

    def fill(self, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Overwrite `out` (uint8 [n], contiguous) with the next stream bytes; a call takes whole blocks.

        Raises ProtocolAbort in a fork of the process that made this stream, DomainError for another kind of array.
        """
        if out.dtype != np.uint8 or not out.flags.carray:
            raise DomainError(f"a stream fills writable, contiguous bytes; got {out.dtype}, strides {out.strides}")
        first = self._take(out.size)
        if self._stream is None:
            self._host.write(first, out)
        else:
            self._stream.write(first * self.block, out.ctypes.data, out.size)

    def words(self, count: int, device: str | torch.device = "cpu") -> Tensor:
        """`count` uniform 64-bit words as int64 [count]."""
        return self.draw(count, torch.int64, device)

    def elements(self, count: int, ring: Ring, device: str | torch.device = "cpu") -> Tensor:
        """`count` uniform ring elements [count]."""
        return self.draw(count, ring.dtype, device)

    def draw(self, count: int, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        """`count` integers of a dtype, in whole blocks; none for the meta device. Raises ProtocolAbort in a fork."""
        if str(device) == "meta":
            return torch.empty(count, dtype=dtype, device="meta")
        on_gpu = torch.device(device).type == "cuda"
        out = torch.empty(count, dtype=dtype, pin_memory=on_gpu and torch.cuda.is_initialized())
        if self._stream is None:
            self._host.write(self._take(out.nbytes), out.numpy().view(np.uint8))
        else:
            self._stream.write(self._take(out.nbytes) * self.block, out.data_ptr(), out.nbytes)
        if str(device) != "cpu":
            out = out.to(device, non_blocking=True)  # PyTorch keeps pinned memory until it is copied
        hook = this_thread.hook
        if hook is not None:
            hook.masks_drawn(self, out)
        return out

    def __repr__(self) -> str:
        return "Prg(<secret>)"

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a Prg is not copied or pickled: both would hand out the same masks")


class ChaCha(Prg):
    """A ChaCha20 stream (blocks numbered as `ops.chacha20` does), made on the device that asks. Not thread-safe.

    A device that draws from it holds its key, and the number of a block from which on it counts, as long as it lives.
    """

    __slots__ = ("_devices", "_key")
    block = 64

    def __init__(self, key: bytes) -> None:
        self._key, self._block, self._forks = key, 0, process.forks
        self._host, self._stream = KeyStream(key), None
        self._devices: dict[torch.device, _Placed] = {}

    def draw(self, count: int, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        """`count` uniform integers of a dtype [count]."""
        where, hook = torch.device(device), this_thread.hook
        if not makes_streams(where):
            return super().draw(count, dtype, where)
        if hook is None:
            return self.make(count, dtype, where)
        with traced_by(None), _disable_current_modes():  # masks come from outside: how they are made is no step
            out = self.make(count, dtype, where)
        hook.masks_drawn(self, out)
        return out

    def make(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next `count` elements, as `fill` would give, by the device's kernel. Raises ProtocolAbort in a fork."""
        words = torch.empty(-(-count * dtype.itemsize // self.block) * 16, dtype=torch.int32, device=device)
        first, placed = self._take(4 * words.numel()), self._placed(device)
        ops.chacha20(placed.key, placed.counter, first - placed.at, words)
        return words.view(dtype)[:count]

    def advance(self, size: int, device: torch.device) -> None:
        """Count `size` bytes that `write_next`, or its graph, makes on a device. Raises ProtocolAbort in a fork."""
        placed, first = self._placed(device), self._take(size)
        if placed.at != first:
            placed.counter.fill_(first)
        placed.at = self._block

    def write_next(self, out: Tensor) -> None:
        """Overwrite out (int32, whole blocks) with the blocks from its device's counter on, which moves on.

        Two launches, which may be captured. Python's count stays as it is: see `advance`.
        """
        placed = self._placed(out.device)
        ops.chacha20(placed.key, placed.counter, 0, out)
        placed.counter.add_(out.numel() // 16)

    def _placed(self, device: torch.device) -> _Placed:
        found = self._devices.get(device)
        if found is None:
            key = torch.frombuffer(bytearray(self._key), dtype=torch.int32).to(device)
            counter = torch.full((1,), self._block, dtype=torch.int64, device=device)
            found = self._devices[device] = _Placed(key, counter, self._block)
        return found


@dataclass(repr=False)
class _Placed:
    """Key and counter of a ChaCha20 stream on one device, and what Python knows of the counter."""

    key: Tensor
    counter: Tensor
    at: int


def makes_streams(device: torch.device) -> bool:
    """Whether a device makes ChaCha20 streams by itself."""
    return device.type == "cuda"
