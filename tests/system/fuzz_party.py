"""What `fuzz.py` does to parties that serve one client at a time: whatever a client that was let in can say.

A case connects as a client, goes some way (connected, loaded, behind a call, in the middle of one), and then says what
no honest client says: changed commands, inputs of other shapes or of noise, changed frames, half frames. It leaves in
order, without a word, or by resetting its connections. Every so many cases an honest client must get the right text.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzz_mutators import changed, edited, edits, encoded
from fuzz_wire import Failure, facts
from private_llm_hf import AutoPrivateModelForCausalLM
from private_llm_hf.client.launch import start_parties
from private_llm_hf.client.parties import Parties
from private_llm_hf.wire import commands
from private_llm_hf.wire.answers import Loaded
from private_llm_hf.wire.codec import text_of
from private_llm_hf.wire.commands import OPENED, Call, Forward, Tokens
from served_parties import VOCABULARY, Served, served

from private_llm.errors import PrivateLLMError
from private_llm.net import wire
from private_llm.net.ledger import CONTROL
from private_llm.net.wire import FrameKind
from private_llm.ring.dpf import key_words

STATES = ("connected", "loaded", "called", "asked")
ACTS = ("command", "command", "call", "noise", "frame", "half", "note", "flood")
ENDS = ("close", "abort", "reset", "silence")
_EVERY = 20
"""Cases between two honest clients."""
IDS = torch.tensor([[5, 6, 7, 8]])


class Party:
    """Parties as processes, and clients that misbehave."""

    def __init__(self) -> None:
        self._stack, self._cases = contextlib.ExitStack(), 0
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-party-"))
        self._served: Served = self._stack.enter_context(served(Path(folder), timeout_s=30.0))
        self._want = self._served.plain.generate(IDS, max_new_tokens=3, do_sample=False)
        self.processes = self._served.processes
        self._be_honest()

    def make(self, random: Random) -> dict[str, Any]:
        """How far a client goes, what it then says to whom, and how it leaves."""
        acts = []
        for _ in range(random.randrange(1, 4)):
            kind = random.choice(ACTS)
            value: object = facts(random)
            if kind == "call":
                call = Call({}, (Tokens("input_ids", (1, 4), VOCABULARY),), 1, None, None, OPENED)
                value = json.loads(text_of(Forward(call)))
            raw = encoded(random, changed(random, value)) if kind in ("command", "call") else random.randbytes(64)
            count = random.choice((0, 1, 4, 5, 1000))
            parties = random.sample(range(3), random.choice((1, 2, 3, 3)))
            acts.append({"kind": kind, "raw": raw.hex(), "count": count, "edits": edits(random), "to": parties})
        return {"state": random.choice(STATES), "acts": acts, "end": random.choice(ENDS), "pause": random.random() / 50}

    def run(self, case: dict[str, Any]) -> None:
        """The case, and now and then an honest client."""
        with contextlib.suppress(PrivateLLMError, OSError):
            self._misbehave(case)
        self._cases += 1
        if self._cases % _EVERY == 0:
            self._be_honest()

    def _misbehave(self, case: dict[str, Any]) -> None:
        parties = start_parties(self._served.config)
        try:
            self._go(parties, case["state"])
            for act in case["acts"]:
                for party in act["to"]:
                    self._act(parties, act, party)
            time.sleep(case["pause"])
            self._part(parties, case["end"])
        finally:
            parties.transport.close()

    def _go(self, parties: Parties, state: str) -> None:
        if state == "connected":
            return
        parties.stored_model()
        parties.tell(commands.LoadFile())
        parties.answers(Loaded)
        call = Call({}, (Tokens("input_ids", (1, 4), VOCABULARY),), 1, None, None, OPENED)
        if state == "called":
            parties.forward(call, [(IDS.reshape(-1), VOCABULARY)])
        elif state == "asked":
            parties.tell(Forward(call))

    def _act(self, parties: Parties, act: dict[str, Any], party: int) -> None:
        transport, kind, raw = parties.transport, act["kind"], bytes.fromhex(act["raw"])
        link: Any = transport._out[party]  # type: ignore[attr-defined]
        if kind in ("command", "call"):
            transport.send_bytes(party, CONTROL, raw or b" ")
        elif kind == "noise":
            transport.send(party, "index", torch.zeros(2, act["count"], key_words(VOCABULARY), dtype=torch.int64))
        elif kind == "note":
            link.note(FrameKind.WAITING, raw[: act["count"]])
        elif kind == "flood":
            for _ in range(200):
                transport.send_bytes(party, CONTROL, text_of(commands.TellCosts(False)).encode())
        else:
            head = wire.encode(FrameKind.DATA, 255, link._session, link._sequence, CONTROL, torch.uint8, len(raw)) + raw
            head = head[: wire.HEADER_BYTES + act["count"]] if kind == "half" else edited(head, act["edits"])
            with contextlib.suppress(BlockingIOError):
                link._sock.send(head)

    def _part(self, parties: Parties, end: str) -> None:
        links = [*parties.transport._out.values(), *parties.transport._in.values()]  # type: ignore[attr-defined]
        if end == "abort":
            parties.transport.abort("the client stopped: \n forged \x1b[2J")
        elif end == "reset":
            for link in links:
                link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                link._sock.close()
        elif end == "silence":
            time.sleep(0.2)

    def _be_honest(self) -> None:
        with AutoPrivateModelForCausalLM.from_pretrained(self._served.source, self._served.config) as model:
            got = model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
        if not torch.equal(got, self._want):
            raise Failure(f"an honest client got {got.tolist()}; want {self._want.tolist()}")

    def close(self) -> None:
        """End the parties. Raises Failure if one has ended before, or has a broken line in its log."""
        said = self._served.log.read_text()
        self._stack.close()
        if "forged" in said and any(line.lstrip().startswith("forged") for line in said.splitlines()):
            raise Failure("a client has forged a line of a log")
