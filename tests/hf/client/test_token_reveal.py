"""reveal="token": the client opens the most likely token only, and nothing that would need more works silently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import transformers as tr
from private_llm_hf import patch
from private_llm_hf.wire.answers import GUARD
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, DomainError
from private_llm.net.transport import CLIENT
from tests.hf import tiny
from tests.hf.compare import BATCH, PADDED
from tests.hf.conftest import PLAIN, TRIO

Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.fixture(scope="module")
def opt() -> Iterator[Pair]:
    model = tiny.build("opt")
    with patch(model, replace(PLAIN, reveal="token")) as private:
        yield model, private


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["opt", "gpt2", "t5"])
def test_greedy_tokens_under_trio(name: str) -> None:
    model = tiny.build(name)
    with patch(model, replace(TRIO, reveal="token")) as private:
        results = [each.generate(**BATCH, max_new_tokens=4, do_sample=False) for each in (model, private)]
    assert torch.equal(*results)


def test_only_the_arg_max_is_opened() -> None:
    model = tiny.build("opt")
    with patch(model, replace(TRIO, reveal="token")) as private:
        private.cost(reset=True)
        out = private(PADDED)
        costs = private.cost()
    sent = [(op, to, count) for ledger in costs.ledgers for (_, op, to), count in ledger.sent.items()]
    opened = sum(count for op, to, count in sent if op == "reveal" and to == CLIENT)
    assert opened == 2 * 8 * (PADDED.numel() + 1), "one ring element of each evaluator a position, and the guard"
    assert torch.equal(out.logits.argmax(-1), model(PADDED).logits.argmax(-1))
    assert torch.equal(out.logits.exp().sum(-1), torch.ones(2, 5)), "a one-hot distribution"


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"do_sample": True}, "do_sample"),
        ({"num_beams": 2}, "num_beams"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor"),
        ({"min_new_tokens": 3}, "MinNewTokensLengthLogitsProcessor"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"bad_words_ids": [[5]]}, "NoBadWordsLogitsProcessor"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    ],
)
def test_what_needs_more_is_refused(opt: Pair, how: dict[str, object], named: str) -> None:
    private = opt[1]
    private.cost(reset=True)
    with pytest.raises(ConfigError, match=f"opens only the most likely token, which .*{named}"):
        private.generate(**BATCH, **{"do_sample": False, "max_new_tokens": 4, **how})
    assert private.cost().bytes_total == 0


def change(private: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, **answers: Tensor) -> None:
    """From now on the parties answer every call with these values."""
    forward = private.parties.forward

    def changed(call: object, secrets: object) -> tuple[str, dict[str, Tensor]]:
        kind, made = forward(call, secrets)
        return kind, made | {name: value.expand_as(made[name]) for name, value in answers.items()}

    monkeypatch.setattr(private.parties, "forward", changed)


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_a_token_that_no_model_has_is_told(opt: Pair, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    change(opt[1], monkeypatch, token=torch.tensor(token))
    with pytest.raises(DomainError, match="index out of range; their shares do not fit together"):
        opt[1](PADDED)


def test_a_cache_with_values_that_left_their_range_is_not_used_again(
    opt: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opt[1](PADDED, use_cache=True).past_key_values
    with monkeypatch.context() as once:
        change(opt[1], once, **{GUARD: torch.ones(1)})
        with pytest.raises(DomainError, match="range"):
            opt[1](PADDED[:, :1], past_key_values=cache)
    with pytest.raises(DomainError, match="start again without it"):
        opt[1](PADDED[:, :1], past_key_values=cache)


def test_a_users_processor_is_refused(opt: Pair) -> None:
    class Shift(tr.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.roll(1, -1)

    with pytest.raises(ConfigError, match="Shift"):
        opt[1].generate(**BATCH, max_new_tokens=2, do_sample=False, logits_processor=tr.LogitsProcessorList([Shift()]))


def test_stopping_and_padding_work(opt: Pair) -> None:
    """Rows end at their own end token and are padded, as in plaintext."""
    first = opt[0].generate(**BATCH, max_new_tokens=6, do_sample=False)
    stop = int(first[0, PADDED.shape[1] + 2])
    results = [each.generate(**BATCH, max_new_tokens=6, do_sample=False, eos_token_id=stop) for each in opt]
    assert torch.equal(*results)
