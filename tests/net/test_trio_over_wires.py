"""The same protocol over threads, sockets and TLS: the same messages, the same bytes, the same result."""

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.net.certificates import make_certificates
from private_llm.net.local import LocalHub
from private_llm.net.record import RecordingTransport
from private_llm.net.transport import CLIENT
from private_llm.protocols.session import join, join_as_client

from .mesh import ENDPOINTS, open_mesh, run_threads

X = torch.tensor([3, -4, 2**40, -(2**40), 0, 12345678901])
CONFIG = PrivateConfig()


def party(transport):
    protocol = join(CONFIG, transport.me, transport).protocol
    x = protocol.receive_input((6,))
    square = protocol.mul(x, x, 0)
    relu = protocol.inject(protocol.invert(protocol.msb(x)), x, [1], [0])
    protocol.reveal_to_client(square)
    protocol.reveal_to_client(relu)
    return transport.outline, transport.ledger.cost()


def client(transport):
    end = join_as_client(CONFIG, transport)
    end.share(X)
    return [end.open((6,)), end.open((6,))]


def run(transports):
    work = {0: party, 1: party, 2: party, CLIENT: client}
    results = run_threads({me: RecordingTransport(transports[me]) for me in ENDPOINTS}, work)
    for transport in transports.values():
        transport.close()
    return results


@pytest.fixture(scope="module")
def over_threads():
    hub = LocalHub(3, 20.0)
    return run({me: hub.transport(me) for me in ENDPOINTS})


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_the_wire_changes_nothing(secured, over_threads, tmp_path):
    results = run(open_mesh(tls=make_certificates(tmp_path, 3) if secured else None))
    for opened in (results[CLIENT], over_threads[CLIENT]):
        assert torch.equal(opened[0], X * X)
        assert torch.equal(opened[1], X.clamp(min=0))
    for me in (0, 1, 2):
        assert results[me] == over_threads[me]
