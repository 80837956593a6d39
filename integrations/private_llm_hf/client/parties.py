"""The client's link to the parties: commands out, results opened, errors named, nothing left hanging.

One call = one command (public facts) to every party, the secret inputs as shares, and the parties' answer, which must
be the same of all and states the shapes that are then opened. After any failure the session is over: it is aborted
everywhere, and later calls repeat the reason. What the parties learn from commands: shapes, attention masks, positions,
which cache a call continues, how many tokens are generated, and in beam search which beams survive (indices).
"""

import functools
import itertools
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from private_llm import errors
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PartyFailed, PrivateLLMError, ShareFileError, TransportError
from private_llm.forks import Origin
from private_llm.net.ledger import Ledger
from private_llm.net.roles import HEARSAY, WHO, named
from private_llm.net.transport import Transport
from private_llm.protocol_facts import names_where
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.offline_phase import section_label
from private_llm.protocols.weight_sharing import Dealer, packed_key, pieces
from private_llm.ranges import UNKNOWN, Ranges
from private_llm.ring.ring import Ring
from private_llm_hf.checkpoint.weights import Sink, encode_weight
from private_llm_hf.client.costs import Costs
from private_llm_hf.client.preprocess import Schedule, handles_of
from private_llm_hf.client.session_client import Secret, SessionClient, share
from private_llm_hf.wire import commands
from private_llm_hf.wire.answers import Alive, CostRows, Loaded, Outputs, Prepared, StoredFile
from private_llm_hf.wire.codec import M, Message
from private_llm_hf.wire.commands import CacheEdit, Call, CallOrEdit, Description, Slices, recv_message, send_message

_REMOTE = re.compile(rf"({HEARSAY}(?:{WHO})): (\w+): (.*)", re.DOTALL)


