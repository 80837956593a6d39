"""Connections lent to compiled programs, which write and read frames without Python (`kernels/backends/cpu/frames.py`).

Only plain sockets are lent: what encrypts, delays, counts or alters messages is asked for each of them. While a
connection is lent, whoever else wants to write to it (the end of the session, of another thread) waits, for at most as
long as a program waits for a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from private_llm.kernels.backends.cpu import connection
from private_llm.net.socket_io import Incoming, Outgoing, Row

MOST = 16
"""Endpoints; of those with higher numbers none is lent."""


class Direct:
    """All connections of an endpoint that can be lent; inside `with`, `address` is that of the rows, by endpoint."""

    def __init__(self, ends: Callable[[int], Sequence[Outgoing | Incoming]]) -> None:
        """ends: `Transport.ends`."""
        self._table = np.zeros((MOST, connection.FIELDS), np.int64)
        self._table[:, [connection.OUT, connection.IN]] = -1
        self._ends: list[tuple[Outgoing | Incoming, Row]] = []
        self.address = self._table.ctypes.data
        for endpoint in range(MOST if connection.HERE else 0):
            for end in ends(endpoint):
                self._ends.append((end, self._table[endpoint]))

    def __enter__(self) -> Direct:
        for number, (end, row) in enumerate(self._ends):
            try:
                end.lend(row)
            except BaseException:
                for other, its in self._ends[:number]:
                    other.take_back(its)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end, row in self._ends:
            end.take_back(row)
