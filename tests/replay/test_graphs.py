"""Programs of a GPU, without one: the same recorder and program, whose segments run node by node in main memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_llm_hf import patch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from private_llm.config import PrivateConfig
from private_llm.errors import UnsupportedOp
from private_llm.kernels import ops, waves
from private_llm.kernels.forms import Matmul
from private_llm.kernels.seeded_tensor import SeededTensor, StreamKey
from private_llm.kernels.trace_hook import this_thread, traced_by
from private_llm.net.local import LocalMesh
from private_llm.net.transport import PlacedTransport, Transport
from private_llm.nn import attention
from private_llm.protocols.session import Session
from private_llm.protocols.share import Share
from private_llm.replay import graph_recorder, graphs, joint, modules, program_cache
from private_llm.replay.events import tensors_of
from private_llm.replay.program_cache import ProgramCache, programs_of
from private_llm.replay.regions import CompiledRegion
from private_llm.replay.transports import LiveTransport
from private_llm.ring import prg
from private_llm.ring.prg import ChaCha, Prg
from private_llm.tensor import range_check
from private_llm.tensor.fixed import Fixed
from tests.kernels.cases import ALL
from tests.replay import test_failures, test_graph_breaks, test_programs
from tests.replay.test_programs import CALLS, FRAC, FUNCTIONS, run, some
from tests.session import run_session


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are told to who watches as those of a GPU are, and everything is recorded as graphs."""

    def announced(function: Callable[..., Any], writes: int) -> Callable[..., Any]:
        def alone(*arguments: Any) -> Any:
            with traced_by(None):
                return function(*arguments)

        @functools.wraps(function)
        def call(*arguments: Any, onto: Tensor | None = None) -> Any:
            hook, given = this_thread.hook, arguments if onto is None else (*arguments, onto)
            return function(*given) if hook is None else hook.computed(alone, given, writes + (onto is not None))

        return call

    for name, writes in {case.op: int(case.changes) for case in ALL if hasattr(ops, case.op)}.items():
        monkeypatch.setattr(ops, name, announced(getattr(ops, name), writes))
    monkeypatch.setattr(range_check, "ring_matmul", ops.ring_matmul)
    monkeypatch.setattr(Matmul, "product", staticmethod(ops.ring_matmul))
    monkeypatch.setattr(Matmul, "pair", staticmethod(ops.ring_matmul_pair))
    monkeypatch.setattr(range_check, "_FEW", range_check._FEW_ON_GPUS)

    def weighed(masked: Tensor, keep: Tensor, shares: Tensor, digits: Any, factors: Any) -> Tensor:
        piece = torch.empty_like(masked)
        waves.weighed_by_operations(masked, keep, shares, digits, factors, piece)
        return piece

    monkeypatch.setattr(waves, "weighed", weighed)
    monkeypatch.setattr(waves, "placed", waves.placed_by_operations)
    monkeypatch.setattr(waves, "hidden", waves.hidden_by_operations)
    monkeypatch.setattr(waves, "wraps", announced(waves.wraps, 0))
    monkeypatch.setattr(waves, "widened", announced(waves.widened, 1))
    monkeypatch.setattr(
        waves, "summed",
        lambda masked, shares, plan, turns, first: waves.summed_by_operations(
            masked, shares, plan, turns, plan.first if first else 0
        ),
    )  # fmt: skip

    for module in (program_cache, modules, joint, attention):
        monkeypatch.setattr(module, "uses_cuda_graphs", lambda session: True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_repeated(name: str, protocol: str) -> None:
    inputs = some(1)
    config = PrivateConfig.from_dict({"protocol": protocol})
    made, held, ledgers = run(config, FUNCTIONS[name], inputs)
    for got, given in zip(made, inputs, strict=True):
        assert torch.allclose(got, FUNCTIONS[name](given).double(), atol=2e-3)  # type: ignore[arg-type]
    want = {"plain": 1, "recorded": 1, "checked": 1, "repeated": CALLS - 3}
    assert not any(each.refused for each in held.values()), [each.refused for each in held.values()]
    assert [dict(held[party].counts) for party in range(3)] == [want] * 3
    plain = run(PrivateConfig.from_dict({"protocol": protocol, "replay": False}), FUNCTIONS[name], inputs)
    assert ledgers == plain[2], "the same bytes, rounds and multiply-adds under the same names"


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_a_graph_break_that_differs_from_call_to_call(protocol: str) -> None:
    test_graph_breaks.test_a_graph_break_that_differs_from_call_to_call(protocol)


FILES = ("graphs.py", "graph_recorder.py", "recording.py")
"""Of the recorder of graphs."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "same",
    [
        test_programs.test_masks_never_repeat,
        test_programs.test_what_depends_on_values_is_refused,
        test_programs.test_a_program_that_is_wrong_is_found_before_it_is_used,
        test_graph_breaks.test_public_values_that_are_computed_are_refused,
        test_graph_breaks.test_what_has_no_graph_break_or_two_stays_in_python,
        functools.partial(test_failures.an_error_in_any_function, *FILES, every=2),
        pytest.param(
            functools.partial(test_failures.an_error_in_any_function, *FILES, first=1, every=2), marks=pytest.mark.full
        ),
    ],
)
def test_what_holds_of_programs_holds_of_graphs(same: Callable[[], None]) -> None:
    same()


def test_a_program_moves_what_it_receives_itself() -> None:
    """Into memory of its own, so the links leave what comes where it lies."""

    def nowhere() -> str:
        raise RuntimeError("a message that was moved twice")

    mesh = LocalMesh(2)
    live = LiveTransport(PlacedTransport(mesh.transport(1), nowhere), [])
    mesh.transport(0).send(1, "x", torch.arange(3))
    assert torch.equal(live.receive(0, "x", (3,), torch.int64), torch.arange(3))


def test_masks_that_a_gpu_makes_are_those_of_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of party 1 draw in main memory, all others by their devices: also where the upper half of a block's
    number changes."""
    copied: set[int] = set()
    begun, stream, fill = ChaCha.__init__, LiveTransport.stream, LiveTransport.fill

    def begin(each: ChaCha, key: bytes) -> None:
        begun(each, key)
        each._block = (1 << 32) - 1000

    def filled(live: LiveTransport, number: int, out: Any) -> None:
        copied.add(live.transport.me)
        fill(live, number, out)

    def in_main_memory(live: LiveTransport, number: int) -> Prg | None:
        return None if live.transport.me == 1 else stream(live, number)

    monkeypatch.setattr(ChaCha, "__init__", begin)
    monkeypatch.setattr(LiveTransport, "fill", filled)
    monkeypatch.setattr(LiveTransport, "stream", in_main_memory)
    monkeypatch.setattr(prg, "makes_streams", lambda device: True)
    inputs = some(2, (3, 65))
    made, held, _ = run(PrivateConfig(prg="chacha20"), F.gelu, inputs)
    assert all(torch.allclose(got, F.gelu(x).double(), atol=2e-3) for got, x in zip(made, inputs, strict=True))
    assert [held[party].counts["repeated"] for party in range(3)] == [CALLS - 3] * 3
    assert copied == {1}


def repeats(function: Callable[[Fixed, int], Tensor]) -> list[dict[str, dict[str, int]]]:
    """`function` of a share and the number of the call, six times at each party: counts, and why it was refused."""
    found: list[dict[str, dict[str, int]]] = []

    def party(session: Session, transport: Transport) -> None:
        x, programs, calls = Fixed(session, session.protocol.receive_input((2, 8)), FRAC), ProgramCache(), [0]

        def compute(values: Sequence[Fixed]) -> tuple[Sequence[Fixed], tuple[()]]:
            calls[0] += 1
            part = function(values[0], calls[0])
            return [values[0].with_share(Share((part, *values[0].share.parts[1:])))], ()

        want = function(x, 0)
        for _ in range(6):
            made, _ = programs.run(session, "unit", [x], compute)
            if not torch.equal(made[0].share.parts[0], want):
                raise RuntimeError("another result")
        found.append({"counts": dict(programs.counts), "refused": dict(programs.refused)})

    run_session(PrivateConfig(), party, lambda end: end.share(torch.arange(16).view(2, 8) << FRAC))
    return found


def test_memory_that_a_step_fills_begins_anew_and_constants_are_kept() -> None:
    table = torch.arange(8)

    def function(x: Fixed, call: int) -> Tensor:
        part = x.share.parts[0]
        sums = torch.zeros_like(part)
        first = sums[0]
        first += part[0]
        sums.index_add_(0, torch.tensor([1, 1]), part)
        low, high = (table * 2 + 1).split(4)
        return torch.cat([sums[:, :4] * low, sums[:, 4:] * high], 1) + torch.full((2, 8), 3)

    for each in repeats(function):
        assert each == {"counts": {"plain": 1, "recorded": 1, "checked": 1, "repeated": 3}, "refused": {}}


def test_what_comes_from_outside_may_be_changed_in_place() -> None:
    """Also by an operation that did nothing when it was recorded: an input changes below."""
    found: list[list[bool]] = []

    def party(session: Session, transport: Transport) -> None:
        x, programs = session.protocol.receive_input((2, 8)), ProgramCache()

        def compute(values: Sequence[Fixed]) -> tuple[Sequence[Fixed], tuple[()]]:
            first, *others = values[0].share.parts
            first.clamp_(max=3)
            return [values[0].with_share(Share((first * 2, *others)))], ()

        right = []
        for call in range(7):
            given = torch.full((2, 8), call)
            share = Share((given, *(part.clone() for part in x.parts[1:])))
            made, _ = programs.run(session, "unit", [Fixed(session, share, FRAC)], compute)
            right.append(torch.equal(made[0].share.parts[0], torch.full((2, 8), 2 * min(call, 3))))
        found.append([*right, programs.counts["repeated"] == 4])

    run_session(PrivateConfig(), party, lambda end: end.share(torch.arange(16).view(2, 8) << FRAC))
    assert found == [[True] * 8] * 3


def test_results_that_are_constants_belong_to_the_caller() -> None:
    table = torch.full((2, 8), 9)

    def party(session: Session, transport: Transport) -> None:
        x, programs = Fixed(session, session.protocol.receive_input((2, 8)), FRAC), ProgramCache()

        def compute(values: Sequence[Fixed]) -> tuple[Sequence[Fixed], tuple[()]]:
            return [values[0].with_share(Share((table * 1, *values[0].share.parts[1:])))], ()

        for _ in range(6):
            made, _ = programs.run(session, "unit", [x], compute)
            if not torch.equal(made[0].share.parts[0], table):
                raise RuntimeError("a constant that a caller changed")
            if programs.counts["repeated"]:  # before, the check would see it
                made[0].share.parts[0].add_(1)
        if programs.counts["repeated"] != 3:
            raise RuntimeError("nothing was repeated")

    run_session(PrivateConfig(), party, lambda end: end.share(torch.ones(2, 8, dtype=torch.int64)))


def test_what_reaches_beyond_a_step_is_refused() -> None:
    before, kept = [torch.zeros(2, 8, dtype=torch.int64) for _ in range(3)], []

    def writes(x: Fixed, call: int) -> Tensor:
        own = before[x.session.party].copy_(x.share.parts[0])
        return own + 1

    def keeps(x: Fixed, call: int) -> Tensor:
        kept.append(x.share.parts[0] * 3)
        return x.share.parts[0] + 1

    def chooses(x: Fixed, call: int) -> Tensor:
        part = x.share.parts[0]
        return torch.zeros_like(part) if not part[part > part].numel() else part

    for function, reason in (
        (writes, "writes to memory of before"),
        (keeps, "outlives the step"),
        (chooses, "depends on values"),
    ):
        for each in repeats(function):
            assert set(each["counts"]) == {"plain", "recorded"}
            assert [reason in why for why in each["refused"]] == [True], each


def test_a_step_that_is_too_large_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_recorder, "MOST_RECORDED", 1 << 10)
    for each in repeats(lambda x, call: x.share.parts[0].repeat(8, 8)[:2, :8] + 1):
        assert set(each["refused"]) == {"more than 0 MiB in one step"}


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[ProgramCache]:
    """The programs of all parties that compute, in the order in which they begin."""
    found: list[ProgramCache] = []

    def followed(session: Session) -> ProgramCache | None:
        programs = programs_of(session)
        if programs is not None and programs not in found:
            found.append(programs)
        return programs

    for module in (program_cache, modules):
        monkeypatch.setattr(module, "programs_of", followed)
    return found


