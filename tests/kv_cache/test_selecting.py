"""Attention of one query to the clusters most like it: against loops, for every way of gathering, and to the byte.

Bound: as in test_attention.py; what is gathered is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.kv_cache.policies.policy import ClusterShape, Level, Selection
from private_llm.kv_cache.selecting import FORBIDDEN, attend_to_chosen, choose_clusters
from private_llm.kv_cache.selection_costs import (
    GATHERS,
    cheapest_gather,
    composes,
    gather_cost,
    moving_cost,
    rows_cost,
)
from private_llm.net.ledger import Cost
from private_llm.nn.attention import AttentionQuery, pattern_of, score_width, soften
from private_llm.protocols.registry import Pricing, protocol_names
from private_llm.protocols.session import Session, meta_session
from private_llm.tensor.fixed import Fixed, narrows
from private_llm.tensor.range_check import verdict
from tests.harness import run_meta, run_parties
from tests.kv_cache import slow_choices
from tests.kv_cache.selection_prices import ranking_cost, step_cost
from tests.tensor.secrets import fixed, noise, opened, plain_session

BOUND = 1e-3
every = pytest.mark.parametrize("protocol", protocol_names())
gathers = pytest.mark.parametrize("gather", GATHERS)


def config(protocol: str) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "insecure": protocol == "plain"})


@dataclass(frozen=True)
class Case:
    """batch, query heads, key heads, entries, D, Dv; how clusters are chosen."""

    batch: int
    heads: int
    groups: int
    entries: int
    depth: int
    value_size: int
    selection: Selection
    cap: float | None = None
    sinks: bool = False
    seed: int = 0

    @property
    def shape(self) -> ClusterShape:
        made = self.selection.shape(self.entries)
        if made is None:
            raise ValueError("nothing is left out")
        return made

    @property
    def blocks(self) -> int:
        return self.batch * self.groups

    def inputs(self) -> list[Tensor]:
        """Query, key, value, and what stands for clusters at each level."""
        q = noise(self.batch, self.heads, 1, self.depth, seed=self.seed, scale=2)
        k = noise(self.batch, self.groups, self.entries, self.depth, seed=self.seed + 1, scale=2)
        v = noise(self.batch, self.groups, self.entries, self.value_size, seed=self.seed + 2)
        part = k[:, :, self.shape.first : self.shape.first + self.shape.clustered]
        levels = [slow_choices.clusters(part, self.selection, size, None) for size in self.shape.sizes]
        return [q, k, v, *levels]


def level(*pairs: tuple[int, float]) -> tuple[Level, ...]:
    return tuple(Level(*pair) for pair in pairs)


CASES = {
    "one level": Case(1, 2, 2, 13, 4, 4, Selection(level((2, 0.5)))),
    "grouped heads, first, recent": Case(2, 4, 2, 19, 4, 6, Selection(level((3, 0.4)), first=2, recent=3)),
    "two levels, one key head": Case(2, 3, 1, 27, 5, 3, Selection(level((4, 0.5), (2, 0.4)), first=1), seed=3),
    "three levels": Case(1, 2, 1, 42, 4, 4, Selection(level((8, 0.6), (4, 0.5), (1, 0.3)), recent=1), seed=4),
    "one head, single entries": Case(1, 1, 1, 9, 3, 2, Selection(level((1, 0.3)))),
    "no tail": Case(1, 2, 1, 8, 4, 4, Selection(level((4, 0.5)), alpha=1.0)),
    "cap and sinks": Case(2, 4, 2, 18, 4, 4, Selection(level((4, 0.5)), first=1), cap=3.0, sinks=True, seed=5),
    "an inner level that keeps all": Case(1, 2, 2, 20, 4, 4, Selection(level((4, 0.5), (2, 1.0)), alpha=0.0)),
}
every_case = pytest.mark.parametrize("name", CASES)
SINKS = torch.tensor([-2.0, 0.5, 1.0, 3.0], dtype=torch.float64)


def private(
    case: Case, gather: str, session: Session, mask: Tensor | None, addend: Tensor | None, q: Fixed, k: Fixed, v: Fixed,
    *levels: Fixed,
) -> list[Fixed]:  # fmt: skip
    """Output and masses."""
    chosen = choose_clusters(q, levels, case.shape, gather, case.value_size)
    part = q.share.parts[0]

    def known(values: Tensor) -> Fixed:
        elements = session.ring.encode(values, session.frac).to(part.device)
        return Fixed(session, session.protocol.public(elements), session.frac)

    sinks = known(SINKS[: case.heads]) if case.sinks else None
    more = None if addend is None else known(addend)
    out, mass = attend_to_chosen(AttentionQuery(q, mask, None, 0.5, case.cap, sinks), k, v, chosen, more)
    if mass is None:
        raise AssertionError("no mass")
    return [out, mass]


def reference(
    case: Case, q: Tensor, k: Tensor, v: Tensor, *levels: Tensor, seen: Tensor | None = None, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """Output [B, H, 1, Dv] and masses [B, G, n]. seen: bool [B, G, n], entries that may be attended to."""
    out = torch.zeros(case.batch, case.heads, 1, case.value_size, dtype=torch.float64)
    mass = torch.zeros(case.batch, case.groups, case.entries, dtype=torch.float64)
    shared = case.heads // case.groups
    for b in range(case.batch):
        for g in range(case.groups):
            heads = range(g * shared, (g + 1) * shared)
            total = sum(q[b, h, 0] for h in heads)
            wanted = slow_choices.entries(total, [part[b, g] for part in levels], case.shape, exact)  # type: ignore[arg-type]
            wanted = [i for i in wanted if seen is None or bool(seen[b, g, i])]
            for h in heads:
                sink = float(SINKS[h]) if case.sinks else None
                out[b, h, 0], weights = slow_choices.attention(
                    q[b, h, 0], k[b, g], v[b, g], wanted, 0.5, case.cap, sink
                )
                mass[b, g] += weights
    return out, mass


@pytest.mark.sampled(4)
@every
@gathers
@every_case
def test_against_loops(name: str, gather: str, protocol: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    got = run_parties(config(protocol), lambda s, *x: private(case, gather, s, None, None, *x), inputs).values
    for mine, want in zip(got, reference(case, *inputs), strict=True):
        assert (mine - want).abs().max() <= BOUND


@gathers
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("side", ["left", "right", "both", "a row of it but one"])
def test_padding_gets_nothing(side: str, cap: float | None, gather: str) -> None:
    """A cap of 1.5 would leave padding e^-3 of the largest score."""
    case = Case(2, 4, 2, 19, 4, 6, Selection(level((3, 0.6)), first=1, recent=2), cap=cap, seed=2)
    seen = torch.ones(2, 19, dtype=torch.bool)
    if side in ("left", "both"):
        seen[0, :7] = False
    if side in ("right", "both"):
        seen[1, 13:18] = False
    if side == "a row of it but one":
        seen[1, :18] = False
    inputs, session = case.inputs(), plain_session()
    made = [fixed(session, x) for x in inputs]
    out, mass = private(case, gather, session, seen[:, None, None], None, *made)
    want = reference(case, *inputs, seen=seen[:, None].expand(2, 2, 19))
    assert (opened(out) - want[0]).abs().max() <= BOUND
    assert (opened(mass) - want[1]).abs().max() <= BOUND
    assert not opened(mass)[~seen[:, None].expand(2, 2, 19)].any()


@gathers
@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_secret_mask_hides_entries(cap: float | None, gather: str) -> None:
    case = Case(2, 4, 2, 19, 4, 6, Selection(level((3, 0.6)), first=1, recent=2), cap=cap, seed=2)
    hidden = noise(2, 2, 19, seed=9) > 0.3
    hidden[..., -1] = False
    inputs, session = case.inputs(), plain_session()
    made = [fixed(session, x) for x in inputs]
    addend = (hidden * -FORBIDDEN).double()[:, :, None]
    out, mass = private(case, gather, session, None, addend, *made)
    want = reference(case, *inputs, seen=~hidden)
    assert (opened(out) - want[0]).abs().max() <= BOUND
    assert (opened(mass) - want[1]).abs().max() <= BOUND


@gathers
def test_heads_that_are_left_out_stay_zero(gather: str) -> None:
    """Comet's heads: a mask with empty rows; padding beside it."""
    case = CASES["grouped heads, first, recent"]
    mask = torch.ones(2, 4, 1, 19, dtype=torch.bool)
    mask[0, :, :, :5] = False
    mask[0, 1] = mask[1, 2] = mask[1, 3] = False
    inputs, session = case.inputs(), plain_session()
    out, mass = private(case, gather, session, mask, None, *[fixed(session, x) for x in inputs])
    seen = mask.any(1).view(2, 1, 19).expand(2, 2, 19)
    full = reference(case, *inputs, seen=seen)[0]
    there = mask.any(-1, keepdim=True)
    assert (opened(out) - full * there).abs().max() <= BOUND
    assert not opened(out)[~there.expand(2, 4, 1, 6)].any()
    assert not opened(mass)[1, 1].any()  # both heads of this key head are left out


