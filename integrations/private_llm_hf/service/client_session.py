"""One client at one party: a thread that takes its commands and inputs, and hands its calls to the service.

A session asks for one thing at a time, so a call that waits is all that a client holds here besides its caches. What
goes wrong in it ends it, with the reason told to its client, and nothing else.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never, get_args

import torch
from torch import Tensor

from private_llm.errors import ConfigError, DomainError, PartyFailed, ShareFileError, TransportError
from private_llm.kernels.address import trim_allocator
from private_llm.net.admission import ClientLink
from private_llm.net.incoming import Allowance
from private_llm.net.ledger import Ledger
from private_llm.net.transport import CLIENT, PassingTransport, Transport
from private_llm.protocols.registry import protocol_spec
from private_llm.protocols.session import meet_client, receiving_end
from private_llm.ring.dpf import key_words
from private_llm.ring.prg import Prg, Seed
from private_llm_hf.party.agreement import digest
from private_llm_hf.party.calls import PlannedCall, PreprocessingPlan, receive_inputs, table_of
from private_llm_hf.party.command_loop import Heartbeat, reported, serve_commands, tell_costs
from private_llm_hf.party.model_description import validate_input_shape
from private_llm_hf.service.served_model import ServedModel
from private_llm_hf.wire import commands
from private_llm_hf.wire.answers import Loaded, Outputs, Prepared
from private_llm_hf.wire.codec import Message, text_of
from private_llm_hf.wire.commands import CacheEdit, Call, Forward, PartyCommand, send_message

if TYPE_CHECKING:
    from private_llm_hf.service.party_service import PartyService

_LOG = logging.getLogger("private_llm")
_TICK_S = 0.25  # how often a session that waits for a batch looks whether its client is still there
_EACH_S, _AT_ONCE = 0.02, 100  # between two questions, but for so many at once: who only asks takes everybody's time
MOST_CALLS = 1 << 12  # calls of one plan
_KEYS = 4  # keys of point functions for each index, at most (quad)

_COMMANDS: tuple[type[PartyCommand], ...] = get_args(PartyCommand)


@dataclass(frozen=True)
class ReceivedTensor:
    """One tensor that a client has sent."""

    tag: str
    payload: Tensor

    def __repr__(self) -> str:
        return f"Frame({self.tag!r}, shape={tuple(self.payload.shape)})"


class ClientInputRecorder(PassingTransport):
    """A client's link that remembers what is received over it; nothing can be sent."""

    def __init__(self, link: Transport) -> None:
        super().__init__(link)
        self.frames: list[ReceivedTensor] = []

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        raise TransportError(f"'{tag}': nothing is sent while a client's inputs are received")

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        payload = super()._recv(frm, tag, shape, dtype)
        self.frames.append(ReceivedTensor(tag, payload))
        return payload


def owner_of(session: str) -> str:
    """Under this name the caches of a session's plan are kept: no other call can name them."""
    return f"{session} plan"


@dataclass(eq=False)
class Request:
    """A call that waits for a batch. edits: of caches, before it. free: handles to drop. planned: its call of a plan.
    prepares: it is computed ahead (stored, digests: what came of it). drop: the older plan is over.
    """

    session: "ClientSession"
    number: int
    call: Call
    edits: tuple[CacheEdit, ...]
    free: tuple[int, ...]
    frames: Sequence[ReceivedTensor]
    facts: dict[str, str]
    planned: PlannedCall | None = None
    prepares: bool = False
    drop: bool = False
    since: float = field(default_factory=time.monotonic)
    stored: int = 0
    digests: tuple[str, ...] = ()
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __repr__(self) -> str:
        return f"Request({self.session.short}, {self.number})"

    @property
    def owner(self) -> str:
        """Under which name its caches are kept."""
        return self.session.id if self.planned is None else owner_of(self.session.id)

    def fail(self, error: Exception) -> None:
        """It will not be answered."""
        self.error = error
        self.done.set()


