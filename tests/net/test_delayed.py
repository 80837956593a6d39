"""Links with a latency carry the same, later, in order."""

from __future__ import annotations

import time

import torch
from delayed_links import DelayedTransport

from private_llm.net.local import LocalMesh


def test_tensors_arrive_later_and_in_order() -> None:
    mesh = LocalMesh(2, 5.0)
    here, there = DelayedTransport(mesh.transport(0), 0.1), mesh.transport(1)
    began = time.monotonic()
    for number in range(3):
        here.send(1, "n", torch.tensor([number]))
    got = [int(there.recv(0, "n", (1,), torch.int64)) for _ in range(3)]
    assert got == [0, 1, 2]
    assert time.monotonic() - began >= 0.1
    assert here.ledger.cost().total == 24
    here.close()