@every
@gathers
def test_of_equal_clusters_as_many_count_as_should(gather: str, protocol: str) -> None:
    """Truncated likenesses of equal clusters may differ by a unit; without truncation errors the first ones count.

    Shuffled clusters are in a secret order when the second level ranks them.
    """
    case = Case(1, 2, 1, 12, 4, 4, Selection(level((4, 0.4), (2, 0.5))))
    q, k, v, *levels = case.inputs()
    same = [torch.ones_like(part) for part in levels]
    program = run_parties(config(protocol), lambda s, *x: private(case, gather, s, None, None, *x), [q, k, v, *same])
    out, mass = program.values
    assert torch.allclose(mass.sum(), torch.tensor(2.0, dtype=torch.float64), atol=BOUND)
    assert int((mass.view(6, 2) > 1e-4).any(1).sum()) == case.shape.kept[-1]
    if protocol == "plain" and gather != "shuffled-scores":
        assert (out - reference(case, q, k, v, *same, exact=True)[0]).abs().max() <= BOUND
        assert mass[0, 0, 4:].abs().max() == 0


def test_a_rotated_query_and_large_keys_leave_room_in_the_ring() -> None:
    """Likenesses of several thousands, of a query with 34 fractional bits."""
    case = Case(1, 4, 2, 20, 64, 4, Selection(level((2, 0.5))))
    session = plain_session()
    q, r = noise(1, 4, 1, 64, scale=12), noise(1, 2, 10, 64, seed=1, scale=12)
    for frac in (18, 24, 25, 34):
        chosen = choose_clusters(fixed(session, q, frac), [fixed(session, r)], case.shape, "scores", 4)
        marks = opened(chosen.levels[0].matrix).sum(1)  # type: ignore[attr-defined]
        for g in range(2):
            likeness = [float(q[0, 2 * g : 2 * g + 2, 0].sum(0) @ r[0, g, c]) for c in range(10)]
            assert max(map(abs, likeness)) > 2000
            assert marks[g].nonzero().view(-1).tolist() == slow_choices.best(likeness, 5)


