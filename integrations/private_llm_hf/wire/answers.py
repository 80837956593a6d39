"""What parties and nodes answer to the client: one class for each answer."""

import math
from typing import Annotated

from private_llm.errors import DomainError
from private_llm.net.ledger import CONTROL, Ledger
from private_llm_hf.wire.codec import Between, Message, ShapeOf

GUARD = "range check"  # name under which the verdict on the ranges of a call is opened and booked

MOST_OPENED = 1 << 36  # elements of one output that the client makes room for

Number = Annotated[int, Between(0, 1 << 62)]


class Alive(Message):
    """Still computing; the answer comes later."""


class StoredFile(Message):
    """The share file that a party holds: digest of its model, number of its sharing; None if it holds none."""

    model: str | None
    sharing: str | None

    def __post_init__(self) -> None:
        if (self.model is None) != (self.sharing is None):
            raise DomainError(f"a share file: got model {self.model} and sharing {self.sharing}; want both or neither")


class NodeModel(Message):
    """The checkpoint that a CompNode holds: digests of model and weights, and its class; None if it holds none."""

    model: str | None
    class_: str | None
    weights: str | None

    def __post_init__(self) -> None:
        if len({fact is None for fact in (self.model, self.class_, self.weights)}) != 1:
            raise DomainError("the model of a node: got a part of model, class and weights; want all of them or none")


class Loaded(Message):
    """The model is there. ranges: with which a party works."""

    ranges: dict[str, dict[str, int]]


class NodeLoaded(Message):
    """A node is ready."""


class Output(Message):
    """An output that is opened next. frac: its fractional bits."""

    name: str
    shape: Annotated[tuple[int, ...], ShapeOf(MOST_OPENED)]
    frac: Annotated[int, Between(0, 63)]

    def __post_init__(self) -> None:
        if math.prod(self.shape) > MOST_OPENED:
            raise DomainError(f"output '{self.name}': got shape {self.shape}; want at most {MOST_OPENED} elements")


class Outputs(Message):
    """A call is done. class_: of the model's output."""

    class_: str
    outputs: tuple[Output, ...]


class NodeOutput(Message):
    """An output that a CompNode sends next."""

    name: str
    shape: Annotated[tuple[int, ...], ShapeOf(MOST_OPENED)]


class NodeOutputs(Message):
    """A CompNode's part of a forward is done; client/nodes.py checks it. class_: of the model's output."""

    class_: str
    outputs: tuple[NodeOutput, ...]


class Prepared(Message):
    """A preprocessing plan was prepared. stored: bytes. digests: digests (hex) of what a quad's helper opens later.
    ask_all: planned requests go to the helping party, too, which has nothing to do for them but must hear of them.
    """

    stored: Number
    digests: tuple[str, ...]
    ask_all: bool = False


class CostRows(Message):
    """A ledger without control messages: what went to whom, rounds, multiply-adds and seconds, by module."""

    party: Annotated[int, Between(0, 255)]
    sent: tuple[tuple[str, str, Annotated[int, Between(0, 255)], Number], ...]
    rounds: tuple[tuple[str, str, Number], ...]
    macs: tuple[tuple[str, Number], ...]
    spent: tuple[tuple[str, float], ...]
    seconds: dict[str, float]

    @classmethod
    def of(cls, ledger: Ledger) -> "CostRows":
        """The rows of a ledger, without control traffic."""
        return cls(
            ledger.party,
            tuple((scope, op, to, n) for (scope, op, to), n in ledger.sent.items() if op != CONTROL),
            tuple((scope, op, n) for (scope, op), n in ledger.rounds.items() if op != CONTROL),
            tuple(ledger.macs.items()), tuple(ledger.spent.items()), dict(ledger.seconds),
        )  # fmt: skip
