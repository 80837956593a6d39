"""Two keys give shares of beta below alpha and of zero from there on; one key alone is uniform and of public length."""

from __future__ import annotations

import hashlib

import numba
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from private_llm.errors import DomainError
from private_llm.kernels.prg import aes
from private_llm.ring import comparison_keys
from private_llm.ring.comparison_keys import EPOCH, Array, Ciphers
from private_llm.ring.prg import Seed

COUNT = 40
CIPHERS = Ciphers(Seed(bytes(range(32)))).take(1)


def words(generator: np.random.Generator, levels: int, *shape: int) -> Array:
    """Random numbers of `levels` bits."""
    drawn = np.frombuffer(generator.bytes(8 * int(np.prod(shape))), dtype=np.uint64)
    return drawn.reshape(shape) >> np.uint64(64 - levels)


def value(alpha: Array, beta: Array, x: Array, levels: int) -> Array:
    """What both holders' shares add up to, at x [points, n]."""
    seeds = Seed.fresh(), Seed.fresh()
    key = comparison_keys.make_keys(alpha, beta, levels, *(seed.stream("t") for seed in seeds), CIPHERS)
    assert key.shape == (len(alpha), comparison_keys.key_words(levels, beta.shape[1]))
    roots = [comparison_keys.roots(seed.stream("t"), len(alpha)) for seed in seeds]
    shares = [comparison_keys.evaluate(b, roots[b], key, x, levels, beta.shape[1], CIPHERS) for b in (0, 1)]
    assert shares[0].shape == (*x.shape, beta.shape[1])
    return shares[0] + shares[1]


@pytest.fixture(params=["instructions", "library"])
def cipher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to AES, as far as this processor has them."""
    way: str = request.param
    if way == "library":
        monkeypatch.setattr(aes, "usable", lambda: False)
    elif not aes.usable():
        pytest.skip("this processor has no AES instructions")
    return way


@pytest.mark.parametrize("levels", [1, 2, 7, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_shares_add_up_to_beta_below_alpha(levels: int, width: int, cipher: str) -> None:
    random = np.random.default_rng(levels)
    most = np.uint64((1 << levels) - 1)
    alpha, beta = words(random, levels, COUNT), words(random, 64, COUNT, width)
    alpha[:3] = [0, most, most >> np.uint64(1)]
    near = [(alpha + np.uint64(step % (1 << 64))) & most for step in (-1, 0, 1)]
    ends = [np.zeros(COUNT, np.uint64), np.full(COUNT, most)]
    x = np.stack([*near, *ends, *words(random, levels, 10, COUNT)])
    want = np.where((x < alpha)[..., None], beta, np.uint64(0))
    assert np.array_equal(value(alpha, beta, x, levels), want)


def test_both_ways_make_the_same_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parties may have different processors."""
    if not aes.usable():
        pytest.skip("this processor has no AES instructions")
    random = np.random.default_rng(3)
    alpha, beta, x = words(random, 37, COUNT), words(random, 64, COUNT, 3), words(random, 37, 5, COUNT)
    seeds, found = (Seed.fresh(), Seed.fresh()), []
    for way in (True, False):
        monkeypatch.setattr(aes, "usable", lambda way=way: way)
        key = comparison_keys.make_keys(alpha, beta, 37, *(seed.stream("t") for seed in seeds), CIPHERS)
        root = comparison_keys.roots(seeds[1].stream("t"), COUNT)
        found.append((key, comparison_keys.evaluate(1, root, key, x, 37, 3, CIPHERS)))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("number", [2, 3])
