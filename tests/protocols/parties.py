"""Run ring-level protocol code with all parties as threads, and open its result at the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Cost, Ledger, merge
from private_llm.net.transport import Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session
from private_llm.protocols.share import Index, Share
from tests.session import run_session

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
    ledgers = [Ledger(number) for number in range(config.parties)]

    def at_party(session: Session, transport: Transport) -> None:
        protocol = session.protocol
        shares: list[Share | Index] = [protocol.receive_input(tuple(x.shape)) for x in inputs]
        if secret_index is not None:
            shares.append(protocol.receive_index(secret_index[0].numel(), secret_index[1]))
        transport.ledger.reset()
        out = program(protocol, *shares)
        ledgers[protocol.party].sent.update(transport.ledger.sent)
        ledgers[protocol.party].rounds.update(transport.ledger.rounds)
        protocol.reveal_to_client(out)

    def at_client(client: ClientEnd) -> Tensor:
        for x in inputs:
            client.share(x)
        if secret_index is not None:
            client.share_index(*secret_index)
        return client.open(tuple(shape))

    return Run(run_session(config, at_party, at_client, wrap), merge(ledgers), ledgers)


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
