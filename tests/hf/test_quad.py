"""Models of HuggingFace under `quad`: four parties give the plaintext model's results, and stop when one lies."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.model_spec import ModelSpec
from private_llm_hf.checkpoint.share_files import ShareFile, share_path
from private_llm_hf.checkpoint.weights import stream_loaded
from private_llm_hf.party import party

from private_llm.errors import ProtocolAbort
from private_llm.net.local import LocalMesh
from private_llm.net.transport import Transport
from private_llm.ranges import Ranges
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, shares_of, worst
from tests.hf.test_remote import free_ports, running
from tests.hf.test_trio import CANARY, PROMPT, memory_of
from tests.recording import RecordingTransport

QUAD = PrivateConfig(protocol="quad", timeout_s=60)


def test_exact_truncation() -> None:
    model = tiny.build("opt")
    with patch(model, replace(QUAD, truncation="exact")) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR


def test_remote_hosts_with_share_files(tmp_path: Path) -> None:
    model = tiny.build("llama")
    model.save_pretrained(tmp_path / "checkpoint")
    config = replace(QUAD, party_mode="remote", hosts=free_ports(4), allow_plain_loopback=True, timeout_s=30)
    share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "shares", config)
    files: list[Path | None] = [share_path(tmp_path / "shares", party) for party in range(4)]
    source = str(tmp_path / "shares" / "client")
    with running(config, files), AutoPrivateModelForCausalLM.from_pretrained(source, config) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
        private.close()


def test_the_four_share_files_add_up_to_the_weights(tmp_path: Path) -> None:
    model = tiny.build("llama")
    model.save_pretrained(tmp_path / "checkpoint")
    share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "shares", QUAD)
    files = [ShareFile.open(share_path(tmp_path / "shares", p), QUAD, p) for p in range(4)]
    held, ranges = [shares_of(each) for each in files], Ranges(files[0].description.ranges)
    spec, weights = ModelSpec.of(type(model), model.config, fold_norms_too=True), dict[str, torch.Tensor]()
    stream_loaded(model, spec.source, spec.folding(weights.__setitem__))
    assert all(each.keys() == weights.keys() for each in held)
    for name, weight in weights.items():
        (a1, a2, third), (x1, b1, u1), (x2, b2, u2), (c1, c2, c3) = (each[name].parts for each in held)
        encoded = torch.round(weight.double() * 2.0 ** ranges.frac_of_weight(name, 18)).to(torch.int64)
        assert all(torch.equal(*pair) for pair in ((a1, b1), (a1, c1), (a2, b2), (a2, c2), (u1, u2), (u1, c3)))
        assert all(torch.equal(masked, encoded) for masked in (third - u1, x1 - a2, x2 - a1))
    assert share_path(tmp_path / "shares", 3).stat().st_size < 10_000, "party 3 holds seeds, no weights"


def test_no_party_reaches_weights_or_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[party.Party] = []
    original = party.Party.__init__

    def spy(self: party.Party, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        seen.append(self)

    monkeypatch.setattr(party.Party, "__init__", spy)
    model = tiny.build("opt")
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.bias[:64] = CANARY
    encoded = torch.round(CANARY.double() * 2**18).to(torch.int64)
    forbidden = {"ring": encoded[:4].numpy().tobytes(), "tokens": struct.pack("<8q", *PROMPT)}
    with patch(model, QUAD) as private:
        private.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)
        assert sorted(each.number for each in seen) == [0, 1, 2, 3]
        for each in seen:
            memory = memory_of(each)
            bias = each.state.model.model.decoder.layers[0].fc1.bias.value(masked=True).share.parts
            assert all(part[:4].numpy().tobytes() in memory for part in bias), "the search finds what a party holds"
            assert [name for name, pattern in forbidden.items() if pattern in memory] == []


class LyingMesh(LocalMesh):
    """One bit of one message is altered: the `count`-th that `liar` sends under `tag`."""

    def __init__(self, liar: int, tag: str, count: int) -> None:
        super().__init__(4, timeout=20)
        self.liar, self.tag, self.left = liar, tag, count

    def transport(self, me: int) -> Transport:  # type: ignore[override]
        inner = super().transport(me)
        return RecordingTransport(inner, alter=self._alter) if me == self.liar else inner

    def _alter(self, number: int, tag: str, payload: torch.Tensor) -> torch.Tensor:
        self.left -= tag == self.tag
        if tag != self.tag or self.left:
            return payload
        changed = payload.clone()
        flat = changed.view(-1)
        flat[flat.numel() // 2] ^= 1
        return changed


LIES = [
    (1, "matmul", 3), (1, "msb", 1), (1, "inject", 2), (1, "verify", 1), (1, "reveal", 1), (2, "matmul", 4),
    (2, "mul", 1), (2, "lookup", 1), (2, "reveal digest", 1), (3, "matmul", 2), (3, "matmul", 3), (3, "msb", 1),
    (3, "inject", 1),    (3, "reveal digest", 1), (0, "reveal", 1), (0, "verify", 2),
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("liar", "tag", "count"), LIES)
def test_a_lie_ends_the_session_before_the_client_has_a_result(liar: int, tag: str, count: int) -> None:
    model = tiny.build("opt")
    mesh = LyingMesh(liar, tag, count)
    with patch(model, QUAD, mesh) as private, pytest.raises(ProtocolAbort):
        private(**BATCH)
    assert mesh.left <= 0, "the lie was told"
