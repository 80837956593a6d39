"""Mixtures of experts: all experts computed, routing secret, the plaintext model's logits."""

from __future__ import annotations

import pytest
import torch
import transformers as tr
from private_llm_hf import patch
from private_llm_hf.models.experts import Routing, is_experts, routing_of
from private_llm_hf.models.miniature import miniature
from torch import Tensor, nn

from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, worst
from tests.hf.conftest import PLAIN, TRIO


def build(name: str, **settings: object) -> tr.PreTrainedModel:
    config = tr.AutoConfig.for_model(name, **settings)
    return miniature(tr.AutoModelForCausalLM._model_mapping[type(config)], config)


def test_mixtral_on_shares() -> None:
    model = build("mixtral")
    with patch(model, TRIO) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen2_moe", {}), ("qwen3_moe", {"norm_topk_prob": True}), ("qwen3_moe", {"norm_topk_prob": False}),
     ("olmoe", {}), ("granitemoe", {})],
)  # fmt: skip
def test_other_families(name: str, settings: dict[str, object]) -> None:
    model = build(name, **settings)
    with patch(model, PLAIN) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


def test_parties_send_the_same_whatever_the_experts() -> None:
    """What is sent depends on the number of tokens, never on where they go."""
    model = build("mixtral")
    with patch(model, TRIO) as private:
        costs = []
        for tokens in (torch.full((1, 6), 7), torch.arange(1, 7).view(1, 6) * 17):
            private(tokens)
            costs.append(private.cost(reset=True).cost)
        plan = str(private.plan)
    assert costs[0] == costs[1]
    assert "all experts on all tokens" in plan


# -- routers ----------------------------------------------------------------------------------------------------------
class Router(nn.Module):
    """Of no family; `formula` decides what it is."""

    def __init__(self, formula: str, count: int = 8) -> None:
        super().__init__()
        self.top_k, self.formula, self.scaling = 3, formula, 2.5
        self.weight = nn.Parameter(torch.zeros(count, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(x, self.weight)
        scores = logits.sigmoid() if self.formula == "sigmoid" else logits.softmax(-1)
        values, index = (-scores if self.formula == "smallest" else scores).topk(self.top_k, dim=-1)
        if self.formula == "chosen first":
            values = logits.topk(self.top_k, dim=-1)[0].softmax(-1)
        if self.formula in ("normal", "scaled"):
            values = values / values.sum(-1, keepdim=True)
        return logits, values * (self.scaling if self.formula == "scaled" else 1.0), index


@pytest.mark.parametrize(
    ("formula", "routing"),
    [("normal", Routing(3, True, 1.0)), ("plain", Routing(3, False, 1.0)), ("chosen first", Routing(3, True, 1.0)),
     ("scaled", Routing(3, True, 2.5)), ("sigmoid", None), ("smallest", None)],
)  # fmt: skip
def test_a_router_is_what_it_computes(formula: str, routing: Routing | None) -> None:
    assert routing_of(Router(formula)) == routing


def test_experts_with_biases_are_none() -> None:
    experts = build("mixtral").model.layers[0].mlp.experts
    assert is_experts(experts)
    experts.bias = nn.Parameter(torch.zeros(4))
    assert not is_experts(experts)


def test_a_configuration_that_asks_for_router_logits_gets_none() -> None:
    """They would open the routing; the plaintext model's own forward adds nothing to its logits for them."""
    model = build("mixtral", output_router_logits=True)
    with patch(model, PLAIN) as private, torch.no_grad():
        found = private(**BATCH)
        assert worst(found.logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
    assert "router_logits" not in found
