"""Decoder layers are programs around their attention, and what does more than that stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from private_llm_hf import patch
from private_llm_hf.kv_cache import cache as kv_cache
from private_llm_hf.transformers_versions import CACHE
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from private_llm.config import PrivateConfig
from private_llm.kernels import parallel
from private_llm.protocols.session import Session
from private_llm.replay.program_cache import ProgramCache

LAYERS = 2
SEEDS = {"weights_at_rest": "seeds"}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 64}


def llama() -> PreTrainedModel:
    config = LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64)
    return LlamaForCausalLM(config).eval()


def opt() -> PreTrainedModel:
    config = OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64)
    return OPTForCausalLM(config).eval()


STEPS = (6, 7, 7, 7, 8, 9, 8, 9, *range(10, 19))
"""Positions of tokens, with steps back: programs are recorded and checked at one of them."""


class Counted:
    """What became of the calls of layers, and of checks of ranges."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repeated = self.verdicts = 0
        self.refused: set[str] = set()
        run, repeat = ProgramCache.run, ProgramCache._repeat

        def counted(this: ProgramCache, session: Session, key: Any, *args: Any, **kwargs: Any) -> Any:
            before = this.counts["repeated"]
            made = run(this, session, key, *args, **kwargs)
            self.verdicts += key[0][0] == "verdict" and this.counts["repeated"] > before
            self.refused |= set(this.refused)
            return made

        def again(this: ProgramCache, *args: Any) -> Any:
            self.repeated += args[0].graph_break is not None
            return repeat(this, *args)

        monkeypatch.setattr(ProgramCache, "run", counted)
        monkeypatch.setattr(ProgramCache, "_repeat", again)


def answers(make: Callable[[], PreTrainedModel], **settings: Any) -> tuple[list[Tensor], int, int]:
    """Logits of steps behind a prompt, with a step back between; bytes and rounds."""
    torch.manual_seed(0)
    plain = make()
    ids = torch.arange(19)[None] % 40
    with patch(plain, PrivateConfig.from_dict({"party_mode": "threads", **settings})) as model, torch.no_grad():
        out = model(input_ids=ids[:, :6], use_cache=True)
        cache, found = out.past_key_values, [out.logits[:, -1]]
        for position, before in zip(STEPS, (5, *STEPS), strict=False):
            cache.crop(min(0, position - before - 1))
            out = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            found.append(out.logits[:, -1])
        cost = model.cost()
        want = plain(ids).logits[0]
    for logits, position in zip(found, (5, *STEPS), strict=True):
        assert torch.allclose(logits[0], want[position], atol=2e-2)
    return found, cost.bytes_total, cost.rounds


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "settings", "threads"),
    [
        *((make, each, 1) for make in (llama, opt) for each in ({}, {"protocol": "dealer"}, SEEDS)),
        (llama, SEEDS, 3), (opt, {}, 3),
    ],
)  # fmt: skip
def test_layers_are_repeated_around_attention(
    make: Callable[[], PreTrainedModel], settings: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "threads", lambda seconds: threads)
    monkeypatch.setattr("private_llm.kernels.parallel._SMALL_S", 0.0)
    counted = Counted(monkeypatch)
    _, sent, rounds = answers(make, **settings)
    assert not counted.refused
    assert counted.repeated >= 3 * LAYERS * 10, "of 17 steps at most 7 are first, recorded and checked"
    assert counted.verdicts >= 3 * 8, "bounds of sums change with 8 and with 16 tokens, and programs with them"
    assert answers(make, **settings, replay=False)[1:] == (sent, rounds)


@pytest.mark.full
def test_a_layer_that_asks_for_the_length_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaAttention.forward

    def asks(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(CACHE) is not None:
            kwargs[CACHE].get_seq_length()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", asks)
    counted = Counted(monkeypatch)
    answers(llama)
    assert counted.refused == {"the length of a cache"}
    assert not counted.repeated


def test_a_prompt_of_one_token_leaves_steps_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call but for an empty cache, which no program begins; chunks may leave one token over, too."""
    counted, plain = Counted(monkeypatch), llama()
    ids, how = torch.tensor([[5]]), {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with patch(plain, PrivateConfig(calibrate=False)) as model:
        assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))
    assert counted.repeated
    assert not counted.refused


@pytest.mark.full
@pytest.mark.parametrize("make", [llama, opt])
def test_masked_steps_are_repeated_with_the_mask_of_each(
    make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding on the left is a mask, which says which keys count: attention alone reads it, outside of programs."""
    counted = Counted(monkeypatch)
    torch.manual_seed(0)
    plain, ids = make(), torch.arange(12).view(2, 6)
    limits = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with patch(plain, PrivateConfig(party_mode="threads")) as model:
        for padding in (2, 3):
            mask = torch.ones_like(ids)
            mask[0, :padding] = 0
            made = model.generate(ids, attention_mask=mask, **limits)
            assert torch.equal(made, plain.generate(ids, attention_mask=mask, **limits))
    assert counted.repeated >= 3 * LAYERS * 5
    assert not counted.refused


def test_what_layers_are_called_with() -> None:
    angle, position = torch.rand(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64)
    given = {CACHE: object(), "use_cache": True, "position_embeddings": (angle, angle), "mask": None}
    facts, publics, mask = kv_cache._facts({**given, "position_ids": position}) or ((), [], None)
    assert [x is y for x, y in zip(publics, [angle, angle, position], strict=True)] == [True] * 3
    assert mask is None
    assert facts != (kv_cache._facts({**given, "use_cache": False, "position_ids": position}) or ((),))[0]
    given["position_embeddings"] = (angle, angle.clone())  # a program of one tensor has one memory for both
    assert facts != (kv_cache._facts({**given, "position_ids": position}) or ((),))[0]
    some = torch.tensor([[False, True]])
    assert kv_cache._facts({"attention_mask": some}) == ((("attention_mask", True),), [], some)
    for odd in (torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.bool)):  # an addend; nobody sees anything
        assert kv_cache._facts({"attention_mask": odd}) is None
    assert kv_cache._facts({"scale": 2.0}) is None
