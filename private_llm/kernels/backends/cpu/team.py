"""Pieces of one step on several cores, handed out and taken without Python's lock (Numba; Linux).

A team has one caller at a time and some workers, which sleep until pieces are posted. Whoever is awake takes the next
piece, the caller, too, so a worker that the system wakes late or not at all delays nobody. What they share are words
of 64 bits, read and written in one order that all see (`sequentially consistent`); those that change often have
a line of the cache each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from private_llm.kernels.address import SIGNED, flat
from private_llm.kernels.compiling import compiled

_LINE = 8
STATE, ROW, FINISHED, WAITING, DONE, WORKERS = (_LINE * n for n in range(6))
"""Words of a team. STATE: how many rows were posted, and in the lowest `_BITS` bits how many pieces nobody has taken.
ROW: the address of the row that was posted last. FINISHED: how many of its pieces are done. WAITING: whether the
caller sleeps until the counter (of the operating system) number DONE is raised. WORKERS: how many there are.
"""
ASLEEP, WAKE = 0, 1
"""Words of a worker: whether it sleeps until the counter number WAKE is raised."""
SCRATCH = _LINE - 1
"""The last word of a line of DONE or of a worker: what is written to counters and read of them."""

_BITS = 16
_LEFT = (1 << _BITS) - 1
_TRIES = 3000
"""How often somebody who waits looks before sleeping: some 10 us. To sleep and to be woken takes 30 and more."""

_WORD = ir.IntType(64)

_write = types.ExternalFunction("write", types.intp(types.intc, types.uintp, types.uintp))
_read = types.ExternalFunction("read", types.intp(types.intc, types.uintp, types.uintp))


def words(workers: int) -> int:
    """Words of a team of so many workers."""
    return WORKERS + _LINE * (workers + 1)


def word_of(number: int, word: int) -> int:
    """A worker's word, among those of its team."""
    return WORKERS + _LINE * (number + 1) + word


@compiled
def _worker(team: int, number: int) -> int:
    """Where the words of a worker begin."""
    return team + 8 * (WORKERS + _LINE * (number + 1))


@intrinsic
def call(typing_context, function, row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Call the function at an address with the address of a row."""
    signature = types.void(types.int64, types.int64)

    def codegen(context: Any, builder: Any, _: Any, arguments: Any) -> Any:  # noqa: ANN401
        pointer = ir.PointerType(_WORD)
        kind = ir.FunctionType(ir.VoidType(), [pointer])
        made = builder.inttoptr(arguments[0], ir.PointerType(kind))
        builder.call(made, [builder.inttoptr(arguments[1], pointer)])
        return context.get_dummy_value()

    return signature, codegen


def _place(builder: Any, address: Any) -> Any:  # noqa: ANN401
    return builder.inttoptr(address, ir.PointerType(_WORD))


@intrinsic
def _load(typing_context, address):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The word at an address."""

    def codegen(_: Any, builder: Any, __: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.load_atomic(_place(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _exchange(typing_context, address, value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Write a word, and return the one before."""

    def codegen(_: Any, builder: Any, __: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.atomic_rmw("xchg", _place(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _raised(typing_context, address):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Add one to a word, and return the sum."""

    def codegen(_: Any, builder: Any, __: Any, arguments: Any) -> Any:  # noqa: ANN401
        before = builder.atomic_rmw("add", _place(builder, arguments[0]), _WORD(1), "seq_cst")
        return builder.add(before, _WORD(1))

    return types.int64(types.int64), codegen


@intrinsic
def _replaced(typing_context, address, before, after):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Write `after` where `before` is; whether it was."""

    def codegen(_: Any, builder: Any, __: Any, arguments: Any) -> Any:  # noqa: ANN401
        place = _place(builder, arguments[0])
        pair = builder.cmpxchg(place, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@compiled
def _raise(counter: int, scratch: int) -> None:
    """Wake who sleeps at a counter."""
    flat(scratch, 1, SIGNED)[0] = 1
    _write(counter, scratch, 8)


@compiled
def _sleep(counter: int, scratch: int) -> None:
    """Until a counter is raised; it is 0 then."""
    while _read(counter, scratch, 8) != 8:  # a signal came
        pass


@compiled
def piece(row: int, number: int) -> None:
    """Compute a piece of the row at an address: pieces, where each begins (in words), and after it their steps, how
    many, and for each how many words, its function and what it takes.
    """
    words = flat(row, 1 << 40, SIGNED)
    at = words[1 + number]
    count = words[at]
    at += 1
    for _ in range(count):
        call(words[at + 1], row + 8 * (at + 2))
        at += 1 + words[at]


@compiled
def _taken(team: int) -> bool:
    """Compute one of the pieces that nobody has taken; False if there is none."""
    state = _load(team + 8 * STATE)
    while state & _LEFT:
        # as long as this piece is not taken, nobody posts another row
        row = _load(team + 8 * ROW)
        if _replaced(team + 8 * STATE, state, state - 1):
            pieces = flat(row, 1, SIGNED)[0]
            piece(row, (state & _LEFT) - 1)
            if _raised(team + 8 * FINISHED) == pieces and _exchange(team + 8 * WAITING, 0):
                words = flat(team, WORKERS, SIGNED)
                _raise(words[DONE], team + 8 * (WAITING + SCRATCH))
            return True
        state = _load(team + 8 * STATE)
    return False


@compiled
def alone(row: int) -> None:
    """Compute all pieces of the row at an address, one after the other."""
    for number in range(flat(row, 1, SIGNED)[0]):
        piece(row, number)


@compiled
def together(team: int, row: int) -> None:
    """Compute all pieces of the row at an address with the team at another; on Linux only."""
    pieces = flat(row, 1, SIGNED)[0]
    words = flat(team, WORKERS + 1, SIGNED)
    posted = _load(team + 8 * STATE) >> _BITS
    _exchange(team + 8 * ROW, row)
    _exchange(team + 8 * FINISHED, 0)
    _exchange(team + 8 * STATE, ((posted + 1) << _BITS) | pieces)
    for number in range(min(pieces - 1, words[WORKERS])):
        worker = _worker(team, number)
        if _exchange(worker + 8 * ASLEEP, 0):
            _raise(flat(worker, _LINE, SIGNED)[WAKE], team + 8 * (DONE + SCRATCH))
    while _taken(team):
        pass
    for _ in range(_TRIES):
        if _load(team + 8 * FINISHED) == pieces:
            return
    while True:
        _exchange(team + 8 * WAITING, 1)
        done = _load(team + 8 * FINISHED) == pieces
        # done: unless somebody saw it waiting, and wakes it; not done: a worker of the row before may wake it, too
        if not done or not _exchange(team + 8 * WAITING, 0):
            _sleep(words[DONE], team + 8 * (DONE + SCRATCH))
        if done:
            return


@compiled
def serve(team: int, number: int) -> None:
    """Take pieces, as long as the process lives."""
    worker = _worker(team, number)
    own = flat(worker, _LINE, SIGNED)
    while True:
        if _taken(team):
            continue
        tries = _TRIES
        while tries and not _load(team + 8 * STATE) & _LEFT:
            tries -= 1
        if tries:
            continue
        _exchange(worker + 8 * ASLEEP, 1)
        if _load(team + 8 * STATE) & _LEFT:
            _exchange(worker + 8 * ASLEEP, 0)
        else:
            _sleep(own[WAKE], worker + 8 * SCRATCH)
