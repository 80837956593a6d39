"""Who is addressed under quad: a party, a role, or an endpoint without a role; never one taken for another."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import TransportError
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, MetaTransport
from private_llm.protocols.quad.records import Member, MemberTransport, TranscriptMac
from private_llm.protocols.session import join, join_as_client, opened
from private_llm.ring.prg import Seed
from private_llm.token_sharding import ShardingPlan
from tests.recording import RecordingTransport

PAYLOAD = torch.zeros(2, dtype=torch.int64)


class Noting(MetaTransport):
    """Keeps who was addressed."""

    def __init__(self) -> None:
        super().__init__(1)
        self.addressed: list[int] = []

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        self.addressed.append(to)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.addressed.append(frm)
        return torch.zeros(shape, dtype=dtype)


def links(party: int = 1) -> tuple[MemberTransport, Noting]:
    inner = Noting()
    seed = Seed(bytes(32))
    return MemberTransport(inner, party, {other: TranscriptMac(seed) for other in range(3) if other != party}), inner


@pytest.mark.parametrize("endpoint", [4, 5, 15, 16, 17, 18, 19, 20, 103, CLIENT])
def test_a_node_of_any_number_is_addressed_itself(endpoint: int) -> None:
    roles, inner = links()
    roles.send(endpoint, "reveal", PAYLOAD)
    roles.recv(endpoint, "reveal", (2,), torch.int64)
    roles.wait(endpoint)
    assert inner.addressed == [endpoint, endpoint]
    assert roles.name_of(endpoint) == inner.name_of(endpoint)


@pytest.mark.parametrize("party", [0, 1, 2, 3])
@pytest.mark.parametrize("me", [0, 1, 2])
def test_a_member_is_the_party_itself_and_not_its_role(party: int, me: int) -> None:
    roles, inner = links(me)
    before = [view.close() for view in links(me)[0]._transcripts.values()]
    roles.send(Member(party), "verify", PAYLOAD)
    roles.recv(Member(party), "verify", (2,), torch.int64)
    assert inner.addressed == [party, party]
    assert [view.close() for view in roles._transcripts.values()] == before, "a message to a member entered a record"


def test_role_zero_speaks_through_party_three() -> None:
    roles, inner = links()
    for role in (0, 2):
        roles.send(role, "mul", PAYLOAD)
    assert inner.addressed == [3, 2]


@pytest.mark.parametrize("address", [-1, 3, 256, 4096])
def test_impossible_addresses_are_refused(address: int) -> None:
    roles, inner = links()
    with pytest.raises(TransportError, match=f"got {address}; want a role"):
        roles.send(address, "reveal", PAYLOAD)
    with pytest.raises(TransportError, match=f"got {address}"):
        roles.recv(address, "reveal", (2,), torch.int64)
    assert inner.addressed == []


@pytest.mark.parametrize("party", [-1, 4, 16])
def test_members_are_parties(party: int) -> None:
    with pytest.raises(TransportError, match=f"member: got {party}"):
        Member(party)


def test_thirteen_comp_nodes_get_their_rows_and_no_party_gets_any() -> None:
    """Endpoints 16 to 19 were once taken for parties 0 to 3, who know the masks."""
    config = PrivateConfig(protocol="quad", split=1, plan=ShardingPlan(16, 1, 1, accept_weak_plan=True), timeout_s=20)
    nodes = range(4, 20)
    mesh = LocalMesh(config.endpoints, timeout=20)
    ends = {party: RecordingTransport(mesh.transport(party)) for party in range(4)}
    values = torch.arange(16 * 3).view(16, 3)
    found: dict[int, Tensor] = {}

    def be_party(party: int) -> None:
        protocol = join(config, party, ends[party]).protocol
        share = protocol.receive_input((16, 3))
        ends[party].messages.clear()
        protocol.reveal([(node, share.map(lambda part, row=node - 4: part[row])) for node in nodes])

    def be_node(node: int) -> None:
        found[node] = opened(config, mesh.transport(node), (3,))

    threads = [threading.Thread(target=be_party, args=(party,), daemon=True) for party in range(4)]
    threads += [threading.Thread(target=be_node, args=(node,), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    join_as_client(config, mesh.transport(CLIENT)).share(values)
    for thread in threads:
        thread.join(30)
    assert {node: rows.tolist() for node, rows in found.items()} == {n: values[n - 4].tolist() for n in nodes}
    for end in ends.values():
        got = {(m.peer, m.tag) for m in end.messages if m.direction == "received"}
        assert all(tag == "verify" and peer < 4 for peer, tag in got)
