"""Mixtures of experts: all experts computed, routing secret, the plaintext model's logits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
import transformers as tr
from private_llm_hf import FixedCounts, PrivateConfig, SpeculationConfig, patch
from private_llm_hf.checkpoint.miniature import miniature
from private_llm_hf.models.experts import is_experts, places
from private_llm_hf.models.routers import PrivateRouter, RouterParts, Routing, router_of
from private_llm_hf.service.checks import batch_key
from private_llm_hf.tools.estimate import estimate
from private_llm_hf.wire.commands import Call, Tokens
from torch import Tensor, nn
from transformers.integrations import moe

from private_llm.errors import ConfigError
from private_llm.exact.ranks import Groups
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm.token_sharding import ShardingPlan
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


@pytest.mark.parametrize(("capacity", "grouped"), [(None, True), (None, False), (1.0, True)])
def test_calibration_sees_what_experts_make(
    capacity: float | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small inner values and large last matrices: products beyond the inner values' range are right all the same.

    grouped: by torch's product; else by transformers' own, which it takes where torch has none (2.8 and before).
    """
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: grouped)
    model, text = build("mixtral"), torch.arange(1, 41).view(1, 40)
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.data.mul_(0.05)
        layer.mlp.experts.down_proj.data.mul_(20)
    with patch(model, replace(PLAIN, expert_capacity=capacity)) as private, torch.no_grad():
        with nullcontext() if capacity is None else limited(model, torch.ones_like(text)):
            wanted = model(text).logits
        assert worst(private(text).logits, wanted) < LOGIT_ERROR


# -- a capacity -------------------------------------------------------------------------------------------------------
TEXT = torch.randint(1, 60, (2, 40), generator=torch.Generator().manual_seed(5))
PRESENT = torch.ones_like(TEXT).index_put((torch.tensor(1), torch.arange(9)), torch.tensor(0))
CAPACITY = 1.0


@contextmanager
def limited(model: tr.PreTrainedModel, present: Tensor) -> Iterator[None]:
    """The plaintext model whose experts take as many tokens of each row, chosen one by one, of texts of this shape."""

    def only(forward: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor, *, experts: int) -> Tensor:
        if len(hidden) == present.numel():
            rows, columns = present.shape
            most = places(CAPACITY, columns, index.shape[-1], experts)
            of_all = torch.zeros(len(hidden), experts).scatter_(-1, index, weights).view(rows, columns, experts)
            kept = torch.zeros_like(of_all)
            for row, expert in itertools.product(range(rows), range(experts)):
                own = [float(of_all[row, t, expert]) * int(present[row, t]) for t in range(columns)]
                best = sorted(range(columns), key=lambda t: (-own[t], t))[:most]
                kept[row, best, expert] = of_all[row, best, expert]
            weights = kept.view(len(hidden), experts).gather(-1, index)
        return forward(hidden, index, weights)

    found = [each for each in model.modules() if hasattr(each, "gate_up_proj")]
    for each in found:
        each.forward = functools.partial(only, each.forward, experts=len(each.gate_up_proj))
    yield
    for each in found:
        del each.forward


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "config", [PLAIN, TRIO, replace(TRIO, weights="public"), replace(TRIO, weights_at_rest="seeds")]
)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_with_a_capacity_experts_take_the_tokens_of_largest_weight(name: str, config: PrivateConfig) -> None:
    """As the plaintext model whose experts are limited so, padding left out; texts of 16 tokens are computed whole."""
    model = build(name)
    given = {"input_ids": TEXT, "attention_mask": PRESENT}
    with patch(model, replace(config, expert_capacity=CAPACITY)) as private, torch.no_grad():
        whole = model(**given).logits
        with limited(model, PRESENT):
            wanted, tokens = model(**given).logits, model.generate(**given, **GREEDY)
        assert worst(private(**given).logits, wanted, PRESENT) < LOGIT_ERROR
        assert torch.equal(private.generate(**given, **GREEDY), tokens)
        assert worst(whole, wanted, PRESENT) > 10 * LOGIT_ERROR  # something was left out
        short = {"input_ids": TEXT[:, :16]}
        assert worst(private(**short).logits, model(**short).logits) < LOGIT_ERROR


