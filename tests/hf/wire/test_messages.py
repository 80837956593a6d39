"""Every command and every answer: it arrives as it was sent, and altered in any field it does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_llm_hf.token_sharding import commands as node_commands
from private_llm_hf.token_sharding.commands import AttnForward, CompForward, CropTo, LoadNode, NodeCommand
from private_llm_hf.token_sharding.cut import Cut
from private_llm_hf.wire import answers, commands
from private_llm_hf.wire.answers import (
    Alive,
    CostRows,
    Loaded,
    NodeLoaded,
    NodeModel,
    NodeOutput,
    NodeOutputs,
    Output,
    Outputs,
    Prepared,
    StoredFile,
)  # fmt: skip
from private_llm_hf.wire.codec import NAME, Message, _tensor, message_of, text_of
from private_llm_hf.wire.commands import (
    OPENED,
    Call,
    CopyCache,
    CropCache,
    Description,
    Encoded,
    EndOfWeights,
    Forward,
    Hello,
    LoadFile,
    LoadLike,
    LoadModel,
    ManageCache,
    PartyCommand,
    Preprocess,
    ResetCache,
    SelectRows,
    Stop,
    TellCosts,
    Tokens,
    Values,
    Weight,
)  # fmt: skip

from private_llm.errors import DomainError, TransportError
from private_llm.token_sharding import AttentionCall, ForwardStep
from tests.hf.wire.raw import facts_of

MODEL = Description("OPTForCausalLM", {"model_type": "opt", "deep": [1, {"a": None}]}, "digest", {"x": {"output": -3}})
MASK = torch.tensor([[True, False, True], [True, True, True]])
IDS = torch.tensor([[3, 1 << 40], [-1, 0]])
CALL = Call(
    {"attention_mask": MASK, "position_ids": IDS, "use_cache": True, "logits_to_keep": 1},
    (Tokens("input_ids", (2, 5), 128), Values("pixel_values", (2, 3, 16, 16))), 7, Encoded(8, torch.tensor([1, 0])),
    None, OPENED,
)  # fmt: skip
SELECT = SelectRows(7, torch.tensor([2, 0, 0]))
STEP = ForwardStep(4, 2, 1, 2, MASK)
COMMANDS: tuple[Message, ...] = (
    Hello(), Stop(), EndOfWeights(), LoadFile(), LoadLike(2), LoadModel(MODEL, "model.layers.3"),
    LoadModel(MODEL, None), Weight("lm_head.weight", (128, 64)), Weight("scalar", ()),
    Forward(CALL, (1, 2), (3, 0), ((3, (0, 4)), (4, ()))), Forward(dataclasses.replace(CALL, encoded=None, cache=None)),
    Forward(dataclasses.replace(CALL, encoded=Encoded(9, None), encode_to=5)), ManageCache(SELECT),
    ManageCache(CropCache(7, 3)), ManageCache(ResetCache(7)), ManageCache(CopyCache(7, 8)),
    Preprocess(3, (CALL, SELECT, CopyCache(1, 2), ResetCache(1), CropCache(2, 1)), (9,)), TellCosts(True),
)  # fmt: skip
NODE_COMMANDS: tuple[Message, ...] = (
    LoadNode(MODEL, True, Cut("model.layers", 2, 64, True), (AttentionCall(4, 2, 16, 16, 0.25),), ("input_ids",)),
    LoadNode(MODEL, False, None, (AttentionCall(2, 2, 8, 8, 1.0, slopes=(0.5, 0.25), back=3, coarse=True),
                                  AttentionCall(2, 2, 8, 8, 1.0, softcap=30.0, ahead=0)), ()),
    AttnForward(STEP, (1,)), AttnForward(ForwardStep(None, 1, 0, 3), ()), CropTo(7, 12), SELECT, CopyCache(7, 8),
    ResetCache(7), CompForward(STEP, "tokens", 2, IDS, (1, 2), IDS), CompForward(STEP, "states", 2, IDS, (), None),
)  # fmt: skip
ANSWERS: tuple[Message, ...] = (
    Alive(), StoredFile("a", "b"), StoredFile(None, None), NodeModel("a", "b", "c"), NodeModel(None, None, None),
    Loaded({}), Loaded({"x": {"weight": 30}}), NodeLoaded(), Outputs("ModelOutput", ()),
    Outputs("X", (Output("logits", (2, 1, 128), 18), Output("range check", (), 0))),
    NodeOutputs("X", (NodeOutput("logits", (2, 1, 128)),)), Prepared(1 << 40, ("ab", "cd")),
    CostRows(1, (("m", "mul", 255, 80),), (("", "mul", 2),), (("m", 9),), (("m", 0.5), ("n", 1.0)), {"busy": 0.25}),
)  # fmt: skip
SAMPLES = (*COMMANDS, *NODE_COMMANDS, *ANSWERS)
KINDS = tuple(dict.fromkeys(type(sample) for sample in SAMPLES))


def read(facts: object) -> Message:
    return message_of(json.dumps(facts).encode(), KINDS, "the client")


def test_every_class_has_a_sample() -> None:
    """And what a loop takes is what the union of commands lists."""
    modules = (commands, answers, node_commands)
    classes = {
        found for module in modules for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, Message) and found is not Message
    }  # fmt: skip
    inside = {Description, Tokens, Values, Encoded, Call, CropCache, Output, NodeOutput}
    assert classes - inside == set(KINDS)
    assert {*get_args(PartyCommand)} <= {type(sample) for sample in COMMANDS}
    assert {*get_args(NodeCommand)} <= {type(sample) for sample in (*COMMANDS, *NODE_COMMANDS)}
    assert all(dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen for kind in classes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_every_message_arrives_as_it_was_sent(sample: Message) -> None:
    text = text_of(sample)
    found = message_of(text.encode(), KINDS, "the client")
    assert type(found) is type(sample)
    assert text_of(found) == text
    for field in dataclasses.fields(sample):  # type: ignore[arg-type]
        assert type(getattr(found, field.name)) is type(getattr(sample, field.name))


def test_equal_messages_are_equal() -> None:
    """Answers of all parties are compared, requests are compared with planned ones."""
    assert all(message_of(text_of(sample).encode(), KINDS, "x") == sample for sample in ANSWERS)
    mirrored = dataclasses.replace(CALL, public=dict(reversed(CALL.public.items())))
    assert text_of(CALL, ordered=True) == text_of(mirrored, ordered=True)
    assert text_of(CALL, ordered=True) != text_of(dataclasses.replace(CALL, cache=6), ordered=True)


# -- one alteration of one place -----------------------------------------------------------------------------
WRONG: tuple[object, ...] = (
    None, True, -7, 1 << 70, 0.5, "x", [], ["x"], [None], [-1], [1 << 70], {}, {"x": "y"}, {NAME: "Stop"},
    {NAME: "Nothing"}, [[]], [{}], {"__tensor__": []}, {"__tensor__": ["float32", [1], [1]]},
    {"__tensor__": ["int64", [2], [1]]}, {"__tensor__": ["int64", [-1, -1], [1]]},
    {"__tensor__": ["int64", [1], [0.5]]},
    {"__tensor__": ["int64", [1], [1 << 70]]}, {"__tensor__": ["int64", [1], [True]]},
    {"__tensor__": ["bool", [1], [1]]}, {"__tensor__": ["int32", [1], [1 << 40]]},
    {"__tensor__": ["int64", [1] * 9, [1]]}, {"__tensor__": [["int64"], [1], [1]]},
)  # fmt: skip
FREE = {"config"}
"""JSON that somebody else checks."""


def objects(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Every message in a message, with the way to it."""
    if isinstance(value, dict):
        if NAME in value:
            yield path, value
        for key, inner in value.items():
            if key not in FREE:
                yield from objects(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from objects(inner, (*path, place))


def altered(facts: dict[str, Any], path: tuple[str | int, ...], change: dict[str, Any]) -> dict[str, Any]:
    """A copy in which the object at the end of `path` is another one."""
    copy = json.loads(json.dumps(facts))
    if not path:
        return change
    here = copy
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = change
    return copy  # type: ignore[no-any-return]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_field_too_few_or_too_many(sample: Message) -> None:
    facts = facts_of(sample)
    for path, found in objects(facts):
        for name in found:
            less = {key: value for key, value in found.items() if key != name}
            with pytest.raises(TransportError, match="control message from the client"):
                read(altered(facts, path, less))
        for name in ("extra", "", "__class__", "self", "class_"):
            with pytest.raises(TransportError, match="control message from the client"):
                read(altered(facts, path, {**found, name: 1}))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_a_field_of_another_type_or_size(sample: Message) -> None:
    """Whatever stands in a field: it is what its class allows (and then comes back as it was), or refused by name."""
    facts = facts_of(sample)
    for path, found in objects(facts):
        for name in found:
            if name in FREE:
                continue
            said = []
            for wrong in WRONG:
                change = altered(facts, path, {**found, name: wrong})
                try:
                    got = read(change)
                except TransportError as error:
                    said.append(str(error))
                else:
                    assert facts_of(got) == change
            assert all(text.startswith("control message from the client") and len(text) < 600 for text in said)
            assert len(said) >= len(WRONG) - 10, (path, name)


NEVER = {
    int: (True, 0.5, "1", [1], {}), bool: (1, 0, "true", [True]), str: (1, True, ["x"], {}),
    float: (True, "1", [0.5]), list: ({}, "x", 3, True),
}  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_no_type_stands_for_another(sample: Message) -> None:
    """1 is not true, true is not 1, a text is no list."""
    facts = facts_of(sample)
    for path, found in objects(facts):
        for name, value in found.items():
            if name in FREE:
                continue
            for wrong in NEVER.get(type(value), ()):
                with pytest.raises(TransportError):
                    read(altered(facts, path, {**found, name: wrong}))


NINE = {"__tensor__": ["int64", [1] * 9, [1]]}


@pytest.mark.parametrize(
    ("sample", "change", "text"),
    [
        (
            LoadLike(0),
            {"parallel_session": 256},
            "LoadLike.parallel_session: got 256; want a whole number from 0 to 255",
        ),
        (ManageCache(ResetCache(1)), {"edit": {NAME: "ResetCache", "handle": 0}}, "ManageCache.edit.handle: got 0"),
        (ManageCache(ResetCache(1)), {"edit": {NAME: "Call"}}, "want SelectRows or CropCache or ResetCache"),
        (Forward(CALL), {"at": [1]}, "Forward.at: got .*; want nothing or a list of 2"),
        (Forward(CALL), {"at": [1, -1]}, "Forward.at.items: got -1"),
        (StoredFile(None, None), {"model": "a"}, "want both or neither"),
        (NodeModel(None, None, None), {"weights": "a"}, "want all of them or none"),
        (AttnForward(STEP, ()), {"step": {**facts_of(STEP), "new": 1 << 20}}, "want up to"),  # type: ignore[arg-type]
        (AttnForward(STEP, ()), {"step": {**facts_of(STEP), "past": 9}}, "padding: got"),  # type: ignore[arg-type]
        (CompForward(STEP, "tokens", 2, IDS, (), None), {"rows": 3}, "positions: got shape"),
        (CompForward(STEP, "tokens", 2, IDS, (), None), {"source": "x"}, "want one of tokens, values, states"),
        (Prepared(0, ()), {"stored": -1}, "Prepared.stored: got -1"),
        (CostRows(0, (), (), (), (), {}), {"sent": [["a", "b", 256, 1]]}, "CostRows.sent.items.items: got 256"),
        (CostRows(0, (), (), (), (), {}), {"seconds": {"a": 10**400}}, "CostRows.seconds.items: got .* a float holds"),
        (CostRows(0, (), (), (), (), {}), {"seconds": {"a": (1 << 53) + 1}}, "seconds.items: .* a float holds"),
        (Loaded({}), {"ranges": {"a": {"b": 0.5}}}, "Loaded.ranges.items.items: got 0.5"),
        (SELECT, {"index": {"__tensor__": ["int64", [1, 1], [0]]}}, "SelectRows.index: got .*with 1 dimension"),
        (SELECT, {"index": {"__tensor__": ["bool", [1], [True]]}}, "SelectRows.index: got .*a tensor of torch.int64"),
        (LoadModel(MODEL, None), {"description": {**facts_of(MODEL), "config": {"x": float("nan")}}}, "is malformed"),
        (
            Forward(CALL),
            {"call": {**facts_of(CALL), "public": {"use_cache": "x"}}},
            "public.items: got 'x'",
        ),
        (Forward(CALL), {"call": {**facts_of(CALL), "public": {"a": NINE}}}, "Forward.call.public.items: got"),
    ],
)
def test_the_error_says_where_and_what(sample: Message, change: dict[str, Any], text: str) -> None:
    with pytest.raises(TransportError, match=f"control message from the client.*{text}"):
        read({**facts_of(sample), **change})


def test_sizes_that_multiply_are_bounded() -> None:
    with pytest.raises(DomainError, match="want at most"):
        Output("logits", (1 << 20, 1 << 20), 18)
    with pytest.raises(DomainError, match="want each 1 to"):
        LoadNode(MODEL, False, None, (AttentionCall(4, 2, 1 << 30, 16, 0.25),), ())
    with pytest.raises(DomainError, match="want none below 0"):
        SelectRows(1, torch.tensor([0, -1]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 52), 1 << 52) | st.just(1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SAMPLES), st.data())