class Parties(SessionClient):
    """All parties of one session, as the client sees them. Thread-safe: one call at a time.

    Whatever talks to the parties raises PartyFailed once the session is over; it is over when a call fails or is
    interrupted. The call itself raises TransportError, or the PrivateLLMError that a party reported (DomainError, ...).
    A fork of the process that opened the session raises ProtocolAbort wherever it would talk to the parties, and ends
    nothing, whatever it does: the session is its parent's.
    """

    def __init__(
        self, config: PrivateConfig, transport: Transport, end: ClientEnd, shutdown: Callable[[], None]
    ) -> None:
        self.config = config
        self.ring = Ring(config.ring)
        self.members = range(config.parties)
        self.ranges = UNKNOWN
        self.transport, self.end, self.shutdown = transport, end, shutdown
        self.lock, self._origin = threading.RLock(), Origin()
        self._handles = itertools.count(1)
        self._unused: deque[int] = deque()
        self.over: str | None = None  # why this session has ended; None while it goes on
        self._plans = itertools.count(1)
        self._schedule: Schedule | None = None
        self._ask_all = False
        self._filled: dict[bool, set[int]] = {False: set(), True: set()}  # handles, by whether they were preprocessed

    # -- one call at a time ---------------------------------------------------------------------------------
    @contextmanager
    def _call(self) -> Iterator[None]:
        with self.alone(), self._guarded():
            yield

    def alone(self) -> AbstractContextManager[bool]:
        """What keeps other threads off. Raises ProtocolAbort in a fork, where the lock might be held for ever."""
        self._origin.demand("this session")
        return self.lock

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self.over is not None:
            again = "call its reconnect(), or load" if self.config.party_mode == "remote" else "load"
            raise PartyFailed(f"this session is over ({self.over}); {again} the model again")
        finished = False
        try:
            yield
            finished = True
        except TransportError as error:
            raise _remote_error(type(error)(named(self.config, str(error)))) from None
        finally:
            if not finished and self.over is None:
                self._stop("an earlier call failed or was interrupted")

    def _stop(self, reason: str) -> None:
        """End the session. reason: a public fact, which the parties are told."""
        self.over = reason
        try:
            self.transport.abort(f"the client stopped: {reason}")
        finally:  # an interrupt may come here too
            self.shutdown()

    def tell(self, message: Message, parties: Iterable[int] | None = None) -> None:
        """Send a command to every party, or to these."""
        for party in self.members if parties is None else parties:
            send_message(self.transport, party, message)

    def _answer(self, party: int, kind: type[M]) -> M:
        """One party's answer, which must be of this kind; those that only say "still computing" are skipped."""
        while True:
            answer: Message = recv_message(self.transport, party, (kind, Alive))
            if isinstance(answer, kind):
                return answer

    def answers(self, kind: type[M], parties: Iterable[int] | None = None) -> M:
        """The answer of every party, or of these. Raises TransportError unless all are equal."""
        answers = [self._answer(party, kind) for party in (self.members if parties is None else parties)]
        if any(answer != answers[0] for answer in answers[1:]):
            raise TransportError(
                "the parties gave different answers: they do not run the same model, ranges (explain() shows them) or "
                "version"
            )
        return answers[0]

    # -- weights ----------------------------------------------------------------------------------------------
    def use_stored(self, description: Description, mine: Callable[[], str | None]) -> bool:
        """Let the parties build the model from what they hold; False if that is nothing. mine: `WeightsDigest` of the
        client's own weights, or None. Raises ShareFileError if they hold other models, or files of several sharings.
        """
        with self._call():
            stored = self.stored_model(description.model)
            if stored is None:
                return False
            if stored != description.model:
                raise ShareFileError(
                    f"the parties hold share files of another model than this {description.class_}; start them with "
                    "its files, or load the model they hold"
                )
            self.tell(commands.LoadFile())
            self.ranges = Ranges(self.answers(Loaded).ranges)
            self.transport.ledger.reset()
            return True

    def stored_model(self, wanted: str | None = None) -> str | None:
        """Digest of the model that all hold (of several, the wanted one); None: they hold none. Raises ShareFileError
        if they differ.
        """
        self.tell(commands.Hello(wanted))
        answers = [self._answer(party, StoredFile) for party in self.members]
        if any(answer != answers[0] for answer in answers[1:]):
            raise ShareFileError(
                "the parties hold share files of different models or different sharings; give them the files of one "
                "run of `private-llm share`"
            )
        return answers[0].model

    @contextmanager
    def loading(self, description: Description, stop_after: str | None = None) -> Iterator[Sink]:
        """Share a model: pass its weights to the sink; then parties build it, up to module `stop_after` (split)."""
        with self._call():
            self.tell(commands.LoadModel(description, stop_after))
            ranges = Ranges(description.ranges)
            yield self._publish if self.config.weights == "public" else self._sharing(ranges)
            self.tell(commands.EndOfWeights())
            self.ranges = Ranges(self.answers(Loaded).ranges)
            self.transport.ledger.reset()

    def _sharing(self, ranges: Ranges) -> Sink:
        """A sink that splits each weight into shares: seeds first, then what the seeds do not give."""
        dealer = Dealer(self.config, self.end.cipher)
        for party in range(self.config.parties):
            for key in dealer.keys(party):
                self.transport.send(party, "weight key", packed_key(key))

        def share(name: str, tensor: Tensor) -> None:
            self.tell(commands.Weight(name, tuple(tensor.shape)))
            sharing, frac = dealer.begin(name), ranges.frac_of_weight(name, self.config.frac_bits)
            for piece in pieces(tensor):
                elements = encode_weight(name, piece, self.ring, frac)
                for party, part in enumerate(sharing.deal(elements)):
                    if part is not None:
                        self.transport.send(party, "weight", part)

        return share

    def _publish(self, name: str, tensor: Tensor) -> None:
        self.tell(commands.Weight(name, tuple(tensor.shape)))
        for piece in pieces(tensor):
            encode_weight(name, piece, self.ring, self.config.frac_bits)  # refuses what the ring cannot hold
            # links carry integers, so that no plaintext float passes by mistake: this one is public, bits as they are
            raw = piece.to(torch.float32).contiguous().view(torch.int32)
            for party in range(self.config.parties):
                self.transport.send(party, "weight", raw)

    # -- calls --------------------------------------------------------------------------------------------------
    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """As `SessionClient.forward`."""
        with self.alone():
            place = self.place_of(call)
            with self._call(), self.asking(call, secrets, place) as answer:
                return answer()

    @contextmanager
    def asking(
        self, call: Call, secrets: list[Secret], place: tuple[int, int] | None
    ) -> Iterator[Callable[[], tuple[str, dict[str, Tensor]]]]:
        """Ask at once; what is yielded waits for what comes back. place: in the schedule of what was preprocessed."""
        if place is None:
            self.ask(call, secrets)
            yield self.opened
            return
        self.tell(commands.Forward(call, at=place), self.members if self._ask_all else self.online)
        with self.end.section(section_label(*place)):  # masks of a preprocessed call
            share(self.end, secrets)
            yield functools.partial(self.opened, self.online)

    def ask(self, call: Call, secrets: list[Secret], slices: Slices | None = None) -> None:
        """The first half of `forward`: command and inputs."""
        self.tell(commands.Forward(call, self._take_unused(), slices=slices))
        share(self.end, secrets)

    def opened(self, parties: Iterable[int] | None = None) -> tuple[str, dict[str, Tensor]]:
        """The second half: what comes back."""
        answer = self.answers(Outputs, parties)
        opened = {}
        for output in answer.outputs:
            elements = self.end.open(output.shape)
            opened[output.name] = self.ring.decode(elements, output.frac)
        return answer.class_, opened

    def command(self, edit: CacheEdit) -> None:
        """As `SessionClient.command`."""
        with self.alone():
            planned = self.place_of(edit) is not None
            with self._call():
                if not planned:  # the parties have a plan's
                    self.tell(commands.ManageCache(edit))

    # -- preprocessing ------------------------------------------------------------------------------------------
    def preprocess(self, entries: list[CallOrEdit]) -> int:
        """As `SessionClient.preprocess`; without entries what was preprocessed is forgotten."""
        self._check_helped()
        with self._call():
            return self.prepare(entries)()

    def _check_helped(self) -> int:
        helper = self.config.helper
        if helper is None:
            raise ConfigError(f"preprocess: want protocol {names_where(lambda facts: facts.helper is not None)}")
        return helper

    def prepare(self, entries: list[CallOrEdit]) -> Callable[[], int]:
        """The first half of `preprocess`; the result waits for the parties and gives the bytes stored. Raises
        ConfigError where nobody runs ahead.
        """
        helper = self._check_helped()
        self._drop_schedule()
        schedule = Schedule(next(self._plans), entries)
        self.tell(commands.Preprocess(schedule.number, tuple(entries), self._take_unused()))

        def prepared() -> int:
            answers = [self._answer(party, Prepared) for party in self.members]
            self.end.take_digests(answers[helper].digests)
            self._schedule = schedule if entries else None
            self._ask_all = any(answer.ask_all for answer in answers)
            return sum(answer.stored for answer in answers)

        return prepared

    def place_of(self, message: CallOrEdit) -> tuple[int, int] | None:
        """Where a request stands in the schedule; None without one. Raises DomainError if it is not the next."""
        schedule, handles = self._schedule, handles_of(message)
        if schedule is not None:
            place = (schedule.number, schedule.take(message, self._filled[False] | self._filled[True]))
            self._filled[True].update(handles)
            if schedule.finished:
                self._drop_schedule()
            return place
        if not self._filled[True].isdisjoint(handles):
            raise DomainError(
                "this cache was filled by preprocessed calls and ends with them; plan more new tokens in "
                "model.preprocess(...), or start again without past_key_values"
            )
        self._filled[False].update(handles)
        return None

    def _drop_schedule(self) -> None:
        """Forget it; the helping party frees what it computed ahead with the next request that it receives."""
        if self._schedule is not None:
            self._unused.extend({handle for entry in self._schedule.entries for handle in handles_of(entry)})
            self._schedule = None

    @property
    def online(self) -> list[int]:
        """Who computes when the helping party has run ahead."""
        return [party for party in self.members if party != self.config.helper]

    # -- handles ------------------------------------------------------------------------------------------------
    def new_handle(self) -> int:
        """As `SessionClient.new_handle`."""
        return next(self._handles)

    def release(self, handle: int) -> None:
        """As `SessionClient.release`."""
        self._unused.append(handle)
        for filled in self._filled.values():
            filled.discard(handle)

    def _take_unused(self) -> tuple[int, ...]:
        return tuple(self._unused.popleft() for _ in range(len(self._unused)))

    # -- costs and end --------------------------------------------------------------------------------------------
    def costs(self, reset: bool = False) -> Costs:
        """As `SessionClient.costs`."""
        with self._call():
            self.tell(commands.TellCosts(reset))
            rows = [self._answer(party, CostRows) for party in self.members]
            mine: Ledger = self.transport.ledger
            rows.append(CostRows.of(mine))
            if reset:
                mine.reset()
            return Costs.from_rows(rows, self.config.helper)

    def close(self) -> None:
        """Stop the parties. Idempotent; nothing in a fork."""
        if not self._origin.here:
            return
        with self.lock:
            if self.over is not None:
                return
            self.over = "it was closed"
            try:
                self.stop()
            except TransportError:
                self.transport.abort("the client closed the session")
            except BaseException:  # interrupted halfway: the parties would wait for the rest
                self.transport.abort("the client was interrupted")
                raise
            finally:
                self.shutdown()

    def stop(self) -> None:
        """Tell the parties that the session ends."""
        self.tell(commands.Stop())


def _remote_error(error: TransportError) -> PrivateLLMError:
    """The error a party reported, under its own class; its text names the party, and who passed it on."""
    match = _REMOTE.match(str(error))
    if match is None:
        return error
    kind = getattr(errors, match[2], None)
    if isinstance(kind, type) and issubclass(kind, PrivateLLMError):
        return kind(f"{match[1]}: {match[3]}")
    return PartyFailed(match[0])
