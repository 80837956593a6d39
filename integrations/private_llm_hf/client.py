"""The client's link to the parties: commands out, results opened, errors named, nothing left hanging.

One call = one command (public facts) to every party, the secret inputs as shares, and the parties' answer, which
states the shapes that are then opened. Every party must give the same answer. After any failure the session is
over: it is aborted everywhere, and later calls repeat the reason.

What the parties learn from commands: shapes, attention masks, positions, which cache a call continues, how many
tokens are generated, and in beam search which beams survive (indices, not tokens).
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from private_llm import errors
from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed, PrivateLLMError, TransportError
from private_llm.net.ledger import Ledger
from private_llm.net.transport import Transport
from private_llm.protocols.session import ClientEnd, deal
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from private_llm_hf.costs import Costs, rows_of
from private_llm_hf.weights import Sink, encode_weight
from private_llm_hf.wire import Message, recv_message, send_message

_REMOTE = re.compile(r"(party \d+): (\w+): (.*)", re.DOTALL)


class Parties:
    """All parties of one session, as the client sees them. Thread-safe: one call at a time."""

    def __init__(
        self, config: PrivateConfig, transport: Transport, end: ClientEnd, shutdown: Callable[[], None]
    ) -> None:
        self.config = config
        self.ring = Ring(config.ring)
        self._transport, self._end, self._shutdown = transport, end, shutdown
        self._lock = threading.RLock()
        self._handles = itertools.count(1)
        self._unused: deque[int] = deque()
        self._over: str | None = None

    # -- one call at a time ---------------------------------------------------------------------------------
    @contextmanager
    def _call(self) -> Iterator[None]:
        """Serialise calls; end the session if one fails or is interrupted halfway."""
        with self._lock:
            if self._over is not None:
                raise PartyFailed(f"this session is over ({self._over}); load the model again")
            finished = False
            try:
                yield
                finished = True
            except TransportError as error:
                raise _remote_error(error) from None
            finally:
                if not finished:
                    self._end_session("an earlier call failed or was interrupted")

    def _end_session(self, reason: str) -> None:
        if self._over is None:
            self._over = reason
            self._transport.abort(f"the client stopped: {reason}")
            self._shutdown()

    def _tell(self, message: Message) -> None:
        for party in range(self.config.parties):
            send_message(self._transport, party, message)

    def _answers(self) -> Message:
        """One answer of each party, all equal; frames that only say "still computing" are skipped."""
        answers = []
        for party in range(self.config.parties):
            answer = recv_message(self._transport, party)
            while "alive" in answer:
                answer = recv_message(self._transport, party)
            answers.append(answer)
        if any(answer != answers[0] for answer in answers[1:]):
            raise TransportError("the parties gave different answers: they do not run the same model or version")
        return answers[0]

    # -- weights ----------------------------------------------------------------------------------------------
    def hello(self) -> Message:
        """What the parties already hold: {"model": description or None}."""
        with self._call():
            self._tell({"do": "hello"})
            return self._answers()

    @contextmanager
    def loading(self, description: Message) -> Iterator[Sink]:
        """Share a model with the parties: pass every weight to the yielded sink, then they build the model."""
        with self._call():
            self._tell({"do": "load", **description})
            seed = Seed.fresh()
            frac = self.config.frac_bits

            def share(name: str, tensor: Tensor) -> None:
                elements = encode_weight(name, tensor, self.ring, frac)
                shares = deal(self.config, elements, seed, name)
                for party, mine in enumerate(shares):
                    header = {"weight": name, "shape": list(tensor.shape), "frac": frac, "parts": len(mine.parts)}
                    send_message(self._transport, party, header)
                    for part in mine.parts:
                        self._transport.send(party, "weight", part.contiguous())

            yield share
            self._tell({"weight": None})
            self._answers()
            self._transport.ledger.reset()

    # -- calls --------------------------------------------------------------------------------------------------
    def forward(self, call: Message, secrets: list[Tensor]) -> tuple[str, dict[str, Tensor]]:
        """Run the model once: name of its output class and the opened outputs (float64).

        secrets: ring elements of the inputs listed in call["secret"], in that order.
        """
        with self._call():
            self._tell({"do": "forward", "free": self._take_unused(), **call})
            for elements in secrets:
                self._end.share(elements)
            answer = self._answers()
            opened = {}
            for name, shape, frac in answer["outputs"]:
                elements = self._end.open(tuple(shape))
                opened[name] = self.ring.decode(elements, frac)
            return str(answer["class"]), opened

    def command(self, message: Message) -> None:
        """A command without an answer (cache management); an error surfaces at the next call."""
        with self._call():
            self._tell(message)

    # -- handles ------------------------------------------------------------------------------------------------
    def new_handle(self) -> int:
        """A number for something that the parties keep."""
        return next(self._handles)

    def release(self, handle: int) -> None:
        """Forget a handle with the next call (callable from a finalizer: sends nothing itself)."""
        self._unused.append(handle)

    def _take_unused(self) -> list[int]:
        unused = []
        while self._unused:
            unused.append(self._unused.popleft())
        return unused

    # -- costs and end --------------------------------------------------------------------------------------------
    def costs(self, reset: bool = False) -> Costs:
        """What everybody sent since the last reset (control messages apart)."""
        with self._call():
            self._tell({"do": "costs", "reset": reset})
            rows = []
            for party in range(self.config.parties):
                answer = recv_message(self._transport, party)
                while "alive" in answer:
                    answer = recv_message(self._transport, party)
                rows.append(answer)
            mine: Ledger = self._transport.ledger
            rows.append(rows_of(mine))
            if reset:
                mine.reset()
            return Costs.from_rows(rows)

    def close(self) -> None:
        """Stop the parties. Idempotent."""
        with self._lock:
            if self._over is not None:
                return
            self._over = "it was closed"
            try:
                self._tell({"do": "stop"})
            except TransportError:
                self._transport.abort("the client closed the session")
            self._shutdown()


def _remote_error(error: TransportError) -> PrivateLLMError:
    """The error a party reported, under its own class; its text names the party."""
    match = _REMOTE.search(str(error))
    if match is None:
        return error
    kind = getattr(errors, match[2], None)
    if isinstance(kind, type) and issubclass(kind, PrivateLLMError):
        return kind(f"{match[1]}: {match[3]}")
    return PartyFailed(match[0])
