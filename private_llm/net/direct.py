"""Connections lent to compiled programs, which write and read frames without Python.

Plain sockets and links between threads are lent; what encrypts, delays, counts or alters messages is asked for each of
them. While a socket is lent, whoever else wants to write to it (the end of the session, of another thread) waits for
the program: as long as that computes, and at most `WAIT_MS` of waiting on each connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from private_llm.kernels.backends.cpu import connection

Row = np.ndarray[tuple[int], np.dtype[np.int64]]
"""A connection as programs use it: the words of `connection`."""


MOST = 16
"""Endpoints; of those with higher numbers none is lent."""


class End(Protocol):
    """One end of a connection, in Python."""

    def lend(self, row: Row) -> None:
        """Let a program use it, until `take_back`; nobody else uses it meanwhile. It may keep it for itself."""

    def take_back(self, row: Row) -> None:
        """The end of `lend`; nothing, if it was not lent."""


class Direct:
    """All connections of an endpoint that can be lent; inside `with`, `address` is that of the rows, by endpoint."""

    def __init__(self, ends: Callable[[int], Sequence[End]]) -> None:
        """ends: `Transport.ends`."""
        self._table = np.zeros((MOST, connection.FIELDS), np.int64)
        self._table[:, [connection.OUT, connection.IN]] = -1
        self._ends: list[tuple[End, Row]] = []
        self.address = self._table.ctypes.data
        for endpoint in range(MOST if connection.HERE else 0):
            for end in ends(endpoint):
                self._ends.append((end, self._table[endpoint]))

    def __enter__(self) -> Direct:
        try:
            for end, row in self._ends:
                end.lend(row)
        except BaseException:
            self._take_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_back()

    def _take_back(self) -> None:
        """All of them, whatever becomes of one."""
        failed: BaseException | None = None
        left, tried = self._ends[::-1], -1
        while left:
            try:
                while left:
                    end, row = left[-1]
                    end.take_back(row)
                    left.pop()
            except BaseException as error:  # noqa: BLE001 - raised below
                failed = failed or error
                if tried == len(left):  # a second time; after an interrupt that does what the first did not come to
                    left.pop()
                tried = len(left)
        if failed is not None:
            raise failed
