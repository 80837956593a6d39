"""WeightSharing by mask seeds: the parts add up, one party's part says nothing, what does not fit is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, ShareFileError
from private_llm.kernels.seeded_tensor import SeededTensor
from private_llm.protocols.weight_sharing import PIECE, Dealer, assemble, bytes_at_rest, keys_held, pieces, sends_parts

TRIO = PrivateConfig()
PLAIN = PrivateConfig(protocol="plain", insecure=True)


def dealt(config: PrivateConfig, elements: torch.Tensor, label: str = "w") -> list[tuple[torch.Tensor, ...]]:
    dealer = Dealer(config)
    sharing = dealer.begin(label)
    dealt = [sharing.deal(piece) for piece in pieces(elements)]
    shape = tuple(elements.shape)
    whole = [
        torch.cat([each[p] for each in dealt]).view(shape) if sends_parts(config, p) else None
        for p in range(config.parties)
    ]
    return [assemble(config, p, dealer.keys(p), whole[p], shape, label).parts for p in range(config.parties)]


@pytest.mark.parametrize("ring", [64, 32])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4), (3, PIECE - 1)])
def test_parts_add_up(ring: int, shape: tuple[int, ...]) -> None:
    config = PrivateConfig(ring=ring, frac_bits=12)
    x = torch.full(shape, -(2 ** (ring - 3)), dtype=torch.int64 if ring == 64 else torch.int32)
    (a1, a2), (masked2, first), (masked1, second) = dealt(config, x)
    assert torch.equal(first, a1)
    assert torch.equal(second, a2)
    assert torch.equal(masked2, x + a2)
    assert torch.equal(masked1, x + a1)


def test_plain_hands_over_the_elements() -> None:
    x = torch.arange(6).view(2, 3)
    assert torch.equal(dealt(PLAIN, x)[0][0], x)
    assert keys_held(PLAIN, 0) == 0


def test_masks_differ_by_label_and_by_dealer() -> None:
    x = torch.zeros(64, dtype=torch.int64)
    dealer = Dealer(TRIO)
    one, two = (dealer.begin(label).deal(x)[1] for label in ("a", "b"))
    other = Dealer(TRIO).begin("a").deal(x)[1]
    assert not torch.equal(one, two)
    assert not torch.equal(one, other)


def test_what_an_evaluator_receives_is_uniform() -> None:
    """Chi-square of bytes, 255 degrees of freedom, p = 1e-9, for constant elements."""
    dealt = Dealer(TRIO).begin("w").deal(torch.full((40_000,), 12345))
    assert dealt[0] is None
    for piece in dealt[1:]:
        counts = np.bincount(np.frombuffer(piece.numpy().tobytes(), np.uint8), minlength=256)
        expected = piece.numel() * 8 / 256
        assert ((counts - expected) ** 2 / expected).sum() < 378


def test_what_does_not_fit_is_refused() -> None:
    dealer = Dealer(TRIO)
    x = torch.zeros(4, dtype=torch.int64)
    piece = dealer.begin("w").deal(x)[1]
    with pytest.raises(ShareFileError, match="mask seeds: got 1; want 2 for party 0"):
        assemble(TRIO, 0, dealer.keys(1), None, (4,), "w")
    with pytest.raises(ShareFileError, match="party 0 holds masks only"):
        assemble(TRIO, 0, dealer.keys(0), piece, (4,), "w")
    for wrong in (None, torch.zeros(5, dtype=torch.int64)):
        with pytest.raises(ShareFileError, match=r"want a share of shape \(4,\)"):
            assemble(TRIO, 1, dealer.keys(1), wrong, (4,), "w")


@pytest.mark.parametrize("shape", [(), (7,), (3, PIECE - 1)])
def test_four_parties_get_the_masks_they_may_know_and_one_masked_tensor(shape: tuple[int, ...]) -> None:
    config = PrivateConfig(protocol="quad")
    x = torch.full(shape, -(2**61), dtype=torch.int64)
    (a1, a2, third), (x1, b1, u1), (x2, b2, u2), (c1, c2, c3) = dealt(config, x)
    assert all(torch.equal(*same) for same in ((a1, b1), (a1, c1), (a2, b2), (a2, c2), (u1, u2), (u1, c3)))
    assert all(torch.equal(masked, x) for masked in (third - u1, x1 - a2, x2 - a1))
    assert [sends_parts(config, party) for party in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("protocol", ["trio", "dealer", "quad"])
@pytest.mark.parametrize("ring", [64, 32])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (0, 4), (2, 3, 4)])
def test_masks_that_stay_seeds(protocol: str, ring: int, shape: tuple[int, ...]) -> None:
    """The same shares; matrices hold what was received alone, and `bytes_at_rest` says how much that is."""
    config = PrivateConfig(protocol=protocol, ring=ring, frac_bits=12, prg="chacha20" if len(shape) > 2 else "aes")
    dealer = Dealer(config)
    whole = dealer.begin("w").deal(torch.arange(math.prod(shape)).to(torch.int64 if ring == 64 else torch.int32))
    for party in range(config.parties):
        received = whole[party]
        given = None if received is None else received.view(shape)
        resident, seeds = (
            assemble(config, party, dealer.keys(party), given, shape, "w", seeds=seeds).parts for seeds in (False, True)
        )
        assert all(map(torch.equal, (part.contiguous() for part in seeds), resident))
        for parts, kept in ((resident, False), (seeds, True)):
            held = sum(part.nbytes for part in parts if not isinstance(part, SeededTensor))
            assert held == bytes_at_rest(config, party, shape, seeds=kept)
        if len(shape) > 1:
            assert bytes_at_rest(config, party, shape, True) == (
                ring // 8 * math.prod(shape) if given is not None else 0
            )


def test_another_seed_gives_another_mask() -> None:
    """A party with a wrong seed computes with garbage, as when masks are held."""
    keys = [Dealer(TRIO).keys(1) for _ in range(2)]
    received = torch.zeros(3, 5, dtype=torch.int64)
    first, again, other, label = (
        assemble(TRIO, 1, key, received, (3, 5), name, seeds=True).parts[1].contiguous()
        for key, name in ((keys[0], "w"), (keys[0], "w"), (keys[1], "w"), (keys[0], "v"))
    )
    assert torch.equal(first, again)
    assert not (first == other).any()
    assert not (first == label).any()


def test_what_has_no_masks_has_no_seeds() -> None:
    for settings in ({"protocol": "plain", "insecure": True}, {"weights": "public"}):
        with pytest.raises(ConfigError, match="no masks that could be made from seeds"):
            PrivateConfig(weights_at_rest="seeds", **settings)
    assert bytes_at_rest(PLAIN, 0, (3, 5), True) == bytes_at_rest(PLAIN, 0, (3, 5), False) == 120


def test_what_parties_hold_on_a_gpu() -> None:
    """LLaMA-7B at three parties of trio whose masks stay seeds: 108 GB of fake tensors on one fake GPU, and keys."""
    config, device = PrivateConfig(prg="chacha20"), torch.device("cuda:0")
    layer = [*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008)]
    dealer, held = Dealer(config), [0, 0, 0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, shape in enumerate([*layer * 32, *[(32000, 4096)] * 2]):
            for party in range(3):
                received = torch.empty(shape, dtype=torch.int64) if sends_parts(config, party) else None
                share = assemble(config, party, dealer.keys(party), received, shape, str(name), seeds=True)
                moved = [part.to(device) for part in share.parts]
                there = [part for part in moved if not isinstance(part, SeededTensor)]
                keys = [
                    piece.key.words(device) for part in moved if isinstance(part, SeededTensor) for piece in part.slices
                ]
                assert all(x.device == device for x in (*moved, *keys))
                assert [x.nbytes for x in keys] == [32] * keys_held(config, party)
                held[party] += sum(x.nbytes for x in there)
                assert sum(x.nbytes for x in there) == bytes_at_rest(config, party, shape, True)
    assert [round(size / 1e9, 1) for size in held] == [0.0, 53.9, 53.9]
