"""A whole model with four parties, one of whom alters one message of its answer: the user gets an error, no logits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers as tr
from private_llm_hf import patch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed, ProtocolAbort, TransportError
from private_llm.net.local import LocalMesh, LocalTransport
from private_llm.net.transport import Transport
from tests.hf.party.vouching import vouch
from tests.protocols.cheating import Liar
from tests.recording import Alter, RecordingTransport

QUAD = PrivateConfig(protocol="quad", timeout_s=20)
IDS = torch.tensor([[5, 6, 7]])
KEYS = ("hello", "group key", "group digest")


@pytest.fixture(scope="module")
def model() -> tr.OPTForCausalLM:
    """One layer, 16 wide: 0.2 s a session."""
    torch.manual_seed(0)
    config = tr.OPTConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=32, num_attention_heads=2, ffn_dim=16, word_embed_proj_dim=16,
        max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    made = tr.OPTForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return made


def flipped(tag: str, number: int, bit: int) -> Alter:
    """Flip a bit of the number-th message named `tag`."""
    seen: Counter[str] = Counter()

    def alter(index: int, name: str, payload: Tensor) -> Tensor:
        seen[name] += 1
        if name != tag or seen[name] != number + 1:
            return payload
        changed = payload.clone(memory_format=torch.contiguous_format)
        octets = changed.view(-1).view(torch.uint8)
        octets[bit // 8 % octets.numel()] ^= 1 << bit % 8
        return changed

    return alter


class _ParallelSessions(RecordingTransport):
    """Its other parallel sessions are those of the links within, which pass through `listen` by themselves."""

    def parallel_session(self, number: int) -> Transport:
        return self._inner.parallel_session(number) if number else self


class _LyingParallelSessions(_ParallelSessions, Liar):
    """A cheater's."""


def listen(
    monkeypatch: pytest.MonkeyPatch, cheater: int = -1, alter: Alter | None = None, parallel_session: int = 0
) -> dict[int, Transport]:
    """Put a recorder around every party's links, around the cheater's one that lies in one parallel session."""
    original, ends = LocalMesh.transport, {}

    def transport(self: LocalMesh, me: int) -> Transport:
        inner: LocalTransport = original(self, me)
        end = (
            _LyingParallelSessions(inner, alter=alter if self.number == parallel_session else None)
            if me == cheater
            else _ParallelSessions(inner)
        )
        if self.number == parallel_session:
            ends[me] = end
        return end

    monkeypatch.setattr(LocalMesh, "transport", transport)
    return ends


def test_an_honest_run_gives_the_logits(model: tr.OPTForCausalLM) -> None:
    private = patch(model, QUAD)
    with torch.no_grad():
        assert float((private(IDS).logits - model(IDS).logits).abs().max()) < 2e-3
    tokens = private.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, model.generate(IDS, max_new_tokens=3, do_sample=False))
    private.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cheater", range(4))
def test_a_message_of_every_kind(model: tr.OPTForCausalLM, cheater: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last message of each name that a party sends, one bit each."""
    with monkeypatch.context() as patched:
        ends = listen(patched)
        private = patch(model, QUAD)
        private(IDS)
        private.close()
    sent = Counter(message.tag for message in ends[cheater].messages if message.direction == "sent")  # type: ignore[attr-defined]
    kinds = {tag: count for tag, count in sent.items() if tag not in KEYS and not tag.startswith("control")}
    assert set(kinds) >= ({"verify", "reveal"} if cheater == 0 else {"matmul", "mul", "msb", "poly", "truncate"})
    for tag, count in kinds.items():
        for number in {0, count - 1}:
            with monkeypatch.context() as patched:
                listen(patched, cheater, flipped(tag, number, 5))
                private = patch(model, QUAD)
                with pytest.raises((ProtocolAbort, TransportError)):
                    private(IDS)
                with pytest.raises(PartyFailed, match="this session is over"):
                    private(IDS)
                private.close()


@pytest.mark.parametrize("what", ["input", "command"])
def test_a_client_that_tells_party_2_something_else(
    model: tr.OPTForCausalLM, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Party 0, who alone judges records, vouches for it: the others must find it before they compute anything."""
    vouch(monkeypatch)
    sent = listen(monkeypatch)
    embedded = model.get_input_embeddings()(IDS)
    with torch.no_grad():
        private = patch(model, QUAD)
        private(inputs_embeds=embedded)
        transport = private.parties.end.transport
        send, send_bytes, before = transport.send, transport.send_bytes, len(sent[1].messages)  # type: ignore[attr-defined]

        def lie(to: int, tag: str, payload: Tensor) -> None:
            send(to, tag, payload + 1 if (to, tag, what) == (2, "input", "input") else payload)

        def lie_bytes(to: int, tag: str, payload: bytes) -> None:
            less = (to, what) == (2, "command")  # one output less, which this model does not have
            send_bytes(to, tag, payload.replace(b',"pooler_output"', b"") if less else payload)

        monkeypatch.setattr(transport, "send", lie)
        monkeypatch.setattr(transport, "send_bytes", lie_bytes)
        with pytest.raises(ProtocolAbort, match="told to run different things"):
            private(inputs_embeds=embedded)
    told = [message.tag for message in sent[1].messages[before:] if message.direction == "sent"]  # type: ignore[attr-defined]
    assert {*told} == {"control"}, told
    private.close()


@pytest.mark.full
@pytest.mark.parametrize("rotate_roles", [False, True])
def test_a_lie_in_one_of_two_parallel_sessions(
    model: tr.OPTForCausalLM, rotate_roles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parallel session has records and a verdict of its own; one that fails ends the whole session."""
    config = PrivateConfig(protocol="quad", timeout_s=20, parallel_sessions=2, rotate_roles=rotate_roles)
    batch = IDS.repeat(2, 1)
    with monkeypatch.context() as patched:
        ends = listen(patched, parallel_session=1)
        private = patch(model, config)
        private(batch)
        private.close()
    for cheater in range(4):
        sent = [message.tag for message in ends[cheater].messages if message.direction == "sent"]  # type: ignore[attr-defined]
        number = sent.count("matmul") // 2
        if not number:
            continue
        with monkeypatch.context() as patched:
            listen(patched, cheater, flipped("matmul", number, 9), parallel_session=1)
            private = patch(model, config)
            with pytest.raises((ProtocolAbort, TransportError)):
                private(batch)
            private.close()
