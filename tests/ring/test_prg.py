"""Known answers for seeds and streams, and the properties shares rely upon."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from private_llm.errors import ConfigError, DomainError, ProtocolAbort
from private_llm.ring.prg import ChaCha, Prg, Seed
from private_llm.ring.ring import RING32, RING64


def test_aes_core_matches_fips_197_appendix_c1() -> None:
    """The block cipher under the stream: FIPS-197 C.1, key 000102..0f, plaintext 00112233..ff."""
    key, block = bytes(range(16)), bytes.fromhex("00112233445566778899aabbccddeeff")
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    assert encryptor.update(block).hex() == "69c4e0d86a7b0430d8cdb78070b4c55a"


def test_stream_is_aes_of_a_counter_from_zero() -> None:
    key = bytes(range(16))
    ecb = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    expected = b"".join(ecb.update(i.to_bytes(16, "big")) for i in range(8))
    assert Prg(key).words(16).numpy().tobytes() == expected


def test_known_answer_of_key_derivation() -> None:
    """Derived from BLAKE2b by hand: a change of label or personalisation breaks agreement between parties."""
    seed = Seed(bytes(range(32)))
    key = hashlib.blake2b(b"trio masks", key=bytes(range(32)), digest_size=16, person=b"pllm-prg").digest()
    assert torch.equal(seed.stream("trio masks").words(4), Prg(key).words(4))
    assert seed.stream("trio masks").words(2).tolist() == [7908340457693692814, -1967959876142403407]


@pytest.mark.parametrize("cipher", ["aes", "chacha20"])
def test_first_words_are_those_of_the_stream(cipher: str) -> None:
    """Also from many threads, one after the other: round keys are scratch memory of the kernel."""
    seed = Seed(bytes(range(32)), cipher)
    counts = [0, 1, 2, 3, 7, 129, 4096, 1 << 17, (1 << 17) + 1] * 4
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda at: seed.first_words(f"label {at}", counts[at]), range(len(counts))))
    for at, count in enumerate(counts):
        assert torch.equal(made[at], seed.stream(f"label {at}").words(count))


def test_labels_and_derived_seeds_give_other_streams() -> None:
    seed = Seed(bytes(32))
    streams = [seed.stream("a"), seed.stream("b"), seed.derive("a").stream("a"), Seed.fresh().stream("a")]
    name = "a" * 200  # of a weight far inside a model
    streams += [made.stream(name + end) for made in (seed, seed.derive(name), seed.derive(name + "b")) for end in "ab"]
    first = [tuple(s.words(4).tolist()) for s in streams]
    assert len(set(first)) == len(streams)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 5), (1000, 1, 7)])
def test_a_stream_never_repeats_and_both_holders_stay_in_step(sizes: tuple[int, ...]) -> None:
    one, two = Seed(bytes(32)).stream("x"), Seed(bytes(32)).stream("x")
    drawn = [one.elements(n, RING64) for n in sizes]
    assert all(torch.equal(a, two.elements(n, RING64)) for a, n in zip(drawn, sizes, strict=True))
    together = torch.cat(drawn)
    assert together.unique().numel() == together.numel()


def test_small_elements_do_not_reuse_bytes_of_a_block() -> None:
    stream = Seed(bytes(32)).stream("x")
    values = torch.cat([stream.elements(1, RING32) for _ in range(200)])
    assert values.unique().numel() == 200


def test_elements_cover_the_whole_ring_uniformly() -> None:
    """Chi-square over the top byte of 2^18 draws; 255 degrees of freedom, bound at p = 1e-12."""
    for ring in (RING64, RING32):
        values = Seed(bytes(32)).stream("uniform").elements(1 << 18, ring).numpy()
        counts = np.bincount((values >> (ring.bits - 8)).astype(np.uint8), minlength=256)
        expected = values.size / 256
        assert ((counts - expected) ** 2 / expected).sum() < 448


def test_seeds_do_not_print_pickle_or_take_other_lengths() -> None:
    seed = Seed(b"k" * 32)
    assert "k" * 4 not in repr(seed)
    assert "secret" in repr(seed.stream("x"))
    with pytest.raises(TypeError, match="raw"):
        pickle.dumps(seed)
    with pytest.raises(TypeError, match="raw"):
        copy.copy(seed)
    with pytest.raises(ConfigError, match="got 31 bytes; want 32"):
        Seed(bytes(31))


# -- ChaCha20 -----------------------------------------------------------------------------------------------------
def test_chacha_matches_rfc_8439_appendix_a1() -> None:
    """Test vectors 1 and 2: key and nonce zero, blocks 0 and 1."""
    stream = ChaCha(bytes(32)).words(16).numpy().tobytes().hex()
    assert stream.startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert stream[128:].startswith("9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed")


def test_known_answer_of_chacha_key_derivation() -> None:
    seed = Seed(bytes(range(32)), "chacha20")
    key = hashlib.blake2b(b"trio masks", key=bytes(range(32)), digest_size=32, person=b"pllm-prg").digest()
    assert torch.equal(seed.stream("trio masks").words(9), ChaCha(key).words(9))
    assert isinstance(seed.derive("more").stream("x"), ChaCha)
    assert isinstance(Seed(bytes(32)).stream("x"), Prg)
    with pytest.raises(ConfigError, match="chacha20"):
        Seed(bytes(32), "rot13")


def test_a_chacha_stream_is_the_same_on_every_device() -> None:
    """One party draws in main memory, the other by the kernel of its device, taking turns."""
    here, there = ChaCha(bytes(range(32))), ChaCha(bytes(range(32)))
    for count, ring in ((3, RING64), (1, RING32), (0, RING64), (16, RING32), (1000, RING64), (5, RING32)):
        mine = here.elements(count, ring)
        assert torch.equal(mine, there.make(count, ring.dtype, torch.device("cpu")))
        here, there = there, here
        assert torch.equal(here.words(2), there.words(2))


def test_draws_of_chacha_never_overlap() -> None:
    """Each draw takes whole blocks; the next nonce follows the last block of one."""
    stream = ChaCha(bytes(32))
    drawn = torch.cat([stream.words(count) for count in (1, 7, 8, 9, 200_000, 3)])
    assert len(set(drawn.tolist())) == drawn.numel()
    late = ChaCha(bytes(32))
    late._block = (1 << 32) - 1
    assert late.words(8).numel() == 8
    following = late.words(8)
    other = Cipher(algorithms.ChaCha20(bytes(32), bytes(4) + (1).to_bytes(12, "little")), None).encryptor()
    assert following.numpy().tobytes() == other.update(bytes(64))


def test_a_chacha_stream_is_the_same_however_many_calls_take_it() -> None:
    """Also where the next nonce begins within a call: a program draws at once what Python draws piece by piece."""
    at_once, by_pieces, elsewhere = (ChaCha(bytes(range(32))) for _ in range(3))
    for each in (at_once, by_pieces, elsewhere):
        each._block = (1 << 32) - 3
    sizes = (8, 16, 40, 5)
    together = sum(-(-size // 8) * 8 for size in sizes)
    want = torch.cat([torch.cat([by_pieces.words(size), torch.zeros(-size % 8, dtype=torch.int64)]) for size in sizes])
    for made in (at_once.words(together), elsewhere.make(together, torch.int64, torch.device("cpu"))):
        assert torch.equal(made[: sum(sizes)], want[: sum(sizes)])
    assert at_once._block == by_pieces._block == elsewhere._block == (1 << 32) + 6
    assert torch.equal(at_once.words(3), by_pieces.words(3))


def test_a_device_goes_on_where_other_draws_ended() -> None:
    """What a graph draws reads its counter on the device, which others leave behind."""
    one, other, device = ChaCha(bytes(range(32))), ChaCha(bytes(range(32))), torch.device("cpu")
    one._block = other._block = (1 << 32) - 4
    out, want = torch.zeros(32, dtype=torch.int32), torch.zeros(128, dtype=torch.uint8)
    for among in (lambda each: None, lambda each: each.words(3), lambda each: each.make(20, torch.int64, device)):
        for _ in range(3):
            among(one), among(other)
            one.advance(128, device)
            one.write_next(out)
            other.fill(want.numpy())
            assert torch.equal(out.view(torch.uint8), want)


def test_chacha_on_meta_draws_nothing() -> None:
    stream = ChaCha(bytes(32))
    assert stream.words(5, "meta").is_meta
    assert torch.equal(stream.words(4), ChaCha(bytes(32)).words(4))


@pytest.mark.parametrize("cipher", ["aes", "chacha20"])
def test_streams_are_not_copied(cipher: str) -> None:
    stream = Seed(bytes(32), cipher).stream("masks")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="the same masks"):
            copied(stream)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("cipher", ["aes", "chacha20"])
def test_a_fork_draws_nothing_of_its_parents_streams(cipher: str) -> None:
    """Parent and child would mask two prompts alike, and whoever sees both messages has their difference. What is
    derived in the child from a seed of the parent is what the parent derives, too."""
    seed = Seed(bytes(32), cipher)
    stream = seed.stream("masks")
    stream.words(3)

    def refused(draw: Callable[[], object]) -> bool:
        try:
            draw()
        except ProtocolAbort as error:
            return "before this process was forked" in str(error)
        return False

    drawn = seed.drawn("mask", (2, 3), RING64) if cipher == "aes" else None
    child = os.fork()
    if not child:
        right = False
        try:
            draws = [lambda: stream.words(3), lambda: stream.fill(np.zeros(16, np.uint8))]
            draws += [lambda: seed.stream("own"), lambda: seed.derive("own"), seed.raw]
            draws += [lambda: seed.first_words("own", 3)]
            draws += [drawn.made, lambda: drawn + 1] if drawn is not None else []
            own = Seed(bytes(32), cipher)
            right = all(map(refused, draws)) and bool(torch.equal(own.stream("o").words(2), own.stream("o").words(2)))
        finally:
            os._exit(not right)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(stream.words(2), _behind(seed, 3, 2))


def _behind(seed: Seed, drawn: int, count: int) -> Tensor:
    """What a stream gives behind a first draw."""
    stream = seed.stream("masks")
    stream.words(drawn)
    return stream.words(count)


def test_streams_fill_writable_bytes_in_a_row() -> None:
    stream, room = Seed(bytes(32)).stream("masks"), np.zeros(64, np.uint8)
    fixed = np.zeros(16, np.uint8)
    fixed.flags.writeable = False
    for wrong in (room[::-1], room[::2], fixed, np.zeros(4, np.int64)):
        with pytest.raises(DomainError, match="contiguous bytes"):
            stream.fill(wrong)


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 5, 3 << 20])
def test_several_threads_make_the_same_stream(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm.kernels.parallel.threads", lambda seconds: 3)
    seed = Seed(bytes(32))
    stream, whole = seed.stream("masks"), Cipher(algorithms.AES(seed._key("masks", 16)), modes.CTR(bytes(16)))
    want = whole.encryptor().update(bytes(2 * size + 32))
    room = np.zeros(size, np.uint8)
    stream.fill(room)
    assert room.tobytes() == want[:size]
    stream.fill(room)
    start = size + -size % 16
    assert room.tobytes() == want[start : start + size]