@pytest.mark.parametrize(("likeness", "left"), [(2.0**21, 0.0), (2.0**25, 1.0), (-(2.0**25), 1.0)])
def test_a_likeness_beyond_its_range_withholds_the_answer(likeness: float, left: float) -> None:
    """Its top-k compares no more bits, whatever the scores of its entries are."""
    case = Case(1, 2, 2, 13, 4, 4, Selection(level((2, 0.5))))
    session = plain_session()
    q, _, _, r = case.inputs()
    q[0, 1, 0], r[0, 1, 3] = 2.0**10, likeness / 2**12
    choose_clusters(fixed(session, q), [fixed(session, r)], case.shape, "scores", case.value_size)
    found = verdict(session)
    if found is None:
        raise AssertionError("nothing was watched")
    assert opened(found).tolist() == [left]


# -- costs ----------------------------------------------------------------------------------------------------
COSTLY = ["one level", "grouped heads, first, recent", "two levels, one key head", "three levels"]
real = pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])


def ran(case: Case, protocol: str, program: object) -> Cost:
    made = config(protocol)
    inputs = case.inputs()
    cost = run_parties(made, program, inputs).cost  # type: ignore[arg-type]
    if protocol != "quad":
        assert run_meta(made, program, [x.shape for x in inputs]) == cost  # type: ignore[arg-type]
    return cost


def width_of(protocol: str) -> int | None:
    """Bits of scores that softmax reads."""
    session = meta_session(config(protocol), 0)
    return score_width(session, 1, alone=True) if narrows(session) else None


def softmax_cost(case: Case, protocol: str) -> Cost:
    """Of a softmax over the entries that are left, which all kinds of attention have."""
    count = case.shape.first + case.shape.chosen + case.shape.tail
    pattern = pattern_of(None, case.batch, case.heads, 1, count)
    shape = (case.batch, case.heads, 1, count)
    return run_parties(config(protocol), lambda s, x: soften(x, pattern), [noise(*shape)]).cost