class ClientSession:
    """A client's session; `start` begins its thread. `masks` of its inputs are drawn during batches alone."""

    def __init__(self, host: "PartyService", link: ClientLink) -> None:
        self.host, self.link = host, link
        self.id, self.user, self.short = link.number, link.user, link.number[:12]
        self.began = time.monotonic()
        self.costs = Ledger(host.number)
        self.keys: list[Seed] = []
        self.masks: list[Prg] = []
        self.model: ServedModel = host.model_of(None)
        self._edits: list[CacheEdit] = []
        self._plan = PreprocessingPlan(0, ())
        self._drop = False
        self._requests, self._earlier = 0, ""
        self._sending = threading.Lock()
        self._answered = True
        self._cut: str | None = None
        self._questions, self._heartbeat = Allowance(_EACH_S, _AT_ONCE), Heartbeat(link, host.config.timeout_s / 4)
        self._thread = threading.Thread(target=self._run, name=f"session {self.short}", daemon=True)

    def start(self) -> None:
        """Serve the client from now on."""
        self._thread.start()

    def cut(self, reason: str) -> None:
        """End the session from another thread; its client is told why."""
        self._cut = self._cut or reason
        self.link.abort(reason)

    def join(self, seconds: float) -> None:
        """Wait until its thread has ended."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(seconds)

    def answer(self, outputs: Outputs) -> None:
        """Say what is opened next. A client that is gone is not missed."""
        with self._sending:
            self._answered = True
            self._quietly(lambda: send_message(self.link, CLIENT, outputs))

    def give(self, tag: str, payload: Tensor) -> None:
        """Send an opened part. A client that is gone is not missed."""
        self._quietly(lambda: self.link.send(CLIENT, tag, payload))

    def _quietly(self, send: Callable[[], None]) -> None:
        try:
            send()
        except TransportError as error:
            self._cut = self._cut or str(error)

    # -- its thread -------------------------------------------------------------------------------------------
    def _run(self) -> None:
        reason: str | None = None
        try:
            reason = reported(self.host.config, self.host.number, self.link, self._serve)
        finally:
            self.host.over(self, reason and (self._cut or reason))
            self.link.close()
            trim_allocator()

    def _serve(self) -> None:
        self.keys = meet_client(self.host.config, self.host.number, self.link)
        serve_commands(self.link, _COMMANDS, self._obey, self._heartbeat, self.host.limits.message_bytes)

    def _obey(self, command: PartyCommand) -> None:
        if not isinstance(command, Forward | commands.ManageCache):
            time.sleep(self._questions.lacks())
        match command:
            case commands.Hello():
                before, self.model = self.model, self.host.model_of(command.model)
                if self.model is not before:  # what was prepared is another model's, and fits no call of this one
                    self._plan = PreprocessingPlan(self._plan.number, ())
                send_message(self.link, CLIENT, self.model.stored)
            case commands.LoadFile():
                send_message(self.link, CLIENT, Loaded(self.model.ranges.to_dict()))
            case Forward():
                self._forward(command)
            case commands.ManageCache():
                self.host.limits.check_edits(0, len(self._edits) + 1)
                self._check_edit(command.edit)
                self._edits.append(command.edit)
            case commands.TellCosts():
                tell_costs(self.link, self.costs, command)
            case commands.LoadModel() | commands.LoadLike():
                raise ShareFileError("this party serves the models of its share files only, none that clients send")
            case commands.Preprocess():
                self._preprocess(command)
            case _:
                assert_never(command)
        self.link.await_reader()

    def _check_edit(self, edit: CacheEdit) -> None:
        if isinstance(edit, commands.SelectRows) and edit.index.numel() > self.host.rows:
            raise DomainError(
                f"rows of a cache: got {edit.index.numel()}; this service takes {self.host.rows} at a time"
            )

    def _forward(self, command: Forward) -> None:
        """Receive what a call needs, and wait until a batch has answered it."""
        if command.slices is not None:
            raise TransportError("a party service takes no calls of a split")
        if command.at is None:
            planned, edits, self._edits = None, tuple(self._edits), []
        else:
            planned = self._plan.take(command.at)
            command, edits = replace(command, call=planned.call), planned.edits
        self._answered = planned is not None and self.host.number == self.host.config.helper
        frames = self._receive(command.call, planned is not None)
        facts = self._facts(command, edits, frames)
        self._run_request(command.call, edits, command.free, facts, frames, planned)

    def _run_request(
        self, call: Call, edits: tuple[CacheEdit, ...], free: tuple[int, ...], facts: dict[str, str],
        frames: Sequence[ReceivedTensor] = (), planned: PlannedCall | None = None, prepares: bool = False,
    ) -> Request:  # fmt: skip
        """Wait until a batch has run a request. Raises what went wrong with it."""
        self._requests += 1
        drop, self._drop = self._drop, False
        request = Request(self, self._requests, call, edits, free, frames, facts, planned, prepares, drop)
        self.host.submit(request)
        self._await(request)
        if request.error is not None:
            raise request.error
        return request

    def _preprocess(self, command: commands.Preprocess) -> None:
        """Prepare every call of a plan, whenever nobody else waits; what is left of an older one is dropped."""
        config = self.host.config
        if config.helper is None or config.sparsity is not None:
            raise ConfigError(
                f"preprocess: nothing can be computed ahead under {config.protocol!r}"
                + (" with sparsity" if config.sparsity is not None else "")
            )
        plan = PreprocessingPlan(command.plan, command.calls, self._plan.number)
        if len(plan.calls) > MOST_CALLS:
            raise DomainError(f"preprocess: got {len(plan.calls)} calls; this service takes {MOST_CALLS} in a plan")
        for planned in plan.calls:
            self.host.limits.check_edits(0, len(planned.edits))
            self._check_inputs(planned.call, one_hot=True)
            for edit in planned.edits:
                self._check_edit(edit)
        facts = self._facts(command, [], [])
        free, stored, digests = command.free, 0, list[str]()
        self._drop, self._answered = True, False
        for planned in plan.calls:
            request = self._run_request(planned.call, planned.edits, free, facts, planned=planned, prepares=True)
            free, stored, digests = (), stored + request.stored, [*digests, *request.digests]
        self._plan, self._answered = plan, True
        send_message(self.link, CLIENT, Prepared(stored, tuple(digests), ask_all=True))

    def _check_inputs(self, call: Call, one_hot: bool) -> None:
        """Raise for inputs that are larger than this service takes, and for another vocabulary than the model's."""
        if not call.secret:
            raise TransportError("a call has one secret input; got none")
        for item in call.secret:
            shape = validate_input_shape(item.shape)
            if shape[0] > self.host.rows:
                raise DomainError(f"{item.name}: got {shape[0]} rows; this service takes {self.host.rows} at a time")
            count = math.prod(shape)
            if isinstance(item, commands.Tokens):
                table_of(self.model.model, item)  # refuses another vocabulary: the size of what is sent follows from it
                count *= item.vocabulary if one_hot else _KEYS * key_words(item.vocabulary)
            most = self.host.limits.elements
            if count > most:
                raise DomainError(f"an input of {count} elements is too large for this service; want {most}")

    def _receive(self, call: Call, planned: bool) -> list[ReceivedTensor]:
        """The secret inputs of a call, as they come: nothing is computed with them yet."""
        recorder = ClientInputRecorder(self.link)
        end = receiving_end(self.host.config, self.host.number, recorder)
        with end.section("planned") if planned else nullcontext():
            self._check_inputs(call, getattr(end, "one_hot", False))
            receive_inputs(end, self.model.model, call)
        return recorder.frames

    def _facts(self, command: Message, edits: Sequence[CacheEdit], frames: Sequence[ReceivedTensor]) -> dict[str, str]:
        """Digests of what another party must have got alike. earlier: calls that drew from the streams of its masks; a
        session that begins anew at one party alone, under an older number and keys, has had others.
        """
        spec = protocol_spec(self.host.config.protocol)
        text = text_of([command, list(edits)], ordered=True)
        facts = {"call": digest(text.encode()), "model": digest(self.model.digest.encode())}
        facts["earlier"] = self._earlier
        self._earlier = digest(self._earlier.encode(), facts["call"].encode())
        facts["user"] = digest(self.user.encode())
        for mask, key in zip(spec.masks_of(self.host.number), self.keys, strict=True):
            facts[f"mask {mask}"] = digest(key.raw())
        values = [frame.payload for frame in frames if frame.tag == "input"]
        if values and self.model.session.protocol.same_inputs:
            facts["values"] = digest(*(value.contiguous().view(-1).numpy().data.cast("B") for value in values))
        return facts

    def _await(self, request: Request) -> None:
        """Wait for a batch, and tell the client meanwhile that it waits. Raises PartyFailed if it is gone."""
        self._heartbeat.start()
        while not request.done.wait(_TICK_S):
            if self._cut is not None:
                raise PartyFailed(self._cut)
            self.link.look()
            with self._sending:
                if not self._answered:
                    self._heartbeat.beat()
