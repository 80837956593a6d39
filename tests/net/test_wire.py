"""Whatever bytes arrive, decoding returns a well-formed frame or raises TransportError."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from private_llm.errors import DomainError, TransportError
from private_llm.net import wire
from private_llm.net.wire import FrameKind

DTYPES = [torch.int64, torch.int32, torch.uint8]
TAGS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=32).filter(
    lambda text: len(text.encode()) <= 32 and text.isprintable()
)
HEADERS = st.builds(
    wire.encode,
    st.just(FrameKind.DATA),
    st.integers(0, 255),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**64 - 1),
    TAGS,
    st.sampled_from(DTYPES),
    st.integers(0, wire.MAX_PAYLOAD // 8),
)


def header(**changes):
    values = {"kind": FrameKind.DATA, "sender": 1, "session": b"sessionx", "sequence": 7, "tag": "mul"}
    values |= {"dtype": torch.int64, "count": 5}
    return wire.encode(**(values | changes))


@given(
    st.integers(0, 255),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**64 - 1),
    TAGS,
    st.sampled_from(DTYPES),
    st.integers(0, wire.MAX_PAYLOAD // 8),
)
def test_decode_inverts_encode(sender, session, sequence, tag, dtype, count):
    raw = wire.encode(FrameKind.DATA, sender, session, sequence, tag, dtype, count)
    assert len(raw) == wire.HEADER_BYTES
    frame = wire.decode(raw)
    assert (frame.kind, frame.sender, frame.session, frame.sequence) == (FrameKind.DATA, sender, session, sequence)
    assert (frame.tag, frame.dtype, frame.count) == (tag, dtype, count)
    assert frame.nbytes == count * dtype.itemsize


def test_known_bytes():
    raw = header()
    assert raw == (
        b"PLLM\x02\x00\x01\x01sessionx" + (7).to_bytes(8, "big") + (5).to_bytes(8, "big") + b"mul" + bytes(29)
    )


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_transport_error(raw):
    with pytest.raises(TransportError):
        wire.decode(raw)


@given(st.binary(min_size=59, max_size=120))
def test_random_bytes_behind_a_right_start(tail):
    try:
        frame = wire.decode(b"PLLM\x02" + tail)
    except TransportError:
        return
    limit = wire.MAX_PAYLOAD if frame.kind is FrameKind.DATA else wire.MAX_NOTE
    assert frame.nbytes <= limit
    raw = wire.encode(frame.kind, frame.sender, frame.session, frame.sequence, frame.tag, frame.dtype, frame.count)
    assert raw == (b"PLLM\x02" + tail)[:64]


@given(HEADERS, st.integers(0, 63))
def test_truncated_header(raw, cut):
    with pytest.raises(TransportError, match=f"got {cut} bytes"):
        wire.decode(raw[:cut])


@given(HEADERS, st.integers(0, 255).filter(lambda v: v != wire.WIRE_VERSION))
def test_other_version(raw, version):
    with pytest.raises(TransportError, match=f"got {version}; want {wire.WIRE_VERSION}"):
        wire.decode(raw[:4] + bytes([version]) + raw[5:])


@given(st.sampled_from(DTYPES), st.integers(0, 2**64 - 1), st.integers(0, 1 << 20))
def test_a_length_is_compared_with_the_maximum(dtype, count, maximum):
    raw = bytearray(header(dtype=dtype))
    struct.pack_into(">Q", raw, 24, count)
    if count * dtype.itemsize <= maximum:
        assert wire.decode(raw, maximum).nbytes <= maximum
    else:
        with pytest.raises(TransportError, match="oversized"):
            wire.decode(raw, maximum)


@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.ABORT, FrameKind.WAITING, FrameKind.BYE])
def test_notes_are_short_bytes(kind):
    assert wire.decode(header(kind=kind, dtype=torch.uint8, count=wire.MAX_NOTE)).kind is kind
    with pytest.raises(TransportError, match="oversized"):
        wire.decode(header(kind=kind, dtype=torch.uint8, count=wire.MAX_NOTE + 1))
    with pytest.raises(TransportError, match="bytes"):
        wire.decode(header(kind=kind, count=1))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"HTTP", "want a frame of private-llm"),
        (0, b"\x16\x03\x01\x00", "want a frame of private-llm"),
        (5, b"\x05", "kind"),
        (6, b"\x00", "dtype"),
        (6, b"\x04", "dtype"),
        (32, b"\xff", "UTF-8"),
        (32, b"a\0b", "printable"),
        (32, b"\n", "printable"),
    ],
)
def test_each_field_is_checked(offset, value, message):
    raw = bytearray(header())
    raw[offset : offset + len(value)] = value
    with pytest.raises(TransportError, match=message):
        wire.decode(raw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int8])
def test_only_ring_elements_and_bytes_travel(dtype):
    with pytest.raises(DomainError, match="int64, int32 or uint8"):
        header(dtype=dtype)


@pytest.mark.parametrize("tag", ["x" * 33, "\N{GREEK SMALL LETTER MU}" * 17, "a\0b"])
def test_tags_that_do_not_fit(tag):
    with pytest.raises(DomainError, match="tag"):
        header(tag=tag)
