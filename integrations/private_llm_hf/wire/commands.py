"""What the client asks of the parties: one class for each command, and the requests that commands hold.

A request (`Call`, or a change of a cache) is the same wherever it goes: to the parties at once, into a preprocessing
plan, to parallel sessions. Commands to the nodes of token sharding are in token_sharding/commands.py.
"""

from dataclasses import field
from typing import Annotated, Any

import torch
from torch import Tensor

from private_llm.errors import DomainError, TransportError
from private_llm.net.ledger import CONTROL
from private_llm.net.roles import endpoint_name
from private_llm.net.transport import CLIENT, Transport
from private_llm_hf.wire.codec import Between, Dims, M, Message, OneOf, ShapeOf, message_of, text_of

OPENED = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
"""Outputs that a client may ask to open, if the architecture returns them."""

PUBLIC = frozenset(
    {"attention_mask", "decoder_attention_mask", "position_ids", "token_type_ids", "use_cache", "logits_to_keep"}
)
"""Public arguments that a client may pass to a party's model."""

Handle = Annotated[int, Between(1, 1 << 53)]  # the number of something that parties keep: a cache, an encoder's output

Count = Annotated[int, Between(0, 1 << 31)]  # how many there are of something, or the place of one

RowIndex = Annotated[Tensor, Dims(1, torch.int64)]  # which rows of a batch

Fact = Tensor | bool | int  # a public argument of a model


class Description(Message):
    """What parties build a model of. class_: of transformers, or `Network`. config: checked in
    party/model_description.py. model: a digest of both. ranges: as `Ranges.to_dict`. folded: norms with layers that
    hold them.
    """

    class_: str
    config: dict[str, object]
    model: str
    ranges: dict[str, dict[str, int]]
    folded: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """As share files hold it."""
        return {
            "class": self.class_, "config": self.config, "model": self.model, "ranges": self.ranges,
            "folded": {norm: list(layers) for norm, layers in self.folded.items()},
        }  # fmt: skip

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "Description":
        """The inverse; share files of before norms were folded say nothing of it."""
        folded = {norm: tuple(layers) for norm, layers in facts.get("folded", {}).items()}
        return cls(facts["class"], facts["config"], facts["model"], facts["ranges"], folded)


# -- requests -------------------------------------------------------------------------------------------------
class Tokens(Message):
    """A secret input that comes as shares of indices into a vocabulary. shape: [rows, length]."""

    name: Annotated[str, OneOf(("input_ids", "decoder_input_ids"))]
    shape: Annotated[tuple[int, ...], ShapeOf(1 << 62)]
    vocabulary: int


class Values(Message):
    """A secret input that comes as shares of real numbers. shape: [rows, ...]."""

    name: Annotated[str, OneOf(("inputs_embeds", "decoder_inputs_embeds", "pixel_values"))]
    shape: Annotated[tuple[int, ...], ShapeOf(1 << 62)]


class Encoded(Message):
    """An encoder's output that the parties keep. rows: which of its rows (None: all, in order)."""

    handle: Handle
    rows: RowIndex | None


class Call(Message):
    """Run the model. cache: to continue or fill. encoded: what a decoder reads. encode_to: run the encoder alone, and
    keep its output under this number. outputs: to open. more: chunks of the same prompt follow.
    """

    public: dict[str, Fact]
    secret: tuple[Tokens | Values, ...]
    cache: Handle | None
    encoded: Encoded | None
    encode_to: Handle | None
    outputs: tuple[str, ...]
    more: bool = False

    @property
    def rows(self) -> int:
        """Of the batch."""
        return self.secret[0].shape[0]


class SelectRows(Message):
    """Continue a cache with these of its rows."""

    handle: Handle
    index: RowIndex

    def __post_init__(self) -> None:
        if self.index.numel() and int(self.index.min()) < 0:
            raise DomainError(f"rows of a cache: got {int(self.index.min())}; want none below 0")


