"""A computing party: waits for the client's commands and runs its share of the model.

It sees shapes, masks and positions, shares of everything else. An error of any kind ends the session: its name
and text (never a value) go to all endpoints, who stop as well.
"""

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never, get_args

import torch
from transformers.modeling_outputs import ModelOutput

from private_llm.config import PrivateConfig
from private_llm.errors import ShareFileError, TransportError
from private_llm.kernels.address import trim_allocator, tune_allocator
from private_llm.kernels.compile_note import NOTE
from private_llm.net.parallel_sessions import RoleAssignment, assignment, parallel_session_links
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocol_facts import ASSISTED
from private_llm.protocols.offline_phase import OfflinePhase, section_label
from private_llm.protocols.session import Session, join
from private_llm.replay.program_cache import forget
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.share_files import ShareFile
from private_llm_hf.party import calls
from private_llm_hf.party.agreement import Transcript
from private_llm_hf.party.command_loop import Heartbeat, reported, serve_commands, tell_costs
from private_llm_hf.party.loading import LoadedModel, receive_weights
from private_llm_hf.party.model import release
from private_llm_hf.party.node import Node, NodeCheckpoint
from private_llm_hf.party.placement import weights_of_file
from private_llm_hf.party.product_server import OpenWeights, ProductServer
from private_llm_hf.token_sharding.cut import states_before_cut
from private_llm_hf.wire import commands
from private_llm_hf.wire.answers import Loaded, Prepared, StoredFile
from private_llm_hf.wire.codec import Message
from private_llm_hf.wire.commands import Call, Forward, LoadModel, PartyCommand, Slices, send_message

_COMMANDS: tuple[type[PartyCommand], ...] = get_args(PartyCommand)


