"""The same protocol over threads, sockets and TLS: the same messages, the same bytes, the same result."""

from functools import partial

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed, PrivateLLMError, ProtocolAbort
from private_llm.net.authority import make_certificates
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT
from private_llm.protocols.session import join, join_as_client
from tests.recording import RecordingTransport, flip

from .mesh import open_mesh, run_threads

X = torch.tensor([3, -4, 2**40, -(2**40), 0, 12345678901])
TRIO, QUAD = PrivateConfig(), PrivateConfig(protocol="quad")


def party(config, transport):
    try:
        return compute(config, transport)
    except PrivateLLMError as error:
        transport.abort(str(error))
        raise


def compute(config, transport):
    protocol = join(config, transport.me, transport).protocol
    x = protocol.receive_input((6,))
    square = protocol.mul(x, x, 0)
    relu = protocol.inject(protocol.invert(protocol.msb(x)), x, [1], [0])
    protocol.reveal_to_client(square)
    protocol.reveal_to_client(relu)
    return transport.outline, transport.ledger.cost()


def client(config, transport):
    end = join_as_client(config, transport)
    end.share(X)
    return [end.open((6,)), end.open((6,))]


def run(config, transports, cheater=None, alter=None):
    ends = {me: RecordingTransport(t, alter=alter if me == cheater else None) for me, t in transports.items()}
    results = run_threads(ends, {me: partial(client if me == CLIENT else party, config) for me in ends})
    for transport in transports.values():
        transport.close()
    return results


@pytest.fixture(scope="module", params=[TRIO, QUAD], ids=["trio", "quad"])
def over_threads(request):
    mesh = LocalMesh(request.param.parties, 20.0)
    return request.param, run(request.param, {me: mesh.transport(me) for me in (*range(request.param.parties), CLIENT)})


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_the_wire_changes_nothing(secured, over_threads, tmp_path):
    config, expected = over_threads
    tls = make_certificates(tmp_path, config.parties) if secured else None
    results = run(config, open_mesh(tls=tls, protocol=config.protocol))
    for opened in (results[CLIENT], expected[CLIENT]):
        assert torch.equal(opened[0], X * X)
        assert torch.equal(opened[1], X.clamp(min=0))
    for me in range(config.parties):
        assert results[me] == expected[me]


@pytest.mark.parametrize("cheater", [1, 2, 3])
def test_a_lie_over_a_wire_stops_all_endpoints(cheater):
    """The last message of the computation is altered: the one before the first verdict or opening."""
    mesh = LocalMesh(4, 20.0)
    outline, _ = run(QUAD, {me: mesh.transport(me) for me in (0, 1, 2, 3, CLIENT)})[cheater]
    sent = [tag for direction, _, tag, _, _ in outline if direction == "sent"]
    first = next(n for n, tag in enumerate(sent) if tag.startswith(("verify", "reveal")))
    results = run(QUAD, open_mesh(protocol="quad"), cheater, flip(first - 1))
    honest = [results[me] for me in (0, 1, 2, 3) if me != cheater]
    assert any(isinstance(error, ProtocolAbort) for error in honest)
    assert all(isinstance(error, ProtocolAbort | PartyFailed) for error in [*honest, results[CLIENT]])
