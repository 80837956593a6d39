"""Preprocessing on disk: what the helping party sends is stored by its receiver and read back when data are there.

  1. The helping party (party 0 of trio, the dealer, party 3 of quad) runs planned calls ahead through an
     `OfflineTransport`: a wire header tells the receiver (party 2; in quad also party 0, with comparison keys also
     party 1), which does not compute yet, what comes; a BYE header ends a call.
  2. The receiver writes the messages to an `OfflineStore`: wire headers, each followed by the payload, AES-128-GCM
     encrypted in pieces under a key that never leaves this process (nonce = number of the piece, header authenticated).
     What lies on the disk says nothing and cannot be altered unnoticed; the file has no name.
  3. Online, an `OfflineStoreTransport` hands the messages to the protocol as if they had just been sent.

A store is read once, front to back, because masks must never repeat. A fork shares the file, the key and the place in
the file, so it neither reads nor writes (and the file has no buffer that it could write when it ends).
"""

import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from private_llm.errors import ConfigError, ProtocolAbort, ShareFileError, TransportError
from private_llm.forks import Origin
from private_llm.net import wire
from private_llm.net.ledger import CONTROL
from private_llm.net.transport import PassingTransport, Transport
from private_llm.net.wire import HEADER_BYTES, Frame, FrameKind

ANNOUNCED = "store frame"
_WRITER = 0  # stands for the sender in headers on a store
_PIECE = 1 << 24  # bytes encrypted at a time
_SEAL = 16  # bytes that authentication adds to a piece


