"""A party holds its weights once while it serves, also where layers are fused, and nothing after the session."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import private_llm_hf.party.model
import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.party.model import build_party_model
from process_memory import live_bytes

from private_llm.nn.linear import SharedInput
from private_llm.protocols.weight_sharing import bytes_at_rest, keys_held, sends_parts
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.party.parties import description, weights_of
from tests.tensor.secrets import fixed, plain_session

TINY = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = tr.LlamaConfig(**TINY, intermediate_size=384, num_key_value_heads=2, tie_word_embeddings=True)
OPT = tr.OPTConfig(**TINY, ffn_dim=512, max_position_embeddings=64, word_embed_proj_dim=128)
LEAST = 0.99
"""Of what a model's own weights would take: those of norms are parts of others."""

MODELS = {"llama": (tr.LlamaForCausalLM, LLAMA), "opt": (tr.OPTForCausalLM, OPT)}
IDS = torch.arange(5, 13)[None]


@pytest.fixture(autouse=True)
def only_what_is_referenced() -> Iterator[None]:
    """Garbage of earlier tests is gone, and none is collected meanwhile: what is let go must go by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_by_parties(config: PrivateConfig, model: tr.PreTrainedModel) -> int:
    """What the parties' shares of all weights must take, tied ones once."""
    parts = sum(keys_held(config, party) + sends_parts(config, party) for party in range(config.parties))
    return parts * (config.ring // 8) * sum(weight.numel() for weight in model.parameters())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_party_holds_its_weights_once(protocol: str, kind: str) -> None:
    """All parties are threads here, so the sum over them is counted, while they wait for the first call."""
    cls, settings = MODELS[kind]
    model, config = cls(settings).eval(), PrivateConfig(protocol=protocol, parallel_sessions=2)
    before = live_bytes()
    with patch(model, config):
        held = live_bytes() - before
    assert LEAST <= held / held_by_parties(config, model) <= 1.05


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"parallel_sessions": 2}, {"protocol": "dealer"}, {"protocol": "quad"}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_with_seeds_a_party_holds_what_it_received(kind: str, settings: dict[str, Any]) -> None:
    """Half of a share, or a third: and the same when a call has used every weight, but for what the call leaves."""
    cls, shape = MODELS[kind]
    model, config = cls(shape).eval(), PrivateConfig(weights_at_rest="seeds", **settings)
    sizes = [
        bytes_at_rest(config, party, tuple(weight.shape), True)
        for party in range(config.parties)
        for weight in model.parameters()
    ]
    before = live_bytes()
    with patch(model, config) as private:
        held = live_bytes() - before
        private(input_ids=IDS[:, :1], use_cache=False)
        behind = live_bytes() - before
    assert LEAST <= held / sum(sizes) <= 1.05
    assert behind / sum(sizes) <= 1.2
    assert sum(sizes) < 0.55 * held_by_parties(config, model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", MODELS)
def test_fused_layers_are_never_there_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a model is built: after each fusion the layers' own weights are gone."""
    cls, settings = MODELS[kind]
    model, session = cls(settings).eval(), plain_session()
    expected = sum(weight.numel() for weight in model.parameters()) * session.ring.bits // 8
    seen: list[float] = []

    class Watched(SharedInput):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            seen.append((live_bytes() - before) / expected)

    monkeypatch.setattr(private_llm_hf.party.model, "SharedInput", Watched)
    before = live_bytes()
    build_party_model(*description(model), {n: fixed(session, w) for n, w in weights_of(model).items()}, session)
    assert len(seen) == settings.num_hidden_layers * (2 if kind == "llama" else 1)
    assert max(seen) <= 1.05


CASCADE = PrivateConfig(protocol="cascade", plan=ShardingPlan(2, 1, 1, accept_weak_plan=True))


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore::private_llm.errors.WeakProtection")
@pytest.mark.parametrize(
    "config",
    [
        *(PrivateConfig(protocol=protocol) for protocol in ("trio", "quad", "dealer")),
        PrivateConfig(parallel_sessions=2),
        PrivateConfig(weights="public"),
        CASCADE,
    ],
    ids=["trio", "quad", "dealer", "parallel_sessions", "public", "cascade"],
)
def test_a_closed_session_holds_nothing(config: PrivateConfig) -> None:
    """Neither weights nor caches nor plans of attention stay, without any help of the garbage collector."""
    model = tiny.build("llama")
    threads = set(threading.enumerate())
    after = []
    for _ in range(3):
        private = patch(model, config)
        private.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
        private.close()
        for thread in set(threading.enumerate()) - threads:
            if thread.name.startswith("party"):
                thread.join(10)
        after.append(live_bytes())
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert after[2] - after[1] <= weights // 100  # the first session fills what a process keeps for good
