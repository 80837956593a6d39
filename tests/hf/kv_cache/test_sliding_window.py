"""The window policy on a buffer, through random texts: what it must hold, and that what the client reckons is so."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch
from private_llm_hf.client.session_client import PrivateCache
from private_llm_hf.wire.commands import CropCache
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.kv_cache.buffer import KVBuffer
from private_llm.kv_cache.policies.policy import CacheFacts, SlidingWindow
from tests.tensor.secrets import fixed, opened, plain_session

S = plain_session()


class _Parties:
    """What a handle needs of the link to the parties: it sends crops to the buffer."""

    def __init__(self, policy: SlidingWindow, buffer: KVBuffer) -> None:
        self.config, self._buffer = PrivateConfig(kv_cache=policy), buffer

    def new_handle(self) -> int:
        return 1

    def release(self, handle: int) -> None:
        """Nothing is kept."""

    def command(self, message: CropCache) -> None:
        self._buffer.crop(message.count)


def _append(buffer: KVBuffer, count: int, rows: int) -> None:
    """Keys that are their own positions."""
    keys = torch.arange(buffer.position, buffer.position + count, dtype=torch.float64).view(1, 1, count, 1)
    buffer.append(fixed(S, keys.expand(rows, 2, -1, 1)), fixed(S, -keys.expand(rows, 2, -1, 1)))


def _must_hold(row: int, padding: Tensor, policy: SlidingWindow) -> set[int]:
    """Tokens of a row that a window over an uncut text holds."""
    tokens = padding[row].nonzero().flatten().tolist()
    return {*tokens[: policy.first], *(t for t in tokens if t >= padding.shape[1] - policy.recent)}


@pytest.mark.parametrize("seed", range(60))
def test_windows_over_random_texts(seed: int) -> None:
    """Prompts, single steps, several tokens at once, drafts that are cropped; rows of padding of any length."""
    rng = random.Random(seed)
    policy = SlidingWindow(recent=rng.randint(1, 5), first=rng.randint(0, 3))
    pads = [rng.randint(0, 9) for _ in range(3)] if seed % 3 else [0, 0, 0]
    buffer = KVBuffer()
    handle = PrivateCache(cast(Any, _Parties(policy, buffer)), 3)
    cut = False
    for call in range(12):
        count = rng.randint(1, 12) if call == 0 else rng.choice([1, 1, 1, 2, 4])
        before = buffer.length
        _append(buffer, count, 3)
        padding = torch.stack([torch.arange(buffer.position) >= pad for pad in pads])
        facts = CacheFacts(0, buffer.position, buffer.positions_held(), padding if any(pads) else None)
        index = policy.after_step(facts, None)
        if index is not None:
            buffer.keep(index)
        handle.extend(count)
        assert buffer.length == policy.entries(before + count, buffer.position, count)
        assert (handle.position, handle.kv_length) == (buffer.position, buffer.length)
        assert handle.kv_length <= policy.first + policy.recent
        held = buffer.positions_held().expand(3, -1, -1)[:, 0]
        assert torch.equal(opened(buffer.keys)[:, 0, :, 0].long(), held)
        if not cut:
            for row in range(3):
                assert _must_hold(row, padding, policy) <= {*held[row].tolist()}
        if rng.random() < 0.3:
            cut = True
            back, position = rng.randint(1, 5), buffer.position
            if not handle._newest < back < position:
                handle.crop(-back)
                position = max(0, position - back)
            else:  # refused at the client, before the parties hear of it
                with pytest.raises(DomainError, match="of this cache only the last"):
                    handle.crop(-back)
            assert buffer.position == position
            assert (handle.position, handle.kv_length) == (buffer.position, buffer.length)


def test_padding_does_not_count_as_first_tokens() -> None:
    policy, buffer = SlidingWindow(recent=2, first=2), KVBuffer()
    _append(buffer, 8, 3)
    padding = torch.stack([torch.arange(8) >= pad for pad in (0, 3, 7)])
    index = policy.after_step(CacheFacts(0, 8, buffer.positions_held(), padding), None)
    assert index is not None
    assert index[:, 0].tolist() == [[0, 1, 6, 7], [3, 4, 6, 7], [4, 5, 6, 7]]
    index = policy.after_step(CacheFacts(0, 8, buffer.positions_held(), None), None)
    assert index is not None
    assert index.tolist() == [[[0, 1, 6, 7]]]
