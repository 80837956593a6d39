"""Tensors that are slices of a key stream and not in memory: made whenever they are read, forgotten afterwards.

A mask of a weight is such a piece, so a party that knows its seed need not hold it. Products with such a matrix make
it piece by piece (`matmul`); taking rows, joining rows and turning a matrix make nothing; every other operation
gets the whole tensor, made for it alone. Results are those of the same tensor in memory, bit for bit.

The stream is AES-128 in counter mode from counter 0, as `ring.prg.Prg` gives it, or ChaCha20 from block 0, as
`ring.prg.ChaCha` does, so any part can be made by itself: AES in main memory, ChaCha20 also by kernels of GPUs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from private_llm.errors import PlaintextLeak, UnsupportedOp
from private_llm.forks import Origin, forked, process
from private_llm.kernels import parallel
from private_llm.kernels.address import Array
from private_llm.kernels.devices import triton_module
from private_llm.kernels.prg import aes as cpu_aes
from private_llm.kernels.trace_hook import this_thread

BYTES = 1e10  # bytes of a stream in a second, to guess how many threads are worth their start

_PAGE = 4096
_SHARED = 1 << 20  # bytes below which nobody asks how many threads are worth it


def makes_fast() -> bool:
    """Whether this processor makes a stream as fast as it reads memory: AES on four blocks an instruction."""
    return cpu_aes.usable() and cpu_aes.LANES > 1


def few_words(key: bytes, count: int) -> Tensor | None:
    """The first words of an AES stream, int64 [count]; None for many, and on a processor without AES instructions."""
    if 8 * count >= _SHARED or not cpu_aes.usable():
        return None
    out = torch.empty(count, dtype=torch.int64)
    cpu_aes.write_once(*struct.unpack("<qq", key), out.data_ptr(), 8 * count)
    return out


_ZEROS = memoryview(bytes(1 << 20))


class KeyStream:
    """The blocks of one key, by the vectorised code of OpenSSL: of AES in counter mode (16 bytes) or of ChaCha20 (32),
    numbered as `ops.chacha20` does; where one call ends the next one begins at no cost. Not thread-safe.
    """

    __slots__ = ("_at", "_encrypt", "_key", "block")

    def __init__(self, key: bytes) -> None:
        self._key, self._at, self.block = key, -1, 16 if len(key) == 16 else 64

    def _from(self, number: int) -> CipherContext:
        if self.block == 16:
            return Cipher(algorithms.AES(self._key), modes.CTR(number.to_bytes(16, "big"))).encryptor()
        return Cipher(algorithms.ChaCha20(self._key, number.to_bytes(16, "little")), mode=None).encryptor()

    def write(self, number: int, octets: Array, skipped: int = 0) -> None:
        """Overwrite octets [bytes] uint8 with the key stream from block `number` on, without so many bytes of it."""
        if skipped:
            block = np.empty(self.block, dtype=np.uint8)
            self.write(number, block)
            head = min(self.block - skipped, octets.size)
            octets[:head] = block[skipped : skipped + head]
            number, octets = number + 1, octets[head:]
        first = 0
        while first < octets.size:
            if number != self._at or not number % (1 << 32):  # OpenSSL's counter of ChaCha20 has 32 bits
                self._encrypt = self._from(number)
            last = min(first + self.block * ((1 << 32) - number % (1 << 32)), first + len(_ZEROS), octets.size)
            self._encrypt.update_into(_ZEROS[: last - first], octets[first:last].data)
            number += -((first - last) // self.block)
            self._encrypt.update(_ZEROS[: (first - last) % self.block])
            first, self._at = last, number


class StreamKey:
    """The key of one AES stream (16 bytes); `repr` never shows it. A fork of the process that made it makes nothing of
    it: what gives bytes, or the place of the key, raises ProtocolAbort there.
    """

    __slots__ = ("_address", "_origin", "_raw", "_rounds")
    on_gpus = False  # whether kernels of GPUs make the stream

    def __init__(self, raw: bytes) -> None:
        self._raw, self._origin = raw, Origin()
        self._rounds = cpu_aes.round_keys(raw) if cpu_aes.usable() else None
        self._address = None if self._rounds is None else int(self._rounds.ctypes.data)

    @property
    def rounds(self) -> int | None:
        """The address of the round keys, for kernels of the CPU; None where there are none."""
        self._origin.demand("a mask")
        return self._address

    @property
    def place(self) -> tuple[int, int]:
        """Where the key lies that kernels take, and its bytes. Raises UnsupportedOp without AES instructions."""
        address = self.rounds
        if self._rounds is None or address is None:
            raise UnsupportedOp("round keys on a processor without AES instructions")
        return address, self._rounds.nbytes

    def fill(self, start: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Overwrite out (uint8 [n], contiguous) with bytes start .. start + n - 1 of the stream."""
        if self.rounds is None:
            stream = KeyStream(self._raw)
            stream.write(start // stream.block, out, start % stream.block)
        else:
            self.write(start, out.ctypes.data, out.size)

    def write(self, start: int, to: int, size: int) -> None:
        """The same at an address. Raises UnsupportedOp on processors without AES instructions."""
        keys = self._address
        if self._origin.forks != process.forks:  # as `rounds` does; a call less for each mask
            raise forked("a mask")
        if keys is None:
            raise UnsupportedOp("a stream at an address, on a processor without AES instructions")
        pieces = 1 if size < _SHARED else parallel.threads(size / BYTES)
        if pieces == 1:
            cpu_aes.write_bytes(keys, start, to, size)
            return

        def part(first: int, last: int) -> None:
            cpu_aes.write_bytes(keys, start + first, to + first, last - first)

        parallel.run_parallel(part, parallel.split_range(size, pieces, _PAGE))

    def words(self, device: torch.device) -> Tensor:
        """Raises UnsupportedOp: no kernel of a GPU makes AES streams."""
        raise UnsupportedOp(f"an AES stream on {device}; make it in main memory, or share the weights with chacha20")

    def __repr__(self) -> str:
        return "StreamKey(<secret>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PlaintextLeak("the key of a mask never leaves its party through pickle or torch.save")


class ChaChaKey(StreamKey):
    """The key of one ChaCha20 stream (32 bytes)."""

    __slots__ = ("_room", "_words")
    on_gpus = True

    def __init__(self, raw: bytes) -> None:
        self._raw, self._origin = raw, Origin()
        self._rounds = self._address = None
        self._room, self._words = np.frombuffer(bytearray(raw), dtype=np.int32), dict[torch.device, Tensor]()

    @property
    def place(self) -> tuple[int, int]:
        """Where the key lies in main memory, and its bytes."""
        self._origin.demand("a mask")
        return int(self._room.ctypes.data), self._room.nbytes

    def words(self, device: torch.device) -> Tensor:
        """The key's eight words, int32, on a device: the same tensor as long as this key lives, for captured graphs."""
        self._origin.demand("a mask")
        found = self._words.get(device)
        if found is None:
            found = self._words.setdefault(device, torch.from_numpy(self._room).to(device))
        return found


@dataclass(frozen=True, slots=True)
class StreamSlice:
    """Lines one after the other in one stream; `start`: the number of the first element."""

    key: StreamKey
    start: int
    lines: int


class Unprinted(Tensor):
    """A tensor of which texts show its `repr` alone, and that no file or wire takes as it is (PlaintextLeak)."""

    __slots__ = ()

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PlaintextLeak("shares and masks never leave their party by pickle or torch.save; write a share file")


class SeededTensor(Unprinted):
    """Integers [lines, ..] from streams, or a matrix [.., lines] if `turned`; `repr` shows the shape only.

    Never changed in place (UnsupportedOp), never pickled or exported (PlaintextLeak).
    """

    __slots__ = ("slices", "turned")
    slices: tuple[StreamSlice, ...]
    turned: bool

    @staticmethod
    def __new__(
        cls: type[SeededTensor], slices: Sequence[StreamSlice], line: Sequence[int], dtype: torch.dtype,
        device: torch.device | str = "cpu", turned: bool = False,
    ) -> SeededTensor:  # fmt: skip
        """line: the shape of a line; of turned tensors one number."""
        shape = (sum(piece.lines for piece in slices), *line)
        strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
        if turned:
            shape, strides = shape[::-1], strides[::-1]
        where = torch.device(device)
        self: SeededTensor = Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=where)
        self.slices, self.turned = tuple(slices), turned
        return self

    @property
    def line(self) -> torch.Size:
        """The shape of a line."""
        return self.shape[:1] if self.turned else self.shape[1:]

    @property
    def on_gpus(self) -> bool:
        """Whether kernels of GPUs make it, piece by piece."""
        return all(piece.key.on_gpus for piece in self.slices)

    def made(self) -> Tensor:
        """The whole tensor, in memory of its own; made by the GPU that it is on, where kernels can."""
        if self.device.type == "cuda" and self.on_gpus:
            with torch.cuda.device(self.device):
                made: Tensor = triton_module("matmul.seeded_triton").made(self)
            return made
        length = self.line.numel()
        whole = torch.empty((sum(piece.lines for piece in self.slices), *self.line), dtype=self.dtype)
        room, at = whole.view(-1).numpy(), 0
        for piece in self.slices:
            part = room[at : at + piece.lines * length]
            piece.key.fill(piece.start * whole.itemsize, part.view(np.uint8))
            at += part.size
        if this_thread.hook is not None:
            this_thread.hook.escaped(whole)
        whole = whole.to(self.device)
        return whole.mT if self.turned else whole

    def with_lines(self, slices: Sequence[StreamSlice]) -> SeededTensor:
        """Other lines of the same shape."""
        return SeededTensor(slices, self.line, self.dtype, self.device, self.turned)

    def lines(self, first: int, last: int) -> SeededTensor:
        """Lines first .. last - 1."""
        found, at, length = [], 0, self.line.numel()
        for piece in self.slices:
            low, high = max(first, at), min(last, at + piece.lines)
            if low < high:
                found.append(StreamSlice(piece.key, piece.start + (low - at) * length, high - low))
            at += piece.lines
        return self.with_lines(found)

    # -- what looks like memory and is none ---------------------------------------------------------------------
    def is_contiguous(self, *_: object, **__: object) -> bool:
        """False: kernels that take addresses must ask for `contiguous()`."""
        return False

    def contiguous(self, *_: object, **__: object) -> Tensor:
        """The whole tensor, made."""
        return self.made().contiguous()

    def data_ptr(self) -> NoReturn:
        """Raises UnsupportedOp: there is no memory."""
        raise UnsupportedOp("a mask that is made from its seed has no memory; take what `made` or `dense` gives")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SeededTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> SeededTensor:
        """Itself: it is never changed."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401  # fmt: skip
        """What makes nothing, or the function of whole tensors. Raises UnsupportedOp for changes in place."""
        kwargs = dict(kwargs or {})
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = _RULES.get(func)
        found = None if rule is None else rule(*args, **kwargs)
        if found is not None:
            return found
        name = func.__name__.partition(".")[0]
        if (name.endswith("_") and not name.endswith("__")) or name in _CHANGES or kwargs.get("out") is not None:
            raise _unchangeable(name)
        return func(*map(_dense_within, args), **{key: _dense_within(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401  # fmt: skip
        """The same for calls that do not pass through Python."""
        if func._schema.is_mutable:
            raise _unchangeable(str(func))
        kwargs = {key: _dense_within(value) for key, value in (kwargs or {}).items()}
        return func(*map(_dense_within, args), **kwargs)


def _unchangeable(name: str) -> UnsupportedOp:
    return UnsupportedOp(f"{name}: a mask that is made from its seed cannot be changed in place; change a copy of it")


def dense(x: Tensor) -> Tensor:
    """The tensor itself, or, of one that is not in memory, the whole of it, made."""
    return x.made() if isinstance(x, SeededTensor) else x


def _dense_within(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dense_within, value))
    return dense(value) if isinstance(value, Tensor) else value


# -- operations that make nothing; None: not in this case ---------------------------------------------------------
def _same(x: SeededTensor) -> SeededTensor:
    return SeededTensor(x.slices, x.line, x.dtype, x.device, x.turned)


def _turned(x: SeededTensor, first: int = 0, second: int = 1) -> SeededTensor | None:
    if x.dim() != 2:
        return None
    if (first - second) % 2 == 0:
        return _same(x)
    return SeededTensor(x.slices, x.line, x.dtype, x.device, not x.turned)


def _along_lines(x: SeededTensor, dim: int) -> bool:
    return dim % x.dim() == (1 if x.turned else 0)


def _at(x: SeededTensor, index: object) -> SeededTensor | None:
    """x[number] and x[first:last], along lines."""
    if x.turned or not x.dim():
        return None
    if isinstance(index, slice) and index.step in (None, 1):
        first, last, _ = index.indices(len(x))
        return x.lines(first, max(first, last))
    if type(index) is not int or x.dim() < 2 or not -len(x) <= index < len(x):
        return None
    number = index % len(x)
    (piece,) = x.lines(number, number + 1).slices
    return SeededTensor([StreamSlice(piece.key, piece.start, x.line[0])], x.line[1:], x.dtype, x.device)


def _split(x: SeededTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[SeededTensor, ...] | None:
    if not _along_lines(x, dim) or isinstance(sizes, int):
        return None
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    if ends[-1:] != [x.shape[dim]]:
        return None
    return tuple(x.lines(end - size, end) for size, end in zip(sizes, ends, strict=True))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> SeededTensor | None:
    drawn = [x for x in tensors if isinstance(x, SeededTensor)]
    kinds = {(x.line, x.dtype, x.device, x.turned) for x in drawn}
    if len(drawn) < len(tensors) or len(kinds) > 1 or not _along_lines(drawn[0], dim):
        return None
    return drawn[0].with_lines([piece for x in drawn for piece in x.slices])


def _picked(x: SeededTensor, dim: int, index: Tensor) -> Tensor | None:
    """Chosen lines alone are made, neighbours together."""
    numbers = index.tolist() if isinstance(index, Tensor) and index.dim() == 1 else []
    if not _along_lines(x, dim) or not numbers or min(numbers) < 0 or max(numbers) >= x.shape[dim]:
        return None
    cuts = [0, *(n for n in range(1, len(numbers)) if numbers[n] != numbers[n - 1] + 1), len(numbers)]
    runs = [x.lines(numbers[first], numbers[last - 1] + 1) for first, last in pairwise(cuts)]
    return x.with_lines([piece for run in runs for piece in run.slices]).made()


def _moved(x: SeededTensor, device: object = None, *more: object, **named: object) -> SeededTensor | None:
    if more or named or not isinstance(device, (str, torch.device)) or torch.device(device).type == "meta":
        return None
    return SeededTensor(x.slices, x.line, x.dtype, device, x.turned)


_FACTS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "device", "dtype", "ndim", "layout", "requires_grad")),
        *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "itemsize", "nbytes")),
        Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.storage_offset, Tensor.get_device,
    }
)  # fmt: skip
"""What is known of a tensor without its elements."""

_CHANGES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__iand__", "__ior__", "__ixor__", "__set__"})

_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.detach: _same,
    Tensor.t: _turned,
    torch.t: _turned,
    Tensor.T.__get__: _turned,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _turned,  # type: ignore[attr-defined]
    Tensor.transpose: _turned,
    torch.transpose: _turned,
    Tensor.__getitem__: _at,
    Tensor.split: _split,
    torch.split: _split,
    torch.cat: _cat,
    Tensor.index_select: _picked,
    torch.index_select: _picked,
    Tensor.to: _moved,
}
