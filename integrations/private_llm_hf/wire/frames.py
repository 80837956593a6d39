"""Control messages between client and parties: one frame each, JSON with small public integer tensors.

They carry public facts only (shapes, masks, positions, handles, costs). Their bytes are booked under
`CONTROL`, apart from the protocol's traffic.
"""

from __future__ import annotations

from private_llm.errors import TransportError
from private_llm.net.ledger import CONTROL
from private_llm.net.transport import CLIENT, Transport, endpoint_name
from private_llm_hf.wire.codec import M, Message, message_of, text_of
from private_llm_hf.wire.commands import EndOfWeights, Weight

MOST_BYTES = 64 << 20
"""Bytes of the largest message: a plan of thousands of calls, the costs of thousands of modules."""


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
