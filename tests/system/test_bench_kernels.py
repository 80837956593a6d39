"""`bench_kernels.py`: every kernel runs at a tiny shape, and rows say what they measured."""

from __future__ import annotations

import bench_kernels as kernels
import pytest
import torch
from bench_kernels import count, measure_kernels

from private_llm.ring.prg import Seed


@pytest.mark.full
def test_every_kernel_has_a_row_in_both_rings() -> None:
    steps: list[str] = []
    rows = list(measure_kernels(repeat=2, tiny=True, progress=steps.append))
    assert len(rows) == count(tiny=True) == len(steps)
    for ring in (32, 64):
        names = {row.name for row in rows if row.ring == ring}
        assert {
            "matmul",
            "matmul-rows",
            "matmul-lines",
            "matmul-drawn",
            "conv2d",
            "transpose_bits",
            "join_carries",
            "inject_terms",
            "trunc_close",
            "prg",
        } <= names
    for row in rows:
        found = row.to_dict()
        assert found["seconds"]["min"] <= found["seconds"]["median"] <= found["seconds"]["max"]
        assert found["unit"] in ("GMAC/s", "GB/s", "G elements/s")
        assert (found["threads"] == 1) is (found["speedup"] is None) is (found["note"] != "all cores")
        assert (found["over_dense"] is not None) is found["name"].startswith("matmul-")


def test_active_neurons_are_blocks_that_no_two_lists_share() -> None:
    lists = kernels._active(Seed(bytes(32)).stream("lists"), 100, 3, 8)
    assert [len(each) for each in lists] == [32] * 3
    together = torch.cat(lists)
    assert len(together.unique()) == len(together)
    for each in lists:
        blocks = each.view(-1, 8)
        assert torch.equal(blocks, blocks[:, :1] + torch.arange(8))
        assert not (blocks[:, 0] % 8).any()
        assert int(each.max()) < 100


def test_kernels_on_all_cores_stand_beside_themselves_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    for cores, wanted in ((1, 0), (3, 23)):
        monkeypatch.setattr(kernels, "usable_cores", lambda cores=cores: cores)
        rows = [row for row in measure_kernels(repeat=1, tiny=True) if row.note == "all cores"]
        assert [row.threads for row in rows] == [cores] * wanted
        assert all(row.speedup is not None and row.speedup > 0 for row in rows)
    assert torch.get_num_threads() == before
