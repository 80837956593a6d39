"""What attacks are given is what nodes of a real session receive: the first layer's rows and results, all numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attacks.attacked import RowsAt
from attacks.view import view_of
from private_llm_hf import PrivateConfig, patch
from torch import Tensor

from private_llm.token_sharding import ShardingPlan
from private_llm.token_sharding.nodes import exchange, floats
from tests.hf import tiny

IDS = torch.randint(3, 100, (1, 14), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["opt", "llama", "gpt2"])
@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_views_are_what_nodes_receive(monkeypatch: pytest.MonkeyPatch, name: str, wire: str) -> None:
    plan = ShardingPlan.from_dict(
        {"alpha": 3, "c": 4, "m": 2, "wire": wire, "partials": "open", "accept_weak_plan": True}
    )
    model = tiny.build(name)
    received: dict[tuple[int, int, str], list[Tensor]] = {}

    def noting(module: Any) -> None:
        real = module.recv_floats

        def recv(transport: Any, frm: int, tag: str, expected: Any) -> list[Tensor]:
            parts: list[Tensor] = real(transport, frm, tag, expected)
            received.setdefault((transport.me, frm, tag), [part.clone().float() for part in parts])  # the first layer's
            return parts

        monkeypatch.setattr(module, "recv_floats", recv)

    noting(exchange)
    noting(floats)  # of which attention nodes take it
    with torch.no_grad(), patch(model, PrivateConfig(protocol="cascade", plan=plan, timeout_s=30)) as private:
        private(IDS)
    attacked = RowsAt(model, 0)
    rows = attacked.of(IDS[0])
    compared = 0
    for (me, frm, tag), parts in received.items():
        if tag not in ("rows", "partial"):
            continue
        view = view_of(plan, [me], attacked.call, 0, IDS[0], rows)
        compared += 1
        if tag == "rows":
            if plan.attn_shards(me)[0] == plan.attn_shards(me)[1]:
                mine = [p for p in view.rows if plan.owner(plan.shard_of(p)) == frm]
                for index in range(3):
                    seen = torch.stack([view.rows[p][index] for p in mine], 1)
                    assert torch.allclose(parts[index][0], seen, atol=2e-3 if wire == "float16" else 1e-5)
            continue
        low, high = plan.attn_shards(frm)
        asked = [s for s in (low, high) if plan.owner(s) == me]
        if len(asked) != 1 and low != high:
            continue  # both shards are this CompNode's: two answers of one sender, not told apart here
        own, other = (asked[0], high if asked[0] == low else low)
        lse, out = parts
        for index, row in enumerate(plan.rows_of_shard(own, 0, 14)):
            if (row, other) in view.results:
                expected_out, expected_lse = view.results[row, other]
                assert torch.allclose(out[0, :, index], expected_out, atol=2e-3 if wire == "float16" else 1e-5)
                assert torch.allclose(lse[0, :, index], expected_lse, atol=2e-2 if wire == "float16" else 1e-5)
    assert compared > plan.attn_nodes
