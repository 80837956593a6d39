"""What a client asks of the servers of protocol "assisted", which multiply by public weights."""

from __future__ import annotations

from typing import Annotated

from private_llm_hf.wire.codec import Between, Message, Unfit
from private_llm_hf.wire.commands import Count, TellCosts

_LONGEST = 1 << 12
MOST_ELEMENTS = 1 << 27
"""Elements of the inputs, or of the outputs, of one product."""


def _short(value: str) -> None:
    if len(value) > _LONGEST or not value.isascii():
        raise Unfit(value, f"at most {_LONGEST} ASCII characters")


Side = Annotated[int, Between(1, 1 << 22)]
"""Inputs or outputs of a weight."""

ShortText = Annotated[str, _short]


class LoadLines(Message):
    """Hold this weight, int16 [outputs, inputs], under the next number from 0; its bytes follow. No answer.

    name: of the layers that it belongs to, for accounts of costs.
    """

    name: ShortText
    outputs: Side
    inputs: Side


class Multiply(Message):
    """Multiply masked rows that follow, or the mask of this label, by a weight. Answered by the product, packed."""

    weight: Count
    rows: Annotated[int, Between(1, 1 << 22)]
    label: ShortText | None


ServerCommand = LoadLines | Multiply | TellCosts
