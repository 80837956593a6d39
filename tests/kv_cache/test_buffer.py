"""The buffer of keys and values: what stays, which positions it belongs to, and what cannot be undone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kv_cache.buffer import CacheRows, KVBuffer
from tests.tensor.secrets import fixed, noise, opened, plain_session

S = plain_session()
B, G, D = 2, 3, 4


def _filled(*lengths: int) -> tuple[KVBuffer, Tensor]:
    """A buffer after appends of these lengths, and the keys that went in (values are minus the keys)."""
    buffer, keys = KVBuffer(), noise(B, G, sum(lengths), D)
    for key in keys.split(list(lengths), dim=2):
        buffer.append(fixed(S, key), fixed(S, -key))
    return buffer, keys


def _holds(buffer: KVBuffer, keys: Tensor) -> bool:
    got = buffer.keys, buffer.values
    return all(x is not None for x in got) and torch.equal(opened(got[0]), keys) and torch.equal(opened(got[1]), -keys)


def _at(keys: Tensor, positions: Tensor) -> Tensor:
    return keys.gather(2, positions.expand(B, G, -1).unsqueeze(-1).expand(-1, -1, -1, D))


def test_while_nothing_is_evicted_length_and_position_are_one() -> None:
    buffer, keys = _filled(5, *[1] * 50, 3)
    assert _holds(buffer, keys)
    assert (buffer.position, buffer.length, buffer.positions, buffer.batch) == (58, 58, None, B)
    assert buffer.positions_held().tolist() == [[list(range(58))]]
    table = torch.ones(1, 1, 2, 58)
    assert buffer.columns(table, 6) is table


SHAPES = {
    "one for all": torch.tensor([0, 2, 5]),
    "by row": torch.tensor([[[0, 1, 5]], [[2, 3, 5]]]),
    "by head": torch.tensor([[[0, 1, 5], [2, 3, 5], [0, 4, 5]]]),
    "by row and head": torch.stack([torch.tensor([[i, 4, 5] for i in range(G)]), torch.tensor([[0, 1, 2]] * G)]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_entries_stay_under_their_positions(name: str) -> None:
    index = SHAPES[name]
    buffer, keys = _filled(4, 2)
    buffer.keep(index)
    positions = index.view(1, 1, -1) if index.ndim == 1 else index
    assert (buffer.position, buffer.length) == (6, 3)
    assert torch.equal(buffer.positions_held(), positions)
    assert _holds(buffer, _at(keys, positions))
    more = noise(B, G, 2, D, seed=5)
    buffer.append(fixed(S, more), fixed(S, -more))
    new = torch.tensor([6, 7]).expand(*positions.shape[:2], 2)
    assert torch.equal(buffer.positions_held(), torch.cat([positions, new], -1))
    assert _holds(buffer, torch.cat([_at(keys, positions), more], 2))
    buffer.keep(torch.tensor([1, 3, 4]))
    assert buffer.positions_held()[..., 1:].unique().tolist() == [6, 7]
    assert torch.equal(buffer.positions_held()[..., 0], positions[..., 1])
    assert (buffer.position, buffer.length) == (8, 3)


@pytest.mark.parametrize("name", SHAPES)
def test_columns_are_those_of_the_entries(name: str) -> None:
    buffer, _ = _filled(6)
    buffer.keep(SHAPES[name])
    heads, table = 2 * G, torch.arange(B * 5 * 6).view(B, 1, 5, 6)
    got = buffer.columns(table, heads)
    positions = buffer.positions_held().expand(B, G, -1)
    for row in range(B):
        for head in range(heads):
            mine = got[row, head if got.shape[1] > 1 else 0]
            assert torch.equal(mine, table[row, 0][:, positions[row, head // 2]])


def test_an_append_after_an_eviction_does_not_copy_what_is_held() -> None:
    buffer, _ = _filled(5)
    buffer.keep(torch.tensor([0, 4]))
    before = buffer._rows[0].parts[0].data_ptr()
    buffer.append(fixed(S, noise(B, G, 1, D)), fixed(S, noise(B, G, 1, D)))
    assert buffer._rows[0].parts[0].data_ptr() == before


def test_rows_take_their_positions_along() -> None:
    buffer, keys = _filled(6)
    positions = SHAPES["by row"]
    buffer.keep(positions)
    held = _at(keys, positions)
    buffer.select(torch.tensor([1, 0, 1]))
    assert torch.equal(buffer.positions_held(), positions[[1, 0, 1]])
    assert _holds(buffer, held[[1, 0, 1]])
    shared, _ = _filled(6)
    shared.keep(torch.tensor([1, 2]))
    shared.select(torch.tensor([1, 1, 1]))
    assert shared.positions_held().tolist() == [[[1, 2]]]


def test_copies_go_on_independently() -> None:
    buffer, keys = _filled(6)
    buffer.keep(torch.tensor([0, 4, 5]))
    twin = buffer.copy()
    more = noise(B, G, 1, D, seed=7)
    buffer.append(fixed(S, more), fixed(S, -more))
    twin.append(fixed(S, 2 * more), fixed(S, -2 * more))
    twin.keep(torch.tensor([3]))
    assert _holds(buffer, torch.cat([keys[:, :, [0, 4, 5]], more], 2))
    assert _holds(twin, 2 * more)
    assert buffer.positions_held().flatten().tolist() == [0, 4, 5, 6]


def test_what_follows_a_crop_changes_no_copy() -> None:
    buffer, keys = _filled(6)
    twin, more = buffer.copy(), noise(B, G, 1, D, seed=7)
    buffer.crop(3)
    buffer.append(fixed(S, more), fixed(S, -more))
    assert _holds(twin, keys)
    assert _holds(buffer, torch.cat([keys[:, :, :3], more], 2))


def test_cropping_goes_back_as_far_as_entries_are_held() -> None:
    buffer, keys = _filled(8)
    buffer.keep(torch.tensor([[[0, 5, 6, 7]], [[2, 5, 6, 7]]]))
    twin = buffer.copy()
    buffer.crop(2)
    assert (buffer.position, buffer.length) == (6, 2)
    assert buffer.positions_held().tolist() == [[[0, 5]], [[2, 5]]]
    assert _holds(buffer, _at(keys, torch.tensor([[[0, 5]], [[2, 5]]])))
    with pytest.raises(DomainError, match=r"got 2 positions; some of them were evicted.* position 4"):
        buffer.crop(2)
    assert (buffer.position, buffer.length) == (6, 2)
    twin.crop(8)
    assert (twin.position, twin.length, twin.positions) == (0, 0, None)
    whole, keys = _filled(5)
    whole.crop(2)
    assert _holds(whole, keys[:, :, :3])


def test_after_secret_choices_only_entries_that_none_has_moved_are_cropped() -> None:
    buffer, keys = _filled(8)
    held = keys[:, :, [0, 3, 6, 7]]
    buffer.replace(fixed(S, held), fixed(S, -held), 2, None)
    with pytest.raises(DomainError, match="got 3 positions; of this cache only the last 2 can be removed"):
        buffer.crop(3)
    buffer.crop(2)
    more = noise(B, G, 1, D, seed=5)
    buffer.append(fixed(S, more), fixed(S, -more))
    held = torch.cat([held[:, :, 1:2], more], 2)
    buffer.replace(fixed(S, held), fixed(S, -held), 2, None)  # an older choice had moved the last but one
    with pytest.raises(DomainError, match="only the last 1 can be removed"):
        buffer.crop(2)
    buffer.crop(1)
    assert _holds(buffer, held[:, :, :1])


def test_an_emptied_cache_takes_other_rows() -> None:
    buffer, keys = _filled(5)
    buffer.crop(5)
    assert (buffer.position, buffer.length, buffer.keys) == (0, 0, None)
    other = keys[:1, :2]
    buffer.append(fixed(S, other), fixed(S, -other))
    assert _holds(buffer, other)


@pytest.mark.parametrize("wrong", [[], [0, 0], [2, 1], [-1, 0], [5, 6], [[[0]], [[0]], [[0]]], [[[0], [0]]], [[0, 1]]])
def test_indices_that_do_not_ascend_exist_or_fit_are_refused(wrong: list[object]) -> None:
    buffer, keys = _filled(6)
    with pytest.raises(DomainError, match="keep: "):
        buffer.keep(torch.tensor(wrong, dtype=torch.int64))
    assert _holds(buffer, keys)


def test_an_empty_cache_evicts_nothing() -> None:
    with pytest.raises(DomainError, match="nothing yet"):
        KVBuffer().keep(torch.tensor([0]))


def test_keeping_everything_is_no_work() -> None:
    buffer, _ = _filled(6)
    before = buffer._rows
    buffer.keep(torch.arange(6))
    assert buffer.positions is None
    assert buffer._rows is before


def test_pieces_are_stacked_with_zeros_on_the_left_and_go_on() -> None:
    one, first = _filled(5, 2)
    other, second = _filled(3)
    made = KVBuffer.stacked([(other, CacheRows(1, 1, 1)), (one, CacheRows(0, 2, 3)), (one, CacheRows(1, 1))])
    assert (made.position, made.length, made.batch) == (7, 7, 4)
    wanted = torch.zeros(4, G, 7, D, dtype=torch.float64)
    wanted[0, :, 5:], wanted[1:3, :, 3:], wanted[3] = second[1, :, 1:], first[:, :, 3:], first[1]
    assert _holds(made, wanted)
    assert _holds(one, first)
    more = noise(4, G, 1, D, seed=8)
    before = made._rows[0].parts[0].data_ptr()
    made.append(fixed(S, more), fixed(S, -more))
    assert made._rows[0].parts[0].data_ptr() == before  # there is room for the next ones
    assert _holds(made, torch.cat([wanted, more], 2))
    assert KVBuffer.stacked([(KVBuffer(), CacheRows(0, 1)), (KVBuffer(), CacheRows(0, 1))]).length == 0


def test_what_was_evicted_cannot_be_stacked() -> None:
    one, _ = _filled(5)
    with pytest.raises(DomainError, match="got empty and filled caches"):
        KVBuffer.stacked([(one, CacheRows(0, 1)), (KVBuffer(), CacheRows(0, 1))])
    one.keep(torch.tensor([0, 3]))
    with pytest.raises(DomainError, match="some were evicted"):
        KVBuffer.stacked([(one, CacheRows(0, 1))])
