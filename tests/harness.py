"""Runs a function as all parties of a session (threads) with a client that shares inputs and opens the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Cost, Ledger, merge
from private_llm.net.transport import Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.share import Share
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from tests.session import run_session

Function = Callable[..., "Fixed | Sequence[Fixed]"]

PLAIN = PrivateConfig(protocol="plain", insecure=True)
TRIO = PrivateConfig()


@dataclass
class Outcome:
    """`values` as float64, `elements` as the opened ring integers, `ledgers` of the parties (inputs not counted)."""

    values: list[Tensor]
    elements: list[Tensor]
    ledgers: list[Ledger]

    @property
    def value(self) -> Tensor:
        """The only result."""
        (value,) = self.values
        return value

    @property
    def cost(self) -> Cost:
        """Bytes by link between parties, and rounds."""
        return merge(self.ledgers)


def run_parties(
    config: PrivateConfig, fn: Function, inputs: Sequence[Tensor], fracs: Sequence[int] | None = None
) -> Outcome:
    """Run `fn(session, *secrets)` at every party; `fracs` are the inputs' fractional bits (default: the config's)."""
    fracs = [config.frac_bits] * len(inputs) if fracs is None else list(fracs)
    results: list[list[Fixed]] = [[] for _ in range(config.parties)]
    ledgers = [Ledger(number) for number in range(config.parties)]
    computed = threading.Semaphore(0)

    def at_party(session: Session, transport: Transport) -> None:
        protocol = session.protocol
        secrets = [
            Fixed(session, protocol.receive_input(tuple(x.shape)), frac) for x, frac in zip(inputs, fracs, strict=True)
        ]
        transport.ledger.reset()
        try:
            out = fn(session, *secrets)
            results[session.party] = [out] if isinstance(out, Fixed) else list(out)
            ledgers[session.party] = _copy(transport.ledger)
        finally:
            computed.release()
        for result in results[session.party]:
            protocol.reveal_to_client(result.share)

    def at_client(client: ClientEnd) -> list[Tensor]:
        for x, frac in zip(inputs, fracs, strict=True):
            client.share(client.ring.encode(x, frac))
        for _ in range(config.parties):
            computed.acquire(timeout=60.0)  # the shapes of the results are known when all parties have computed
        return [client.open(tuple(result.shape)) for result in results[0]]

    elements = run_session(config, at_party, at_client, timeout=60.0)
    ring = Ring(config.ring)
    return Outcome([ring.decode(e, r.frac) for e, r in zip(elements, results[0], strict=True)], elements, ledgers)


def run_meta(
    config: PrivateConfig, fn: Function, shapes: Sequence[Sequence[int]], fracs: Sequence[int] | None = None
) -> Cost:
    """The same function on meta tensors at every party: its cost, without any data."""
    fracs = [config.frac_bits] * len(shapes) if fracs is None else list(fracs)
    ledgers = []
    for number in range(config.parties):
        session = meta_session(config, number)
        fn(session, *[meta_fixed(session, shape, frac) for shape, frac in zip(shapes, fracs, strict=True)])
        ledgers.append(session.protocol.ledger)
    return merge(ledgers)


def meta_fixed(session: Session, shape: Sequence[int], frac: int) -> Fixed:
    """A secret without values, of a meta session."""
    count = 1 if session.config.protocol == "plain" else 2
    part = torch.empty(tuple(shape), dtype=session.ring.dtype, device="meta")
    return Fixed(session, Share((part,) * count), frac)


def _copy(ledger: Ledger) -> Ledger:
    copy = Ledger(ledger.party)
    copy.sent.update(ledger.sent)
    copy.rounds.update(ledger.rounds)
    copy.macs.update(ledger.macs)
    return copy
