"""`private-llm chat`: a conversation in the terminal, or with lines from a pipe.

Answers go to stdout, all else (costs, errors, progress) to stderr. A session that fails is renewed, with the user's
consent if there is one to ask, and the answer goes on where it was.
"""

import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from private_llm.config import PrivateConfig
from private_llm.errors import CorrectionsUsedUp, DomainError, PrivateLLMError, ProtocolAbort, TransportError
from private_llm_cli.commands import output
from private_llm_cli.commands.models import demo_model, loaded_from, smollm2_model, tokenizer_of
from private_llm_cli.commands.output import duration, size
from private_llm_cli.commands.text import Conversation, TextStream, is_text

if TYPE_CHECKING:
    from rich.status import Status

HELP = "/reset forgets the conversation, /cost sums up, /quit ends; Ctrl-C stops an answer"
_FINISHES = {"stop": "", "length": "; it was cut at its longest", "stopped": "; stopped"}


@dataclass(frozen=True)
class ChatUsage:
    """What answers cost. seconds: from question to end."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    bytes_total: int = 0
    rounds: int = 0

    def __add__(self, other: "ChatUsage") -> "ChatUsage":
        return ChatUsage(
            self.answers + other.answers, self.tokens + other.tokens, self.seconds + other.seconds,
            self.bytes_total + other.bytes_total, self.rounds + other.rounds,
        )  # fmt: skip

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.tokens} tokens in {duration(self.seconds)} ({rate:.2f} tokens/s); "
            f"{size(self.bytes_total)} over all links, {self.rounds} rounds"
        )


def terminal_chat(source: str, config: PrivateConfig, new_tokens: int, sampling: dict[str, Any]) -> None:
    """Talk until /quit or the end of input. source: a model, or the client folder of share files with `config.hosts`;
    "" for SmolLM2 if it is installed, else the bundled model. Raises what loading raises, and of lines from a pipe what
    ended the session.
    """
    if not source:
        from private_llm_hf.models import smollm2

        source = demo_model() if smollm2.missing() is not None else smollm2_model()
    if config.party_mode == "auto" and not config.hosts:  # threads would wait for the interpreter's lock
        config = replace(config, party_mode="processes")
    tokenizer = tokenizer_of(source)

    def load() -> Any:  # noqa: ANN401 - a private model
        from private_llm_hf import AutoPrivateModelForCausalLM

        with output.progress_bar() as step:
            step("calling the parties" if config.hosts else "sharing the weights", 0)
            return loaded_from(AutoPrivateModelForCausalLM, source, config)

    talk = Conversation(load(), tokenizer, new_tokens, sampling)
    try:
        chat = TerminalChat(talk, load, sys.stdin.isatty())
        chat.welcome(source, config)
        output.note_sparsity(talk.model, *output.TURN)
        output.note_corrections(talk.model, sum(output.TURN))
        chat.run()
    finally:
        talk.model.close()


class TerminalChat:
    """The loop of questions and answers. interactive: whether somebody can be asked."""

    def __init__(self, talk: Conversation, load: Callable[[], Any], interactive: bool) -> None:
        self._talk, self._load, self._interactive = talk, load, interactive
        self._spent = ChatUsage()
        self._status: Status | None = None

    def welcome(self, source: str, config: PrivateConfig) -> None:
        """What this is, for somebody at a terminal; for all, what protects nobody."""
        if self._interactive:
            _note(f"{source} under protocol {config.protocol}. {HELP}.")
            if not self._talk.has_template:
                _note("This model has no chat template: it continues what you type.")
        if not config.hosts:
            _note("All parties run on this machine, which protects nobody from its owner.", "yellow")

    def run(self) -> None:
        """Until /quit or the end of input."""
        for line in self._lines():
            text = line.strip()
            if text == "/quit":
                return
            if text.startswith("/"):
                self._command(text)
            elif not is_text(text):
                _note("this line is not UTF-8, so it was not asked", "red")
            elif text:
                self._answer(text)

    def _lines(self) -> Iterator[str]:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # `run` says so, and goes on
        if not self._interactive:
            yield from sys.stdin
            return
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history
        while True:
            try:
                yield input("> ")
            except EOFError:
                _note("")
                return
            except KeyboardInterrupt:
                _note("\n/quit or Ctrl-D ends")

    def _command(self, text: str) -> None:
        if text == "/reset":
            self._talk.reset()
            _note("a new conversation")
        elif text == "/cost":
            _note(f"{self._spent.answers} answers: {self._spent}; {self._talk.cached} positions are cached")
        else:
            _note(f"{text.split()[0]}: no such command; {HELP}")

    def _answer(self, text: str) -> None:
        """One turn. Raises what ended the session if nobody can be asked and it cannot be renewed."""
        self._talk.ask(text)
        stream, started = TextStream(self._talk.tokenizer, self._show), time.perf_counter()
        while True:
            try:
                with self._waiting(), _interruptible() as stopped:
                    finish = self._talk.answer(stream, stopped)
                break
            except DomainError as error:
                self._talk.take_back()
                _note(f"{error}. /reset begins a new conversation.", "red")
                return
            except CorrectionsUsedUp as error:
                self._talk.take_back()
                if not self._interactive:
                    raise
                _note(f"{error}", "red")
                return
            except (TransportError, ProtocolAbort) as error:
                if stream.ids:
                    output.show_text("\n")
                _note(f"{error}", "red")
                if not self._renew(error):
                    self._talk.keep(stream)
                    return
                if isinstance(error, ProtocolAbort):  # what it had may not be trusted
                    stream = TextStream(self._talk.tokenizer, self._show)
                elif stream.ids:
                    output.show_text(stream.text)
        output.show_text("\n")
        costs = self._talk.model.cost(reset=True)
        seconds = time.perf_counter() - started
        spent = ChatUsage(1, len(stream.ids), seconds, costs.bytes_total, costs.rounds)
        self._spent += spent
        _note(f"{spent}{_FINISHES[finish]}", "dim")
        output.note_corrections(self._talk.model, sum(output.TURN))

    def _renew(self, reason: PrivateLLMError) -> bool:
        """Another session; False if the user does not want one. Raises `reason` if nobody can be asked and it fails."""
        while True:
            if self._interactive and not _agreed("Reconnect, and go on with the answer?"):
                return False
            try:
                self._talk.renew(_reconnected(self._talk.model, self._load))
            except PrivateLLMError as error:
                _note(f"{error}", "red")
                if not self._interactive:
                    raise reason from error
            else:
                return True

    def _show(self, text: str) -> None:
        if self._status is not None:
            self._status.stop()
        output.show_text(text)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A sign of life until the first word."""
        if output.NOTES.is_terminal:
            self._status = output.NOTES.status("computing on shares")
            self._status.start()
        self._talk.model.on_chunk = lambda read, length: self._tell(f"reading, {read} of {length} tokens")
        try:
            with output.compile_shown(self._tell):
                yield
        finally:
            if self._status is not None:
                self._status.stop()
            self._status = None

    def _tell(self, what: str) -> None:
        if self._status is not None:
            self._status.update(what)


def _reconnected(model: Any, load: Callable[[], Any]) -> Any:  # noqa: ANN401 - a private model
    """The model on a new session of the same parties, or, where it cannot ask for one, loaded anew."""
    if hasattr(model, "reconnect"):
        model.reconnect()
        return model
    model.close()
    return load()


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C stops after the token that is computed, so that the session stays in step; a second one at once."""
    asked = False

    def note(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _agreed(question: str) -> bool:
    try:
        return input(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def _note(text: str, style: str = "") -> None:
    output.NOTES.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
