"""One party's side of `model.preprocess`: party 0 runs planned calls ahead, party 2 stores what it receives, and later
both computing parties follow the plan while party 0 is silent (net/tape.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from private_llm.errors import ProtocolAbort
from private_llm.net.tape import HELPER, KEEPER, AheadTransport, Tape, TapeTransport, store_call
from private_llm.net.transport import Transport
from private_llm.protocols.session import Session
from private_llm_hf.wire import Message


class Tapes:
    """The plan that is being prepared or followed; there is one at a time."""

    def __init__(
        self, session: Session, transport: Transport, run: Callable[[Message], None], beat: Callable[[], None]
    ) -> None:
        """run: computes one request and answers nobody. beat: called whenever there is progress."""
        self._session, self._transport, self._run, self._beat = session, transport, run, beat
        self._tape: Tape | None = None
        self._plan = self._calls = self._next = 0

    def prepare(self, message: Message) -> Message:
        """Run ahead, or store, every call of a new plan; what is left of an older one is thrown away."""
        self.close()
        if message["plan"] <= self._plan:
            raise ProtocolAbort(f"plan {message['plan']} was prepared before; masks must never repeat")
        self._plan, self._calls, self._next = message["plan"], len(message["calls"]), 0
        if self._session.party == HELPER:
            for number, call in enumerate(message["calls"]):
                self._ahead(number, call)
        elif self._session.party == KEEPER:
            return {"stored": self._store()}
        return {"stored": 0}

    def _ahead(self, number: int, call: Message) -> None:
        links: list[AheadTransport] = []

        def announcing(transport: Transport) -> Transport:
            links.append(AheadTransport(transport))
            return links[0]

        with self._session.protocol.stretch(self._label(number), announcing):
            self._run(call)
        links[0].end_call()

    def _store(self) -> int:
        if not self._calls:
            return 0
        self._tape = tape = Tape(self._session.config.tape_folder)
        for _ in range(self._calls):
            store_call(self._transport, tape, self._beat)
        stored = tape.nbytes
        tape.rewind()
        return stored

    @contextmanager
    def following(self, place: tuple[int, int]) -> Iterator[None]:
        """Inside runs call place[1] of plan place[0], with party 0's part from the tape.

        Raises ProtocolAbort for any call but the next: masks must never repeat.
        """
        if tuple(place) != (self._plan, self._next) or self._next >= self._calls:
            raise ProtocolAbort(
                f"call {place[1]} of plan {place[0]}: want call {self._next} of plan {self._plan}; what was "
                "preprocessed is used in order and once, because masks must never repeat"
            )
        protocol, tape = self._session.protocol, self._tape
        label = self._label(self._next)
        self._next += 1

        def reading(transport: Transport) -> Transport:
            return transport if tape is None else TapeTransport(transport, tape, lambda: protocol.device)

        with protocol.stretch(label, reading):
            yield
        if tape is not None:
            tape.finish_call()
        if self._next == self._calls:
            self.close()

    def close(self) -> None:
        """Delete what is left. Idempotent."""
        if self._tape is not None:
            self._tape.close()
            self._tape = None
        self._calls = 0

    def _label(self, number: int) -> str:
        return f"plan {self._plan} call {number}"
