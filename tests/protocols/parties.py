"""Run ring-level protocol code with all parties as threads, and open its result at the client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Cost, Ledger, merge
from private_llm.net.local import LocalHub
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.session import join, join_as_client
from private_llm.protocols.share import Index, Share

Program = Callable[..., Share]


@dataclass
class Run:
    """What a program did: the opened result, its cost and each party's ledger."""

    result: Tensor
    cost: Cost
    ledgers: list[Ledger]


def run_ring(
    config: PrivateConfig,
    inputs: Sequence[Tensor],
    program: Program,
    shape: Sequence[int],
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
    secret_index: tuple[Tensor, int] | None = None,
) -> Run:
    """Share `inputs` (ring elements), run program(protocol, *shares) at every party, open a result of `shape`."""
    hub = LocalHub(config.parties, timeout=30)
    ledgers: list[Ledger] = [Ledger(i) for i in range(config.parties)]
    failures: list[BaseException] = []

    def party(index: int) -> None:
        try:
            transport = wrap(hub.transport(index))
            protocol: Protocol = join(config, index, transport).protocol
            shares: list[Share | Index] = [protocol.receive_input(tuple(x.shape)) for x in inputs]
            if secret_index is not None:
                shares.append(protocol.receive_index(secret_index[0].numel(), secret_index[1]))
            transport.ledger.reset()
            out = program(protocol, *shares)
            ledgers[index] = Ledger(index)
            ledgers[index].sent.update(transport.ledger.sent)
            ledgers[index].rounds.update(transport.ledger.rounds)
            protocol.reveal_to_client(out)
        except BaseException as error:
            failures.append(error)
            hub.abort(f"party {index}: {type(error).__name__}")

    threads = [threading.Thread(target=party, args=(i,), daemon=True) for i in range(config.parties)]
    for thread in threads:
        thread.start()
    try:
        client = join_as_client(config, hub.transport(CLIENT))
        for x in inputs:
            client.share(x)
        if secret_index is not None:
            client.share_index(*secret_index)
        result = client.open(tuple(shape))
    except Exception:
        for thread in threads:
            thread.join(5)
        if failures:
            raise failures[0] from None
        raise
    for thread in threads:
        thread.join(30)
    if failures:
        raise failures[0]
    return Run(result, merge(ledgers), ledgers)


def ring_values(ring: int, shape: Sequence[int], bits: int, seed: int = 0) -> Tensor:
    """Random ring elements of `bits` signed bits, with 0, 1, -1 and both extremes among the first five."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.int64 if ring == 64 else torch.int32
    high = 1 << (bits - 1)
    x = torch.randint(-high, high - 1, tuple(shape), generator=generator, dtype=torch.int64)
    flat = x.view(-1)
    special = torch.tensor([0, 1, -1, high - 1, -high], dtype=torch.int64)[: flat.numel()]
    flat[: special.numel()] = special
    return x.to(dtype)