def test_rows_of_a_batch_take_no_places_from_each_other() -> None:
    model = build("mixtral")
    with patch(model, replace(PLAIN, expert_capacity=CAPACITY)) as private, torch.no_grad():
        alone = private(input_ids=TEXT[:1]).logits
        other = private(input_ids=torch.cat([TEXT[:1], TEXT[1:].flip(1)])).logits
    assert worst(other[:1], alone) < LOGIT_ERROR / 10


@pytest.mark.parametrize(
    "drafts",
    [{"prompt_lookup_num_tokens": 3}, *({"speculation": SpeculationConfig(**counts)} for counts in (  # type: ignore[arg-type]
        {"open_counts": True}, {"length": 3}, {"fixed_counts": FixedCounts(window=17, reserve=0)},
        {"fixed_counts": FixedCounts(exact=True)},
    ))], ids=str,
)  # fmt: skip
def test_drafts_that_would_take_places_are_refused(drafts: dict[str, object]) -> None:
    """Those of the prompt's pass, and passes of more tokens than are always taken; the default drafts keep the text."""
    text = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12] * 5])
    with patch(build("mixtral"), replace(PLAIN, expert_capacity=CAPACITY)) as private:
        with pytest.raises(ConfigError, match=r"drafts: with expert_capacity=1\.0 .* window of at most 16"):
            private.generate(text, **GREEDY, **drafts)
        if "prompt_lookup_num_tokens" in drafts:
            drafted = private.generate(text, **GREEDY, speculation=SpeculationConfig())
            assert torch.equal(drafted, private.generate(text, **GREEDY))
            private.generate(text[:, :12], **GREEDY, **drafts)  # 16 tokens in all


def test_a_capacity_sends_a_part_of_the_bytes() -> None:
    """OLMoE's layer of 64 experts, of which 8 are chosen, and a prompt of 128 tokens: 3.7 times fewer bytes."""
    shape = tr.OlmoeConfig(num_hidden_layers=1, intermediate_size=1024, vocab_size=64, pad_token_id=0)
    full, part = (
        estimate(tr.OlmoeForCausalLM, shape, PrivateConfig(expert_capacity=capacity), 128).costs
        for capacity in (None, 1.25)
    )
    assert full.bytes_total > 3.4 * part.bytes_total


def test_prompts_under_a_capacity_share_no_batch() -> None:
    """Of several users; their decode steps do."""
    model = build("mixtral")
    config = replace(TRIO, expert_capacity=CAPACITY)
    for length, past, shared in ((40, 0, False), (8, 0, True), (1, 40, True)):
        call = Call({}, (Tokens("input_ids", (1, length), model.config.vocab_size),), 1, None, None, ("logits",))
        assert (batch_key(model, config, call, past) is not None) == shared
        assert batch_key(model, TRIO, call, past) is not None


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), "all"])
def test_capacities_that_are_none(wrong: object) -> None:
    with pytest.raises(ConfigError, match="expert_capacity"):
        PrivateConfig(expert_capacity=wrong)  # type: ignore[arg-type]


def test_parties_agree_on_a_capacity() -> None:
    agreed = [replace(TRIO, expert_capacity=capacity).agreement() for capacity in (2, 2.0, 1.5, None)]
    assert agreed[0] == agreed[1]
    assert len(set(agreed)) == 3


def test_protocols_without_private_experts_have_no_capacity() -> None:
    with pytest.raises(ConfigError, match=r"expert_capacity: got 2\.0; protocol='assisted' has no such setting"):
        PrivateConfig(protocol="assisted", expert_capacity=2.0)
    with pytest.raises(ConfigError, match="expert_capacity: nodes of a sharding plan"):
        PrivateConfig(protocol="cascade", weights="public", plan=ShardingPlan(8, 8, 2), expert_capacity=2.0)


def test_models_without_experts_have_no_capacity() -> None:
    with pytest.raises(ConfigError, match=r"expert_capacity: got 2, but LlamaForCausalLM has no experts"):
        patch(build("llama"), replace(PLAIN, expert_capacity=2.0))
