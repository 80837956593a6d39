"""Openings in one secret order give the order away to whoever knows some inputs; in fresh orders they do not."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from linked_orders import (
    UNKNOWN,
    count_differences,
    match_positions,
    pattern_differences,
    read_patterns,
    told,
    within_budget,
)
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.net.transport import Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare
from private_llm.ring.ring import Ring
from tests.session import run_session

ROOT = Path(__file__).resolve().parent.parent.parent
LAYER, KNOWN, LENGTH = 2, 192, 32


@pytest.fixture(scope="module")
def values() -> tuple[Tensor, list[Tensor]]:
    """What the ReLU of one layer of the bundled model receives: for known inputs, and for two unknown texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts" / "studies"))
        script: Any = importlib.import_module("link_orders")
        model, sites, known, unknown = script.bundled(LENGTH)
        site = [site for site in sites if site.layer == LAYER]
        before = script.before_activation(model, site, known[: KNOWN // LENGTH])[LAYER]
        after = script.before_activation(model, site, unknown[:2])[LAYER]
    return before, list(after.split(LENGTH))


def opened_under_trio(values: Tensor, reuse: bool) -> list[Tensor]:
    """What each party sees of [values > 0], row by row: all rows in one order, or each in one of its own."""
    config = PrivateConfig(protocol="trio")
    rows, count = values.shape
    seen: dict[int, Tensor] = {}

    def at_party(session: Session, transport: Transport) -> None:
        p = session.protocol
        flat = p.msb(p.neg(p.receive_input((rows * count,))))
        bits = BitShare(tuple(part.view(rows, -1) for part in flat.parts), count)
        order = p.permutation(count, reuse=True)
        found = []
        for row in range(rows):
            if not reuse:
                order = p.permutation(count)
            opened = p.open_shuffled(p.shuffle_bits(bits.row(row), order))
            assert opened is not None
            found.append(opened)
        seen[p.party] = torch.cat(found)
        p.reveal_to_client(p.public(torch.zeros(1, dtype=torch.int64)))

    def at_client(client: ClientEnd) -> Tensor:
        client.share(Ring(64).encode(values.double().flatten(), 18))
        return client.open((1,))

    run_session(config, at_party, at_client, timeout=120.0)
    return [seen[party] for party in range(3)]


def read_by(seen: Tensor, known: Tensor, slack: int) -> tuple[Tensor, list[Tensor]]:
    places = match_positions(known, seen[: len(known)], slack)
    usual = known.float().mean(0) > 0.5
    return places, [read_patterns(places, bits, usual) for bits in seen[len(known) :].split(LENGTH)]


def test_trio_in_one_order_ends_its_secrecy_for_every_party(values: Any) -> None:
    before, after = values
    known, texts = before > 0, [text > 0 for text in after]
    seen, *others = opened_under_trio(torch.cat([before, *after]), reuse=True)
    assert all(torch.equal(other, seen) for other in others)
    places, read = read_by(seen, known, slack=0)
    assert float((places != UNKNOWN).float().mean()) > 0.95
    for number, truth in enumerate(texts):
        assert float((read[number] == truth).float().mean()) > 0.999
        assert float((read[number] & truth).sum() / truth.sum()) > 0.98
        bits = seen[len(known) :].split(LENGTH)[number]
        assert told(pattern_differences(places, bits, texts)) == number


def test_trio_in_fresh_orders_leaves_the_counts(values: Any) -> None:
    before, after = values
    known, texts = before > 0, [text > 0 for text in after]
    seen = opened_under_trio(torch.cat([before, *after]), reuse=False)[1]
    places, _ = read_by(seen, known, slack=0)
    assert bool((places == UNKNOWN).all())
    _, forced = read_by(seen, known, slack=KNOWN)
    for number, truth in enumerate(texts):
        assert float((forced[number] & truth).sum() / truth.sum()) < 0.1  # of which 8 to 12 % are active
        bits = seen[len(known) :].split(LENGTH)[number]
        assert told(pattern_differences(places, bits, texts)) is None
        assert torch.equal(bits.sum(1), truth.sum(1))
        assert told(count_differences(bits, texts)) == number


def test_a_budget_takes_the_counts_away_and_not_the_link(values: Any) -> None:
    before, after = values
    budget = int((torch.cat([before, *after]) > 0).sum(1).max())
    known, *texts = (within_budget(part, budget) for part in (before, *after))
    for part, active in zip((known, *texts), (before, *after), strict=True):
        assert bool((part.sum(1) == budget).all())
        assert bool((part | ~(active > 0)).all())  # nothing that is active is left out
    assert count_differences(texts[0], texts) == [0, 0]
    order = torch.randperm(known.shape[1], generator=torch.Generator().manual_seed(1))
    places = match_positions(known, known[:, order])
    assert float((places == order).float().mean()) > 0.95
    assert told(pattern_differences(places, texts[1][:, order], texts)) == 1


# -- the attack by itself ----------------------------------------------------------------------------------------------
def layer(inputs: int, count: int = 100, seed: int = 0) -> Tensor:
    return torch.rand(inputs, count, generator=torch.Generator().manual_seed(seed)) < 0.2


def test_positions_are_found_as_soon_as_columns_differ() -> None:
    known = layer(60)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(5))
    assert torch.equal(match_positions(known, known[:, order]), order)
    shares = [float((match_positions(known[:n], known[:n, order]) == order).float().mean()) for n in (2, 8, 16, 32)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1 < 0.9 < shares[-1]


def test_equal_columns_are_not_guessed() -> None:
    known = layer(60)
    known[:, 7] = known[:, 3]
    known[:, [20, 21]] = False
    order = torch.randperm(100, generator=torch.Generator().manual_seed(5))
    places = match_positions(known, known[:, order])
    twins = torch.isin(order, torch.tensor([3, 7, 20, 21]))
    assert bool((places[twins] == UNKNOWN).all())
    assert torch.equal(places[~twins], order[~twins])
    read = read_patterns(places, known[:, order], torch.ones(100, dtype=torch.bool))
    assert bool(read[:, [3, 7, 20, 21]].all())
    others = [n for n in range(100) if n not in (3, 7, 20, 21)]
    assert torch.equal(read[:, others], known[:, others])


def test_slack_finds_what_rounding_changed() -> None:
    known = layer(200)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(5))
    flips = torch.rand(200, 100, generator=torch.Generator().manual_seed(6)) < 0.02
    seen = known[:, order] ^ flips
    assert float((match_positions(known, seen) == order).float().mean()) < 0.1
    assert torch.equal(match_positions(known, seen, slack=15), order)


def test_two_positions_are_not_one_neuron() -> None:
    known = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]).T.bool()
    seen = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0]]).T.bool()
    assert match_positions(known, seen, slack=2).tolist() == [0, 1, UNKNOWN]


def test_a_tie_names_nobody() -> None:
    assert told([3, 1, 2]) == 1
    assert told([1, 2, 1]) is None


def test_other_shapes_are_refused() -> None:
    for call in (match_positions, lambda a, b: count_differences(b, [a])):
        with pytest.raises(DomainError, match=r"got activity \(3, 4\) and opened \(3, 5\); want both \[inputs, n\]"):
            call(layer(3, 4), layer(3, 5))
    with pytest.raises(DomainError, match="pattern_differences"):
        pattern_differences(torch.arange(5), layer(3, 5), [layer(2, 5)])
