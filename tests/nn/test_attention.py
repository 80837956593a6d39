"""Attention on shares against PyTorch: masks, grouped heads, biases, caps; and what it sends.

Bound: values and scores below about 8 in magnitude; a truncated product is off by one unit (2^-18), score scales by
2^-14 relative, softmax by 1e-4 at most (its own tests); the mix of values adds up to |v| times the latter.
"""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import private_llm.nn  # noqa: F401 - registers the rules
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, UnsupportedOp
from private_llm.exact.ragged_rows import Rows
from private_llm.net.ledger import Cost
from private_llm.nn.attention import AttentionQuery, Pattern, _attended, attend, attend_and_weigh, pattern_of
from private_llm.nn.padded_keys import padded_length, repeats
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.share import Share
from private_llm.ranges import Ranges
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.range_check import verdict
from tests.harness import run_meta, run_parties
from tests.tensor.secrets import fixed, noise, opened, plain_session, secret

S = plain_session()
BOUND = 1e-3


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None, bias: Tensor) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    weights = (scores + bias).masked_fill(~mask, -1e30).softmax(-1)
    return (weights * mask) @ v


MASKS = {
    "none": torch.ones(2, 1, 5, 7, dtype=torch.bool),
    "causal": torch.ones(5, 7, dtype=torch.bool).tril(2)[None, None].expand(2, 1, 5, 7),
    "window": (torch.ones(5, 7, dtype=torch.bool).tril(2) & torch.ones(5, 7, dtype=torch.bool).triu(0))[None, None],
    "padding": torch.tensor([[False] * 3 + [True] * 4, [True] * 7])[:, None, None].expand(2, 1, 5, 7),
    "per_head": torch.ones(2, 4, 5, 7, dtype=torch.bool).tril(1) | torch.eye(5, 7, dtype=torch.bool),
    "nothing": torch.zeros(1, 1, 5, 7, dtype=torch.bool),
    "empty_rows": torch.ones(5, 7, dtype=torch.bool).tril(-2)[None, None].expand(2, 1, 5, 7),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_masks_and_grouped_heads(mask: str, groups: int) -> None:
    q, k, v = noise(2, 4, 5, 8), noise(2, groups, 7, 8, seed=1), noise(2, groups, 7, 6, seed=2)
    allowed = MASKS[mask]
    got = attend(fixed(S, q), fixed(S, k), fixed(S, v), allowed, 8**-0.5)
    want = _reference(q, k, v, allowed, 8**-0.5, None, torch.zeros(1))
    assert tuple(got.shape) == (2, 4, 5, 6)
    assert (opened(got) - want).abs().max() <= BOUND
    assert not opened(got)[~allowed.expand(2, 4, 5, 7).any(-1)].any()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [4, 2])
