"""AES-128 inside Numba kernels, by the processor's own instructions (x86-64, ARM64): key streams, and trees of seeds.

The key stream is that of counter mode from counter 0 (NIST SP 800-38A, section 6.5), from any byte on: block i is the
cipher of i as a big-endian number of 16 bytes. Where the processor has them (VAES), an instruction works on four
blocks; eight of them are under way at a time. One core of a Sapphire Rapids makes 18 to 22 GB/s, OpenSSL 4 there 9.

A node of a tree of seeds needs one block under several fixed keys at once. Their round keys are interleaved,
[11, KEYS, 2] (`tables`), so that with VAES one instruction works on the block under all keys.

For processors for which `usable()` is true only: elsewhere nothing here is compiled, and OpenSSL gives the same.
"""

from __future__ import annotations

import platform
from functools import cache

import numpy as np
from llvmlite import binding, ir
from numba import config, types

from private_llm.kernels.address import Array, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.emitting import ADDRESS, I8, I32, I64, Function, IrValue, emitted, known, pointer, shuffled


@cache
def usable() -> bool:
    """Whether this processor has the instructions, and the compiler targets it and no other."""
    if config.CPU_NAME or config.CPU_FEATURES:
        return False
    features = binding.get_host_cpu_features()
    return (_ARM or platform.machine().lower() in ("x86_64", "amd64")) and bool(features.get("aes"))


_ARM = platform.machine().lower() in ("aarch64", "arm64")
_FEATURES = binding.get_host_cpu_features()
WIDE = bool(_FEATURES.get("vaes", False)) and bool(_FEATURES.get("avx512f", False))
LANES = 4 if WIDE else 1  # blocks in a vector
_UNDER_WAY = 8  # vectors encrypted side by side: an AES instruction takes several cycles, and one or two start in each
BLOCK = 16  # bytes of a block
SPILL = BLOCK * LANES  # `write_lines` writes fewer bytes than this beyond a line's end
_BLOCK, _OCTETS = ir.VectorType(I64, 2), ir.VectorType(I8, BLOCK)


def _round(builder: IrValue, number: int, blocks: IrValue, key: IrValue) -> IrValue:
    """Round 1 to 10 of one block, or of four."""
    kind = blocks.type
    if _ARM:  # AESE adds a key first: 0 here, and LLVM puts in the one of the round before
        step = known(builder, "llvm.aarch64.crypto.aese", _OCTETS, _OCTETS, _OCTETS)
        made = builder.call(step, [builder.bitcast(blocks, _OCTETS), ir.Constant(_OCTETS, None)])
        if number < 10:
            made = builder.call(known(builder, "llvm.aarch64.crypto.aesmc", _OCTETS, _OCTETS), [made])
        return builder.xor(builder.bitcast(made, kind), key)
    width = "" if kind == _BLOCK else ".512"
    step = known(builder, f"llvm.x86.aesni.aesenc{'last' if number == 10 else ''}{width}", kind, kind, kind)
    return builder.call(step, [blocks, key])


@emitted(ADDRESS)
def _expanded(builder: IrValue, keys: IrValue) -> None:
    """The rounds' keys after the first, which lies at an address (FIPS 197, section 5.2)."""
    table, four = pointer(builder, keys, _BLOCK), ir.VectorType(I32, 4)
    loaded = builder.bitcast(builder.load(table, align=8), four)
    words, none, constant = [builder.extract_element(loaded, I32(n)) for n in range(4)], ir.Constant(_BLOCK, None), 1
    for number in range(1, 11):
        made = ir.Constant(four, ir.Undefined)
        for n in range(4):  # a last round moves bytes between words, which are equal here
            made = builder.insert_element(made, words[3], I32(n))
        replaced = builder.bitcast(_round(builder, 10, builder.bitcast(made, _BLOCK), none), four)
        last = builder.extract_element(replaced, I32(0))
        last = builder.or_(builder.lshr(last, I32(8)), builder.shl(last, I32(24)))
        last = builder.xor(last, I32(constant))
        for n in range(4):
            words[n] = last = builder.xor(words[n], last)
            made = builder.insert_element(made, last, I32(n))
        builder.store(builder.bitcast(made, _BLOCK), builder.gep(table, [I64(number)]), align=8)
        constant = constant << 1 ^ (0x11B if constant & 0x80 else 0)


