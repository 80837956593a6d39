"""What `fuzz.py` does to party services: clients with a certificate that say what no honest client says.

A case connects as a user, goes some way (connections alone, keys agreed, a model, a call whose cache is held, a call
whose inputs never come or come to some parties), and then sends changed commands, calls of any shape, handles of caches
that are others', other calls to other parties, inputs far out of range, tensors of other types and sizes, changed and
half frames, or loses the connection to one party. It leaves in order, without a word, or by resetting its connections.
All the while honest users generate on sessions of their own, which must not end, and their texts must be right; so must
that of a new one, every so many cases. In the end no session may be left.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from fuzz_mutators import NUMBERS, changed, edited, edits, encoded
from fuzz_wire import Failure, facts, valid
from private_llm_hf import AutoPrivateModelForCausalLM
from private_llm_hf.api import share_checkpoint
from private_llm_hf.client.launch import start_parties
from private_llm_hf.client.parties import Parties
from private_llm_hf.service.local import LocalParties
from private_llm_hf.wire import commands
from private_llm_hf.wire.answers import Loaded
from private_llm_hf.wire.codec import text_of
from private_llm_hf.wire.commands import OPENED, Call, Forward, ManageCache, Tokens, Values
from served_parties import SMALL, VOCABULARY
from soak_watch import children
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from private_llm.config import PrivateConfig
from private_llm.errors import PrivateLLMError
from private_llm.net import wire
from private_llm.net.ledger import CONTROL
from private_llm.net.rendezvous import connect
from private_llm.net.transport import CLIENT
from private_llm.net.wire import FrameKind

STATES = ("linked", "met", "loaded", "called", "called", "asked", "half asked")
ACTS = ("command", "call", "call", "edit", "edit", "shape", "lie", "noise", "frame", "half", "note", "flood", "cut",
        "extreme", "honest")  # fmt: skip
ENDS = ("close", "abort", "reset", "silence")
HONEST = ("anna", "ben")
_EVERY = 20
"""Cases between two new honest clients."""
_NEW = 4
_SPARE = 2
"""Threads that a party may have more than in the beginning: of pools."""
_DTYPES = (torch.int64, torch.int32, torch.uint8)


class Service:
    """Party services as processes, honest users in threads, and clients that misbehave."""

    def __init__(self) -> None:
        self._stack, self._cases = contextlib.ExitStack(), 0
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-service-")))
        logging.disable_progress_bar()
        torch.manual_seed(7)
        self._plain = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
        self._plain.generation_config.pad_token_id = 0
        self._plain.save_pretrained(folder / "checkpoint")
        config = PrivateConfig(timeout_s=30.0, busy_wait_s=60.0)
        share_checkpoint(str(folder / "checkpoint"), folder / "shares", config)
        self._source = str(folder / "shares" / "client")
        before = set(children(os.getpid()))
        self._parties = self._stack.enter_context(
            LocalParties(config, {"small": folder / "shares"}, users=("other", *HONEST), sessions=16, rows=8)
        )
        (forker,) = set(children(os.getpid())) - before
        self.processes = tuple(children(forker))
        self._wrong: list[str] = []
        self._stop = threading.Event()
        self._be_honest(Random(0))
        self._threads = self._held()
        self._users = [threading.Thread(target=self._use, args=(user,), daemon=True) for user in HONEST]
        for user in self._users:
            user.start()

    def make(self, random: Random) -> dict[str, Any]:
        """How far a client goes, what it then says to whom, and how it leaves."""
        acts = [self._act(random, random.choice(ACTS)) for _ in range(random.randrange(1, 5))]
        return {"state": random.choice(STATES), "acts": acts, "end": random.choice(ENDS), "pause": random.random() / 50}

    def _act(self, random: Random, kind: str) -> dict[str, Any]:
        """One thing to say. raw: of commands and noise. to: parties."""
        raw = random.randbytes(64)
        if kind == "command":
            raw = encoded(random, changed(random, facts(random)))
        elif kind == "call":
            value = json.loads(text_of(Forward(_call(random.choice((None, 1, 2))))))
            raw = encoded(random, changed(random, changed(random, value)))
        elif kind == "edit":
            chosen = random.choice((commands.SelectRows, commands.CropCache, commands.ResetCache, commands.CopyCache))
            value = json.loads(text_of(ManageCache(valid(chosen, random))))  # type: ignore[arg-type]
            if random.random() < 0.7:
                value["edit"]["handle"] = random.choice((1, 2, 3))
            raw = json.dumps(value).encode()
        elif kind == "shape":
            shape = [abs(random.choice((*NUMBERS, 1, 1, 4))) % (1 << 62) for _ in range(random.randrange(1, 4))]
            item = Tokens("input_ids", (1,), VOCABULARY) if random.random() < 0.7 else Values("inputs_embeds", (1,))
            value = json.loads(text_of(Forward(Call({}, (item,), random.choice((None, 1, 9)), None, None, OPENED))))
            value["call"]["secret"][0]["shape"] = shape
            raw = json.dumps(value).encode()
        return {
            "kind": kind, "raw": raw.hex(), "edits": edits(random),
            "to": random.sample(range(3), random.choice((1, 2, 3, 3))),
            "count": random.choice((0, 1, 4, 5, 1000)), "dtype": random.randrange(3),
            "tag": random.choice(("index", "index", "input", CONTROL)), "cache": random.choice((None, 1, 1, 2, 9)),
        }  # fmt: skip

    def run(self, case: dict[str, Any]) -> None:
        """The case; honest users saw nothing of it."""
        with contextlib.suppress(PrivateLLMError, OSError):
            self._misbehave(case)
        self._cases += 1
        if self._cases % _EVERY == 0:
            self._be_honest(Random(self._cases))
        if self._wrong:
            raise Failure(self._wrong.pop())

    def _misbehave(self, case: dict[str, Any]) -> None:
        if case["state"] == "linked":
            transport, parties = connect(self._parties.config, CLIENT), None
        else:
            parties = start_parties(self._parties.config)
            transport = parties.transport
        try:
            if parties is not None:
                self._go(parties, case["state"])
            for act in case["acts"]:
                self._say(transport, parties, act)
            time.sleep(case["pause"])
            _part(transport, case["end"])
        finally:
            transport.close()

    def _go(self, parties: Parties, state: str) -> None:
        if state == "met":
            return
        parties.stored_model()
        parties.tell(commands.LoadFile())
        parties.answers(Loaded)
        if state == "called":
            parties.forward(_call(1), [_secret(4)])
        elif state == "asked":
            parties.tell(Forward(_call(1)))
        elif state == "half asked":
            parties.tell(Forward(_call(1)), [0, 2])

    def _say(self, transport: Any, parties: Parties | None, act: dict[str, Any]) -> None:
        kind, raw, to = act["kind"], bytes.fromhex(act["raw"]), act["to"]
        if kind in ("lie", "honest", "extreme"):
            if parties is None:
                return
            if kind == "extreme":  # each text of 64 bytes has words of its own
                words = torch.frombuffer(bytearray(raw), dtype=torch.int64).repeat(4 * SMALL["hidden_size"] // 8)
                item = Values("inputs_embeds", (1, 4, SMALL["hidden_size"]))
                call = Call({}, (item,), act["cache"], None, None, OPENED)
                parties.forward(call, [words.view(item.shape)])
                return
            if kind == "honest":
                parties.forward(_call(act["cache"]), [_secret(4)])
                return
            for party in range(3):
                length = 4 + (party in to and len(to) < 3)
                parties.tell(Forward(_call(act["cache"], length)), [party])
            parties.end.share_index(*_secret(4))
            return
        for party in to:
            link = transport._out[party]
            if kind in ("command", "call", "edit", "shape"):
                transport.send_bytes(party, CONTROL, raw or b" ")
            elif kind == "noise":
                transport.send(party, act["tag"], torch.zeros(2, act["count"], dtype=_DTYPES[act["dtype"]]))
            elif kind == "note":
                link.note(list(FrameKind)[act["count"] % len(FrameKind)], raw[: act["count"]])
            elif kind == "flood":
                for _ in range(200):
                    transport.send_bytes(party, CONTROL, text_of(commands.TellCosts(False)).encode())
            elif kind == "cut":
                _reset(link)
            else:
                head = (
                    wire.encode(FrameKind.DATA, 255, link._session, link._sequence, CONTROL, torch.uint8, len(raw))
                    + raw
                )
                head = head[: wire.HEADER_BYTES + act["count"]] if kind == "half" else edited(head, act["edits"])
                with contextlib.suppress(BlockingIOError):
                    link._sock.send(head)

    # -- the honest -----------------------------------------------------------------------------------------------
    def _use(self, user: str) -> None:
        """Generate again and again on one session; what goes wrong is kept."""
        random = Random(user)
        try:
            with AutoPrivateModelForCausalLM.from_pretrained(self._source, self._parties.config_of(user)) as model:
                while not self._stop.wait(0.1):
                    self._compare(model, random, user)
        except Exception as error:
            self._wrong.append(f"{user}'s session ended: {type(error).__name__}: {error}")

    def _be_honest(self, random: Random) -> None:
        with AutoPrivateModelForCausalLM.from_pretrained(self._source, self._parties.config) as model:
            self._compare(model, random, "a new client")
        if self._wrong:
            raise Failure(self._wrong.pop())

    def _compare(self, model: Any, random: Random, who: str) -> None:
        ids = torch.tensor([[random.randrange(3, VOCABULARY) for _ in range(random.randint(2, 9))]])
        made: list[Any] = [
            each.generate(
                ids, max_new_tokens=_NEW, do_sample=False, pad_token_id=0, output_logits=True,
                return_dict_in_generate=True,
            )
            for each in (model, self._plain)
        ]  # fmt: skip
        got, want = (each.sequences[0].tolist() for each in made)
        best = torch.stack([step[0].topk(2).values for step in made[1].logits])
        if got != want and float((best[:, 0] - best[:, 1]).min()) > 0.01:
            self._wrong.append(f"{who} got {got}; want {want}")

    def _held(self) -> list[int]:
        return [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in self.processes]

    def _more(self) -> list[int]:
        return [now - then for now, then in zip(self._held(), self._threads, strict=True)]

    def close(self) -> None:
        """End everything. Raises Failure if an honest user fared ill, or if parties hold sessions of nobody."""
        self._stop.set()
        for user in self._users:
            user.join(60)
        try:
            self._be_honest(Random(1))
            until = time.monotonic() + 60
            while max(self._more()) > _SPARE and time.monotonic() < until:
                time.sleep(0.2)
            if max(self._more()) > _SPARE:
                raise Failure(f"threads of parties that are there now and were not at first: {self._more()}")
        finally:
            self._stack.close()


def _call(cache: int | None, length: int = 4) -> Call:
    return Call({}, (Tokens("input_ids", (1, length), VOCABULARY),), cache, None, None, OPENED)


def _secret(length: int) -> tuple[torch.Tensor, int]:
    return torch.arange(5, 5 + length), VOCABULARY


def _reset(link: Any) -> None:
    link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link._sock.close()


def _part(transport: Any, end: str) -> None:
    if end == "abort":
        transport.abort("the client stopped: \n forged \x1b[2J")
    elif end == "reset":
        for link in [*transport._out.values(), *transport._in.values()]:
            _reset(link)
    elif end == "silence":
        time.sleep(0.2)
