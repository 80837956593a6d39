"""A cache that fills in what sparse steps left out: the entries are those of a dense cache, at the stated cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from comet_cache.refill import RefillCost, RefillManager, RefillStep, Strategy
from comet_cache.refilling_cache import ActiveHeads, Projection, RefillingCache
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.kv_cache.policies.policy import CacheFacts, SlidingWindow
from private_llm.net.ledger import Cost
from private_llm.nn.attention import attend
from private_llm.protocols.registry import dealer_prices as dealer_cost
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.ring.ring import RING64
from private_llm.tensor.fixed import Fixed
from tests.harness import TRIO, run_meta, run_parties
from tests.protocols.test_suite import prices

H, G, D, DV, N = 6, 3, 4, 3, 10
HEIGHT = (H + G) * D + G * DV
SETTINGS = {name: {"protocol": name, "insecure": name == "plain"} for name in protocol_names()}
SETTINGS["dealer, remask"] = {"protocol": "dealer", "matmul": "remask"}
every = pytest.mark.parametrize("setting", SETTINGS)
CHEAP = RefillCost(weight=1, token=1)


def config(setting: str) -> PrivateConfig:
    return PrivateConfig.from_dict(SETTINGS[setting])


def patterns(batch: int, lengths: Sequence[int], density: float = 0.4, seed: int = 0) -> list[Tensor]:
    """bool [B, q, H] for each call."""
    chance = torch.Generator().manual_seed(seed)
    return [torch.rand((batch, new, H), generator=chance) < density for new in lengths]


def inputs(batch: int, total: int) -> list[Tensor]:
    """Inputs of all positions, the weight, and the bias."""
    shapes = ((batch, total, N), (HEIGHT, N), (HEIGHT,))
    return [torch.randn(s, generator=torch.Generator().manual_seed(i)).double() for i, s in enumerate(shapes)]


def projection(weight: Fixed, bias: Fixed | None = None) -> Projection:
    return Projection(weight, bias, H, G, (D, DV))


def dense(x: Fixed, weight: Fixed, bias: Fixed) -> list[Fixed]:
    """Query [B, H, T, D], key [B, G, T, D] and value [B, G, T, Dv] of all heads."""
    flat = x.matmul(weight.view(lambda part: part.mT)) + bias
    cuts = [0, H * D, (H + G) * D, HEIGHT]
    return [
        flat.view(lambda part, a=a, b=b, h=h: part[..., a:b].unflatten(-1, (h, -1)).transpose(1, 2))
        for a, b, h in zip(cuts, cuts[1:], (H, G, G), strict=False)
    ]


def steps(cache: RefillingCache, x: Fixed, active: Sequence[Tensor]) -> list[ActiveHeads]:
    made, begin = [], 0
    for pattern in active:
        end = begin + pattern.shape[1]
        made.append(cache.step(x.view(lambda part, a=begin, b=end: part[:, a:b]), pattern))
        begin = end
    return made


def run(setting: str, active: Sequence[Tensor], strategy: Strategy, **more: Any) -> tuple[Any, list[Tensor], Cost]:
    """What each step reads: query, key, value by step; those of a dense cache; the cost of the steps."""
    batch, total = active[0].shape[0], sum(pattern.shape[1] for pattern in active)

    def sparse(session: Session, x: Fixed, weight: Fixed, bias: Fixed) -> list[Fixed]:
        made = steps(RefillingCache(projection(weight, bias), strategy, **more), x, active)
        return [value for step in made for value in (step.query, step.key, step.value)]

    found = run_parties(config(setting), sparse, inputs(batch, total))
    truth = run_parties(config(setting), lambda _, *given: dense(*given), inputs(batch, total))
    read = [found.elements[at : at + 3] for at in range(0, len(found.elements), 3)]
    return read, truth.elements, found.cost


def expected(truth: Sequence[Tensor], pattern: Tensor, begin: int) -> list[Tensor]:
    """Query, key and value of the active heads of a call after `begin` positions."""
    row, head = pattern.any(1).nonzero().unbind(1)
    end = begin + pattern.shape[1]
    query = truth[0][row, head, begin:end] * pattern.transpose(1, 2)[row, head][..., None]
    group = head // (H // G)
    return [each.unsqueeze(1) for each in (query, truth[1][row, group, :end], truth[2][row, group, :end])]


def sent(cost: Cost) -> dict[tuple[int, int], int]:
    return {link: count for link, count in cost.sent.items() if count}


@every
@pytest.mark.parametrize("strategy", Strategy)
def test_what_active_heads_read_is_a_dense_cache(setting: str, strategy: Strategy) -> None:
    active = patterns(2, (3, 1, 1, 2, 1, 1))
    read, truth, _ = run(setting, active, strategy, cost=CHEAP)
    begin = 0
    for got, pattern in zip(read, active, strict=True):
        for mine, whole in zip(got, expected(truth, pattern, begin), strict=True):
            assert mine.shape == whole.shape
            assert int((mine - whole).abs().max()) <= (setting != "plain")  # a truncation may be one unit off
        begin += pattern.shape[1]


def test_with_exact_divisions_entries_are_those_of_a_dense_cache_to_the_bit() -> None:
    active = patterns(2, (3, 1, 1))
    exact = PrivateConfig(truncation="exact")

    def sparse(_: Session, x: Fixed, weight: Fixed, bias: Fixed) -> list[Fixed]:
        return [
            each
            for made in steps(RefillingCache(projection(weight, bias)), x, active)
            for each in (made.key, made.value)
        ]

    found = run_parties(exact, sparse, inputs(2, 5)).elements
    truth = run_parties(exact, lambda _, *given: dense(*given), inputs(2, 5)).elements
    begin = 0
    for number, pattern in enumerate(active):
        assert all(map(torch.equal, found[2 * number : 2 * number + 2], expected(truth, pattern, begin)[1:]))
        begin += pattern.shape[1]


def price(setting: str, plans: Sequence[tuple[RefillStep, int]]) -> Cost:
    """Products with these entries and so many queries: outputs, and under `remask` each token and weight row."""
    total = Cost()
    for plan, queries in plans:
        outputs = plan.entries * (D + DV) + queries * D
        if not outputs:
            continue
        if setting == "dealer, remask":
            rows = plan.heads * (D + DV) + queries * D  # batch 1, one query a head: each its own weight rows
            total += dealer_cost.remask(RING64, plan.tokens * N, rows * N)
        total += prices(config(setting).protocol).product(RING64, outputs, TRIO.frac_bits)
    return total


@every
@pytest.mark.parametrize("strategy", Strategy)
def test_bytes_and_rounds_are_those_of_what_is_made(setting: str, strategy: Strategy) -> None:
    active = patterns(1, [1] * 12, density=0.3)
    active[5][:] = False  # nothing is active: nothing is sent
    _, _, cost = run(setting, active, strategy, cost=CHEAP)
    manager = RefillManager(1, G, CHEAP if strategy is Strategy.PREFETCH else None)
    plans = []
    for pattern in active:
        old = manager.length
        plan = manager.step(pattern[:, 0].view(1, G, -1).any(-1))
        parts = list(plan.apart(old)) if strategy is Strategy.PER_HEAD else [plan]
        plans += [(part, 0 if number else int(pattern.sum())) for number, part in enumerate(parts)]
    if setting == "plain":
        assert not sent(cost)
    else:
        due = price(setting, plans)
        assert (sent(cost), cost.rounds) == (sent(due), due.rounds)


def test_costs_are_the_same_without_data() -> None:
    active = patterns(2, (3, 1, 1))
    _, _, cost = run("trio", active, Strategy.MERGED)

    def program(_: Session, x: Fixed, weight: Fixed, bias: Fixed) -> list[Fixed]:
        return [made.key for made in steps(RefillingCache(projection(weight, bias)), x, active)]

    meta = run_meta(TRIO, program, [(2, 5, N), (HEIGHT, N), (HEIGHT,)])
    assert (sent(meta), meta.rounds) == (sent(cost), cost.rounds)


def test_default_costs_prefetch_under_remasking_alone() -> None:
    """Threshold 2 D: one head lacks 2 D + 1 older entries when another that lacks as many comes back."""
    active = [torch.zeros(1, 1, H, dtype=torch.bool) for _ in range(2 * D + 2)]
    active[-1][0, 0, 0] = True
    filled: dict[str, list[list[int]]] = {}

    def program(session: Session, x: Fixed, weight: Fixed, _: Fixed) -> Fixed:
        cache = RefillingCache(Projection(weight, None, H, H, (D, D)), Strategy.PREFETCH)
        made = steps(cache, x, active)
        filled[f"{session.config.protocol} {session.config.matmul}"] = cache.filled().tolist()
        return made[-1].key

    for setting in ("dealer, remask", "dealer", "trio", "quad"):
        given = inputs(1, len(active))
        run_parties(config(setting), program, [given[0], torch.cat([given[1]] * 2)[: 3 * H * D], given[2]])
    last = len(active)
    assert filled.pop("dealer remask") == [[last] * H]
    assert list(filled.values()) == [[[last] + [0] * (H - 1)]] * 3


@pytest.mark.parametrize("setting", ["trio", "dealer", "quad"])
def test_attention_of_active_heads_is_that_of_a_dense_cache(setting: str) -> None:
    active = patterns(2, (4, 1), density=0.5)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    allowed[1, :, :, 0] = False  # a row with padding, whose first query sees nothing

    def sparse(session: Session, x: Fixed, weight: Fixed, bias: Fixed) -> list[Fixed]:
        found = []
        for made, mask in zip(
            steps(RefillingCache(projection(weight, bias)), x, active),
            (allowed[:, :, :4, :4], allowed[:, :, 4:]),
            strict=True,
        ):
            found.append(attend(made.query, made.key, made.value, made.mask(mask), 0.5))
        return found

    def whole(session: Session, x: Fixed, weight: Fixed, bias: Fixed) -> Fixed:
        return attend(*dense(x, weight, bias), allowed, 0.5)

    small = [inputs(2, 5)[0] / 3, *inputs(2, 5)[1:]]
    found, truth = run_parties(config(setting), sparse, small).values, run_parties(config(setting), whole, small).value
    for got, pattern, (begin, end) in zip(found, active, ((0, 4), (4, 5)), strict=True):
        row, head = pattern.any(1).nonzero().unbind(1)
        want = truth[row, head, begin:end] * pattern.transpose(1, 2)[row, head][..., None]
        assert torch.allclose(got[:, 0], want, atol=2e-3)


def test_positions_reach_the_turn_of_queries_and_keys() -> None:
    """A turn by the position: what was left out is turned by where it lies, not by when it is made."""
    active = patterns(1, (2, 1, 1, 1), density=0.4, seed=3)

    def turn(vectors: Fixed, positions: Tensor) -> Fixed:
        return vectors.scale_int((positions + 1)[:, None])

    read, truth, _ = run("trio", active, Strategy.MERGED, turn=turn)
    times = torch.arange(1, 6)[:, None]
    turned = [truth[0] * times, truth[1] * times, truth[2]]
    begin = 0
    for got, pattern in zip(read, active, strict=True):
        for mine, whole in zip(got, expected(turned, pattern, begin), strict=True):
            assert int((mine - whole).abs().max()) <= 5
        begin += pattern.shape[1]


def test_a_turn_may_add_fractional_bits() -> None:
    found: list[tuple[int, int, int]] = []

    def program(_: Session, x: Fixed, w: Fixed) -> Fixed:
        cache = RefillingCache(projection(w), turn=lambda vectors, _: vectors.finer(20))
        made = cache.step(x, torch.ones(1, 2, H).bool())
        found.append((made.query.frac, made.key.frac, made.value.frac))
        return made.key

    run_meta(TRIO, program, [(1, 2, N), (HEIGHT, N)])
    assert set(found) == {(20, 20, 18)}


def test_after_an_eviction_the_rest_is_filled_in() -> None:
    """Four positions that nobody reads, two of them dropped; then all heads read the others."""
    none, every_head = torch.zeros(2, 4, H, dtype=torch.bool), torch.ones(2, 1, H, dtype=torch.bool)
    for index in (torch.tensor([0, 3]), torch.tensor([[[0, 3]], [[1, 2]]])):
        numbers: list[Any] = []

        def program(
            _: Session, x: Fixed, w: Fixed, b: Fixed, index: Tensor = index, to: list[Any] = numbers
        ) -> list[Fixed]:
            cache = RefillingCache(projection(w, b))
            cache.step(x.view(lambda part: part[:, :4]), none)
            cache.keep(index)
            made = cache.step(x.view(lambda part: part[:, 4:]), every_head)
            to += [cache.position, cache.length, cache.filled().tolist(), cache.positions]
            return [made.key, made.value]

        found = run_parties(config("trio"), program, inputs(2, 5)).elements
        truth = run_parties(config("trio"), lambda _, *given: dense(*given), inputs(2, 5)).elements[1:]
        held = torch.cat([index.view(-1, 2).expand(2, 2), torch.full((2, 1), 4)], 1)
        assert numbers[:3] == [5, 3, [[3] * G] * 2]
        assert torch.equal(numbers[3], held[:, None])
        for got, whole in zip(found, truth, strict=True):
            picked = whole.repeat_interleave(H // G, 1).gather(
                2, held[:, None, :, None].expand(2, H, 3, whole.shape[-1])
            )
            assert int((got.view(picked.shape) - picked).abs().max()) <= 1


def test_rows_can_be_reordered() -> None:
    active = patterns(2, (3, 1), density=0.4)

    def program(_: Session, x: Fixed, w: Fixed, b: Fixed) -> Fixed:
        cache = RefillingCache(projection(w, b))
        cache.step(x.view(lambda part: part[:, :3]), active[0])
        cache.select(torch.tensor([1, 1, 0]))
        more = x.view(lambda part: part[[1, 1, 0], 3:])
        return cache.step(more, torch.ones(3, 1, H, dtype=torch.bool)).key

    got = run_parties(config("trio"), program, inputs(2, 4)).elements[0]
    truth = run_parties(config("trio"), lambda _, *given: dense(*given), inputs(2, 4)).elements[1]
    want = truth.repeat_interleave(H // G, 1)[[1, 1, 0]]
    assert int((got.view(want.shape) - want).abs().max()) <= 1


def test_a_cache_policy_evicts_and_attention_goes_on() -> None:
    """The first position and the last two stay; the next step attends to them, and to itself."""
    policy, active = SlidingWindow(recent=2, first=1), patterns(2, (5, 1), density=0.5)
    padding = torch.ones(2, 5, dtype=torch.bool)
    padding[1, :2] = False
    kept = torch.tensor([[0, 3, 4], [2, 3, 4]])

    def sparse(_: Session, x: Fixed, weight: Fixed, bias: Fixed) -> Fixed:
        cache = RefillingCache(projection(weight, bias))
        cache.step(x.view(lambda part: part[:, :5]), active[0])
        found = policy.after_step(CacheFacts(0, cache.position, cache.positions_held(), padding), None)
        assert found is not None
        cache.keep(found)
        made = cache.step(x.view(lambda part: part[:, 5:]), active[1])
        allowed = torch.ones(1, 1, 1, 6, dtype=torch.bool)
        allowed[..., 4] = False
        return attend(made.query, made.key, made.value, made.mask(cache.columns(allowed)), 0.5)

    def whole(_: Session, x: Fixed, weight: Fixed, bias: Fixed) -> Fixed:
        query, key, value = dense(x, weight, bias)
        seen = torch.zeros(2, 1, 1, 6, dtype=torch.bool).index_fill_(3, torch.tensor([5]), True)
        seen[:, 0, 0] |= torch.zeros(2, 6, dtype=torch.bool).scatter_(1, kept[:, :2], True)
        return attend(query.view(lambda part: part[:, :, 5:]), key, value, seen, 0.5)

    small = [inputs(2, 6)[0] / 3, *inputs(2, 6)[1:]]
    found, truth = run_parties(TRIO, sparse, small).value, run_parties(TRIO, whole, small).value
    row, head = active[1].any(1).nonzero().unbind(1)
    assert torch.allclose(found[:, 0], truth[row, head], atol=2e-3)


@pytest.mark.parametrize(("evicted", "count"), [(False, 2), (False, 9), (True, 2)])
def test_positions_can_be_taken_back(evicted: bool, count: int) -> None:
    """Two steps of other inputs are forgotten; what comes in their place is that of a cache that never saw them."""
    active = patterns(2, (4, 1, 1), density=0.5, seed=2)
    first = max(0, 6 - count)

    def program(_: Session, x: Fixed, w: Fixed, b: Fixed) -> list[Fixed]:
        cache = RefillingCache(projection(w, b))
        steps(cache, x, active)
        if evicted:
            cache.keep(torch.tensor([0, 2, 3, 4, 5]))
        cache.crop(count)
        assert (cache.position, cache.length) == (first, max(0, first - evicted))
        assert int(cache.filled().max()) <= cache.length
        made = cache.step(x.view(lambda part: part[:, :2]), torch.ones(2, 2, H).bool())
        assert cache.positions_held()[0, 0].tolist() == [p for p in range(first + 2) if not evicted or p != 1]
        return [made.key, made.value]

    found = run_parties(TRIO, program, inputs(2, 6)).elements
    truth = run_parties(TRIO, lambda _, *given: dense(*given), inputs(2, 6)).elements[1:]
    order = [p for p in range(first) if not evicted or p != 1] + [0, 1]
    for got, every_head in zip(found, truth, strict=True):
        want = every_head.repeat_interleave(H // G, 1)[:, :, order]
        assert int((got.view(want.shape) - want).abs().max()) <= 1


def test_evicted_positions_cannot_be_taken_back() -> None:
    def program(_: Session, x: Fixed, w: Fixed) -> Any:
        cache = RefillingCache(projection(w))
        cache.crop(1)
        cache.step(x, torch.ones(1, 4, H).bool())
        cache.keep(torch.tensor([0, 1, 3]))
        cache.crop(2)

    with pytest.raises(DomainError, match="got 2 positions; some of them were evicted, so position 2 is gone"):
        run_meta(TRIO, program, [(1, 4, N), (HEIGHT, N)])


def test_positions_follow_their_rows() -> None:
    def program(_: Session, x: Fixed, w: Fixed) -> Fixed:
        cache = RefillingCache(projection(w))
        cache.step(x, torch.zeros(2, 3, H).bool())
        cache.keep(torch.tensor([[[0, 2]], [[1, 2]]]))
        cache.select(torch.tensor([1, 1, 0]))
        assert cache.positions is not None
        assert cache.positions.tolist() == [[[1, 2]], [[1, 2]], [[0, 2]]]
        return x

    run_meta(TRIO, program, [(2, 3, N), (HEIGHT, N)])


REFUSALS = {
    "pattern of other heads": (lambda c, x, _: c.step(x, torch.ones(1, 2, H + 1).bool()), r"want bool \(1, 2, 6\)"),
    "pattern of numbers": (lambda c, x, _: c.step(x, torch.ones(1, 2, H)), "torch.float32"),
    "other width": (
        lambda c, x, _: c.step(x.view(lambda p: p[..., :3]), torch.ones(1, 2, H).bool()),
        "got inputs of 3",
    ),
    "eviction by heads": (lambda c, x, _: c.keep(torch.zeros(1, G, 1).long()), r"want \[kept\] or \[1, 1, kept\]"),
    "eviction out of range": (lambda c, x, _: c.keep(torch.tensor([7])), "ascending, from 0 to 1"),
    "other bits": (lambda c, x, _: c.step(x.finer(20), torch.ones(1, 2, H).bool()), "20 fractional bits; want 18"),
    "other rows": (
        lambda c, x, _: c.step(x.view(lambda p: p.expand(2, -1, -1)), torch.ones(2, 2, H).bool()),
        r"want bool \(1, 3\)",
    ),
    "weight of other height": (lambda c, x, w: Projection(w, None, H, G, (D, D)), "want 48 rows"),
    "groups that do not divide": (lambda c, x, w: Projection(w, None, 7, 2, (3, 6)), "whole groups"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_misuse_is_refused(name: str) -> None:
    misuse, words = REFUSALS[name]

    def program(_: Session, x: Fixed, w: Fixed) -> Any:
        cache = RefillingCache(projection(w))
        cache.step(x, torch.ones(1, 2, H).bool())
        return misuse(cache, x, w)

    with pytest.raises(DomainError, match=words):
        run_meta(TRIO, program, [(1, 2, N), (HEIGHT, N)])


def test_an_empty_cache_has_nothing_to_keep() -> None:
    def program(_: Session, w: Fixed) -> Any:
        cache = RefillingCache(projection(w))
        cache.select(torch.tensor([0]))
        assert cache.length == 0
        with pytest.raises(DomainError, match="holds nothing yet"):
            cache.filled()
        cache.keep(torch.tensor([0]))

    with pytest.raises(DomainError, match="holds nothing yet"):
        run_meta(TRIO, program, [(HEIGHT, N)])
