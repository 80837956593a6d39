"""Control messages as JSON objects, for tests that send what no class allows."""

from __future__ import annotations

import json
from typing import Any

from private_llm_hf.wire.codec import Message, text_of

from private_llm.net.ledger import CONTROL
from private_llm.net.transport import Transport


def facts_of(message: Message) -> dict[str, Any]:
    """A message as the JSON object that travels."""
    facts: dict[str, Any] = json.loads(text_of(message))
    return facts


def send_raw(transport: Transport, to: int, facts: object) -> None:
    """Send any JSON in place of a message."""
    transport.send_bytes(to, CONTROL, json.dumps(facts).encode())
