"""Nodes and clients that talk nonsense: the other side stops, with a name; it neither crashes, hangs nor allocates."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.client.nodes import Due, check_equal, in_order, read_answer
from private_llm_hf.party.node import CompNode
from private_llm_hf.wire.answers import NodeOutput, NodeOutputs
from private_llm_hf.wire.codec import Message, message_of

from private_llm.errors import PartyFailed, PrivateLLMError, TransportError
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.wire.raw import facts_of, send_raw

PLAN = ShardingPlan(3, 3, 1, accept_weak_plan=True)  # for models with grouped queries
DUE = Due(2, (3, 4, 5), (5,))

BAD = [
    ({}, "missing field"),
    ({"class": 3, "outputs": [["logits", [2, 1, 9]]]}, "want a text"),
    ({"class": "X", "outputs": {}}, "want a list"),
    ({"class": "X", "outputs": []}, "without outputs"),
    ({"class": "X", "outputs": ["logits"]}, "want a NodeOutput"),
    ({"class": "X", "outputs": [["secret", [2, 1, 9]]]}, "answered with output 'secret'"),
    ({"class": "X", "outputs": [[["logits"], [2, 1, 9]]]}, "want a text"),
    ({"class": "X", "outputs": [["logits", [2, 1, 9]], ["logits", [2, 1, 9]]]}, "at most once"),
    ({"class": "X", "outputs": [["logits", 9]]}, "want a list"),
    ({"class": "X", "outputs": [["logits", [2, 1, "9"]]]}, "want a whole number"),
    ({"class": "X", "outputs": [["logits", [2, 1, True]]]}, "want a whole number"),
    ({"class": "X", "outputs": [["logits", [2, 1, -9]]]}, "want at most 8 sizes"),
    ({"class": "X", "outputs": [["logits", [2, 1, 1 << 40]]]}, "want at most 8 sizes"),
    ({"class": "X", "outputs": [["logits", [2, 3, 9]]]}, r"starts with \[2, 1\]"),
    ({"class": "X", "outputs": [["logits", [3, 9]]]}, r"starts with \[2\]"),
    ({"class": "X", "outputs": [["last_hidden_state", [2, 1, 9]]]}, r"starts with \[2, 3\]"),
    ({"class": "X", "outputs": [["last_hidden_state", [2, 3, 9, 9]]]}, "starts with"),
    ({"class": "X", "outputs": [["pooler_output", []]]}, "starts with"),
]


NAMES = ("message", "name", "shape")


@pytest.mark.parametrize(("message", "complaint"), BAD)
def test_announcements_are_checked(message: dict[str, Any], complaint: str) -> None:
    listed = message.get("outputs")
    if isinstance(listed, list):
        listed = [
            dict(zip(NAMES, ["NodeOutput", *each], strict=True)) if type(each) is list else each for each in listed
        ]
        message = {**message, "outputs": listed}
    raw = json.dumps({"message": "NodeOutputs", **message}).encode()
    with pytest.raises(TransportError, match=f"CompNode 1.*{complaint}"):
        read_answer(message_of(raw, (NodeOutputs,), "CompNode 1"), DUE, "CompNode 1")


def test_nodes_must_agree() -> None:
    shapes = [("logits", (2, 1, 9)), ("logits", (2, 1, 8)), ("logits", (2, 9)), ("pooler_output", (2, 9))]
    first, *others = (read_answer(NodeOutputs("X", (NodeOutput(*output),)), DUE, "a node") for output in shapes)
    assert check_equal({"a": first, "b": first}) == "X"
    for other in (*others, read_answer(NodeOutputs("Y", (NodeOutput(*shapes[0]),)), DUE, "a node")):
        with pytest.raises(TransportError, match="a and b gave different kinds"):
            check_equal({"a": first, "b": other})


def test_rows_come_in_order() -> None:
    states = torch.arange(10.0).view(1, 5, 2)
    dues = [Due(1, rows, tuple(p for p in rows if p >= 3)) for rows in ((0, 3), (1, 4), (2,))]
    found = [
        (due, {"last_hidden_state": states[:, list(due.rows)], "logits": states[:, list(due.wanted)]}) for due in dues
    ]
    merged = in_order(found)
    assert torch.equal(merged["last_hidden_state"], states)
    assert torch.equal(merged["logits"], states[:, 3:])


Outputs = dict[str, torch.Tensor]
LIES: dict[str, Callable[[Outputs], Outputs]] = {
    "a row too many": lambda out: {name: value.repeat(1, 2, 1) for name, value in out.items()},
    "other names": lambda out: {"pooler_output": out["logits"][:, 0]},
    "nothing": lambda out: {},
    "a text too many": lambda out: {name: value.repeat(2, 1, 1) for name, value in out.items()},
    "other numbers of classes": lambda out: {name: value[..., 1:] for name, value in out.items()},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_comp_node_that_lies_ends_the_session(lie: Callable[[Outputs], Outputs], monkeypatch: Any) -> None:
    honest = CompNode.run

    def run(self: CompNode, *arguments: Any) -> tuple[str, Outputs]:
        kind, outputs = honest(self, *arguments)
        return kind, lie(outputs) if self._exchange._transport.me == 1 else outputs

    with torch.no_grad(), patch(tiny.build("llama"), settings()) as private:
        monkeypatch.setattr(CompNode, "run", run)
        with pytest.raises(PrivateLLMError, match="CompNode 1"):
            private(ids())
        with pytest.raises(PartyFailed, match="session is over"):
            private(ids())


@pytest.mark.parametrize("size", [-1, 1], ids=["short", "long"])
def test_an_attn_node_whose_message_has_another_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CompNode that notices says so."""
    from private_llm.net.local import LocalTransport

    honest = LocalTransport.send

    def send(self: LocalTransport, to: int, tag: str, payload: torch.Tensor) -> None:
        if self.me == PLAN.attn_endpoint(0, 1) and tag == "partial":
            flat = payload.view(-1)
            payload = torch.cat([flat, flat.new_zeros(8)]) if size > 0 else flat[:-8]
        honest(self, to, tag, payload)

    with torch.no_grad(), patch(tiny.build("llama"), settings()) as private:
        monkeypatch.setattr(LocalTransport, "send", send)
        with pytest.raises(PrivateLLMError, match=r"CompNode \d.*AttnNode \(0, 1\)"):
            private(ids())


