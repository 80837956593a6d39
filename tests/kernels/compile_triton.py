"""Compile every Triton kernel for a GPU that need not be there; prints one line each. Run without the interpreter."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from private_llm.kernels import attention as triton_attention
from private_llm.kernels.bits import triton as triton_bits
from private_llm.kernels.conv import triton as triton_conv
from private_llm.kernels.fields import STEPS
from private_llm.kernels.fields import triton as triton_trunc
from private_llm.kernels.matmul import planes as triton_planes
from private_llm.kernels.matmul import seeded_triton as triton_seeded
from private_llm.kernels.matmul import triton as triton_few_rows
from private_llm.kernels.prg import triton as triton_prg

TARGET = GPUTarget("cuda", 90, 32)
WORDS, TABLE = "*i64", "*i32"


def build(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], **options: int) -> None:
    """Once with integers as they come, once with all of them 1, which Triton folds into the code."""
    integers = [name for name in kernel.arg_names if name not in pointers and name not in constants]
    for ones in (False, True):
        fixed = constants | (dict.fromkeys(integers, 1) if ones else {})
        kinds = {name: "constexpr" if name in fixed else pointers.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, kinds, constexprs=fixed), target=TARGET, options=options)
        print(kernel.__name__, len(made.asm["cubin"]))


def pointers(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def main() -> None:
    for bits, ring in ((64, "*i64"), (32, "*i32")):
        for name, step in STEPS.items():
            kinds = {f"{x}_at": WORDS if x in step.packed else ring for x in step.operands}
            numbers = dict(zip(step.numbers, (18, 20, (1 << 20) - 1, 1), strict=False))
            sizes = {"WIDTH": 18, "BITS": bits, "BLOCK": triton_trunc.BLOCK}
            build(triton_trunc.KERNELS[name], kinds, numbers | sizes)
        table = pointers(TABLE, "extra") | pointers(WORDS, "bits")
        build(triton_bits.transpose_kernel, {"x": ring, "out": WORDS}, {"BR": triton_bits.ROWS, "BW": 16})
        build(triton_bits.inject_products_kernel, table | pointers(ring, "lam out"), {"BN": 512})
        terms = table | pointers(ring, "m mine shares s_lam w c out")
        build(triton_bits.inject_terms_kernel, terms, {"W_EACH": 0, "C_EACH": 1, "FIRST": True, "UNROLL": 4, "BN": 256})
        digits = {"LIMBS": bits // 8, "SHIFT": -128, "ADD": True, "CHUNK": triton_conv.CHUNK}
        tile = digits | {"BM": 16, "BN": 16, "BK": 32}
        matrices = pointers(ring, "x y out") | {"listed": WORDS}
        for by_column, by_row in ((False, False), (True, False), (False, True)):
            listed = {"LISTED_N": by_column, "LISTED_K": by_row, "ROWS": 2, "SHARE": 2, "BM": 1, "BN": 16, "BK": 32}
            build(triton_few_rows.few_rows_kernel, matrices, listed, num_warps=2)
            build(triton_few_rows.few_rows_kernel, matrices | {"y": "*i16"}, listed, num_warps=2)
        limbs, taken = {"LIMBS": bits // 8}, {"SHIFT": -128, "BR": 32, "BK": 64}
        build(triton_planes.take_apart_kernel, {"x": ring, "out": "*i8"}, limbs | taken)
        for tried in triton_planes.TUNER.tiles[::4]:
            of_tile = limbs | {"SHARE": tried.share, "BM": tried.rows, "BN": tried.columns, "BK": tried.inner}
            how = {"num_warps": tried.warps, "num_stages": tried.stages}
            for others in (2, bits // 8):
                of_digits = of_tile | {"OTHERS": others}
                build(triton_planes.planes_kernel, {"x": "*i8", "y": "*i8", "sums": TABLE}, of_digits, **how)
        seeded = pointers(ring, "x z y out") | {"key": TABLE, "start": "i64", "plane": "i64"}
        for rows, held in ((1, True), (8, False)):
            of_tile = {"BYTES": bits // 8, "HELD": held, "ROWS": rows, "SHARE": 4, "BL": 4, "BJ": 32}
            build(triton_seeded.turned_rows_kernel, seeded, of_tile)
            build(triton_seeded.rows_kernel, seeded, of_tile)
        for turned, packed in ((True, True), (True, False), (False, False)):
            of_tile = {"BYTES": bits // 8, "SHIFT": -128, "TURNED": turned, "PACKED": packed, "BL": 4, "BJ": 32}
            build(triton_seeded.seeded_planes_kernel, seeded | {"out": "*i8"}, of_tile)
        summed = limbs | {"OTHERS": 2, "SHARE": 4, "ADD": True, "BLOCK": 1024}
        build(triton_planes.add_up_kernel, {"sums": TABLE, "out": ring}, summed)
        build(triton_conv.conv_kernel, pointers(ring, "x w out"), tile | {"KH": 3, "KW": 2}, num_warps=2, num_stages=1)
    rows = pointers(TABLE, "factors rows") | pointers(WORDS, "x m mono b lam prod out")
    for kernel in (
        triton_bits.row_products_kernel, triton_bits.block_carries_kernel, triton_bits.join_carries_kernel
    ):  # fmt: skip
        build(kernel, rows, {"BW": triton_bits.WORDS})
    real = pointers("*fp32", "q k v bias out lse") | {"allowed": "*u8", "scale": "fp32", "cap": "fp32"}
    sizes = {"D": 20, "E": 24, "BD": 32, "BE": 32, "BM": triton_attention.ROWS, "BN": triton_attention.KEYS}
    build(triton_attention.attention_kernel, real, sizes | {"MASKED": True, "CAPPED": True, "BIASED": True})
    streams()


def streams() -> None:
    """ChaCha20, whose lanes store 16 bytes at once and turn words by one instruction."""
    kinds, fixed = pointers(TABLE, "key out") | {"counter": WORDS, "offset": "i64"}, {"BB": triton_prg.BLOCKS}
    build(triton_prg.chacha20_kernel, kinds, fixed)
    kinds |= {"blocks": "i32", "BB": "constexpr"}
    aligned = {(triton_prg.chacha20_kernel.arg_names.index("out"),): [["tt.divisibility", 16]]}
    made = triton.compile(ASTSource(triton_prg.chacha20_kernel, kinds, fixed, aligned), target=TARGET).asm["ptx"]
    found = made.count("st.global.v4"), made.count("st."), made.count("shf.l.wrap"), made.count(".local")
    if found != (4, 4, 32, 0):
        raise SystemExit(f"chacha20: stores of 16 bytes, stores, turns and local memory are {found}; want 4, 4, 32, 0")


if __name__ == "__main__":
    main()