def test_the_cipher_is_aes(number: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIPS 197, appendices A.1 and B, and random keys against the library: keys side by side, or one by one."""
    if not aes.usable() or (wide and not aes.WIDE):
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(aes, "WIDE", wide)
    encrypt = aes._fan(number)

    def call(low: Array, high: Array, table: Array, out: Array) -> None:
        encrypt(low, high, table.ctypes.data, out.ctypes.data)

    run = numba.njit(call)

    example = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    assert aes.round_keys(example)[10].tobytes().hex() == "d014f9a8c9ee2589e13f0cc8b6630ca6"
    random = np.random.default_rng(4)
    for text in (bytes.fromhex("3243f6a8885a308d313198a2e0370734"), *(random.bytes(16) for _ in range(8))):
        keys = [example, *(random.bytes(16) for _ in range(number - 1))]
        plain, out = np.frombuffer(text, np.uint64), np.zeros(8, dtype=np.uint64)
        run(*plain, aes.tables([[aes.round_keys(key) for key in keys]]), out)
        for key, made in zip(keys, out.reshape(4, 2), strict=False):
            want = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(text)
            assert (made ^ plain).tobytes() == want
            assert key != example or text[0] != 0x32 or want.hex() == "3925841d02dc09fbdc118597196a0b32"


def test_a_child_is_the_same_by_wide_and_narrow_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    if not aes.WIDE or not aes.usable():
        pytest.skip("this processor has no wide instructions")
    random, found = np.random.default_rng(5), []
    table = aes.tables([[aes.round_keys(random.bytes(16)) for _ in range(3)]])
    node, fix = words(random, 64, 2, 8)
    node[6] = ~np.uint64(0)
    for wide in (True, False):
        monkeypatch.setattr(aes, "WIDE", wide)
        descend = aes._descent(3)

        def call(node: Array, fix: Array, table: Array, out: Array) -> None:
            descend(node.ctypes.data, fix.ctypes.data, table.ctypes.data, out.ctypes.data)  # noqa: B023 - called below

        out = np.zeros(8, dtype=np.uint64)
        numba.njit(call)(node, fix, table, out)
        found.append(out[:7])
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("setting", ["CPU_NAME", "CPU_FEATURES"])
def test_a_compiler_for_other_processors_has_no_instructions(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process over an instruction that its target lacks."""
    monkeypatch.setattr(numba.config, setting, "generic")
    assert not aes.usable.__wrapped__()


def test_every_pair_of_a_small_domain() -> None:
    alpha = np.arange(32, dtype=np.uint64)
    x = np.repeat(alpha[:, None], 32, axis=1)
    beta = np.full((32, 1), 7, dtype=np.uint64)
    assert np.array_equal(value(alpha, beta, x, 5)[..., 0], 7 * (x < alpha))


def test_higher_bits_do_not_count() -> None:
    alpha, beta = np.array([5], np.uint64), np.array([[1]], np.uint64)
    x = np.array([[4 + 16], [5 + 16]], np.uint64)
    assert value(alpha + np.uint64(48), beta, x, 4)[:, 0, 0].tolist() == [1, 0]


def test_a_key_looks_uniform_whatever_alpha_and_beta_are() -> None:
    """Chi-square of bytes, 255 degrees of freedom, p = 1e-9; control bits, and the bit that seeds do not use, apart."""
    for alpha, beta in ((0, 0), (0, 1), ((1 << 20) - 1, 1)):
        levels, count = 20, 512
        seeds = Seed.fresh(), Seed.fresh()
        key = comparison_keys.make_keys(
            np.full(count, alpha, np.uint64), np.full((count, 2), beta, np.uint64), levels,
            *(seed.stream("t") for seed in seeds), CIPHERS,
        )  # fmt: skip
        controls = key[:, 4 * levels]
        rest = np.delete(key, 4 * levels, axis=1)
        rest[:, : 2 * levels : 2] = rest[:, : 2 * levels : 2] >> np.uint64(8)  # which leaves seven of eight bytes
        data = rest.tobytes()
        raw = np.frombuffer(data, np.uint8).reshape(-1, 8)
        seeds_low = np.zeros(rest.shape, bool)
        seeds_low[:, : 2 * levels : 2] = True
        kept = np.concatenate([raw[seeds_low.reshape(-1), :7].reshape(-1), raw[~seeds_low.reshape(-1)].reshape(-1)])
        expected = len(kept) / 256
        assert ((np.bincount(kept, minlength=256) - expected) ** 2 / expected).sum() < 378
        ones = sum(bin(int(word)).count("1") for word in controls)
        assert abs(ones - count * levels) < 6 * (count * levels / 2) ** 0.5


def test_one_holder_alone_has_uniform_values() -> None:
    count = 4096
    seeds = Seed.fresh(), Seed.fresh()
    key = comparison_keys.make_keys(
        np.full(count, 9, np.uint64), np.ones((count, 1), np.uint64), 6, *(seed.stream("t") for seed in seeds), CIPHERS
    )
    for holder, seed in enumerate(seeds):
        root = comparison_keys.roots(seed.stream("t"), count)
        for x in (3, 9, 60):
            share = comparison_keys.evaluate(holder, root, key, np.full((1, count), x, np.uint64), 6, 1, CIPHERS)
            counts = np.bincount(np.frombuffer(share.tobytes(), np.uint8), minlength=256)
            expected = share.size * 8 / 256
            assert ((counts - expected) ** 2 / expected).sum() < 378


def test_the_size_and_the_work_that_prices_name() -> None:
    assert comparison_keys.key_words(26, 2) == 107
    assert comparison_keys.cipher_blocks(26, 2) == 26 * 2 + 1


@pytest.mark.parametrize(("levels", "width"), [(0, 1), (65, 1), (5, 0), (5, 5)])
def test_impossible_sizes_are_refused(levels: int, width: int) -> None:
    alpha, beta = np.zeros(2, np.uint64), np.zeros((2, width), np.uint64)
    with pytest.raises(DomainError, match="want 1 to 64 and 1 to 4"):
        comparison_keys.make_keys(alpha, beta, levels, Seed.fresh().stream("a"), Seed.fresh().stream("b"), CIPHERS)
    with pytest.raises(DomainError, match="want 1 to 64 and 1 to 4"):
        comparison_keys.evaluate(0, np.zeros((2, 2), np.uint64), beta, alpha[None], levels, width, CIPHERS)


@pytest.mark.parametrize("low", [0, 3])
@pytest.mark.parametrize("offsets", [(5,), (0, 1, 2, 3), (200, 130, 7, 3, 0), (-9, -8, -1, 0, 64), (4, 4, 5), (0, 255)])
def test_ways_are_counted_for_every_masked_value(offsets: tuple[int, ...], low: int) -> None:
    """As many as the values with most different ways have: no fewer, so that there is room, and no more."""
    levels = 8 - low
    points = np.array([each % (1 << 64) for each in offsets], dtype=np.uint64)
    masked = np.arange(256, dtype=np.uint64)
    ways = (masked[:, None] + points & np.uint64(255)) >> np.uint64(low)
    for level, count in enumerate(comparison_keys.shared_ways(points, levels, low)):
        short = ways >> np.uint64(levels - 1 - level)
        assert count == 1 + (short[:, 1:] != short[:, :-1]).sum(1).max()


def test_unordered_points_share_nothing() -> None:
    """They would be counted too low otherwise: neighbours alone are compared."""
    assert comparison_keys.shared_ways(np.array([0, 7, 1], dtype=np.uint64), 4, 0).tolist() == [3, 3, 3, 3]
    far = np.array([0, 1 << 63], dtype=np.uint64)
    assert comparison_keys.shared_ways(far, 2, 0).tolist() == [2, 2]


@pytest.mark.parametrize(("levels", "low", "width"), [(16, 12, 3), (27, 0, 2), (63, 1, 4), (5, 2, 1)])
def test_shared_ways_give_the_same_shares(levels: int, low: int, width: int, cipher: str) -> None:
    """Close points and far ones, falling as thresholds make them, and rising; 19 keys, in groups that are not full."""
    random, count = np.random.default_rng(levels), 19
    alpha, beta = words(random, levels, count), words(random, 64, count, width)
    seeds = Seed.fresh(), Seed.fresh()
    key = comparison_keys.make_keys(alpha, beta, levels, *(seed.stream("t") for seed in seeds), CIPHERS)
    root = comparison_keys.roots(seeds[0].stream("t"), count)
    apart = [0, 1, 1, 9, 300, 301, 5000, 1 << (levels + low - 2)]
    for offsets in (apart, apart[::-1], [-each for each in apart], [3]):
        points = np.array([each % (1 << 64) for each in offsets], dtype=np.uint64)
        x = ~((words(random, 64, count) + points[:, None]) >> np.uint64(low))
        nodes = comparison_keys.shared_ways(points, levels, low)
        shared = comparison_keys.evaluate(0, root, key, x, levels, width, CIPHERS, nodes)
        assert np.array_equal(shared, comparison_keys.evaluate(0, root, key, x, levels, width, CIPHERS))


def test_ciphers_are_of_one_session_and_few_keys(cipher: str) -> None:
    """Every key of AES is another one in the next epoch, in a section and in another session; holders agree on all."""
    seed, random = Seed.fresh(), np.random.default_rng(8)

    def keys(ciphers: Ciphers, count: int) -> list[bytes]:
        found = ciphers.take(count)
        return [*found.children, *found.values[0], *found.values[1], *found.end]

    maker, holder = Ciphers(seed), Ciphers(seed)
    counts = (1, EPOCH - 1, 2, EPOCH, EPOCH // 2, 3)
    made = [keys(maker, count) for count in counts]
    assert made == [keys(holder, count) for count in counts]
    assert [made.index(each) for each in made] == [0, 0, 2, 3, 4, 4]
    apart = [keys(Ciphers(seed).apart(label), 1) for label in ("a", "b")]
    every = [key for each in (*made[::2], made[3], *apart, keys(Ciphers(Seed.fresh()), 1)) for key in each]
    assert len(set(every)) == len(every) == 56
    with pytest.raises(DomainError, match="at most"):
        maker.take(EPOCH + 1)
    alpha, beta = words(random, 9, COUNT), words(random, 64, COUNT, 2)
    found = []
    for number in range(2):  # the words of a key depend on the ciphers alone
        ciphers = Ciphers(Seed(bytes([number] * 32))).take(COUNT)
        found.append(comparison_keys.make_keys(alpha, beta, 9, *(Seed(bytes(32)).stream(n) for n in "ab"), ciphers))
    assert not np.any(found[0] == found[1])


def test_ciphers_of_a_given_seed(cipher: str) -> None:
    """Known answer: the ciphers are BLAKE2b and AES in counter mode of the seed, the key is figure 1 of the paper."""
    ciphers = Ciphers(Seed(bytes(32))).take(1)
    streams = (Seed(bytes([number] * 32)).stream("roots") for number in (1, 2))
    key = comparison_keys.make_keys(np.array([5], np.uint64), np.array([[7]], np.uint64), 3, *streams, ciphers)
    stream = Seed(bytes(32)).stream("comparison ciphers 0")
    raw = np.zeros(128, np.uint8)
    stream.fill(raw)
    assert b"".join([*ciphers.children, *ciphers.values[0], *ciphers.values[1], *ciphers.end]) == raw.tobytes()
    assert hashlib.blake2b(key.tobytes(), digest_size=16).hexdigest() == "55daffc9d7f00f9727f91cd6f7feeddf"