@pytest.mark.parametrize(
    "change",
    [
        {"step.new": 10**12}, {"step": "x"}, {"step.new": None}, {"step.handle": []}, {"step.padding": 3},
        {"positions": None}, {"wanted": [10**9]}, {"message": "sing"}, {"message": None}, {"free": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_client_that_sends_nonsense_ends_its_session(change: dict[str, object], monkeypatch: Any) -> None:
    """Nodes stop with an error that names what failed; none hangs or allocates."""
    from private_llm_hf.client import nodes as cascade_client

    ((path, value),) = change.items()
    *outer, last = path.split(".")
    told = []

    def send_message(transport: Any, to: int, message: Message) -> None:
        facts = facts_of(message)
        place = facts[outer[0]] if outer else facts
        if last in place:
            place[last] = value
            told.append(to)
        send_raw(transport, to, facts)

    with torch.no_grad(), patch(tiny.build("llama"), settings()) as private:
        monkeypatch.setattr(cascade_client, "send_message", send_message)
        with pytest.raises(PrivateLLMError, match="Node"):
            private(ids())
    assert told


def settings() -> PrivateConfig:
    return PrivateConfig(protocol="cascade", plan=PLAN, timeout_s=20)


def ids() -> torch.Tensor:
    return torch.randint(3, 100, (2, 17), generator=torch.Generator().manual_seed(1))