@pytest.mark.sampled(4)
@real
@gathers
@pytest.mark.parametrize("name", COSTLY)
def test_costs_of_a_choice_and_of_a_step_are_those_of_the_formulas(name: str, gather: str, protocol: str) -> None:
    case = CASES[name]
    pricing = Pricing.of(config(protocol))
    size = (case.blocks, case.heads // case.groups, case.depth, case.value_size)
    without = step_cost(pricing, case.shape, *size, gather, 18, 19, weigh=True, width=width_of(protocol))
    without += softmax_cost(case, protocol)

    def chosen(session: Session, q: Fixed, k: Fixed, v: Fixed, *levels: Fixed) -> Fixed:
        choose_clusters(q, levels, case.shape, gather, case.value_size)
        return q

    want = ranking_cost(pricing, case.shape, case.blocks, case.depth, 18, 0)
    composed = composes(case.shape, *size[1:], gather)
    assert ran(case, protocol, chosen) == want + rows_cost(pricing, case.shape, case.blocks, gather, composed)
    assert ran(case, protocol, lambda s, *x: private(case, gather, s, None, None, *x)) == without


@real
@gathers
def test_a_layer_that_follows_pays_no_choice(gather: str, protocol: str) -> None:
    """What it attends to is the leader's choice; nothing is ranked, compared or opened."""
    case = CASES["two levels, one key head"]
    pricing = Pricing.of(config(protocol))

    def followed(session: Session, q: Fixed, k: Fixed, v: Fixed, *levels: Fixed) -> Fixed:
        chosen = choose_clusters(q, levels, case.shape, gather, case.value_size)
        session.protocol.ledger.reset()
        return attend_to_chosen(AttentionQuery(q, None, None, 0.5), k, v, chosen, weigh=False)[0]

    size = (case.blocks, case.heads // case.groups, case.depth, case.value_size)
    want = step_cost(pricing, case.shape, *size, gather, 18, 19, leads=False, width=width_of(protocol))
    assert ran(case, protocol, followed) == want + softmax_cost(case, protocol)


@pytest.mark.sampled(3)
@real
@gathers
def test_padding_under_a_cap_is_a_column_more(gather: str, protocol: str) -> None:
    """With scores, whose fractional bits it has and loses again."""
    case = Case(2, 4, 2, 19, 4, 6, Selection(level((3, 0.6)), first=1, recent=2), seed=2)
    seen = torch.ones(2, 1, 1, 19, dtype=torch.bool)
    seen[0, ..., :7] = False
    pricing = Pricing.of(config(protocol))
    size = (case.blocks, case.heads // case.groups, case.depth, case.value_size)

    def moved(mask: Tensor | None, cap: float | None) -> Cost:
        def program(session: Session, q: Fixed, k: Fixed, v: Fixed, *levels: Fixed) -> Fixed:
            chosen = choose_clusters(q, levels, case.shape, gather, case.value_size)
            session.protocol.ledger.reset()
            return attend_to_chosen(AttentionQuery(q, mask, None, 0.5, cap), k, v, chosen, weigh=False)[0]

        return ran(case, protocol, program)

    def formula(column: bool) -> Cost:
        made = moving_cost(pricing, case.shape, *size, gather, column=column)
        left = case.blocks * (case.shape.first + case.shape.chosen + case.shape.tail)
        return made + pricing.prices.truncate(pricing.ring, left, 20) if column and gather != "keys" else made

    for cap in (None, 2.0):
        pays = gather == "keys" or cap is not None
        assert moved(seen, cap).sent == {
            link: sent + formula(pays).sent[link] - formula(False).sent[link]
            for link, sent in moved(None, cap).sent.items()
        }


def test_auto_takes_the_fewest_bytes() -> None:
    """Many query heads on one key head make gathered keys cheap; large keys make them dear."""
    session = plain_session()
    shape = Selection(level((32, 0.5), (16, 0.5))).shape(1024)
    assert shape is not None
    found = set()
    for blocks, shared, depth in ((12, 1, 64), (1, 71, 64), (1, 1, 2), (8, 4, 128), (1, 64, 2)):
        bytes_of = {
            gather: gather_cost(Pricing.of(session.config), shape, blocks, shared, depth, depth, gather).total
            for gather in GATHERS
        }
        picked = cheapest_gather(session, shape, blocks, shared, depth, depth)
        assert bytes_of[picked] == min(bytes_of.values())
        found.add(picked)
    assert {"scores", "keys"} <= found
