"""Whatever interrupts it, what is lent to programs comes back, and only plain sockets are lent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from private_llm.net import connection
from private_llm.net.direct import Direct, Row
from private_llm.net.parallel_sessions import RoleTransport
from tests.net.test_direct import Refusing, numbers, receives, sends

from .mesh import couple

pytestmark = pytest.mark.skipif(not connection.HERE, reason="connections are lent on Linux only")


@pytest.mark.parametrize("method", ["lend", "take_back"])
@pytest.mark.parametrize("number", [0, 1])
def test_other_ends_are_taken_back(number: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    zero, _one = couple()
    direct, ends = Direct(zero.ends), zero.ends(1)
    with monkeypatch.context() as patched:
        patched.setattr(ends[number], method, fail)
        with pytest.raises(MemoryError), direct:
            pass
    if method == "take_back":
        ends[number].take_back(direct._table[1])
    assert not zero._in[1]._lent._is_owned()  # type: ignore[attr-defined]
    assert not zero._out[1]._room._is_owned()  # type: ignore[attr-defined]
    zero.close()


def test_ends_are_taken_back_in_spite_of_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, _one = couple()
    direct, ends, left = Direct(zero.ends), zero.ends(1), [KeyboardInterrupt()] * 2

    def interrupted(end: object, taken: Callable[[Row], None]) -> None:
        def take_back(row: Row) -> None:
            if left:
                raise left.pop()
            taken(row)

        monkeypatch.setattr(end, "take_back", take_back)

    for end in ends:
        interrupted(end, end.take_back)
    left.pop()
    with pytest.raises(KeyboardInterrupt), direct:
        pass
    assert not zero._in[1]._lent._is_owned()  # type: ignore[attr-defined]
    assert not zero._out[1]._room._is_owned()  # type: ignore[attr-defined]
    zero.close()


@pytest.mark.parametrize("end", ["in", "out"])
def test_an_interrupt_right_behind_a_lock_leaves_it_free(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for signals behind calls, so also between acquiring a lock and the next line."""
    zero, one = couple()
    owner, name = (zero._in[1], "_lent") if end == "in" else (zero._out[1], "_room")
    lock = getattr(owner, name)

    class Interrupting:
        def acquire(self) -> None:
            lock.acquire()
            raise KeyboardInterrupt

        def __getattr__(self, other: str) -> object:
            return getattr(lock, other)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, Interrupting())
        with pytest.raises(KeyboardInterrupt):
            sends(zero, 1, "t", numbers(5))
    assert not lock._is_owned()
    sends(zero, 1, "t", numbers(5))
    assert torch.equal(receives(one, 0, "t", 5)[0], numbers(5))


def test_roles_lend_the_connections_of_their_parties() -> None:
    zero, one = couple()
    x = numbers(20)
    swapped = [RoleTransport(zero, {0: 2, 1: 0}), RoleTransport(one, {0: 2, 1: 0})]
    with Refusing(zero), Refusing(one):
        sends(swapped[0], 0, "t", x)
        assert torch.equal(receives(swapped[1], 2, "t", 20)[0], x)


def test_only_plain_sockets_of_other_endpoints_are_lent() -> None:
    zero, _ = couple()
    assert len(zero.ends(1)) == 2
    assert not zero.ends(0)
    assert not zero.ends(2)
    with contextlib.suppress(RuntimeError), Direct(zero.ends) as lent:
        raise RuntimeError(str(lent.address))
    zero.send(1, "t", numbers(3))