def small_llama(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=layers, vocab_size=64, intermediate_size=48
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{}, {"weights_at_rest": "seeds", "prg": "chacha20"}], ids=("resident", "seeds"))
def test_a_model_is_repeated_layer_by_layer(settings: dict[str, Any], met: list[ProgramCache]) -> None:
    """A graph reads the weights with which it was captured, so layers that are alike have one each. (Calibrated ones
    differ in their ranges.) Masks that stay seeds are made again in each run.
    """
    model, ids = small_llama(), torch.arange(1, 7)[None]
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **how)
    with patch(model, PrivateConfig(calibrate=False, **settings)) as private:
        assert torch.equal(private.generate(ids, **how), want)
    assert len(met) == 3
    assert all(each.counts["repeated"] > each.counts["recorded"] > 0 and not each.refused for each in met)
    made = sorted(met, key=made_masks)
    most = made_masks(made[2])
    assert [made_masks(each) for each in made] == [0, most // 2, most], "of a product at the helper, and at party 1"
    assert (
        bool(settings)
        == bool(most)
        == (not any(32 in x.shape[1:] for each in graphs_of(made[2]) for x in matrices(each)))
    ), "the helper has no matrix in memory"


def graphs_of(programs: ProgramCache) -> list[Any]:
    """As they were recorded, and bound to other layers."""
    regions = [region for region in programs._regions.values() if region.compiled is not None]
    return [each for region in regions for each in (region.compiled.program, *region.bound.values())]  # type: ignore[union-attr]


def constants(program: Any) -> list[Tensor]:
    """Tensors that a graph takes as they are."""
    nodes = [node for segment in program.segments for node in segment.nodes]
    return [x for node in nodes for x in tensors_of((node.arguments, node.named))]


def made_masks(programs: ProgramCache) -> int:
    """How many masks that are made products take."""
    return sum(isinstance(x, SeededTensor) for each in graphs_of(programs) for x in constants(each))


def read_by(program: Any) -> set[int]:
    """Memories of constants, and keys of masks that are made."""
    found: set[int] = set()
    for x in constants(program):
        made = isinstance(x, SeededTensor)
        found |= {id(piece.key) for piece in x.slices} if made else {x.untyped_storage()._cdata}  # type: ignore[attr-defined]
    return found


def matrices(program: Any) -> list[Tensor]:
    """Constants in memory that are matrices."""
    return [x for x in constants(program) if x.dim() == 2 and not isinstance(x, SeededTensor)]


@pytest.mark.full
@pytest.mark.parametrize("sweep", [graph_recorder.SWEEP, 0])
def test_chunks_of_a_prompt_are_repeated(sweep: int, met: list[ProgramCache], monkeypatch: pytest.MonkeyPatch) -> None:
    """Full ones, whatever the prompt's length; also where memory is freed at once that the step holds no more."""
    monkeypatch.setattr(graph_recorder, "SWEEP", sweep)
    shape = (1, 20, 32)
    model, ids, found = small_llama(), torch.arange(98)[None] % 63 + 1, list[tuple[set[Any], int]]()
    with patch(model, PrivateConfig(calibrate=False, prompt_chunk=20)) as private, torch.no_grad():
        for length in (78, 98):
            made = private(ids[:, :length], use_cache=False).logits
            assert (made - model(ids[:, :length]).logits).abs().max() < 4e-3
            kept = {
                key for key, each in met[0]._regions.items() if each.compiled is not None and key[-1][0][0] == shape
            }  # type: ignore[index]
            found.append((kept, sum(met[0].refused.values())))
    assert met[0].counts["repeated"] > 0
    assert found[0] == found[1], "a second prompt has the same programs"
    assert (len(found[0][0]), found[0][1]) == (3, 0), "layers, the norm after them and the head"


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"weights_at_rest": "seeds", "prg": "chacha20"}], ids=("resident", "seeds"))
def test_layers_share_a_recording_and_its_memory(settings: dict[str, Any], met: list[ProgramCache]) -> None:
    """One is recorded; others are bound to it and checked. All programs begin at the same place of one memory."""
    model, ids = small_llama(layers=5), torch.arange(80)[None] % 63 + 1
    with patch(model, PrivateConfig(calibrate=False, prompt_chunk=20, **settings)) as private, torch.no_grad():
        assert (private(ids, use_cache=False).logits - model(ids).logits).abs().max() < 4e-3
    for each in met:
        regions = [region for region in each._regions.values() if region.compiled and region.place == (0,)]
        (layers,) = [region for region in regions if len(region.checked) == 5]
        assert len(layers.bound) == 4
        recorded = layers.compiled.program  # type: ignore[union-attr]
        assert all(bound.fixed is recorded.fixed for bound in layers.bound.values())  # type: ignore[union-attr]
        for bound in (recorded, *layers.bound.values()):
            own = {id(x) if isinstance(x, StreamKey) else x._cdata for x in bound.weights}  # type: ignore[union-attr]
            assert own & read_by(bound)
            assert not any(own & read_by(other) for other in layers.bound.values() if other is not bound)
        taken = [sum(x.nbytes for x in region.compiled.program.fixed.values()) for region in regions]  # type: ignore[union-attr]
        assert sum(map(len, each._pools[0].blocks)) < 2 * max(taken)