def test_a_sink_takes_its_part_of_every_row(mask: str, groups: int) -> None:
    q, k, v = noise(2, 4, 5, 8), noise(2, groups, 7, 8, seed=1), noise(2, groups, 7, 6, seed=2)
    allowed, sinks = MASKS[mask], torch.tensor([-30.0, 0.5, 2.0, 30.0], dtype=torch.float64)
    call = AttentionQuery(fixed(S, q), allowed, None, 8**-0.5, sinks=fixed(S, sinks, 12))
    got, _ = attend_and_weigh(call, fixed(S, k), fixed(S, v))
    k, v = k.repeat_interleave(4 // groups, 1), v.repeat_interleave(4 // groups, 1)
    scores = (q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(~allowed, -1e30)
    weights = torch.cat((scores, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)), -1).softmax(-1)[..., :-1]
    assert (opened(got) - weights @ v).abs().max() <= BOUND


def test_sinks_cost_an_entry_a_row() -> None:
    def run(sinks: bool) -> int:
        session = meta_session(PrivateConfig(), 0)

        def empty(*shape: int) -> Fixed:
            parts = (torch.empty(shape, dtype=torch.int64, device="meta"),) * 2
            return Fixed(session, Share(parts), session.frac)

        heads = empty(4) if sinks else None
        call = AttentionQuery(empty(2, 4, 5, 8), MASKS["causal"], None, 0.25, sinks=heads)
        attend_and_weigh(call, empty(2, 4, 7, 8), empty(2, 4, 7, 6))
        return session.protocol.ledger.cost().total

    without, with_sinks = run(False), run(True)
    entries = int(MASKS["causal"].expand(2, 4, 5, 7).sum())
    assert 1.0 < with_sinks / without < 1.0 + 1.2 * 40 / entries


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("groups", "counted"), [(4, 5), (2, 5), (2, 2), (1, 1), (1, 9)])
def test_attention_mass_is_the_column_sums_of_softmax(mask: str, groups: int, counted: int) -> None:
    q, k, v = noise(2, 4, 5, 8), noise(2, groups, 7, 8, seed=1), noise(2, groups, 7, 6, seed=2)
    allowed = MASKS[mask].expand(2, -1, 5, 7)
    call = AttentionQuery(fixed(S, q), allowed, None, 0.25)
    mixed, mass = attend_and_weigh(call, fixed(S, k), fixed(S, v), counted=counted)
    scores = (q @ k.repeat_interleave(4 // groups, 1).transpose(-1, -2) * 0.25).masked_fill(~allowed, -1e30)
    want = (scores.softmax(-1) * allowed)[:, :, -counted:].sum(2).view(2, groups, -1, 7).sum(2)
    assert mass is not None
    assert tuple(mass.shape) == (2, groups, 7)
    assert (opened(mass) - want).abs().max() <= 4 // groups * 5 * 1e-4  # softmax's error, as often as it is added
    alone = attend(fixed(S, q), fixed(S, k), fixed(S, v), allowed, 0.25)
    assert torch.equal(opened(mixed), opened(alone))


@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
def test_attention_mass_under_every_protocol(protocol: str) -> None:
    q, k, v = noise(2, 4, 5, 8), noise(2, 2, 7, 8, seed=1), noise(2, 2, 7, 6, seed=2)
    mask = MASKS["padding"]

    def mass(_: Session, query: Fixed, key: Fixed, value: Fixed) -> Fixed:
        found = attend_and_weigh(AttentionQuery(query, mask, None, 0.25), key, value, counted=3)[1]
        if found is None:
            raise AssertionError("no mass")
        return found

    got = run_parties(PrivateConfig(protocol=protocol), mass, [q, k, v]).value
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.25).masked_fill(~mask, -1e30)
    want = scores.softmax(-1)[:, :, -3:].sum(2).view(2, 2, 2, 7).sum(2)
    assert (got - want).abs().max() <= 2 * 3 * 1e-4
    assert not got[0, :, :3].any()  # padding gets none, exactly


def test_attention_mass_sends_nothing_and_is_not_made_unasked() -> None:
    def cost(counted: int) -> tuple[object, bool]:
        session = meta_session(PrivateConfig(), 1)
        q, k, v = (
            Fixed(session, Share(tuple(torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))), 18)
            for shape in ((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
        )
        session.protocol.ledger.reset()
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
        _, mass = attend_and_weigh(AttentionQuery(q, mask, None, 0.25), k, v, counted=counted)
        ledger = session.protocol.ledger
        return (dict(ledger.sent), dict(ledger.rounds), dict(ledger.macs)), mass is not None

    (without, made), (asked, too) = cost(0), cost(3)
    assert without == asked
    assert (made, too) == (False, True)


@pytest.mark.parametrize("scale", [1.0, 0.25, 8**-0.5, 80**-0.5, 0.07])
def test_scales_of_all_kinds(scale: float) -> None:
    q, k, v = noise(1, 2, 3, 8, scale=2), noise(1, 2, 3, 8, seed=1, scale=2), noise(1, 2, 3, 4, seed=2)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    got = attend(fixed(S, q), fixed(S, k), fixed(S, v), mask, scale)
    assert (opened(got) - _reference(q, k, v, mask, scale, None, torch.zeros(1))).abs().max() <= 2 * BOUND


@pytest.mark.parametrize("public", [False, True])
def test_bias_and_cap(public: bool) -> None:
    q, k, v, bias = (
        noise(2, 4, 5, 8),
        noise(2, 2, 7, 8, seed=1),
        noise(2, 2, 7, 6, seed=2),
        noise(1, 4, 5, 7, seed=3),
    )
    mask = MASKS["causal"]
    given = bias if public else fixed(S, bias)
    got = attend(fixed(S, q), fixed(S, k), fixed(S, v), mask, 0.25, softcap=5.0, bias=given)
    assert (opened(got) - _reference(q, k, v, mask, 0.25, 5.0, bias)).abs().max() <= 2 * BOUND


def test_a_query_that_rope_left_unsettled() -> None:
    q, k, v = noise(1, 2, 3, 8), noise(1, 2, 3, 8, seed=1), noise(1, 2, 3, 4, seed=2)
    table = torch.linspace(-1, 1, 8)
    rotated = (secret(S, q) * table).value(full=True)
    assert rotated.frac == S.frac + 16
    got = attend(rotated, fixed(S, k), fixed(S, v), None, 8**-0.5)
    want = _reference(q * table, k, v, torch.ones(1, 1, 3, 3, dtype=torch.bool), 8**-0.5, None, torch.zeros(1))
    assert (opened(got) - want).abs().max() <= BOUND


def test_heads_must_divide() -> None:
    q, k = fixed(S, noise(1, 3, 2, 4)), fixed(S, noise(1, 2, 2, 4))
    with pytest.raises(DomainError, match="3 query heads for 2"):
        attend(q, k, k, None, 1.0)


def test_a_pattern_is_made_once_per_mask_and_skipped_where_everything_is_allowed() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    assert pattern_of(mask, 1, 2, 4, 4) is pattern_of(mask, 1, 2, 4, 4)
    assert pattern_of(mask, 1, 2, 4, 4).select.numel() == 20
    assert pattern_of(torch.ones(1, 1, 4, 4, dtype=torch.bool), 1, 2, 4, 4).select is None
    one = torch.tensor([[[[True, False, True]]]])  # for both heads, or nothing for the second one
    assert pattern_of(one, 1, 2, 1, 3).digest != pattern_of(torch.cat([one, one & ~one], 1), 1, 2, 1, 3).digest


def _sent(mask: Tensor | None) -> int:
    """Bytes that party 1 sends for the score product of 1 x 2 heads x 6 x 6 positions."""
    session = meta_session(PrivateConfig(), 1)

    def made() -> Fixed:
        parts = tuple(torch.empty(1, 2, 6, 8, dtype=torch.int64, device="meta") for _ in range(2))
        return Fixed(session, Share(parts), session.frac)

    q, k = made(), made()
    session.protocol.ledger.reset()
    pattern = pattern_of(mask, 1, 2, 6, 6)
    q.matmul(k.view(lambda part: part.transpose(-1, -2)), select=pattern.select)
    return session.protocol.ledger.cost().total


def test_nothing_is_sent_for_positions_above_the_diagonal() -> None:
    full, causal = _sent(None), _sent(torch.ones(1, 1, 6, 6, dtype=torch.bool).tril())
    assert full == 72 * 8 + -(-72 * 18 // 64) * 8  # one ring element and 18 bits each
    assert causal == 42 * 8 + -(-42 * 18 // 64) * 8


def test_softmax_rule_with_and_without_hidden_entries() -> None:
    x = noise(2, 3, 5)
    assert (opened(F.softmax(secret(S, x), dim=-1)) - x.softmax(-1)).abs().max() <= BOUND
    hidden = torch.tensor([[True, False, False, True, False], [True] * 5, [False] * 5])
    got = opened(torch.softmax(secret(S, x).masked_fill(hidden, -torch.inf), -1, dtype=torch.float32))
    want = x.masked_fill(hidden, -1e30).softmax(-1).masked_fill(hidden, 0.0)
    assert (got - want).abs().max() <= BOUND
    with pytest.raises(UnsupportedOp, match="last dimension"):
        F.softmax(secret(S, x), dim=0)


def test_fused_attention_of_torch() -> None:
    q, k, v = noise(2, 4, 5, 8), noise(2, 4, 5, 8, seed=1), noise(2, 4, 5, 8, seed=2)
    three = (secret(S, q), secret(S, k), secret(S, v))
    additive = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float32).min)
    alibi = additive + noise(2, 4, 5, 5).float()
    for kwargs in (
        {"is_causal": True},
        {"attn_mask": additive},
        {"attn_mask": alibi},
        {"attn_mask": additive > -1},
        {},
    ):
        wide = {n: m.double() if isinstance(m, Tensor) and m.is_floating_point() else m for n, m in kwargs.items()}
        got = F.scaled_dot_product_attention(*three, **kwargs)
        want = F.scaled_dot_product_attention(q, k, v, **wide)
        assert (opened(got) - want).abs().max() <= BOUND
    with pytest.raises(UnsupportedOp, match="secret q, k, v"):
        F.scaled_dot_product_attention(q, three[1], three[2])


def _ranged(session: Session, **known: int) -> Session:
    session.numerics.ranges = Ranges({session.protocol.module: known})
    return session


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("protocol", ["plain", "trio", "quad"])
def test_known_ranges_of_scores_and_values(mask: str, protocol: str) -> None:
    """Shorter comparisons, and rows divided after the mix of values: equal answers."""
    q, k, v = noise(2, 4, 5, 8), noise(2, 2, 7, 8, seed=1), noise(2, 2, 7, 6, seed=2)
    allowed = MASKS[mask]
    config = PrivateConfig(protocol=protocol, insecure=protocol == "plain")  # type: ignore[arg-type]

    def out(session: Session, *operands: Fixed) -> Fixed:
        return attend(*operands, allowed, 8**-0.5) if _ranged(session, score=6, value=4) else operands[0]

    got = run_parties(config, out, [q, k, v]).value
    assert (got - _reference(q, k, v, allowed, 8**-0.5, None, torch.zeros(1))).abs().max() <= BOUND
    assert not got[~allowed.expand(2, 4, 5, 7).any(-1)].any()


@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_rows_divided_last_at_the_ends_of_their_ranges(spread: float) -> None:
    """Long rows, flat and peaked, with values up to twice what is stated; a debug session finds no wrap, and the error
    is below that of probabilities."""
    session = _ranged(plain_session(debug_ranges=True, guard=False), score=10, value=8)
    q, k = noise(1, 2, 3, 8, scale=spread), noise(1, 2, 600, 8, seed=1)
    v = noise(1, 2, 600, 6, seed=2).sign() * torch.linspace(1, 511, 600)[:, None]
    want = _reference(q, k, v, torch.ones(1, 1, 3, 600, dtype=torch.bool), 0.25, None, torch.zeros(1))
    error = (opened(attend(fixed(session, q), fixed(session, k), fixed(session, v), None, 0.25)) - want).abs().max()
    usual = (opened(attend(fixed(S, q), fixed(S, k), fixed(S, v), None, 0.25)) - want).abs().max()
    assert error <= 1.2 * usual


def _known_cost(keys: int, config: PrivateConfig, **known: int) -> Cost:
    def out(session: Session, *operands: Fixed) -> Fixed:
        return attend(*operands, None, 0.25) if _ranged(session, **known) else operands[0]

    return run_meta(config, out, [(1, 2, 64, 16), (1, 2, keys, 16), (1, 2, keys, 16)])


def test_what_known_ranges_save() -> None:
    """A product of each entry less, one of each output more; and the positions of comparisons."""
    before, after = (_known_cost(128, PrivateConfig(), **known) for known in ({}, {"value": 5}))
    entries, outputs, ring = 2 * 64 * 128, 2 * 64 * 16, Ring(64)
    whole = math.ceil(math.log2(1.3 * 128))
    saved = cost.product(ring, entries, 24 + 24 + whole - 18).total
    more = cost.product(ring, outputs, 24 + whole).total
    wider = cost.product(ring, outputs, 24).total - cost.product(ring, outputs, 18).total
    assert before.total - after.total == saved - more - wider
    assert after.rounds == before.rounds
    scores = _known_cost(128, PrivateConfig(), score=9)
    narrow = cost.msb(entries, 40, low=17).total - cost.msb(entries, 30, low=17).total
    assert before.total - scores.total >= narrow
    assert scores.rounds <= before.rounds
    assert _known_cost(128, PrivateConfig(), value=14).total < before.total, "the least that is mixed: 14 bits"
    assert _known_cost(128, PrivateConfig(), value=15) == before, "no room in the ring"
    assert _known_cost(128, PrivateConfig(), value=30) == before
    puma = PrivateConfig(approximations="puma", plugins=("rivals",))
    assert _known_cost(128, puma, value=5) == _known_cost(128, puma)


@pytest.mark.parametrize("protocol", ["trio", "quad"])
def test_what_is_added_to_scores_may_leave_their_range(protocol: str) -> None:
    """A bias of hundreds where scores are below 2^4: comparisons have room for it."""
    q, k, v = noise(1, 2, 3, 4), noise(1, 2, 5, 4, seed=1), noise(1, 2, 5, 4, seed=2)
    bias = torch.tensor([0.0, 900.0, -3000.0, 899.0, 400.0]).expand(1, 2, 3, 5)

    def out(session: Session, *operands: Fixed) -> Fixed:
        return attend(*operands, None, 0.5, bias=bias) if _ranged(session, score=4, value=4) else operands[0]

    got = run_parties(PrivateConfig(protocol=protocol), out, [q, k, v]).value  # type: ignore[arg-type]
    every = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    assert (got - _reference(q, k, v, every, 0.5, None, bias)).abs().max() <= BOUND


@pytest.mark.parametrize("known", [{}, {"score": 8, "value": 4}], ids=["unknown", "known"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("keys", [2, 3, 5, 9, 13, 17, 33, 34, 41])
def test_padded_keys_change_nothing_but_bytes(keys: int, sign: float, known: dict[str, int]) -> None:
    """All scores far below 0 or far above, the newest the largest or the smallest of them; rounds as without."""
    q = torch.ones(2, 4, 1, 8, dtype=torch.float64)
    k = sign * (12.0 + noise(2, 2, keys, 8, seed=1) / 8)
    k[:, :, -1] *= 1.02
    v = noise(2, 2, keys, 6, seed=2)
    every = torch.ones(1, 1, 1, keys, dtype=torch.bool)

    def out(session: Session, *operands: Fixed) -> Fixed:
        return attend(*operands, None, 0.25) if _ranged(session, **known) else operands[0]

    found = run_parties(PrivateConfig(), out, [q, k, v])
    assert (found.value - _reference(q, k, v, every, 0.25, None, torch.zeros(1))).abs().max() <= BOUND
    pattern = Pattern((2, 4, 1, keys), None, Rows(()))

    def alone(session: Session, query: Fixed, key: Fixed, value: Fixed) -> Fixed:
        call = AttentionQuery(query, None, None, 0.25)
        return _attended(call, key, value, pattern)[0] if _ranged(session, **known) else query

    without = run_parties(PrivateConfig(), alone, [q, k, v]).cost
    assert found.cost.rounds == without.rounds
    if padded_length(keys) == keys:
        assert found.cost == without
    else:
        assert without.total < found.cost.total <= without.total * padded_length(keys) / keys * 1.1


def test_padded_lengths() -> None:
    """Few of them, never beyond the next power of two, never a quarter more; other protocols keep theirs."""
    for length in range(1, 300):
        found = padded_length(length)
        assert length <= found <= 1 << (length - 1).bit_length()
        assert found <= length * 1.25
        assert padded_length(found) == found
    assert len({padded_length(length) for length in range(129, 257)}) == 8
    names: tuple[Literal["trio", "dealer", "quad"], ...] = ("trio", "dealer", "quad")
    assert [repeats(meta_session(PrivateConfig(protocol=name), 1)) for name in names] == [
        True, True, False,
    ]  # fmt: skip
    assert not repeats(meta_session(PrivateConfig(approximations="puma", plugins=("rivals",)), 1))


def test_the_check_of_ranges_sees_scores_and_mixes_beyond_theirs() -> None:
    def verdicts(large: float, of: str) -> bool:
        session = _ranged(plain_session(), score=10, value=6)
        q, k, v = noise(1, 1, 4, 8), noise(1, 1, 300, 8, seed=1), noise(1, 1, 300, 8, seed=2)
        q, v = (q * large, v) if of == "score" else (q, v * large)
        attend(fixed(session, q), fixed(session, k), fixed(session, v), None, 1.0)
        out = verdict(session)
        return out is not None and bool(opened(out).any())

    assert not verdicts(1.0, "score")
    assert verdicts(1000.0, "score")
    assert verdicts(30_000.0, "value")


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize(("large", "left"), [(1.0, 0), (2.0**10, 1), (2.0**24, 1)])
def test_the_check_of_ranges_sees_narrow_products(protocol: str, large: float, left: int) -> None:
    """Of scores nothing is right but the lowest 33 bits, which reach 2^14: the check needs no more."""
    q, k, v = noise(1, 1, 4, 8) * large, noise(1, 1, 300, 8, seed=1), noise(1, 1, 300, 8, seed=2)

    def out(session: Session, *operands: Fixed) -> Fixed:
        attend(*operands, None, 1.0) if _ranged(session, score=10, value=6) else None
        found = verdict(session)
        return operands[0] if found is None else found

    got = run_parties(PrivateConfig(protocol=protocol), out, [q, k, v]).value  # type: ignore[arg-type]
    assert got.item() == left


def _matmul_rounds(config: PrivateConfig, softcap: float | None = None, scale: float = 0.25) -> int:
    """Rounds of the product of scores and of the mix of values."""

    def out(session: Session, *operands: Fixed) -> Fixed:
        made = attend(*operands, None, scale, softcap)
        rounds = session.protocol.ledger.rounds
        found.append(sum(n for (_, tag), n in rounds.items() if tag == "matmul"))
        return made

    found: list[int] = []
    run_meta(config, out, [(1, 2, 64, 16), (1, 2, 9, 16), (1, 2, 9, 16)])
    return max(found)


def test_scores_are_narrow_products_where_softmax_reads_their_lowest_bits() -> None:
    """Not under a cap, by comparison keys, with exact divisions, and under other approximations."""
    whole = 2 + 2
    assert _matmul_rounds(PrivateConfig()) == _matmul_rounds(PrivateConfig(protocol="dealer")) == whole - 1
    others = [
        PrivateConfig(adder="keys"),
        *(PrivateConfig(approximations=name, plugins=("rivals",)) for name in ("puma", "mpcformer")),
    ]  # fmt: skip
    assert [_matmul_rounds(each) for each in others] == [whole] * len(others)
    assert _matmul_rounds(PrivateConfig(), softcap=30.0) == whole
    assert _matmul_rounds(PrivateConfig(truncation="exact")) == 2, "one each without division"
