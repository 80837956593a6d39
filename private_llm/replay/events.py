"""What a recorded step consists of, on whatever device it is repeated: operations, messages, masks and graph breaks.

A `PlaceT` is how a program names a tensor that changes from run to run: `program.Operand` on a CPU, `Slot` on a GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

PlaceT = TypeVar("PlaceT")


@dataclass(frozen=True)
class Slot:
    """A tensor of a GPU's step that is another one, or has other values, in each run."""

    number: int


@dataclass(frozen=True, repr=False)  # constants may be shares of weights
class TorchCall(Generic[PlaceT]):
    """An operation of PyTorch or a kernel that is called again; tensors that change are places, others are constants.

    made: where its results go; none for what only writes to its arguments. computes: whether a GPU has something to do:
    not for views, and for memory that is only taken. written: arguments that a GPU's call writes to.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    made: tuple[PlaceT, ...]
    computes: bool = True
    written: tuple[PlaceT, ...] = ()


GraphNode = TorchCall[Slot]


@dataclass(frozen=True)
class Send(Generic[PlaceT]):
    """A message."""

    to: int
    tag: str
    payload: PlaceT


@dataclass(frozen=True)
class Receive(Generic[PlaceT]):
    """A message that is awaited."""

    frm: int
    tag: str
    payload: PlaceT


@dataclass(frozen=True)
class BreakEvent(Generic[PlaceT]):
    """What Python computes in the midst (`private_llm.replay.graph_break`), of `inputs`: `outputs`."""

    inputs: tuple[PlaceT, ...]
    outputs: tuple[PlaceT, ...]


@dataclass(frozen=True)
class Masks(Generic[PlaceT]):
    """Masks of one stream, each in whole blocks of so many bytes, that are drawn after so many graph breaks."""

    stream: int
    block: int
    after_break: int
    places: tuple[PlaceT, ...]


Inner = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # computes a program's graph break
NO_BREAK = "a program with a graph break was run without one"


def whole_blocks(block: int, size: int) -> int:
    """Bytes that a draw of `size` takes of a stream."""
    return -(-size // block) * block


def leaves(arguments: Any, *kinds: type) -> Iterator[Any]:  # noqa: ANN401 - whatever PyTorch takes
    """What of these kinds is among an operation's arguments, which may be lists and mappings of them."""
    if isinstance(arguments, kinds):
        yield arguments
    elif isinstance(arguments, list | tuple | Mapping):
        for each in arguments.values() if isinstance(arguments, Mapping) else arguments:
            yield from leaves(each, *kinds)


def mapped(arguments: Any, kind: type, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - as above
    """An operation's arguments, with `change` of each that is of this kind."""
    if isinstance(arguments, kind):
        return change(arguments)
    if isinstance(arguments, list | tuple):
        return type(arguments)([mapped(each, kind, change) for each in arguments])
    if isinstance(arguments, Mapping):
        return {key: mapped(each, kind, change) for key, each in arguments.items()}
    return arguments


def tensors_of(arguments: Any) -> Iterator[Tensor]:  # noqa: ANN401 - as above
    """The tensors among an operation's arguments."""
    return leaves(arguments, Tensor)


def slots_of(arguments: Any) -> Iterator[Slot]:  # noqa: ANN401 - as above
    """The slots among an operation's arguments."""
    return leaves(arguments, Slot)
