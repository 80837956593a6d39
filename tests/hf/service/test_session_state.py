"""What a party keeps for many sessions: edits in company, what is freed, and how much there is."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.wire.commands import CopyCache, CropCache, ResetCache, SelectRows
from torch import Tensor

from private_llm.errors import DomainError, TransportError
from tests.harness import PLAIN
from tests.hf import tiny
from tests.hf.party.parties import ids
from tests.hf.service.sessions import Ask, run_service

SAME = 2e-3
LENGTHS = {"a": (2, 5), "b": (1, 6), "c": (3, 6)}
"""Rows and positions."""


def prompt(mark: str = "") -> list[Ask]:
    return [Ask(owner + mark, ids(*shape, seed=len(owner) + shape[0])) for owner, shape in LENGTHS.items()]


def step(seed: int, rows: dict[str, int], mark: str = "") -> list[Ask]:
    return [Ask(owner + mark, ids(count, 1, seed=seed + count)) for owner, count in rows.items()]


def compared(*edits: tuple[str, Any], rows: dict[str, int]) -> list[Any]:
    """Prompts and a step in company, the edits, a step in company; then the same of sessions that are alone."""
    whole = {owner: shape[0] for owner, shape in LENGTHS.items()}
    facts: list[Any] = []

    def look(state: SessionState) -> object:
        return [(state.past(o, 1), state.rows(o, 1), state.positions(o)) for o in "abc"]

    one = [prompt(), step(1, whole), *edits, look, step(2, rows)]
    apart = [[ask] for ask in (*prompt("'"), *step(1, whole, "'"))]
    again = [(f"{owner}'", edit) for owner, edit in edits]
    found = run_service(PLAIN, tiny.build("llama"), [*one, *apart, *again, *([ask] for ask in step(2, rows, "'"))])
    got, wanted = found[3].logits, [done.logits[0] for done in found[-len(rows) :]]
    assert max(float((x - y).abs().max()) for x, y in zip(got, wanted, strict=True)) <= SAME
    facts += found[2]
    return facts


def test_rows_are_reordered_in_company() -> None:
    """Beam search: as many rows as before stay where they are; others are taken out."""
    assert compared(("c", SelectRows(1, torch.tensor([2, 0, 0]))), rows={"a": 2, "b": 1, "c": 3}) == [
        (6, 2, 12), (7, 1, 7), (7, 3, 21)]  # fmt: skip
    assert compared(("c", SelectRows(1, torch.tensor([2]))), rows={"a": 2, "b": 1, "c": 1})[2] == (7, 1, 7)


def test_positions_are_cropped_in_company() -> None:
    assert compared(("a", CropCache(1, 2)), rows={"a": 2, "b": 1, "c": 3}) == [(4, 2, 8), (7, 1, 7), (7, 3, 21)]


def test_a_cache_is_copied_out_of_company() -> None:
    assert compared(("a", CopyCache(1, 2)), rows={"a": 2, "b": 1, "c": 3})[0] == (6, 2, 24)


def test_what_was_reset_begins_anew() -> None:
    def reset(state: SessionState) -> object:
        state.edit("a", ResetCache(1))
        return state.past("a", 1), state.rows("a", 1), state.positions("a"), state.past("b", 1)

    first, again = prompt(), Ask("a", ids(1, 4, seed=8))
    found = run_service(PLAIN, tiny.build("llama"), [first, reset, [again], [Ask("z", again.given)]])
    assert found[1] == (0, 0, 0, 6)
    assert torch.equal(found[2].logits[0], found[3].logits[0])


def test_bad_edits() -> None:
    def edit(state: SessionState) -> None:
        for one in (CropCache(7, 1), SelectRows(7, torch.tensor([0])), ResetCache(7), CopyCache(7, 8)):
            with pytest.raises(TransportError, match="no cache 7"):
                state.edit("a", one)
        with pytest.raises(TransportError, match="no cache 1"):
            state.edit("z", ResetCache(1))
        for index in ([2], [0, 3], []):
            with pytest.raises(DomainError, match="below 2"):
                state.edit("a", SelectRows(1, torch.tensor(index, dtype=torch.int64)))
        with pytest.raises(DomainError, match="each cache once"):
            state.together([(("a", 1), 2, 1), (("a", 1), 2, 1)])
        with pytest.raises(DomainError, match="new ones"):
            state.together([(("a", 1), 2, 1), (("z", 1), 2, 1)])

    run_service(PLAIN, tiny.build("llama"), [prompt(), edit])


def test_what_ended_is_freed() -> None:
    """Caches of sessions that end leave at once: memory is that of those who stay."""
    alive: list[weakref.ref[Tensor]] = []

    def note(state: SessionState) -> int:
        parts = [p for cache in state.caches() for layer in cache.layers for p in layer.buffer._rows[0].parts]
        alive.extend(weakref.ref(part) for part in parts)
        return sum(part.shape[0] for part in parts) // 2

    def end(state: SessionState) -> list[int]:
        state.forget("c")
        state.free("a", [1, 99])
        return state.handles("a") + state.handles("c")

    def count(state: SessionState) -> int:
        gc.collect()
        return sum(ref() is not None for ref in alive)

    script = [prompt(), note, end, note, count, lambda state: state.forget("b"), count]
    _, rows, handles, left, held, _, nothing = run_service(PLAIN, tiny.build("llama"), script)
    assert (rows, handles, left) == (6, [], 1)
    assert (held, nothing) == (2, 0)
