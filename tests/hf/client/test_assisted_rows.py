"""Under protocol "assisted" the number of rows of a product follows from shapes, or the call ends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import transformers
from private_llm_hf import patch
from private_llm_hf.client.assisted_model import open_assisted
from private_llm_hf.client.assisted_rows import is_sent
from private_llm_hf.client.launch import start_parties
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm.errors import PatchMismatch, UnsupportedOp
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, worst
from tests.hf.test_assisted import ASSISTED, ERROR, assisted

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def test_longformers_global_tokens_are_told_once_and_no_other_number_of_them() -> None:
    config = transformers.LongformerConfig(**SMALL, attention_window=4, max_position_embeddings=64, pad_token_id=1)
    plain = transformers.LongformerForMaskedLM(config).eval()
    ids, mask = torch.arange(8)[None] + 3, torch.zeros(1, 8, dtype=torch.int64)
    one, other, two = mask.clone(), mask.clone(), mask.clone()
    one[0, 0] = other[0, 5] = two[0, :2] = 1
    with patch(plain, ASSISTED) as private, torch.no_grad():
        for given in (one, other):
            got = private(ids, global_attention_mask=given).logits
            assert worst(got, plain(ids, global_attention_mask=given).logits) < ERROR
        before = private.parties.exchanges
        with pytest.raises(UnsupportedOp, match=r"query_global.* same shapes .* choose another protocol"):
            private(ids, global_attention_mask=two)
        seen = private.parties.exchanges - before
        assert (
            worst(private(ids, global_attention_mask=one).logits, plain(ids, global_attention_mask=one).logits) < ERROR
        )
        assert 0 < seen < private.parties.exchanges - before - seen


def test_rows_that_labels_choose_are_told_once() -> None:
    config = transformers.ModernBertConfig(**SMALL, sparse_prediction=True, max_position_embeddings=64, pad_token_id=0)
    plain = transformers.ModernBertForMaskedLM(config).eval()
    ids = torch.arange(8)[None] + 3
    labels = torch.full_like(ids, -100)
    labels[0, 2] = 5
    with patch(plain, ASSISTED) as private, torch.no_grad():
        assert abs(float(private(ids, labels=labels).loss - plain(ids, labels=labels).loss)) < ERROR
        labels[0, 3] = 5
        with pytest.raises(UnsupportedOp, match=r"head\.dense: 2 row"):
            private(ids, labels=labels)


class _Early(nn.Module):
    """A block that values leave out."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if float(x.sum()) > 0 else x


class _Some(_Early):
    """A block for the rows that values choose."""

    def forward(self, x: Tensor) -> Tensor:
        made = x.clone()
        made[x[..., 0] > 0] = self.block(x[x[..., 0] > 0])
        return made


@pytest.mark.parametrize("kind", [_Early, _Some])
def test_rows_that_states_choose_are_refused_before_anything_is_sent(kind: type[_Early]) -> None:
    plain = tiny.build("llama")

    def build(self: PreTrainedModel, config: object) -> None:
        transformers.LlamaForCausalLM.__init__(self, config)
        for layer in self.model.layers:
            layer.mlp = kind(layer.mlp)

    made = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {"__init__": build})

    def weights(*_: object) -> None:
        raise AssertionError("asked for")

    with pytest.raises(PatchMismatch, match=r"'model\.layers\.0\.mlp\.block.* depends on values"):
        open_assisted(made, plain.config, weights, start_parties(ASSISTED), None)


def test_a_call_that_leaves_products_out_is_not_answered() -> None:
    with assisted("llama") as (plain, private), torch.no_grad():
        ids = torch.tensor([[3, 4, 5]])
        private(ids)
        layers = private.model.layers
        private.model.layers = layers[:1]
        with pytest.raises(UnsupportedOp, match=r"lm_head: 3 row|products"):
            private(ids)
        private.model.layers = layers
        assert worst(private(ids).logits, plain(ids).logits) < ERROR


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_implementation": "static"},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 2},
        {"use_cache": False},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_ways_to_generate_ask_for_the_same_products_again(kind: str, settings: dict[str, object]) -> None:
    if kind == "t5" and "prompt_lookup_num_tokens" in settings:
        pytest.skip("of decoders")
    with assisted(kind) as (plain, private):
        given = {name: value[1:] for name, value in BATCH.items()}
        for _ in range(2):
            got = private.generate(**given, **GREEDY, **settings)
            assert torch.equal(got, plain.generate(**given, **GREEDY, **settings))
            given["input_ids"] = given["input_ids"].flip(1)


def test_inference_mode_interrupts_and_errors_of_the_model_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with assisted("llama") as (plain, private), torch.no_grad():
        ids = torch.tensor([[3, 4, 5]])
        mlp = private.model.layers[1].mlp
        for error in (KeyboardInterrupt, ValueError):
            with monkeypatch.context() as patched:
                patched.setattr(mlp, "forward", _raising(error))
                with pytest.raises(error):
                    private(ids)
        for _ in range(2):
            assert worst(private(ids).logits, plain(ids).logits) < ERROR
            with torch.inference_mode():
                assert worst(private(ids).logits, plain(ids).logits) < ERROR


def _raising(error: type[BaseException]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        raise error

    return forward


class _SameMap(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class _Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class _Router(nn.Linear):
    def __init__(self, config: object) -> None:
        super().__init__(config.hidden_size, 2)  # type: ignore[attr-defined]


def test_subclasses_of_linear_layers_are_sent_if_they_compute_the_same() -> None:
    state = torch.random.get_rng_state()
    assert is_sent(_SameMap(5, 5))
    assert not is_sent(_Doubled(5, 5))
    assert not is_sent(_Router(SimpleNamespace(hidden_size=5)))
    torch.random.set_rng_state(state)
    before = torch.rand(1)
    torch.random.set_rng_state(state)

    class Another(_SameMap):
        """Tried anew."""

    layer = Another(5, 5)
    torch.random.set_rng_state(state)
    assert is_sent(layer)
    assert torch.equal(torch.rand(1), before)


def test_layers_of_a_block_that_read_one_tensor_share_an_exchange() -> None:
    """Falcon's MLP reads what its attention reads: three exchanges a layer, and one for the head."""
    plain = tiny.build("falcon")
    ids = torch.tensor([[3, 4, 5]])
    with patch(plain, ASSISTED) as private, torch.no_grad():
        assert worst(private(ids).logits, plain(ids).logits) < ERROR
        assert private.parties.exchanges == 3 * plain.config.num_hidden_layers + 1
