"""Masked partial results: their sum is the attention, one alone is noise, and what cannot be summed is an error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from private_llm.errors import DomainError, TransportError
from private_llm.net.local import LocalMesh
from private_llm.token_sharding.nodes.facts import AttentionCall, ForwardStep
from private_llm.token_sharding.nodes.floats import FRAC, ZeroShares, decode, encode, own_scores
from private_llm.token_sharding.plans import ShardingPlan
from tests.token_sharding.nodes.prices import layer_bytes
from tests.token_sharding.nodes.test_nodes import CAUSAL, FULL, WINDOW, Session

PLAN = ShardingPlan(3, 2, 1)


def partials(session: Session, step: ForwardStep) -> tuple[dict[int, Tensor], list[Tensor]]:
    """One layer's messages to CompNode 0 by sender, and the attention that came of them."""
    sent: dict[int, Tensor] = {}
    for node in range(session.plan.alpha, session.plan.nodes):
        link = session.links[node]

        def send(to: int, tag: str, payload: Tensor, node: int = node, real: object = link.send) -> None:
            if (to, tag) == (0, "partial"):
                sent[node] = payload
            real(to, tag, payload)  # type: ignore[operator]

        link.send = send  # type: ignore[method-assign]
    return sent, session.step(step)


def bits(numbers: Tensor) -> Tensor:
    """How often each of the 64 bits is set."""
    shifts = torch.arange(64)
    return (numbers.reshape(-1, 1) >> shifts & 1).double().mean(0)


def test_a_message_alone_is_uniform_and_the_sum_without_one_is_nothing() -> None:
    step = ForwardStep(None, 2, 0, 240)
    first, _ = partials(Session(PLAN, [CAUSAL], 2, 240), step)
    again, result = partials(Session(PLAN, [CAUSAL], 2, 240), step)
    assert sorted(first) == [PLAN.attn_endpoint(0, other) for other in range(3)]
    total = torch.stack(list(again.values())).sum(0)
    mine = PLAN.rows_of_comp(0, 0, 240)
    assert torch.equal(decode(total), result[0][:, :, mine])
    assert torch.equal(total, torch.stack(list(first.values())).sum(0))
    for node, numbers in again.items():
        assert not (numbers == first[node]).any()
        # each bit is set half of the time, within 6 standard deviations
        assert numbers.numel() == 2 * 4 * len(mine) * 9
        assert float((bits(numbers) - 0.5).abs().max()) < 6 * 0.5 / numbers.numel() ** 0.5
        with pytest.raises(TransportError, match="do not add up"):
            decode(total - numbers)


def test_shards_without_tokens_send_masks_all_the_same() -> None:
    plan = ShardingPlan(3, 4, 2)
    sent, (found,) = partials(session := Session(plan, [CAUSAL], 1, 3), step := ForwardStep(None, 1, 0, 3))
    assert len(sent) == plan.beta
    assert not any((numbers == 0).any() for numbers in sent.values())
    assert float((found - session.truth(step)[0]).abs().max()) < 2e-6
    assert sum(session.sent().values()) == layer_bytes(plan, [CAUSAL], 1, 3) == plan.beta * 3 * (4 * 96 + 4 * 8 * 9)


def test_one_owner_of_all_rows_gets_open_results() -> None:
    plan = ShardingPlan(1, 4, 1)
    assert not plan.masked
    assert layer_bytes(plan, [CAUSAL], 1, 9) == 9 * (4 * 96 + 4 * (4 * 8 + 4))


def test_half_precision_rows_leave_masked_numbers_whole() -> None:
    plan = ShardingPlan(3, 2, 1, wire="float16")
    assert layer_bytes(plan, [FULL], 1, 9) == 3 * 9 * (2 * (4 * 8 + 2 * 14) + 4 * 8 * 7)


def test_nodes_at_different_calls_are_noticed() -> None:
    mesh = LocalMesh(PLAN.nodes, timeout=5)
    zeros = [ZeroShares(PLAN, mesh.transport(PLAN.attn_endpoint(1, other)), 1) for other in range(3)]
    for ring in zeros:
        ring.join()
    numbers = torch.full((1, 4, 2, 3), 1 << FRAC)
    assert torch.equal(torch.stack([ring.add_to(numbers) for ring in zeros]).sum(0), 3 * numbers)
    zeros[2].add_to(numbers)
    wrong = torch.stack([ring.add_to(torch.full((1, 16, 8, 3), 1 << FRAC)) for ring in zeros]).sum(0)
    with pytest.raises(TransportError, match="not at the same call"):
        decode(wrong)


def steep(nats: float) -> Session:
    """Position 0 weighs e^nats times as much as every other one, for all queries."""
    session = Session(PLAN, [AttentionCall(1, 1, 2, 3, 1.0, ahead=0)], 1, 15)
    q, k, _ = session.rows[0]
    q[:] = torch.tensor([1.0, 0.0])
    k[:] = torch.tensor([0.0, 1.0])
    k[:, :, 0, 0] = nats
    return session


@pytest.mark.parametrize("nats", [-30.0, 0.0, 15.0, 22.0])
def test_tokens_that_outweigh_all_others(nats: float) -> None:
    session = steep(nats)
    (found,), (right,) = session.step(ForwardStep(None, 1, 0, 15)), session.truth(ForwardStep(None, 1, 0, 15))
    assert float((found - right).abs().max()) < 2e-6


def test_what_a_sum_cannot_hold_is_an_error() -> None:
    with pytest.raises(DomainError, match=r"attention call 1: some keys weigh more than 2\^38 / 3 times"):
        steep(27.0).step(ForwardStep(None, 1, 0, 15))
    half = (torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), (61.5 - FRAC) * math.log(2))), torch.zeros(1, 1, 1)
    assert float(encode(*half, 1).abs().max()) < 2.0**62
    with pytest.raises(DomainError, match=r"weigh more than 2\^38 / 2 times"):
        encode(*half, 2)  # two such numbers have a sum that wraps
    for bad in (torch.nan, torch.inf):
        with pytest.raises(DomainError):
            encode((torch.full((1, 1, 1, 2), bad), torch.zeros(1, 1, 1)), torch.zeros(1, 1, 1), 3)


def test_a_row_s_score_on_itself() -> None:
    session = Session(PLAN, [WINDOW], 2, 4)
    q, k, _ = session.rows[0]
    bias = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(1))
    found = own_scores(WINDOW, q, k, bias)
    for text in range(2):
        for head in range(2):
            for row in range(4):
                raw = float(q[text, head, row] @ k[text, 0, row]) * 0.3
                right = 5.0 * torch.tanh(torch.tensor(raw / 5.0)) + bias[0, head, row]
                assert abs(float(found[text, head, row] - right)) < 1e-6
