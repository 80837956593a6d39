"""What the client asks of the nodes of a sharding plan, beside what it asks of parties, too (wire/commands.py)."""

from typing import Annotated

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.token_sharding import AttentionCall, ForwardStep
from private_llm_hf.token_sharding.cut import Cut
from private_llm_hf.wire.codec import Dims, Message, OneOf
from private_llm_hf.wire.commands import CopyCache, Count, Description, Handle, Hello, ResetCache, SelectRows, TellCosts

ByRow = Annotated[Tensor, Dims(2, torch.int64)]  # a number for each of a node's rows, [batch, rows]


class LoadNode(Message):
    """Build the model, or its attention; answered by `NodeLoaded`. disk: a CompNode has read it; else weights follow as
    after `LoadModel`. cut: of a split. calls: of attention. accepts: arguments of forwards.
    """

    description: Description
    disk: bool
    cut: Cut | None
    calls: tuple[AttentionCall, ...]
    accepts: tuple[str, ...]


class AttnForward(Message):
    """An AttnNode's part of a forward; no answer. free: caches that nobody needs any more."""

    step: ForwardStep
    free: tuple[Handle, ...]


class CompForward(Message):
    """Run a CompNode's rows; answered by `NodeOutputs`. source: "tokens", "values" of the client, or "states" of a
    split's parties. positions, token_types: [batch, rows]. wanted: positions whose logits come back.
    """

    step: ForwardStep
    source: Annotated[str, OneOf(("tokens", "values", "states"))]
    rows: Count
    positions: ByRow
    wanted: tuple[Count, ...]
    token_types: ByRow | None

    def __post_init__(self) -> None:
        want = (self.step.batch, self.rows)
        for name, value in (("positions", self.positions), ("token_types", self.token_types)):
            if value is not None and tuple(value.shape) != want:
                raise DomainError(f"{name}: got shape {tuple(value.shape)}; want {want}")


class CropTo(Message):
    """Forget the positions of a cache from `length` on."""

    handle: Handle
    length: Count


NodeEdit = SelectRows | CropTo | ResetCache | CopyCache
NodeCommand = Hello | LoadNode | AttnForward | CompForward | NodeEdit | TellCosts
