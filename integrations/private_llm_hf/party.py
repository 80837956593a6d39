"""A computing party: waits for the client's commands and runs its share of the model.

It sees shapes, masks and positions, shares of everything else. An error of any kind ends the session: its name
and text (never a value) go to all endpoints, who stop as well.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from private_llm.approx.argmax import argmax
from private_llm.config import PrivateConfig
from private_llm.errors import PrivateLLMError, ShareFileError, TransportError, UnsupportedOp
from private_llm.kernels.memory import tune_allocator
from private_llm.net.roles import named
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.dealing import assemble, keys_held, pieces, sends_parts
from private_llm.protocols.session import Session, join
from private_llm.ring.prg import Seed
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm.tensor.secret_index import SecretIndex
from private_llm_hf.costs import rows_of
from private_llm_hf.party_model import build_party_model
from private_llm_hf.share_files import ShareFile
from private_llm_hf.wire import OPENED, PUBLIC, Message, recv_message, send_message

_LOG = logging.getLogger("private_llm")
_REPORTED = re.compile(r"(party \d+|the dealer): \w+: |the client stopped")
_FOREIGN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Party:
    """One party's end of a model: built by a "load" command, run by "forward" commands."""

    def __init__(self, config: PrivateConfig, number: int, transport: Transport, held: ShareFile | None) -> None:
        self.config, self.number, self.transport, self.held = config, number, transport, held
        self.session: Session = join(config, number, transport)
        self.model: PreTrainedModel | None = None
        self.kept: dict[int, Any] = {}
        self._pulse = Pulse(transport, config.timeout_s / 4)

    def serve(self) -> None:
        """Answer commands until the client stops. Raises what ended the session otherwise."""
        commands = {
            "hello": self._hello,
            "load": self._load,
            "forward": self._forward,
            "cache": self._cache,
            "costs": self._costs,
        }
        while True:
            self.transport.wait(CLIENT)
            message = recv_message(self.transport, CLIENT)
            name = message.get("do")
            if name == "stop":
                return
            if name not in commands:
                raise TransportError(f"unknown command {name!r}: client and party run different versions")
            self._pulse.start()
            with torch.no_grad():
                commands[name](message)

    def _answer(self, message: Message) -> None:
        send_message(self.transport, CLIENT, message)

    def _hello(self, _: Message) -> None:
        held = self.held
        self._answer({"model": held and held.description["model"], "dealing": held and held.dealing})

    # -- the model --------------------------------------------------------------------------------------------
    def _load(self, message: Message) -> None:
        weights: dict[str, Fixed | Tensor]
        if message["held"]:
            if self.held is None:
                raise ShareFileError("the client wants a model that this party holds no share file of")
            message = self.held.description
            weights = {}
            for name, share in self.held.weights():
                weights[name] = Fixed(self.session, share, self.session.frac)
                self._pulse.beat()
        else:
            weights = dict(self._receive_weights())
        self.model = build_party_model(message["config"], message["class"], weights, self.session)
        self._pulse.watch(self.model)
        self.transport.ledger.reset()
        self._answer({"loaded": True})

    def _receive_weights(self) -> Iterator[tuple[str, Fixed | Tensor]]:
        public = self.config.weights == "public"
        count = 0 if public else keys_held(self.config, self.number)
        raw = [self.transport.recv(CLIENT, "weight key", (32,), torch.uint8) for _ in range(count)]
        keys = [Seed(key.numpy().tobytes()) for key in raw]
        ring = self.session.ring
        while True:
            header = recv_message(self.transport, CLIENT)
            name = header["weight"]
            self._pulse.beat()
            if name is None:
                return
            shape = tuple(header["shape"])
            if public:
                yield name, self._receive_pieces(shape, torch.int32).view(torch.float32)
                continue
            received = self._receive_pieces(shape, ring.dtype) if sends_parts(self.config, self.number) else None
            share = assemble(self.config, self.number, keys, received, shape, name)
            yield name, Fixed(self.session, share, self.session.frac)

    def _receive_pieces(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for piece in pieces(whole):
            piece.copy_(self.transport.recv(CLIENT, "weight", tuple(piece.shape), dtype))
        return whole

    # -- calls -----------------------------------------------------------------------------------------------
    def _forward(self, message: Message) -> None:
        model = self._ready()
        for handle in message["free"]:
            self.kept.pop(handle, None)
        inputs = dict(message["public"])
        refused = sorted({*inputs} - PUBLIC) + sorted({*message["outputs"]} - {*OPENED})
        if refused:
            raise UnsupportedOp(f"the client asks for {', '.join(refused)}, which parties do not take or open")
        for item in message["secret"]:
            inputs.update(self._receive(model, item))
        cache = message["cache"]
        if cache is not None:
            if cache not in self.kept:
                self.kept[cache] = model.new_cache()
            inputs["past_key_values"] = self.kept[cache]
        if message["encoded"] is not None:
            inputs["encoder_outputs"] = self._encoded(message["encoded"])
        target = model.get_encoder() if message["encode_to"] is not None else model
        result = target(**inputs, return_dict=True)
        if message["encode_to"] is not None:
            self.kept[message["encode_to"]] = result.last_hidden_state
            self._answer({"class": type(result).__name__, "outputs": []})
            return
        self._reveal(result, message["outputs"])

    def _receive(self, model: PreTrainedModel, item: Message) -> dict[str, Tensor]:
        """One secret input: token ids arrive as index shares and become embeddings, values come as they are."""
        shape = tuple(item["shape"])
        name = item["name"]
        if item["kind"] == "values":
            share = self.session.protocol.receive_input(shape)
            return {name: SecretTensor(Fixed(self.session, share, self.session.frac))}
        owner = model.get_decoder() if name.startswith("decoder_") else model
        index = self.session.protocol.receive_index(math.prod(shape), item["vocabulary"])
        ids = SecretIndex(self.session, index, shape)
        return {name.replace("input_ids", "inputs_embeds"): owner.get_input_embeddings()(ids)}

    def _reveal(self, result: ModelOutput, wanted: list[str]) -> None:
        """State names, shapes and fractional bits of the outputs, then open them towards the client."""
        outputs = []
        for name in wanted:
            value = result.get(name)
            if not isinstance(value, SecretTensor):
                continue
            if self.config.reveal == "logits":
                outputs.append((name, value.fixed))
            elif name == "logits":  # and nothing else, whatever the client asks for
                with self.transport.ledger.scope(self.config.reveal):
                    outputs.append((self.config.reveal, argmax(value.fixed)))
        described = [[name, list(fixed.shape), fixed.frac] for name, fixed in outputs]
        self._answer({"class": type(result).__name__, "outputs": described})
        for _, fixed in outputs:
            self.session.protocol.reveal_to_client(fixed.share)

    def _ready(self) -> PreTrainedModel:
        if self.model is None:
            raise TransportError("a call arrived before a model was loaded")
        return self.model

    def _encoded(self, reference: Message) -> ModelOutput:
        hidden = self.kept[reference["handle"]]
        rows = reference["rows"]
        return BaseModelOutput(last_hidden_state=hidden if rows is None else hidden[rows])

    def _cache(self, message: Message) -> None:
        cache = self.kept[message["handle"]]
        how = message["how"]
        if how == "select":
            cache.reorder_cache(message["index"])
        elif how == "crop":
            cache.crop(-message["count"])
        elif how == "reset":
            cache.reset()
        elif how == "copy":
            self.kept[message["to"]] = copy.deepcopy(cache)
        else:
            raise TransportError(f"unknown cache command {how!r}")

    def _costs(self, message: Message) -> None:
        self._answer(rows_of(self.transport.ledger))
        if message["reset"]:
            self.transport.ledger.reset()


class Pulse:
    """Tells the client "still computing" while a long call makes progress, so that silence means a dead party."""

    def __init__(self, transport: Transport, every_s: float) -> None:
        self._transport, self._every = transport, every_s
        self._last = time.monotonic()

    def start(self) -> None:
        """A call begins."""
        self._last = time.monotonic()

    def watch(self, model: nn.Module) -> None:
        """Beat whenever a module starts and the last beat is long ago."""
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, inputs: self.beat())

    def beat(self) -> None:
        """There is progress: say so if the last time is long ago."""
        now = time.monotonic()
        if now - self._last > self._every:
            self._last = now
            send_message(self._transport, CLIENT, {"alive": True})


def run_party(config: PrivateConfig, number: int, transport: Transport, held: ShareFile | None = None) -> str | None:
    """Serve one client until it stops. Returns None, or why the session ended (which all others were told)."""
    tune_allocator()
    try:
        Party(config, number, transport, held).serve()
    except PrivateLLMError as error:
        reason = f"party {number}: {type(error).__name__}: {error}"
        if isinstance(error, TransportError) and _REPORTED.search(str(error)):
            reason = str(error)  # another endpoint's reason, passed on unchanged
    except _FOREIGN as error:
        # The others wait for this party, so they must learn that it stops. An unforeseen error's text might hold
        # values, so only its kind and place travel; the text stays in this party's own log.
        _LOG.exception("party %d stops", number)
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"party {number}: {type(error).__name__}: in {Path(where.filename).name}, line {where.lineno}"
    else:
        return None
    reason = named(config, reason)
    transport.abort(reason)
    return reason