@compiled
def expand(keys: int) -> None:
    """Overwrite the last ten of the round keys at an address, uint64 [11, 2], by those that follow from the first."""
    _expanded(keys)


def round_keys(key: bytes) -> Array:
    """The round keys uint64 [11, 2] of a key of 16 bytes."""
    made = np.empty((11, 2), np.uint64)
    made[0] = np.frombuffer(key, "<u8")
    expand(made.ctypes.data)
    return made


# -- key streams ------------------------------------------------------------------------------------------------------
_VECTOR = ir.VectorType(I64, 2 * LANES)


def _encrypt(vectors: int) -> Function:
    """Blocks first .. of the stream under the round keys at an address, as many as `vectors` hold, to memory."""

    @emitted(ADDRESS, ADDRESS, ADDRESS)
    def run(builder: IrValue, keys: IrValue, first: IrValue, to: IrValue) -> None:
        table = pointer(builder, keys, _BLOCK)

        def key(number: int) -> IrValue:
            loaded = builder.load(builder.gep(table, [I64(number)]), align=8)
            return shuffled(builder, [0, 1] * LANES, loaded)

        start = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), first, I32(0))
        start, odd = shuffled(builder, [0] * 2 * LANES, start), ir.Constant(_VECTOR, [0, -1] * LANES)
        swap, blocks = known(builder, f"llvm.bswap.v{2 * LANES}i64", _VECTOR, _VECTOR), []
        for n in range(vectors):  # the counter in the odd lanes, big-endian; the even ones are zero
            ahead = [extra for lane in range(LANES) for extra in (0, n * LANES + lane)]
            counter = builder.call(swap, [builder.add(start, ir.Constant(_VECTOR, ahead))])
            blocks.append(builder.xor(builder.and_(counter, odd), key(0)))
        for number in range(1, 11):
            round_key = key(number)
            blocks = [_round(builder, number, block, round_key) for block in blocks]
        for n, block in enumerate(blocks):
            place = builder.add(to, I64(BLOCK * LANES * n))
            builder.store(block, pointer(builder, place, _VECTOR), align=1)

    return run


_many = _encrypt(_UNDER_WAY)
_one = _encrypt(1)


@compiled
def write_blocks(keys: int, first: int, to: int, blocks: int) -> None:
    """Blocks first .. first + blocks - 1 to memory, and up to LANES - 1 more after them."""
    done = 0
    while blocks - done >= _UNDER_WAY * LANES:
        _many(keys, first + done, to + BLOCK * done)
        done += _UNDER_WAY * LANES
    while done < blocks:
        _one(keys, first + done, to + BLOCK * done)
        done += LANES


