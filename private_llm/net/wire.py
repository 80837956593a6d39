"""The wire format: a 64-byte header in front of every payload; versioned, length-checked, no pickle.

    offset  0  magic     4 bytes  b"PLLM"
            4  version   u8       WIRE_VERSION; both ends must be equal
            5  kind      u8       `Kind`
            6  dtype     u8       1 int64, 2 int32, 3 uint8
            7  sender    u8       endpoint number
            8  session   8 bytes  drawn per connection by the handshake
           16  sequence  u64      0, 1, 2, ... on each connection
           24  count     u64      elements of the payload; its bytes are count times the element size
           32  tag       32 bytes UTF-8, padded with zeros: the operation that is being computed

All numbers are big-endian; payload elements are little-endian. Whatever bytes arrive, decoding returns a
`Frame` or raises TransportError; nothing is allocated before the length was compared with a maximum.

How sockets say that something is not possible now, or not any more.
"""

import ssl
import struct
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch

from private_llm.errors import ConfigError, DomainError, TransportError

MAGIC = b"PLLM"
WIRE_VERSION = 2
HEADER_BYTES = 64
TAG_BYTES = 32
MAX_PAYLOAD = 1 << 34  # bytes of the largest payload any frame may announce (16 GiB)
MAX_NOTE = 4096  # bytes of the largest payload of a frame that is not data

_LAYOUT = struct.Struct(">4sBBBB8sQQ32s")
_NAMES = {1: torch.int64, 2: torch.int32, 3: torch.uint8}
_CODES = {dtype: code for code, dtype in _NAMES.items()}
TRAVELS = frozenset(_CODES)  # dtypes that a link carries; floats would not be shares

if sys.byteorder != "little":
    raise ConfigError("this machine is big-endian; tensors travel in little-endian memory order")


class FrameKind(IntEnum):
    """What a frame is for."""

    DATA = 0
    HELLO = 1
    ABORT = 2
    WAITING = 3
    BYE = 4


@dataclass(frozen=True)
class Frame:
    """A decoded header."""

    kind: FrameKind
    sender: int
    session: bytes
    sequence: int
    tag: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the payload that follows."""
        return self.count * self.dtype.itemsize

    @property
    def what(self) -> str:
        """The frame in words, for messages."""
        return f"'{self.tag}' with {self.count} x {str(self.dtype).removeprefix('torch.')}"


def dtype_code(dtype: torch.dtype) -> int:
    """The code of a dtype. Raises DomainError for one that never travels."""
    code = _CODES.get(dtype)
    if code is None:
        raise DomainError(f"a link carries int64, int32 or uint8; got {dtype}")
    return code


@lru_cache(maxsize=1024)
def tag_bytes(tag: str) -> bytes:
    """A tag as it travels. Raises DomainError when it is too long or holds a zero byte."""
    raw = tag.encode()
    if len(raw) > TAG_BYTES or b"\0" in raw:
        raise DomainError(f"tag {tag!r}: want at most {TAG_BYTES} bytes of UTF-8 without zeros")
    return raw.ljust(TAG_BYTES, b"\0")


def encode(
    kind: FrameKind, sender: int, session: bytes, sequence: int, tag: str, dtype: torch.dtype, count: int
) -> bytes:
    """The header of a payload of `count` elements. Raises DomainError for a sender that no endpoint is."""
    if not 0 <= sender <= 255:
        raise DomainError(f"sender: got endpoint {sender}; want 0 to 255")
    return _LAYOUT.pack(MAGIC, WIRE_VERSION, kind, dtype_code(dtype), sender, session, sequence, count, tag_bytes(tag))


def count_in(head: memoryview) -> int:
    """The number of elements that a header states, which nobody has checked yet."""
    return int.from_bytes(head[24:32])


def decode(raw: bytes | bytearray | memoryview, maximum: int = MAX_PAYLOAD) -> Frame:
    """Read a header for at most `maximum` bytes (notes: MAX_NOTE). Raises TransportError for any other header."""
    if len(raw) < HEADER_BYTES:
        raise TransportError(f"truncated frame: got {len(raw)} bytes of header; want {HEADER_BYTES}")
    magic, version, kind, code, sender, session, sequence, count, tag = _LAYOUT.unpack_from(raw)
    if magic != MAGIC:
        raise TransportError(
            "got bytes of another program; want a frame of private-llm: check that the address belongs to a party, "
            "and that both ends use TLS or neither does"
        )
    if version != WIRE_VERSION:
        raise TransportError(
            f"wire version: got {version}; want {WIRE_VERSION}; install the same private-llm at all endpoints"
        )
    try:
        kind = FrameKind(kind)
        text = tag.rstrip(b"\0").decode()
    except ValueError:
        raise TransportError("malformed frame: unknown kind, or a tag that is not UTF-8") from None
    dtype = _NAMES.get(code)
    if dtype is None or "\0" in text or not text.isprintable():
        raise TransportError("malformed frame: unknown dtype, or a tag that is not printable")
    limit = maximum if kind is FrameKind.DATA else min(maximum, MAX_NOTE)
    if kind is not FrameKind.DATA and dtype is not torch.uint8:
        raise TransportError("malformed frame: a note must consist of bytes")
    if count * dtype.itemsize > limit:
        raise TransportError(f"oversized frame: got {count * dtype.itemsize} bytes; want at most {limit}")
    return Frame(kind, sender, session, sequence, text, dtype, count)


BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""There is nothing to read, or no room to write."""


def cause(error: OSError) -> str:
    """An operating system's error in words, without its arguments."""
    return error.strerror or type(error).__name__
