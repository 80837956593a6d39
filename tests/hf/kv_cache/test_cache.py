"""The cache of shares: growth, reordering, cropping, copies that part ways, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from private_llm_hf.kv_cache.cache import SecretCache, SecretCacheLayer, SecretEncoderDecoderCache
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache

import tests.hf.tiny as tiny
from private_llm.errors import DomainError, PlaintextLeak, UnsupportedOp
from tests.tensor.secrets import noise, opened, plain_session, secret

S = plain_session()


def _filled(*lengths: int) -> tuple[SecretCacheLayer, DynamicCache]:
    """A secret layer and a plaintext cache after the same updates (batch 3, 2 heads, size 4)."""
    layer, plain = SecretCacheLayer(), DynamicCache()
    for step, length in enumerate(lengths):
        key, value = noise(3, 2, length, 4, seed=2 * step), noise(3, 2, length, 4, seed=2 * step + 1)
        got = layer.update(secret(S, key), secret(S, value))
        want = plain.update(key, value, 0)
        assert all(torch.equal(opened(g), w) for g, w in zip(got, want, strict=True))
    return layer, plain


def _same(layer: SecretCacheLayer, plain: DynamicCache) -> bool:
    pairs = ((layer.keys, plain.layers[0].keys), (layer.values, plain.layers[0].values))
    return all(got is not None and torch.equal(opened(got), want) for got, want in pairs)


def test_it_grows_and_agrees_with_a_dynamic_cache() -> None:
    layer, plain = _filled(5, *[1] * 60, 3)
    assert _same(layer, plain)
    assert (layer.get_seq_length(), layer.get_mask_sizes(2), layer.get_max_length()) == (68, (70, 0), -1)


def test_an_append_does_not_copy_what_is_held() -> None:
    layer, _ = _filled(5, 1)
    before = layer.buffer._rows[0].parts[0].data_ptr()
    layer.update(secret(S, noise(3, 2, 1, 4)), secret(S, noise(3, 2, 1, 4)))
    assert layer.buffer._rows[0].parts[0].data_ptr() == before


@pytest.mark.parametrize("index", [[2, 0, 0], [1], [0, 1, 2, 2, 1, 0]])
def test_rows_are_selected_repeated_and_reordered(index: list[int]) -> None:
    layer, plain = _filled(4, 1)
    layer.reorder_cache(torch.tensor(index))
    plain.reorder_cache(torch.tensor(index))
    assert _same(layer, plain)
    layer.batch_repeat_interleave(2)
    plain.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([1, 0]))
    plain.batch_select_indices(torch.tensor([1, 0]))
    assert _same(layer, plain)


def test_cropping() -> None:
    layer, plain = _filled(4, 3)
    layer.crop(-2)
    plain.crop(-2)
    assert _same(layer, plain)
    layer.crop(0)
    assert layer.get_seq_length() == 5
    with pytest.raises(DomainError, match="negative"):
        layer.crop(3)
    layer.reset()
    assert (layer.get_seq_length(), layer.keys) == (0, None)


def test_copies_go_on_independently() -> None:
    layer, _ = _filled(4, 1)
    twin = copy.deepcopy(layer)
    more: list[Tensor] = [noise(3, 2, 1, 4, seed=s) for s in (20, 21)]
    layer.update(secret(S, more[0]), secret(S, more[0]))
    twin.update(secret(S, more[1]), secret(S, more[1]))
    assert torch.equal(opened(layer.keys)[:, :, -1:], more[0])
    assert torch.equal(opened(twin.keys)[:, :, -1:], more[1])
    assert torch.equal(opened(layer.keys)[:, :, :5], opened(twin.keys)[:, :, :5])


def test_whole_caches_copy_crop_and_reorder() -> None:
    cache = SecretEncoderDecoderCache()
    key = noise(2, 2, 3, 4)
    cache.self_attention_cache.update(secret(S, key), secret(S, key), 0)
    cache.cross_attention_cache.update(secret(S, key), secret(S, key), 0)
    cache.is_updated[0] = True
    twin = copy.deepcopy(cache)
    twin.reorder_cache(torch.tensor([1]))
    twin.crop(-1)
    assert tuple(twin.self_attention_cache.layers[0].keys.shape) == (1, 2, 2, 4)
    assert tuple(twin.cross_attention_cache.layers[0].keys.shape) == (1, 2, 3, 4)
    assert twin.is_updated == {0: True}
    assert tuple(cache.self_attention_cache.layers[0].keys.shape) == (2, 2, 3, 4)
    plain = SecretCache()
    plain.update(secret(S, key), secret(S, key), 0)
    plain.crop(-2)
    assert plain.get_seq_length() == 1


def test_plain_keys_are_refused_and_secret_keys_do_not_enter_plain_buffers() -> None:
    with pytest.raises(UnsupportedOp, match="secret keys"):
        SecretCacheLayer().update(noise(1, 1, 1, 4), noise(1, 1, 1, 4))
    key = secret(S, noise(1, 2, 3, 16))
    static = StaticCache(config=tiny.build("llama").config, max_cache_len=8)
    static.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(PlaintextLeak):
        static.update(key, key, 0)


def test_a_dynamic_cache_holds_secrets_too() -> None:
    """`torch.cat([plain empty, secret])` is what transformers' own cache does."""
    plain, key = DynamicCache(), noise(1, 2, 3, 4)
    plain.update(secret(S, key), secret(S, key), 0)
    keys, _ = plain.update(secret(S, key), secret(S, key), 0)
    assert torch.equal(opened(keys), torch.cat([key, key], -2))