@compiled
def write_bytes(keys: int, start: int, to: int, count: int) -> None:
    """Bytes start .. start + count - 1 of the stream to memory, and nothing else."""
    at, end, zero = start, start + count, np.uint8(0)
    scratch = np.empty(SPILL, np.uint8)
    while at < end:
        lead = at & (BLOCK - 1)
        blocks = (end - at) // BLOCK // LANES * LANES
        if lead == 0 and blocks:
            write_blocks(keys, at // BLOCK, to + at - start, blocks)
            at += BLOCK * blocks
        else:
            _one(keys, at // BLOCK, scratch.ctypes.data)
            taken = min(SPILL - lead, end - at)
            place = flat(to + at - start, taken, zero)
            for n in range(taken):
                place[n] = scratch[lead + n]
            at += taken


@compiled
def write_once(low: int, high: int, to: int, count: int) -> None:
    """The first bytes of the stream of a key, both halves of which are given, as `write_bytes`."""
    keys = np.empty(22, np.int64)
    keys[0], keys[1] = low, high
    _expanded(keys.ctypes.data)
    write_bytes(keys.ctypes.data, 0, to, count)
    keys[:] = 0  # without a use after the calls Numba frees it before them


@compiled
def write_lines(keys: int, start: int, step: int, lines: int, length: int, to: int, pitch: int) -> None:
    """Line i, `length` bytes of the stream from byte start + i step on, to memory at to + i pitch.

    Up to BLOCK - 1 bytes before each line are overwritten, and fewer than `SPILL` after it: lines need at least BLOCK
    bytes between them, and the last one SPILL after it.
    """
    for i in range(lines):
        first = start + i * step
        lead = first & (BLOCK - 1)
        write_blocks(keys, first // BLOCK, to + i * pitch - lead, (lead + length + BLOCK - 1) // BLOCK)


# -- trees of seeds ---------------------------------------------------------------------------------------------------
KEYS = 4  # keys of a table, and blocks that are written for each, whether there are so many or not
LINE = 64  # bytes of so many blocks; addresses that are multiples of it are read fastest
_LINE = ir.VectorType(I64, 2 * KEYS)
_SEED = range(2)
_CONTROL = 6  # where a line that is a node has its seed, and all bits of it the control bit; its words are between


def _encrypted(builder: IrValue, plain: IrValue, table: IrValue, keys: int) -> IrValue:
    """The first `keys` blocks of a line, each under its key of the table, plus itself; the others are anything."""

    def rounds(block: IrValue, offset: int) -> IrValue:
        for number in range(11):
            place = builder.add(table, I64(16 * KEYS * number + offset))
            key = builder.load(pointer(builder, place, block.type), align=8)
            block = _round(builder, number, block, key) if number else builder.xor(block, key)
        return block

    if WIDE:
        return builder.xor(rounds(plain, 0), plain)
    blocks = [rounds(shuffled(builder, [0, 1], plain), 16 * key) for key in range(keys)]
    blocks += [blocks[0]] * (KEYS - keys)
    halves = [shuffled(builder, range(4), blocks[n], blocks[n + 1]) for n in (0, 2)]
    return builder.xor(shuffled(builder, range(8), *halves), plain)


def _fan(keys: int) -> Function:
    """The block (low, high) under the first `keys` keys of the table at an address, plus itself, to memory."""

    @emitted(types.uint64, types.uint64, ADDRESS, ADDRESS)
    def run(builder: IrValue, low: IrValue, high: IrValue, table: IrValue, to: IrValue) -> None:
        plain = builder.insert_element(ir.Constant(_LINE, ir.Undefined), low, I32(0))
        plain = shuffled(builder, [0, 1] * KEYS, builder.insert_element(plain, high, I32(1)))
        builder.store(_encrypted(builder, plain, table, keys), pointer(builder, to, _LINE), align=8)

    return run


def _descent(keys: int) -> Function:
    """The child of a node: all are lines at addresses.

    A node: seed (2 words, the lowest bit 0), sum of words (4), control bit in all bits, nothing. fix: what is added if
    the control bit is set: to the child's seed, whose lowest bit is the child's control bit (2), and to the words (4).
    """

    @emitted(ADDRESS, ADDRESS, ADDRESS, ADDRESS)
    def run(builder: IrValue, node: IrValue, fix: IrValue, table: IrValue, to: IrValue) -> None:
        old = builder.load(pointer(builder, node, _LINE), align=8)
        made = _encrypted(builder, shuffled(builder, [0, 1] * KEYS, old), table, keys)
        control = shuffled(builder, [_CONTROL] * 2 * KEYS, old)
        added = builder.and_(builder.load(pointer(builder, fix, _LINE), align=8), control)
        seed, words = builder.xor(made, added), builder.add(old, builder.add(made, added))
        bit = builder.and_(builder.extract_element(seed, I32(0)), I64(1))
        line = shuffled(builder, [n if n in _SEED else n + 2 * KEYS for n in range(2 * KEYS)], seed, words)
        line = builder.and_(line, ir.Constant(_LINE, [-2, *[-1] * (2 * KEYS - 1)]))
        line = builder.insert_element(line, builder.neg(bit), I32(_CONTROL))
        builder.store(line, pointer(builder, to, _LINE), align=8)

    return run


encrypt_two, encrypt_three = _fan(2), _fan(3)
"""(low, high, address of a table, address of a line): the block under two or three keys, each plus the block."""
descend_two, descend_three = _descent(2), _descent(3)
"""(address of a node, of a fix, of a table, of the child): as `_descent`, for at most two words and for more."""


def tables(groups: list[list[Array]]) -> Array:
    """A table for each group of at most KEYS round keys [11, 2], the last repeated: [groups, 11, KEYS, 2], at LINEs."""
    made = np.stack([np.stack([keys[min(n, len(keys) - 1)] for n in range(KEYS)], 1) for keys in groups])
    room = np.empty(made.size + LINE // 8, dtype=np.uint64)
    start = -room.ctypes.data % LINE // 8
    room[start : start + made.size] = made.reshape(-1)
    return room[start : start + made.size].reshape(made.shape)
