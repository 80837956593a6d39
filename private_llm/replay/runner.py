"""Rows of a recorded program, run without Python: kernels, messages and pieces (Numba, GIL-free).

A row is the address of a step's function (`kernels/steps.py`) and what it takes, or one of the codes below.
"""

from private_llm.kernels import teams
from private_llm.kernels.address import SIGNED, Array, flat
from private_llm.kernels.compiling import compiled
from private_llm.net import frames
from private_llm.net.connection import FIELDS, HERE, KIND, MEMORY

STOP, SEND, RECEIVE, TOGETHER = range(4)
"""What stands in place of a function's address: an event for Python; a message, with the number of its connection, the
address of its payload, the number of its elements, and 4 words of tag; pieces of a step (`teams.piece`)."""


if HERE:

    @compiled
    def _message(code: int, link: int, payload: int, count: int, tag: Array) -> bool:
        """Send or receive; False: Python does it."""
        memory = flat(link, FIELDS, SIGNED)[KIND] == MEMORY
        if code == SEND:
            done = frames.put(link, payload, count, tag) if memory else frames.send(link, payload, count, tag)
        else:
            done = frames.take(link, payload, count, tag) if memory else frames.receive(link, payload, count, tag)
        return bool(done)

    @compiled
    def _pieces(workers: int, row: int) -> None:
        """With a team, if there is one."""
        if workers:
            teams.together(workers, row)
        else:
            teams.alone(row)

else:

    @compiled
    def _message(code: int, link: int, payload: int, count: int, tag: Array) -> bool:
        """Python does it: elsewhere the functions that would be called do not exist."""
        return False

    @compiled
    def _pieces(workers: int, row: int) -> None:
        """One after the other, for the same reason."""
        teams.alone(row)


@compiled
def run(table: int, starts: int, first: int, last: int, links: int, workers: int) -> int:
    """Rows first .. last - 1 of a table of words, which begin where `starts` says, with the connections `links`
    (`net/frames.py`) and a team (`teams.py`; all by address, 0 for none). Returns the first row left, or `last`.
    """
    words, rows = flat(table, 1 << 40, SIGNED), flat(starts, 1 << 40, SIGNED)
    for step in range(first, last):
        at = rows[step]
        code = words[at]
        if code > TOGETHER:
            teams.call(code, table + 8 * (at + 1))
            continue
        if code == TOGETHER:
            _pieces(workers, table + 8 * (at + 1))
            continue
        if code == STOP:
            return step
        link, tag = links + 8 * FIELDS * words[at + 1], words[at + 4 : at + 8]
        if not _message(code, link, words[at + 2], words[at + 3], tag):
            return step
    return last
