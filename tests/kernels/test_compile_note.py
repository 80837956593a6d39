"""A bar on stderr while kernels are compiled for long, one line where that is no terminal, never within an answer."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest

from private_llm.kernels import compile_note
from private_llm.kernels.compile_note import NOTE, Streamed, shown_by


class Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal  # type: ignore[method-assign]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Screen]:
    """Puts one in the place of stderr, with a short patience."""
    monkeypatch.setattr(compile_note, "PATIENCE_S", 0.3)
    monkeypatch.setattr(compile_note, "_IDLE_S", 0.2)
    monkeypatch.setattr(compile_note, "_TICK_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    NOTE.begin_anew()
    NOTE.said = False

    def put(terminal: bool) -> Screen:
        made = Screen(terminal)
        monkeypatch.setattr(sys, "stderr", made)
        return made

    return put


def compile_for(seconds: float) -> None:
    NOTE.begins("kernel_of_a_test", lambda: "why")
    time.sleep(seconds)
    NOTE.ends()


def until(what: Callable[[], bool]) -> None:
    for _ in range(1000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("nothing came of it")


def test_a_bar_on_a_terminal(screen: Callable[[bool], Screen], capsys: pytest.CaptureFixture[str]) -> None:
    told = screen(True)
    NOTE.begins("kernel_of_a_test", lambda: "why")
    until(lambda: "compiling kernels: kernel_of_a_test" in told.getvalue())
    NOTE.ends()
    until(lambda: not NOTE._shown)
    assert told.getvalue().rstrip().endswith("\x1b[2K"), "the line is cleared"
    assert not capsys.readouterr().out


def test_one_line_elsewhere(screen: Callable[[bool], Screen]) -> None:
    told = screen(False)
    for _ in range(2):
        NOTE.begins("kernel_of_a_test", lambda: "why")
        until(lambda: told.getvalue() != "")
        NOTE.ends()
        until(lambda: not NOTE._shown)
    assert told.getvalue() == "why\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_short_compilations_say_nothing(terminal: bool, screen: Callable[[bool], Screen]) -> None:
    told = screen(terminal)
    compile_for(0.0)
    until(lambda: not NOTE._shown)
    assert told.getvalue() == ""


def test_an_answer_stays_alone(screen: Callable[[bool], Screen]) -> None:
    """Others show it where they show something; and once an answer has begun, nobody does."""
    told, given = screen(True), list[object]()

    class Streamer:
        put = staticmethod(given.append)

        def end(self) -> None:
            given.append("end")

    NOTE.begins("kernel_of_a_test", lambda: "why")
    until(lambda: "compiling" in told.getvalue())
    streamed = Streamed(Streamer())
    streamed.put("prompt")
    assert not NOTE.others
    streamed.put("token")
    assert NOTE.others == [None]
    said = told.getvalue()
    time.sleep(0.1)
    streamed.put("token")
    streamed.end()
    assert told.getvalue() == said, "no bar from the moment that a token is written"
    streamed.close()
    assert not NOTE.others
    assert given == ["prompt", "token", "token", "end"]
    NOTE.ends()
    until(lambda: not NOTE._shown)
    with shown_by(given.append):
        assert NOTE.others == [given.append]


def test_parties_of_a_client_stay_silent_once_they_answer(
    screen: Callable[[bool], Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their client writes its text to the same terminal; a party of its own goes on saying what it waits for."""
    told = screen(False)
    NOTE.answers()
    assert not NOTE.others, "nobody's text is here"
    monkeypatch.setattr(NOTE, "of_client", True)
    try:
        NOTE.answers()
        NOTE.answers()
        compile_for(0.5)
        until(lambda: not NOTE._shown)
        assert told.getvalue() == ""
        assert NOTE.others == [None]
    finally:
        NOTE.others.clear()