def test_whatever_stands_in_a_place(sample: Message, data: st.DataObject) -> None:
    """Any JSON in any place, and any cut of the bytes: a message that comes back as it was, or TransportError."""
    facts = facts_of(sample)
    path, found = data.draw(st.sampled_from(list(objects(facts))))
    name = data.draw(st.sampled_from(list(found)))
    raw = json.dumps(altered(facts, path, {**found, name: data.draw(JSON)})).encode()
    for given_raw in (raw, raw[: data.draw(st.integers(0, len(raw)))]):
        try:
            got = message_of(given_raw, KINDS, "the client")
        except TransportError:
            continue
        assert json.loads(text_of(got)) == json.loads(given_raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_whatever_the_bytes(raw: bytes) -> None:
    with pytest.raises(TransportError, match="control message from the client"):
        message_of(raw, KINDS, "the client")


def test_commands_are_no_answers_and_nodes_are_no_parties() -> None:
    for sample, kinds in ((COMMANDS[5], get_args(NodeCommand)), (NODE_COMMANDS[0], get_args(PartyCommand))):
        with pytest.raises(TransportError, match=f"unknown command '{type(sample).__name__}'; want Hello or"):
            message_of(text_of(sample).encode(), kinds, "the client", "command")


@pytest.mark.parametrize("shape", [[2] * 9, [2] * 80_000, [1 << 80], [-1]])
def test_shapes_are_short_before_anybody_multiplies_them(shape: list[int]) -> None:
    raw = json.dumps({"message": "Output", "name": "logits", "shape": shape, "frac": 3})
    text = '{"message": "Outputs", "class": "X", "outputs": [' + raw + "]}"
    with pytest.raises(TransportError, match=r"shape: got .* at most 8 sizes"):
        message_of(text.encode(), (Outputs,), "party 1")


def test_many_brackets_are_refused_before_they_become_objects() -> None:
    with pytest.raises(TransportError, match="more than 4194304 values"):
        message_of(b"[" + b"[]," * 3_000_000 + b"0]", (Outputs,), "party 1")


def test_what_an_endpoint_says_is_shown_legibly() -> None:
    raw = json.dumps({"message": "Output", "name": "\x1b[31m\nlogits", "shape": [1 << 35, 1 << 35], "frac": 3})
    with pytest.raises(TransportError) as caught:
        message_of(('{"message": "Outputs", "class": "X", "outputs": [' + raw + "]}").encode(), (Outputs,), "party 1")
    assert str(caught.value).isprintable()


def test_numbers_beyond_floats_are_refused() -> None:
    with pytest.raises(TransportError, match="malformed"):
        message_of(b'{"message": "Outputs", "class": 1e999}', (Outputs,), "party 1")


def test_a_tensor_without_dimensions_arrives() -> None:
    assert torch.equal(_tensor(json.loads(text_of(torch.tensor(7)))), torch.tensor(7))
