"""`private-llm bench kernels`: every kernel runs at a tiny shape, and rows say what they measured."""

from __future__ import annotations

from private_llm.bench.kernels import count, measure_kernels


def test_every_kernel_has_a_row_in_both_rings() -> None:
    steps: list[str] = []
    rows = list(measure_kernels(repeat=2, tiny=True, progress=steps.append))
    assert len(rows) == count(tiny=True) == len(steps)
    for ring in (32, 64):
        names = {row.name for row in rows if row.ring == ring}
        assert {"matmul", "conv2d", "transpose_bits", "join_carries", "inject_terms", "trunc_close", "prg"} <= names
    for row in rows:
        found = row.to_dict()
        assert found["seconds"]["min"] <= found["seconds"]["median"] <= found["seconds"]["max"]
        assert found["unit"] in ("GMAC/s", "GB/s", "G elements/s")
        assert found["threads"] == 1