class Party:
    """One party's end of a model: built by a "load" command, run by "forward" commands."""

    def __init__(
        self, config: PrivateConfig, number: int, transport: Transport, share_file: ShareFile | None,
        parallel_sessions: "dict[int, Party] | None" = None, parallel_session: int = 0,
    ) -> None:  # fmt: skip
        """parallel_sessions: where one party's find each other; this one enters itself as its number."""
        links = parallel_session_links(transport, config.parties, parallel_session, config.rotate_roles)
        self.config, self.number, self.transport, self.share_file = config, number, links, share_file
        self.role, self.assignment = links.me, assignment(config.parties, parallel_session, config.rotate_roles)
        self.parallel_sessions = {} if parallel_sessions is None else parallel_sessions
        self.parallel_sessions[parallel_session] = self
        self.session: Session = join(config, self.role, links)
        self.state: LoadedModel | None = None
        self._heartbeat = Heartbeat(links, config.timeout_s / 4)
        self.plan, self.ahead = calls.PreprocessingPlan(0, ()), OfflinePhase(self.session, links)
        self._transcript = Transcript(self.session)

    def serve(self) -> None:
        """Answer commands until the client stops. Raises what ended the session otherwise."""
        try:
            serve_commands(self.transport, _COMMANDS, self._obey, self._heartbeat)
        finally:  # free what is large now: this and its parts refer to each other, so Python would do it much later
            self.ahead.close()
            state, self.state = self.state, None
            if state is not None:
                release(state.model)
                state.offloaded = {}
            forget(self.session)

    def _obey(self, command: PartyCommand) -> None:
        planned = isinstance(command, Forward) and command.at is not None
        self._transcript.add(command, "computing" if planned else "all")
        match command:
            case commands.Hello():
                file = self.share_file
                self._answer(StoredFile(*((file.description.model, file.sharing) if file else (None, None))))
            case commands.LoadFile() | commands.LoadLike() | LoadModel():
                self._load(command)
            case Forward():
                self.forward(command)
            case commands.ManageCache():
                self.ready().edit("", command.edit)
            case commands.Preprocess():
                self._preprocess(command)
            case commands.TellCosts():
                tell_costs(self.transport, self.transport.ledger, command)
            case _:
                assert_never(command)

    def _compare(self, parties: Iterable[int]) -> None:
        """Before a call under quad: were all who compute it told the same? Raises ProtocolAbort if not."""
        values = self.session.protocol.take_inputs()
        self._transcript.compare(self.transport, parties, {"values": values} if values else {})

    def _answer(self, message: Message) -> None:
        send_message(self.transport, CLIENT, message)

    # -- the model --------------------------------------------------------------------------------------------
    def _load(self, command: commands.Load) -> None:
        forget(self.session)  # programs of a model that was loaded before
        self.state = self._loaded(command)
        self.transport.ledger.reset()
        self._answer(Loaded(self.session.numerics.ranges.to_dict()))

    def _loaded(self, command: commands.Load) -> LoadedModel:
        session, beat = self.session, self._heartbeat.beat
        if isinstance(command, commands.LoadFile):
            if self.share_file is None:
                raise ShareFileError("the client wants a model that this party holds no share file of")
            self._check_assignment(tuple(range(self.config.parties)), "a share file")
            weights = weights_of_file(session, self.share_file)
            return LoadedModel(session, LoadModel(self.share_file.description, None), weights, beat)
        if isinstance(command, commands.LoadLike):
            other = self.parallel_sessions.get(command.parallel_session)
            if other is None or other.state is None:
                raise TransportError(
                    f"parallel session {command.parallel_session} of this party has no model that another could take"
                )
            if self.config.weights == "secret":
                self._check_assignment(other.assignment, f"the model of parallel session {command.parallel_session}")
            return other.state.again(session, beat)
        if self.share_file is not None:
            raise ShareFileError("this party was started with a share file and serves the model of that file only")
        return LoadedModel(session, command, receive_weights(session, self.transport, command.description, beat), beat)

    def _check_assignment(self, shared: RoleAssignment, what: str) -> None:
        """Raise TransportError for shares of other roles: parties would compute with, and see, what is not theirs."""
        if shared != self.assignment:
            raise TransportError(
                f"{what} was shared for the roles {shared}, and this parallel session plays {self.assignment}: want "
                "weights that are dealt for every role assignment"
            )

    # -- calls -----------------------------------------------------------------------------------------------
    def _preprocess(self, command: commands.Preprocess) -> None:
        """A new plan; what is left of an older one is lost."""
        self._free(command.free)
        self._compare(range(self.config.parties))
        self.ahead.close()
        self.plan = calls.PreprocessingPlan(command.plan, command.calls, before=self.plan.number)
        self.ahead = OfflinePhase(self.session, self.transport)
        for planned in self.plan.calls:
            run = functools.partial(self._run_planned, planned, ())
            self.ahead.prepare(section_label(planned.plan, planned.number), run, self._heartbeat.beat)
        self._answer(Prepared(self.ahead.nbytes, tuple(self.session.protocol.take_digests())))

    def _free(self, handles: Sequence[int]) -> None:
        if handles and self.state is not None:
            self.state.free("", handles)

    def forward(self, command: Forward) -> None:
        """Run the model once. Raises UnsupportedOp for what parties do not take or open, TransportError before a model
        is loaded and for another vocabulary, shape or node, ProtocolAbort for a call out of order.
        """
        with self.transport.ledger.scope(""):  # the time of inputs and opening
            self._free(command.free)
            parties = range(self.config.parties)
            if command.at is None:
                self._run(command.call, parties, command.slices)
                return
            planned = self.plan.take(command.at)
            with self.ahead.following(section_label(*command.at)):
                self._run_planned(planned, [party for party in parties if party != self.config.helper])
            if self.plan.finished:
                self.ahead.close()

    def _run_planned(self, planned: calls.PlannedCall, parties: Iterable[int]) -> None:
        for edit in planned.edits:
            self.ready().edit("", edit)
        self._run(planned.call, parties)

    def _run(self, call: Call, parties: Iterable[int], slices: Slices | None = None) -> None:
        """parties: who computes for the client now; nobody, and the client hears nothing, if a helper runs ahead."""
        calls.refuse_unknown(call)
        state = self.ready()
        secrets = calls.receive_inputs(self.session.protocol.on(torch.device(self.session.device)), state.model, call)
        if parties:
            self._compare(parties)
        if slices is not None:
            inputs = calls.arguments(state, "", call, secrets)
            self._pass_on(states_before_cut(state.model, inputs), slices)
            return
        self._reveal(calls.run_alone(state, "", call, secrets), bool(parties))

    def _reveal(self, result: calls.CallResult, heard: bool = True) -> None:
        """Open the outputs towards the client, which hears first what comes."""
        if heard:
            NOTE.answers()
            self._answer(calls.outputs_message(result))
        for _, fixed in result.outputs:
            self.session.protocol.reveal_to_client(fixed.share)

    def _pass_on(self, states: SecretTensor, slices: Slices) -> None:
        """Reveal to each CompNode after a split its rows of the hidden states."""
        plan, first = self.config.plan, self.config.parties
        nodes = range(first, first) if plan is None else range(first, first + plan.alpha)
        wrong = [endpoint for endpoint, _ in slices if endpoint not in nodes]
        if wrong:
            raise TransportError(f"hidden states go to CompNodes, {nodes.start} to {nodes.stop - 1}; got {wrong}")
        share = states.to_fixed().share
        pieces = [(endpoint, share.map(operator.itemgetter((slice(None), list(rows))))) for endpoint, rows in slices]
        self._reveal(calls.answer(self.session, ModelOutput(), ()))
        with self.transport.ledger.scope("states to the nodes"):
            self.session.protocol.reveal(pieces)

    def ready(self) -> LoadedModel:
        """The model and what is kept for it. Raises TransportError before it is loaded."""
        if self.state is None:
            raise TransportError("a request arrived before a model was loaded")
        return self.state


Stored = ShareFile | NodeCheckpoint | OpenWeights  # of a party, a CompNode, a server of 'assisted'


def run_party(config: PrivateConfig, number: int, transport: Transport, stored: Stored | None = None) -> str | None:
    """Serve one client until it stops. stored: held before it came. None, or why the session ended, as told to all."""
    tune_allocator()
    parallel_sessions: dict[int, Party] = {}
    reasons: list[str] = []

    def serve(parallel_session: int) -> None:
        if config.protocol == ASSISTED:
            weights = stored if isinstance(stored, OpenWeights) else None
            ProductServer(config, transport, weights).serve()
        elif config.protocol == "cascade" or number >= config.parties:
            Node(config, number, transport, stored if isinstance(stored, NodeCheckpoint) else None).serve()
        else:
            share_file = stored if isinstance(stored, ShareFile) else None
            Party(config, number, transport, share_file, parallel_sessions, parallel_session).serve()

    def run(parallel_session: int) -> None:
        reason = reported(config, number, transport, functools.partial(serve, parallel_session))
        if reason is not None:
            reasons.append(reason)

    others = in_threads(f"party {number} parallel session", range(1, config.parallel_sessions), run)
    run(0)
    for thread in others:
        thread.join()
    parallel_sessions.clear()
    trim_allocator()
    return reasons[0] if reasons else None


def in_threads(name: str, numbers: Iterable[int], run: Callable[[int], object]) -> list[threading.Thread]:
    """Threads that run each number; they end with this process at the latest."""
    threads = [threading.Thread(target=run, args=(n,), name=f"{name} {n}", daemon=True) for n in numbers]
    for thread in threads:
        thread.start()
    return threads