@pytest.mark.full
@pytest.mark.parametrize("apart", [False, True])
def test_parties_of_a_process_compute_layers_together(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that one of them cannot repeat: what it calls there, the others never do."""
    launched: Counter[int] = Counter()
    launch, record = joint.JointProgram.launch, ProgramCache._compiled

    def counted(self: joint.JointProgram, number: int, *_: object) -> bool:
        launched[number] += 1
        return launch(self, number)

    def recorded(self: ProgramCache, recorder: Any, *rest: Any) -> CompiledRegion:
        if apart and recorder.me == 1 and rest[-1] is not None:  # the layers of party 1
            raise UnsupportedOp("injected")
        return record(self, recorder, *rest)

    def taken(message: Any, tag: str, room: Tensor, only_read: bool) -> Tensor:
        found = take(message, tag, room, only_read)
        messages[found.data_ptr() == message.payload.data_ptr()] += 1
        return found

    take, messages = joint._BranchMessage.taken, Counter[bool]()
    monkeypatch.setattr(joint._BranchMessage, "taken", taken)
    monkeypatch.setattr(joint.JointProgram, "launch", counted)
    monkeypatch.setattr(ProgramCache, "_compiled", recorded)
    model, ids = small_llama(), torch.arange(1, 7)[None]
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with patch(model, PrivateConfig(calibrate=False, timeout_s=20.0)) as private:
        assert torch.equal(private.generate(ids, **how), model.generate(ids, **how))
    assert launched[0] > 0
    assert (launched[1] > 0) is not apart, "a second section comes after a layer's attention"
    assert messages[True] > 4 * messages[False], "most are read where they were made"


def test_a_graph_that_takes_in_too_much_is_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_BYTES", 100)
    for each in repeats(lambda x, call: x.share.parts[0] + 1):
        assert each["refused"] == {"a graph that takes in more than 0 MiB": 1}