class CropCache(Message):
    """Forget the last `count` positions of a cache."""

    handle: Handle
    count: Count


class ResetCache(Message):
    """Forget all that a cache holds."""

    handle: Handle


class CopyCache(Message):
    """A second cache, called `to`, that starts where the first one is."""

    handle: Handle
    to: Handle


CacheEdit = SelectRows | CropCache | ResetCache | CopyCache
CallOrEdit = Call | CacheEdit

CallPlace = tuple[Count, Count]  # of a preprocessed request: the number of its plan, and its own in it

Slices = tuple[tuple[int, tuple[Count, ...]], ...]  # which rows of hidden states go to which endpoint (split)


# -- commands -------------------------------------------------------------------------------------------------
class Hello(Message):
    """What do you hold? Answered by `StoredFile` or `NodeModel`. model: digest of the wanted one of several."""

    model: str | None = None


class LoadFile(Message):
    """Build the model of the share file that the party holds. Answered by `Loaded`, as all that load."""


class LoadLike(Message):
    """Build the model from the shares of another parallel session of the same party."""

    parallel_session: Annotated[int, Between(0, 255)]


class LoadModel(Message):
    """Build this model from the `Weight`s up to `EndOfWeights`. stop_after: the module where a split ends it."""

    description: Description
    stop_after: str | None


class Weight(Message):
    """A weight follows."""

    name: str
    shape: Annotated[tuple[int, ...], ShapeOf(1 << 62)]


class EndOfWeights(Message):
    """That was the last weight."""


class Forward(Message):
    """Run the model; answered by `Outputs`. free: needed no more. at: place of a preprocessed call. slices: of a split,
    which rows of hidden states go to which endpoint (None: the model runs to its end).
    """

    call: Call
    free: tuple[Handle, ...] = ()
    at: CallPlace | None = None
    slices: Slices | None = None


class ManageCache(Message):
    """Change a cache; no answer. Those of a plan are not sent: the parties know them."""

    edit: CacheEdit


class Preprocess(Message):
    """Run ahead for these requests. Answered by `Prepared`. plan: its number, higher than that of any before."""

    plan: Count
    calls: tuple[CallOrEdit, ...]
    free: tuple[Handle, ...]


class TellCosts(Message):
    """What did you send? Answered by `CostRows`. reset: then count anew."""

    reset: bool


class Stop(Message):
    """The session ends."""


Load = LoadFile | LoadLike | LoadModel
PartyCommand = Hello | Load | Forward | ManageCache | Preprocess | TellCosts


# -- Control messages between client and parties: one frame each, JSON with small public integer tensors --------------
# They carry public facts only (shapes, masks, positions, handles, costs). Their bytes are booked under
# `CONTROL`, apart from the protocol's traffic.
MOST_BYTES = 64 << 20  # bytes of the largest message: a plan of thousands of calls, the costs of thousands of modules


def send_message(transport: Transport, to: int, message: Message) -> None:
    """Send one message. Raises TransportError for one that is too large."""
    raw = text_of(message).encode()
    if len(raw) > MOST_BYTES:
        raise TransportError(f"control message: got {len(raw)} bytes; want at most {MOST_BYTES}")
    with transport.ledger.op(CONTROL):
        transport.send_bytes(to, CONTROL, raw)


def recv_message(transport: Transport, frm: int, kinds: tuple[type[M], ...], most: int = MOST_BYTES) -> M:
    """The next message from `frm`. Raises TransportError unless it is one of these, well-formed and not too long."""
    raw = transport.recv_bytes(frm, CONTROL, most)
    return message_of(raw, kinds, endpoint_name(frm), "command" if frm == CLIENT else "answer")


def recv_weight(transport: Transport) -> Weight | None:
    """What the client says of the weight that it sends next, None if that was the last. Raises as `recv_message`."""
    kinds: tuple[type[Weight | EndOfWeights], ...] = (Weight, EndOfWeights)
    header = recv_message(transport, CLIENT, kinds)
    return header if isinstance(header, Weight) else None
