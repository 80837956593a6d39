"""CompNodes and AttnNodes together against attention at once: plans, masks, prefill and decode, caches, exact bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from private_llm.errors import DomainError, TransportError
from private_llm.net.ledger import merge
from private_llm.net.local import LocalMesh
from private_llm.net.transport import Transport
from private_llm.token_sharding.nodes.attn_node import AttnNode
from private_llm.token_sharding.nodes.exchange import Exchange
from private_llm.token_sharding.nodes.facts import AttentionCall, ForwardStep, allowed, attend
from private_llm.token_sharding.plans import ShardingPlan
from tests.token_sharding.nodes.prices import layer_bytes

FULL = AttentionCall(4, 2, 8, 6, 0.3)
CAUSAL = AttentionCall(4, 4, 8, 8, 0.3, ahead=0)
WINDOW = AttentionCall(2, 1, 8, 8, 0.3, softcap=5.0, back=5, ahead=0)
LOCAL = AttentionCall(2, 1, 8, 8, 0.3, back=3, ahead=3)
PLANS = [
    ShardingPlan(1, 4, 1), ShardingPlan(3, 2, 1), ShardingPlan(3, 4, 2), ShardingPlan(2, 3, 3),
    ShardingPlan(3, 4, 2, partials="open"), ShardingPlan(2, 3, 3, partials="open"),
]  # fmt: skip


class Session:
    """All nodes of a plan, in threads for each step; hidden tensors of the whole text are known to the test."""

    def __init__(self, plan: ShardingPlan, calls: list[AttentionCall], batch: int, length: int) -> None:
        self.plan, self.calls, self.batch = plan, calls, batch
        self.mesh = LocalMesh(plan.nodes, timeout=20)
        self.links: list[Transport] = [self.mesh.transport(n) for n in range(plan.nodes)]
        self.comps = [Exchange(plan, self.links[n], calls) for n in range(plan.alpha)]
        self.attns = [AttnNode(plan, self.links[n], calls) for n in range(plan.alpha, plan.nodes)]
        for node in self.attns:
            node.join()
        for link in self.links:
            link.ledger.reset()
        g = torch.Generator().manual_seed(7)

        def make(heads: int, size: int) -> Tensor:
            return torch.randn(batch, heads, length, size, generator=g)

        self.rows = [(make(c.heads, c.dim), make(c.groups, c.dim), make(c.groups, c.value_dim)) for c in calls]

    def step(self, step: ForwardStep) -> list[Tensor]:
        """Attention of each call for the new positions, put together from all CompNodes."""
        results = [torch.full((self.batch, c.heads, step.new, c.value_dim), torch.nan) for c in self.calls]
        errors: list[BaseException] = []

        def comp(exchange: Exchange) -> None:
            mine = exchange.begin(step)
            if not mine:
                return
            for result, rows in zip(results, self.rows, strict=True):
                result[:, :, [p - step.past for p in mine]] = exchange.attend(*(t[:, :, mine] for t in rows))
            exchange.end()

        def guarded(run: Callable[[], None]) -> None:
            try:
                run()
            except BaseException as error:
                errors.append(error)
                self.mesh.abort(str(error))  # nobody waits for it

        work = [partial(comp, exchange) for exchange in self.comps] + [partial(node.run, step) for node in self.attns]
        threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]
        return results

    def truth(self, step: ForwardStep) -> list[Tensor]:
        everything, new = list(range(step.total)), list(range(step.past, step.total))
        return [
            attend(q[:, :, new], k[:, :, everything], v[:, :, everything], allowed(c, step, new, everything), c.scale,
                   c.softcap)[0]
            for c, (q, k, v) in zip(self.calls, self.rows, strict=True)
        ]  # fmt: skip

    def sent(self) -> dict[tuple[int, int], int]:
        return merge([link.ledger for link in self.links]).sent


def check(session: Session, step: ForwardStep) -> None:
    for found, right in zip(session.step(step), session.truth(step), strict=True):
        assert float((found - right).abs().max()) < 2e-6


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_one_forward_of_all_kinds_of_attention(plan: ShardingPlan) -> None:
    session = Session(plan, [FULL, CAUSAL, WINDOW, LOCAL], 2, 29)
    padding = torch.ones(2, 29, dtype=torch.bool)
    padding[1, :4] = False
    step = ForwardStep(None, 2, 0, 29, padding)
    found, right = session.step(step), session.truth(step)
    for a, b in zip(found, right, strict=True):
        assert float((a - b)[0].abs().max()) < 2e-6
        assert float((a - b)[1, :, 4:].abs().max()) < 2e-6


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_decoding_continues_the_cache(plan: ShardingPlan) -> None:
    session = Session(plan, [CAUSAL, WINDOW], 2, 20)
    for past, new in [(0, 13), (13, 1), (14, 1), (15, 4), (19, 1)]:
        check(session, ForwardStep(1, 2, past, new))


def test_a_new_token_wakes_one_comp_node_and_beta_attn_nodes() -> None:
    plan = ShardingPlan(3, 4, 2)
    session = Session(plan, [CAUSAL], 1, 30)
    session.step(ForwardStep(1, 1, 0, 29))
    for link in session.links:
        link.ledger.reset()
    check(session, ForwardStep(1, 1, 29, 1))
    comp, shard = plan.comp_of(29), plan.shard_of(29)
    awake = {sender for sender, _ in session.sent()}
    assert awake == {comp, *(plan.attn_endpoint(shard, other) for other in range(plan.beta))}
    assert len(awake) == 1 + plan.beta


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("length", [3, 29])
def test_bytes_are_the_formula_s(plan: ShardingPlan, length: int) -> None:
    calls = [FULL, CAUSAL]
    session = Session(plan, calls, 2, length)
    session.step(ForwardStep(None, 2, 0, length))
    assert sum(session.sent().values()) == layer_bytes(plan, calls, 2, length)


def test_fewer_bytes_than_equation_one() -> None:
    """Equation (1): beta F (2 d H + 2 d H_KV + 2 H) N; here one H N less, as every shard has tokens."""
    plan, n = ShardingPlan(3, 4, 2, partials="open"), 60
    paper = plan.beta * 4 * (2 * 8 * 4 + 2 * 8 * 4 + 2 * 4) * n
    assert layer_bytes(plan, [CAUSAL], 1, n) == paper - plan.beta * 4 * 4 * n


@pytest.mark.parametrize(("alpha", "gigabytes"), [(1, 0.009), (4, 0.038), (8, 0.076)])
@pytest.mark.parametrize(("layers", "heads", "factor"), [(12, 12, 1), (24, 16, 0.0253 / 0.0095)])
def test_bytes_of_the_paper_s_table_7(alpha: int, gigabytes: float, layers: int, heads: int, factor: float) -> None:
    """BERT-base and BERT-large, 128 tokens: the table rounds equation (1) with numbers of two bytes."""
    plan = ShardingPlan(alpha, 1, 1, accept_weak_plan=True, wire="float16", partials="open")
    made = layer_bytes(plan, [AttentionCall(heads, heads, 64, 64, 0.125)] * layers, 1, 128)
    assert made == alpha * 2 * (4 * 64 * heads + 2 * heads) * 128 * layers
    assert made / 1e9 == pytest.approx(gigabytes * factor, abs=6e-4 * factor)


def test_half_precision_on_the_wire() -> None:
    """Rows of about 1 carry a relative error of 2^-11; scores and results inherit it."""
    plan = ShardingPlan(3, 2, 1, wire="float16")
    session = Session(plan, [FULL, CAUSAL], 2, 29)
    step = ForwardStep(None, 2, 0, 29)
    for found, right in zip(session.step(step), session.truth(step), strict=True):
        assert 0 < float((found - right).abs().max()) < 1e-2
    assert sum(session.sent().values()) == layer_bytes(plan, [FULL, CAUSAL], 2, 29)


def test_caches_are_selected_cropped_copied_and_freed() -> None:
    plan = ShardingPlan(3, 2, 2)
    session = Session(plan, [CAUSAL], 2, 20)
    session.step(ForwardStep(1, 2, 0, 15))
    for node in session.attns:
        node.copy(1, 2)
        node.crop(2, 11)
    check(session, ForwardStep(2, 2, 11, 3))
    check(session, ForwardStep(1, 2, 15, 1))
    for node in session.attns:
        node.select(1, torch.tensor([1, 0]))
    session.rows = [(q.flip(0), k.flip(0), v.flip(0)) for q, k, v in session.rows]
    check(session, ForwardStep(1, 2, 16, 2))
    for node in session.attns:
        node.free(1)
    check(session, ForwardStep(1, 2, 0, 4))


def test_a_node_that_lost_a_part_of_its_cache_does_not_go_on() -> None:
    session = Session(ShardingPlan(3, 2, 2), [CAUSAL], 2, 20)
    session.step(ForwardStep(1, 2, 0, 15))
    for node in session.attns:
        node.crop(1, 11)
    with pytest.raises(TransportError, match="a step at position 15 does not continue the cache of this node"):
        session.step(ForwardStep(1, 2, 15, 1))


def test_a_model_that_disagrees_is_refused() -> None:
    exchange = Exchange(ShardingPlan(1, 4, 1), LocalMesh(2).transport(0), [CAUSAL])
    exchange.begin(ForwardStep(None, 1, 0, 2))
    wrong = torch.zeros(1, 4, 2, 9)
    with pytest.raises(DomainError, match="attention call 1: got heads, groups, sizes"):
        exchange.attend(wrong, wrong, wrong)
    exchange = Exchange(ShardingPlan(1, 4, 1), LocalMesh(2).transport(0), [CAUSAL])
    exchange.begin(ForwardStep(None, 1, 0, 2))
    with pytest.raises(DomainError, match="made 0 attention calls; want 1"):
        exchange.end()
