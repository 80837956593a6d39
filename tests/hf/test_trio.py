"""The same on shares: three parties under `trio` give the plaintext model's tokens and hidden states."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Literal

import numpy as np
import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.party import party

from private_llm.net.local import LocalMesh
from private_llm.tensor.secret import SecretTensor
from tests.hf import tiny
from tests.hf.compare import BATCH, LOGIT_ERROR, MASK, worst
from tests.hf.conftest import TRIO

PIXELS = torch.linspace(-2, 2, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "bloom", "gemma3_text"])
def test_decoders(name: str) -> None:
    model = tiny.build(name)
    with patch(model, TRIO) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
        greedy = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(private.generate(**BATCH, **greedy), model.generate(**BATCH, **greedy))


def test_sampling_and_beams() -> None:
    model = tiny.build("opt")
    with patch(model, TRIO) as private:
        for how in ({"do_sample": True, "top_k": 20, "temperature": 0.8}, {"do_sample": False, "num_beams": 2}):
            results = []
            for each in (model, private):
                torch.manual_seed(1)
                results.append(each.generate(**BATCH, max_new_tokens=4, **how))
            assert torch.equal(*results)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_encoders(name: str) -> None:
    model = tiny.build(name)
    inputs = {"pixel_values": PIXELS} if name == "vit" else {"input_ids": BATCH["input_ids"].flip(1)}
    with patch(model, TRIO) as private, torch.no_grad():
        out, want = private(**inputs), model(**inputs)
    assert worst(out.last_hidden_state, want.last_hidden_state) < LOGIT_ERROR
    assert worst(out.pooler_output, want.pooler_output) < LOGIT_ERROR


@pytest.mark.full
def test_encoder_decoder() -> None:
    model = tiny.build("t5")
    with patch(model, TRIO) as private:
        for how in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}):
            results = [each.generate(**BATCH, max_new_tokens=4, **how) for each in (model, private)]
            assert torch.equal(*results)


def test_public_weights() -> None:
    model = tiny.build("opt")
    with patch(model, PrivateConfig(weights="public", timeout_s=60)) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
        public = private.cost().bytes_total
    with patch(model, TRIO) as private:
        private(**BATCH)
        assert public < private.cost().bytes_total


def test_the_default_is_three_parties(tmp_path: object) -> None:
    tiny.build("opt").save_pretrained(tmp_path)
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path)) as private:
        assert private.parties.config == PrivateConfig()
        assert private.parties.config.parties == 3


# -- what a party can reach in its own memory ---------------------------------------------------------------
CANARY = torch.linspace(0.731, 0.947, 64)
PROMPT = [101, 47, 113, 89, 71, 23, 59, 97]


def reachable(root: object) -> Iterator[object]:
    """All objects reachable from `root`, except code, classes and the mesh that connects the threads."""
    seen, todo = set(), [root]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, ModuleType | FunctionType | type | LocalMesh):
            continue
        seen.add(id(each))
        yield each
        todo += gc.get_referents(each)
        if isinstance(each, SecretTensor):
            todo.append(each.value(masked=True))


def memory_of(root: object) -> bytes:
    """The bytes of every tensor, array, string and bytes object that `root` reaches."""
    pieces = []
    for each in reachable(root):
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, torch.nn.Parameter) and each.numel():
            storage = torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage())
            pieces.append(storage.numpy().tobytes())
        elif isinstance(each, np.ndarray):
            pieces.append(each.tobytes())
        elif isinstance(each, bytes | bytearray):
            pieces.append(bytes(each))
        elif isinstance(each, str):
            pieces.append(each.encode(errors="replace"))
    return b"\0".join(pieces)


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_no_party_reaches_weights_or_tokens(
    monkeypatch: pytest.MonkeyPatch, protocol: Literal["trio", "dealer"]
) -> None:
    seen: list[party.Party] = []
    original = party.Party.__init__

    def spy(self: party.Party, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        seen.append(self)

    monkeypatch.setattr(party.Party, "__init__", spy)
    model = tiny.build("opt", public_note="a public mark")
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.bias[:64] = CANARY
    encoded = torch.round(CANARY.double() * 2**18).to(torch.int64)
    forbidden = {
        "float32": CANARY[:4].numpy().tobytes(),
        "float64": CANARY[:4].double().numpy().tobytes(),
        "ring": encoded[:4].numpy().tobytes(),
        "tokens": struct.pack("<8q", *PROMPT),
    }
    with patch(model, PrivateConfig(protocol=protocol, timeout_s=60)) as private:
        private.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)
        assert sorted(each.number for each in seen) == [0, 1, 2]
        shares = []
        for each in sorted(seen, key=lambda known: known.number):
            memory = memory_of(each)
            assert b"a public mark" in memory, "the search must find what a party does hold"
            assert [name for name, pattern in forbidden.items() if pattern in memory] == []
            bias = each.state.model.model.decoder.layers[0].fc1.bias.value(masked=True).share.parts
            assert bias[0][:4].numpy().tobytes() in memory
            shares.append(bias)
    # and the control: the parties' shares together do hold the canary
    assert torch.equal((shares[1][0] - shares[0][1])[:64], encoded)