class OfflineStore:
    """One encrypted file of messages, in calls: written, rewound once, read once.

    Raises ProtocolAbort, whatever is asked but `close`, in a fork of the process that made it.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """A new file in `folder` (default: the system's) for this process alone. Raises ConfigError if it cannot."""
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - `close` closes it
        except OSError as error:
            raise ConfigError(f"store folder {str(folder)!r}: {error.strerror}; name one that can be written") from None
        self._origin = Origin()
        self._cipher = AESGCM(AESGCM.generate_key(128))
        self._session = secrets.token_bytes(8)
        self._buffer = bytearray()
        self._messages = self._pieces = 0
        self._reading = False

    @property
    def nbytes(self) -> int:
        """Size of the file; 0 once it is closed, which another thread may do while this one asks."""
        try:
            return os.fstat(self._file.fileno()).st_size
        except ValueError:
            return 0

    # -- writing ----------------------------------------------------------------------------------------------
    def append(self, tag: str, dtype: torch.dtype, count: int, pieces: Iterable[Tensor]) -> None:
        """Store `count` elements that come as in `pieces_of`. Raises ShareFileError first if the disk has no room."""
        size, place = count * dtype.itemsize, os.fstatvfs(self._file.fileno())
        if size > place.f_bavail * place.f_frsize:
            raise ShareFileError(
                f"a message of {size} bytes is to be stored, and the disk of the store has room for "
                f"{place.f_bavail * place.f_frsize}; make room, or name another offline_folder"
            )
        header = self._header(FrameKind.DATA, tag, dtype, count)
        self._write(header)
        for piece in pieces:
            raw = piece.view(torch.uint8).numpy()
            sealed = self._space(len(raw) + _SEAL)
            self._cipher.encrypt_into(self._nonce(), raw.data, header, sealed)
            self._write(sealed)

    def end_call(self) -> None:
        """What was appended since the last end belongs to one call. Raises ShareFileError if it cannot be written."""
        self._write(self._header(FrameKind.BYE, "", torch.uint8, 0))

    def rewind(self) -> None:
        """From now on, read. Raises ProtocolAbort the second time."""
        self._origin.demand("a store of masks")
        if self._reading:
            raise ProtocolAbort("a store may be read once only: masks must never repeat")
        self._reading = True
        self._messages = self._pieces = 0
        self._file.seek(0)

    # -- reading ----------------------------------------------------------------------------------------------
    def next(self, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next message. Raises TransportError if it is another one, ShareFileError if the file is damaged."""
        out = torch.empty(shape, dtype=dtype)
        header = self._expect(Frame(FrameKind.DATA, _WRITER, self._session, self._messages, tag, dtype, out.numel()))
        raw = out.view(-1).view(torch.uint8).numpy()
        for start in range(0, len(raw), _PIECE):
            piece = raw[start : start + _PIECE]
            sealed = self._space(len(piece) + _SEAL)
            try:
                whole = self._file.readinto(sealed) == len(sealed)
                self._cipher.decrypt_into(self._nonce(), sealed, header, piece.data)
            except InvalidTag:
                whole = False
            if not whole:
                raise ShareFileError("the store is damaged; preprocess again (and check the disk)")
        return out

    def finish_call(self) -> None:
        """Raises TransportError unless the call is at its end, ShareFileError if the file is damaged."""
        self._expect(Frame(FrameKind.BYE, _WRITER, self._session, self._messages, "", torch.uint8, 0))

    def close(self) -> None:
        """Close the file, which deletes it. Idempotent."""
        self._file.close()

    def _header(self, kind: FrameKind, tag: str, dtype: torch.dtype, count: int) -> bytes:
        self._origin.demand("a store of masks")
        header = wire.encode(kind, _WRITER, self._session, self._messages, tag, dtype, count)
        self._messages += 1
        return header

    def _expect(self, want: Frame) -> bytes:
        self._origin.demand("a store of masks")
        header = self._file.read(HEADER_BYTES)
        self._messages += 1
        try:
            got = wire.decode(header)
        except TransportError:
            raise ShareFileError("the store is damaged or cut off; preprocess again") from None
        if got != want:
            raise TransportError(
                f"store: got {got.what}; want {want.what} (the preprocessing was made for another computation)"
            )
        return header

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ShareFileError(
                f"the store cannot be written ({error.strerror}); make room, or name another offline_folder"
            ) from None

    def _nonce(self) -> bytes:
        self._pieces += 1
        return self._pieces.to_bytes(12, "big")

    def _space(self, count: int) -> memoryview:
        if len(self._buffer) < count:
            self._buffer = bytearray(count)
        return memoryview(self._buffer)[:count]

    def __repr__(self) -> str:
        return f"OfflineStore(messages={self._messages})"


def pieces_of(payload: Tensor) -> Iterator[Tensor]:
    """The elements of a message in order, in 1-D pieces of at most `_PIECE` bytes; none of an empty one."""
    flat = payload.reshape(-1).contiguous()
    step = _PIECE // payload.element_size()
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]


class OfflineTransport(PassingTransport):
    """The helping party's links while it runs ahead: every message is announced to its receiver, and goes in pieces.

    So the receiver, who cannot know what is right, never has more of a message in memory than one piece.
    """

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """Announce and send."""
        self._announce(to, FrameKind.DATA, tag, payload.dtype, payload.numel())
        for piece in pieces_of(payload):
            self._inner.send(to, tag, piece)

    def end_call(self, keepers: Iterable[int]) -> None:
        """Tell those who store that this call has no more messages."""
        for keeper in keepers:
            self._announce(keeper, FrameKind.BYE, "", torch.uint8, 0)

    def _announce(self, to: int, kind: FrameKind, tag: str, dtype: torch.dtype, count: int) -> None:
        header = wire.encode(kind, self.me, bytes(8), 0, tag, dtype, count)
        self.ledger.sent[("", CONTROL, to)] += len(header)
        self._inner._send(to, ANNOUNCED, torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise TransportError(f"'{tag}' was awaited while preprocessing, when there is nothing to receive")

    def wait(self, frm: int) -> None:
        """Raises TransportError: nothing comes."""
        raise TransportError("preprocessing waits for nobody")


class OfflineStoreTransport(PassingTransport):
    """A party's links while it works from a store: the messages of `helper` come from there."""

    def __init__(
        self, inner: Transport, helper: int, store: OfflineStore, where: Callable[[], torch.device | str]
    ) -> None:
        super().__init__(inner)
        self._helper, self._store, self._where = helper, store, where

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """As the inner transport."""
        self._inner.send(to, tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if frm == self._helper:
            return self._store.next(tag, shape, dtype).to(self._where())
        return self._inner._recv(frm, tag, shape, dtype)


def store_call(
    transport: Transport, helper: int, store: OfflineStore | None, beat: Callable[[], None] = lambda: None,
    room: int | None = None, problem: str | None = None,
) -> str | None:  # fmt: skip
    """Write the messages of one call of `helper` to the store as they come; `beat` is called for each.

    Raises TransportError for an announcement that is malformed, ShareFileError for one that the disk has no room for.
    room: bytes that the call may take. Then what takes more, or goes wrong with the disk, is received and dropped, so
    that the links go on, and the reason is returned; without a store that is `problem`, and all is dropped.
    """
    start = 0 if store is None else store.nbytes
    while True:
        raw = transport.recv(helper, ANNOUNCED, (HEADER_BYTES,), torch.uint8)
        frame = wire.decode(raw.cpu().numpy().tobytes())
        if frame.kind is FrameKind.BYE:
            if store is not None:
                store.end_call()
            return problem
        coming = _coming(transport, helper, frame)
        if store is not None and room is not None and store.nbytes - start + frame.nbytes > room:
            problem, store = f"what is prepared takes more than the {room} bytes that are left for it on disk", None
        if store is not None:
            try:
                store.append(frame.tag, frame.dtype, frame.count, coming)
            except (ShareFileError, OSError) as error:
                if room is None:
                    raise
                problem, store = str(error), None
        for _ in coming:
            pass
        beat()


def _coming(transport: Transport, helper: int, frame: Frame) -> Iterator[Tensor]:
    step = _PIECE // frame.dtype.itemsize
    for start in range(0, frame.count, step):
        size = min(step, frame.count - start)
        yield transport.recv(helper, frame.tag, (size,), frame.dtype).cpu()
