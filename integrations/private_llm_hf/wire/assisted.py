"""What a client asks of the servers of protocol "assisted", which multiply by public weights.

A product takes one frame of bytes (`REQUEST`): the number of the weight and how many rows, and after them the masked
rows, packed, or the label of their mask. A frame of one byte says that a command follows.
"""

import struct
from typing import Annotated

from private_llm.kernels.ops import narrow_length
from private_llm_hf.wire.codec import Between, Matching, Message
from private_llm_hf.wire.commands import TellCosts

LONGEST_LABEL = 256
"""Characters of the label of a mask."""
MOST_ELEMENTS = 1 << 25
"""Of `elements` of one product: a server needs some 48 bytes for each."""


def elements(rows: int, inputs: int, outputs: int) -> int:
    """Elements of the inputs, as a server holds them, or of the outputs of a product, whichever are more."""
    return rows * max(narrow_length(inputs), outputs)


Side = Annotated[int, Between(1, 1 << 22)]
"""Inputs or outputs of a weight."""

ShortText = Annotated[str, Matching(r"(?s:[\x00-\x7f]{0,4096})", "at most 4096 ASCII characters")]
Digest = Annotated[str, Matching("[0-9a-f]{64}", "a SHA-256 digest")]
BlockName = Annotated[str, Matching("[0-9a-f]{32}", "32 digits, 0-9 a-f")]


class MaskKey(Message):
    """Draw masks from the key that follows, from now on. No answer. Who gets none multiplies masked rows."""


class BeginBlock(Message):
    """Rows come now that are masked by this block of corrections. Answered by `BlockBegun`."""

    block: BlockName


class BlockBegun(Message):
    """first: whether this server hears of that block for the first time."""

    first: bool


class LoadLines(Message):
    """Hold this weight [outputs, inputs], int16 (int8 if `weight_bits` is 8), under the next number from 0; its bytes
    follow. No answer.

    name: of the layers that it belongs to, for accounts of costs.
    """

    name: ShortText
    outputs: Side
    inputs: Side


class TellWeights(Message):
    """Which weights do you hold? Answered by `WeightsHeld`."""


class UseLines(Message):
    """Use the weight with this digest, of a server's own, under the next number from 0. No answer."""

    name: ShortText
    digest: Digest


class WeightsHeld(Message):
    """The weights of the checkpoint that a server read itself: which one it is (None: it read none), and digests.

    shapes: outputs and inputs of them, each pair once, for a client to look at before it reads its own. They are the
    same however files hold weights (shards, dtype, GGUF), and who has none of a shape lacks whatever weight of that
    shape is wanted. elements: of a product, as `elements` counts them, at most.
    """

    source: ShortText | None
    digests: tuple[Digest, ...]
    shapes: tuple[tuple[Annotated[int, Between(1, 1 << 40)], Side], ...]
    elements: Annotated[int, Between(1, MOST_ELEMENTS)]


ServerCommand = MaskKey | BeginBlock | LoadLines | TellWeights | UseLines | TellCosts

REQUEST, COMMAND = "request", b"\0"
"""The tag of frames that ask for products, and what such a frame holds before a command."""
HEADER = struct.Struct("<II")
"""Weight and rows of a product."""
