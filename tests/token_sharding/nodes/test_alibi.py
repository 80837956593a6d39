"""ALiBi at the AttnNodes against softmax in plain loops: padding, roundings, a cache, no more bytes, the kernel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.token_sharding.nodes import facts
from private_llm.token_sharding.nodes.facts import AttentionCall, ForwardStep, key_bias
from private_llm.token_sharding.plans import ShardingPlan
from tests.token_sharding.nodes.prices import layer_bytes
from tests.token_sharding.nodes.test_nodes import CAUSAL, Session

FINE = AttentionCall(4, 2, 8, 8, 0.3, ahead=0, slopes=(0.7, 0.35, 0.1, 0.003))
COARSE = AttentionCall(4, 1, 8, 6, 0.3, ahead=0, slopes=(0.70703125, 0.353515625, 0.25, 0.0625), coarse=True)
WINDOW = AttentionCall(2, 2, 8, 8, 0.3, back=4, ahead=0, slopes=(0.5, 0.25))
PLANS = [ShardingPlan(1, 4, 1), ShardingPlan(3, 4, 2), ShardingPlan(2, 3, 3)]


def slowly(call: AttentionCall, rows: tuple[Tensor, Tensor, Tensor], step: ForwardStep) -> Tensor:
    """Attention of the new positions, one query at a time: the bias counts a key's unmasked predecessors."""
    q, k, v = (t.double() for t in rows)
    out = torch.zeros(step.batch, call.heads, step.new, call.value_dim, dtype=torch.float64)
    for text in range(step.batch):
        real = [True] * step.total if step.padding is None else step.padding[text].tolist()
        for head in range(call.heads):
            group = head // (call.heads // call.groups)
            for query in range(step.past, step.total):
                weights = {}
                for key in range(step.total):
                    near = call.back is None or query - key <= call.back
                    if not real[key] or key > query or not near:
                        continue
                    bias = call.slopes[head] * sum(real[:key])
                    if call.coarse:
                        bias = float(torch.tensor(bias).bfloat16()) * call.scale
                    weights[key] = math.exp(float(q[text, head, query] @ k[text, group, key]) * call.scale + bias)
                for key, weight in weights.items():
                    share = weight / sum(weights.values())
                    out[text, head, query - step.past] += share * v[text, group, key]
    return out


def check(session: Session, step: ForwardStep) -> None:
    for call, rows, found in zip(session.calls, session.rows, session.step(step), strict=True):
        right = slowly(call, rows, step)
        assert float((found.double() - right).abs().max()) < 5e-6, call


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_prefill_and_decoding_with_padding_on_the_left_and_within(plan: ShardingPlan) -> None:
    session = Session(plan, [FINE, COARSE, WINDOW], 2, 21)
    padding = torch.ones(2, 21, dtype=torch.bool)
    padding[1, :5] = False
    padding[0, 7:9] = False
    check(session, ForwardStep(1, 2, 0, 17, padding[:, :17]))
    check(session, ForwardStep(1, 2, 17, 1, padding[:, :18]))
    check(session, ForwardStep(1, 2, 18, 3, padding))


def test_without_padding() -> None:
    check(Session(ShardingPlan(3, 4, 2), [FINE, COARSE], 2, 15), ForwardStep(None, 2, 0, 15))


def test_slopes_cost_no_bytes() -> None:
    plan = ShardingPlan(3, 4, 2)
    session = Session(plan, [FINE, COARSE], 2, 15)
    session.step(ForwardStep(None, 2, 0, 15))
    bare = [AttentionCall(c.heads, c.groups, c.dim, c.value_dim, c.scale, ahead=0) for c in (FINE, COARSE)]
    assert sum(session.sent().values()) == layer_bytes(plan, bare, 2, 15)


def test_a_coarse_product_is_rounded_before_it_is_scaled() -> None:
    """Eight bits hold 301 as 300, and 0.70703125 x 300 = 212.1 as 212 (0.70703125 x 301 would be 213)."""
    step = ForwardStep(None, 1, 0, 400)
    coarse = AttentionCall(1, 1, 8, 8, 0.3, slopes=(0.70703125,), coarse=True)
    fine = AttentionCall(1, 1, 8, 8, 0.3, slopes=(0.70703125,))
    assert key_bias(coarse, step, [2, 301]).flatten().tolist() == pytest.approx([0.3 * 1.4140625, 0.3 * 212.0])
    assert key_bias(fine, step, [2, 301]).flatten().tolist() == pytest.approx([2 * 0.70703125, 301 * 0.70703125])
    assert key_bias(CAUSAL, step, [0]) is None


def test_what_a_call_may_say() -> None:
    assert AttentionCall(2, 1, 8, 8, 0.3, slopes=[0.5, 0.25]).slopes == (0.5, 0.25)
    with pytest.raises(DomainError, match="got 1 slopes and softcap None; want a slope for each of 2 heads"):
        AttentionCall(2, 1, 8, 8, 0.3, slopes=(0.5,))
    with pytest.raises(DomainError, match="and no softcap"):
        AttentionCall(2, 1, 8, 8, 0.3, softcap=5.0, slopes=(0.5, 0.25))


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
def test_the_triton_pass_adds_the_bias_of_each_head_and_text(texts: int, heads: int, groups: int) -> None:
    pytest.importorskip("triton")
    from private_llm.kernels.attention import attend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, heads, 35, 20, generator=g), torch.randn(2, groups, 41, 20, generator=g)
    v, bias = torch.randn(2, groups, 41, 24, generator=g), torch.randn(texts, heads, 41, generator=g)
    allowed = torch.ones(2, 1, 35, 41, dtype=torch.bool).tril(3)
    expected = facts.attend(q, k, v, allowed, 0.3, bias=bias)
    found = attend(*(t.to(device) for t in (q, k, v, allowed)), 0.3, None, bias.to(device))
    for one, other in zip(found, expected, strict=True):
        assert float((one.cpu() - other).abs().max()) < 2e-5
