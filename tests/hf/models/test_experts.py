"""Mixtures of experts: all experts computed, routing secret, the plaintext model's logits."""

from __future__ import annotations

import pytest
import torch
import transformers as tr
from private_llm_hf import patch
from private_llm_hf.checkpoint.miniature import miniature
from private_llm_hf.models.routers import PrivateRouter, RouterParts, Routing, is_experts, router_of
from torch import Tensor, nn

from private_llm.exact.maximum import Groups
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.harness import PLAIN as HARNESS_PLAIN
from tests.harness import run_parties
from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, worst
from tests.hf.conftest import PLAIN, TRIO


def build(name: str, **settings: object) -> tr.PreTrainedModel:
    config = tr.AutoConfig.for_model(name, **settings)
    return miniature(tr.AutoModelForCausalLM._model_mapping[type(config)], config)


DEEPSEEK_V2 = {
    "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0, "q_lora_rank": 1536,
}  # fmt: skip
SIGMOIDS = {
    "deepseek_v3": {}, "glm4_moe": {}, "glm4_moe_lite": {}, "minimax_m2": {}, "afmoe": {}, "ernie4_5_moe": {},
    "kolibri1": {}, "hy_v3": {}, "solar_open": {}, "exaone_moe": {}, "axk1": {}, "deepseek_v2": DEEPSEEK_V2,
    "dots1": {
        "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3,
    },
}  # fmt: skip
"""Sigmoid routers, corrected and grouped ones, and those whose correction another module holds or adds."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "minimax_m2"])
def test_on_shares(name: str) -> None:
    model = build(name)
    with patch(model, TRIO) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen2_moe", {}), ("qwen3_moe", {"norm_topk_prob": True}), ("qwen3_moe", {"norm_topk_prob": False}),
     ("olmoe", {}), ("granitemoe", {}), *SIGMOIDS.items()],
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
        plan = str(private.patch_plan)
    assert costs[0] == costs[1]
    assert "all experts on all tokens" in plan


# -- routers ----------------------------------------------------------------------------------------------------------
class Router(nn.Module):
    """Of no family; `formula` decides what it is."""

    def __init__(self, formula: str, count: int = 8) -> None:
        super().__init__()
        self.top_k, self.formula, self.scaling = 3, formula, 2.5
        self.num_group, self.topk_group = (4, 2) if formula.startswith("groups") else (1, 1)
        self.weight = nn.Parameter(torch.zeros(count, 32))
        if formula in ("bias", "corrected", "corrected logits", "groups zero"):
            self.register_parameter("bias" if formula == "bias" else "other", nn.Parameter(torch.zeros(count)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(x, self.weight, getattr(self, "bias", None))
        sigmoid = self.formula in ("sigmoid", "corrected", "corrected logits", "groups zero")
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        choice = logits if self.formula == "corrected logits" else scores
        if hasattr(self, "other"):
            choice = choice + self.other
        if self.formula.startswith("groups"):
            parts = choice.view(-1, 4, 2)
            best = parts.amax(-1) if self.formula == "groups max" else parts.sum(-1)
            kept = torch.zeros_like(best).scatter_(1, best.topk(2, dim=-1)[1], 1.0).repeat_interleave(2, -1).bool()
            choice = choice.masked_fill(~kept, 0.0 if self.formula == "groups zero" else float("-inf"))
        index = (-scores if self.formula == "smallest" else choice).topk(self.top_k, dim=-1)[1]
        values = scores.gather(-1, index)
        if self.formula == "chosen first":
            values = logits.topk(self.top_k, dim=-1)[0].softmax(-1)
        if self.formula in ("normal", "scaled"):
            values = values / values.sum(-1, keepdim=True)
        return logits, values * (self.scaling if self.formula == "scaled" else 1.0), index


@pytest.mark.parametrize(
    ("formula", "routing"),
    [("normal", Routing(3, True, 1.0)), ("plain", Routing(3, False, 1.0)), ("chosen first", Routing(3, True, 1.0)),
     ("scaled", Routing(3, True, 2.5)), ("bias", Routing(3, False, 1.0)),
     ("sigmoid", Routing(3, False, 1.0, "sigmoid")), ("corrected", Routing(3, False, 1.0, "sigmoid", "scores")),
     ("corrected logits", Routing(3, False, 1.0, "sigmoid", "logits")),
     ("groups max", Routing(3, False, 1.0, groups=Groups(4, 2, 1))),
     ("groups sum", Routing(3, False, 1.0, groups=Groups(4, 2, 2))),
     ("groups zero", None), ("smallest", None)],
)  # fmt: skip
def test_a_router_is_what_it_computes(formula: str, routing: Routing | None) -> None:
    found = router_of(Router(formula))
    parts = RouterParts("", "other" if formula.startswith("corrected") else "")
    assert found == (None if routing is None else (routing, parts))


def test_a_router_with_more_weights_is_none() -> None:
    router = Router("normal")
    router.noise = nn.Linear(32, 8, bias=False)
    assert router_of(router) is None


def run_router(routing: Routing, logits: Tensor) -> Tensor:
    """Weights of a private router whose logits are its input."""

    def weights(_: object, x: Fixed) -> Fixed:
        router = PrivateRouter(Router("normal"), routing, RouterParts("", ""))
        router.weight = nn.Parameter(torch.eye(logits.shape[-1]))
        made = router(SecretTensor(x))[1]
        assert isinstance(made, SecretTensor)
        return made.to_fixed()

    return run_parties(HARNESS_PLAIN, weights, [logits.double()]).value


@pytest.mark.parametrize(
    "routing",
    [Routing(3, True, 1.0, "softmax", "", Groups(4, 2, 2)), Routing(3, False, 2.5, "softmax", "", Groups(4, 2, 1)),
     Routing(3, True, 1.0, "sigmoid", "", Groups(4, 2, 2)), Routing(8, True, 1.0, "sigmoid"), Routing(8, True, 1.0)],
    ids=str,
)  # fmt: skip
def test_private_routers_are_their_formulas(routing: Routing) -> None:
    """Sums of two scores order groups otherwise than sums of two logits."""
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(3)) * 3
    assert (run_router(routing, logits) - routing.plain(logits, None)).abs().max() < 1e-3


@pytest.mark.parametrize("size", [1.0, 0.003])
def test_small_sums_of_sigmoids_are_divided_by(size: float) -> None:
    """Down to 2^-8; the sigmoid's own error is what is left."""
    logits = (torch.tensor([[0.9, 0.5, 0.2, 0.1]]) * size).logit()
    routing = Routing(2, True, 1.0, "sigmoid")
    assert torch.allclose(run_router(routing, logits), routing.plain(logits, None).double(), atol=2e-4 / size)


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
