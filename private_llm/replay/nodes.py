"""What a recorded step of a GPU consists of: operations of PyTorch and kernels on slots, and messages between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from private_llm.replay.program import BreakEvent, Receive, Send


@dataclass(frozen=True)
class Slot:
    """A tensor of a step that is another one, or has other values, in each run."""

    number: int


@dataclass(frozen=True, repr=False)  # constants may be shares of weights
class GraphNode:
    """An operation of PyTorch or a kernel; tensors that change are slots, others are constants. made: its results.

    computes: whether a GPU has something to do: not for views, and for memory that is only taken. written: arguments
    that it writes to.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    made: tuple[Slot, ...]
    computes: bool = True
    written: tuple[Slot, ...] = ()


Stop = Send[Slot] | Receive[Slot] | BreakEvent[Slot]
Event = GraphNode | Stop


@dataclass(frozen=True)
class Segment:
    """Nodes, and what comes then; None: the end. dropped: slots that nobody needs after a node."""

    nodes: tuple[GraphNode, ...]
    stop: Stop | None
    dropped: tuple[tuple[Slot, ...], ...] = ()

    def stopped(self) -> tuple[Slot, ...]:
        """Slots that what comes then reads or writes."""
        match self.stop:
            case Send(_, _, payload) | Receive(_, _, payload):
                return (payload,)
            case BreakEvent(inputs, results):
                return *inputs, *results
        return ()

    @property
    def computes(self) -> bool:
        """Whether a GPU has something to do: a graph of nothing is refused."""
        return any(node.computes for node in self.nodes)


def segments_of(events: Sequence[Event]) -> list[Segment]:
    """Nodes up to each message or graph break, and the rest."""
    found: list[Segment] = []
    nodes: list[GraphNode] = []
    for event in events:
        if isinstance(event, GraphNode):
            nodes.append(event)
        else:
            found.append(Segment(tuple(nodes), event))
            nodes = []
    return [*found, Segment(tuple(nodes), None)]


def slots_of(arguments: object) -> Sequence[Slot]:
    """Those among arguments of an operation."""
    if isinstance(arguments, Slot):
        return [arguments]
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    if isinstance(arguments, list | tuple):
        return [slot for each in arguments for slot in slots_of(each)]
    return []


def compute(node: GraphNode, found: dict[Slot, Tensor]) -> None:
    """Run a node, and note what it makes."""
    made = node.function(*filled(node.arguments, found), **filled(node.named, found))
    results = made if isinstance(made, list | tuple) else (made,)
    for slot, x in zip(node.made, results if node.made else (), strict=True):
        found[slot] = x


def compute_segment(segment: Segment, found: dict[Slot, Tensor]) -> None:
    """Run the nodes of a segment, and let go of what no later one needs."""
    for node, dropped in zip(segment.nodes, segment.dropped, strict=True):
        compute(node, found)
        for slot in dropped:
            found.pop(slot, None)


def filled(arguments: Any, found: Mapping[Slot, Tensor]) -> Any:  # noqa: ANN401 - whatever PyTorch takes
    """Arguments with tensors for slots."""
    if isinstance(arguments, Slot):
        return found[arguments]
    if isinstance(arguments, list | tuple):
        return type(arguments)([filled(each, found) for each in arguments])
    if isinstance(arguments, Mapping):
        return {key: filled(each, found) for key, each in arguments.items()}
    return arguments
