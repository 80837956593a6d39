"""Control messages between client and parties: JSON with small public integer tensors, one frame each, never pickle.

They carry public facts only (shapes, masks, positions, handles, costs). Their bytes are booked under
`CONTROL`, apart from the protocol's traffic.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import TransportError
from private_llm.net.ledger import CONTROL
from private_llm.net.transport import Transport, endpoint_name

OPENED = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")
"""Outputs that a client may ask to open, if the architecture returns them."""

GUARD = "range check"
"""Name under which the verdict on the ranges of a call is opened and booked."""

PUBLIC = frozenset(
    {"attention_mask", "decoder_attention_mask", "position_ids", "token_type_ids", "use_cache", "logits_to_keep"}
)
"""Public arguments that a client may pass to a party's model."""

_MAX_BYTES = 64 << 20
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
_TENSOR = "__tensor__"

Message = dict[str, Any]


def send_message(transport: Transport, to: int, message: Message) -> None:
    """Send one message."""
    raw = json.dumps(message, default=packed, allow_nan=False, separators=(",", ":")).encode()
    if len(raw) > _MAX_BYTES:
        raise TransportError(f"control message: got {len(raw)} bytes; want at most {_MAX_BYTES}")
    with transport.ledger.op(CONTROL):
        transport.send_bytes(to, CONTROL, raw)


def recv_message(transport: Transport, frm: int) -> Message:
    """The next message from `frm`. Raises TransportError if it is malformed."""
    raw = transport.recv_bytes(frm, CONTROL, _MAX_BYTES)
    try:
        message = json.loads(raw, object_hook=_unpack)
    except (ValueError, TypeError, KeyError) as error:
        raise TransportError(
            f"control message from {endpoint_name(frm)} is malformed: {type(error).__name__}"
        ) from None
    if not isinstance(message, dict):
        raise TransportError(f"control message from {endpoint_name(frm)}: got {type(message).__name__}; want an object")
    return message


def packed(value: object) -> object:
    """How JSON carries a public integer tensor. Raises TypeError for anything else."""
    if not isinstance(value, Tensor):
        raise TypeError(f"a control message holds JSON and integer tensors, not {type(value).__name__}")
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"a control message holds integer tensors, not {name}")
    return {_TENSOR: [name, list(value.shape), value.reshape(-1).tolist()]}


def _unpack(value: dict[str, Any]) -> object:
    if _TENSOR not in value:
        return value
    name, shape, data = value[_TENSOR]
    if math.prod(shape) != len(data):
        raise ValueError("tensor length")
    return torch.tensor(data, dtype=_DTYPES[name]).view(*shape)
