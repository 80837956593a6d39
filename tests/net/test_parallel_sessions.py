"""Parallel sessions: own links and ledgers, one common end; assignments that spread roles and links evenly."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PartyFailed, TransportError
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.local import LocalMesh
from private_llm.net.parallel_sessions import assignment, assignments, parallel_session_links
from private_llm.net.rendezvous import connect
from private_llm.net.transport import CLIENT, MetaTransport, Transport
from private_llm.protocols.session import join_as_client
from private_llm.protocols.settings_table import TABLE_BYTES

TOKEN = b"a token of one test session"
WORD = (torch.int64,)


def sockets(parallel_sessions: dict[int, int], timeout_s: float = 4) -> dict[int, Transport]:
    """Endpoints with the number of parallel sessions each of them was told."""
    listeners = open_listeners(3)
    hosts = hosts_of(listeners)

    def one(me: int) -> Transport:
        config = PrivateConfig(timeout_s=timeout_s, parallel_sessions=parallel_sessions[me])
        return connect(config, me, hosts=hosts, token=TOKEN, listener=None if me == CLIENT else listeners[me])

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(parallel_sessions, pool.map(one, parallel_sessions), strict=True))


@pytest.fixture(params=["threads", "sockets"])
def mesh(request: pytest.FixtureRequest) -> Iterator[dict[int, Transport]]:
    endpoints = [0, 1, 2, CLIENT]
    if request.param == "sockets":
        made = sockets(dict.fromkeys(endpoints, 2))
    else:
        mesh = LocalMesh(3, 4.0)
        made = {me: mesh.transport(me) for me in endpoints}
    yield made
    for transport in made.values():
        transport.close()


def test_parallel_sessions_do_not_wait_for_each_other(mesh: dict[int, Transport]) -> None:
    sender, receiver = mesh[0], mesh[1]
    sender.send(1, "first", torch.arange(100_000))
    sender.parallel_session(1).send(1, "second", torch.arange(3))
    assert torch.equal(receiver.parallel_session(1).recv(0, "second", (3,), *WORD), torch.arange(3))
    assert torch.equal(receiver.parallel_session(0).recv(0, "first", (100_000,), *WORD), torch.arange(100_000))
    assert sender.parallel_session(0) is sender
    assert sender.parallel_session(1).parallel_session(0).me == 0


def test_each_parallel_session_counts_for_itself(mesh: dict[int, Transport]) -> None:
    parallel_session = mesh[0].parallel_session(1)
    parallel_session.send(2, "m", torch.arange(4))
    assert parallel_session.ledger.cost().sent == {(0, 2): 32}
    assert mesh[0].ledger.cost().sent == {}
    mesh[2].parallel_session(1).recv(0, "m", (4,), *WORD)


def test_the_end_of_a_parallel_session_is_the_end_of_all(mesh: dict[int, Transport]) -> None:
    """Who waits in another parallel session, at the same endpoint or at another one, hears the reason."""
    heard: dict[int, str] = {}

    def wait(me: int) -> None:
        with pytest.raises(PartyFailed) as caught:
            mesh[me].recv(2, "m", (1,), *WORD)
        heard[me] = str(caught.value)

    waiting = [threading.Thread(target=wait, args=(me,)) for me in (0, 1)]
    for thread in waiting:
        thread.start()
    parallel_session = mesh[1].parallel_session(1)
    time.sleep(0.1)
    parallel_session.abort("parallel session 1 broke")
    for thread in waiting:
        thread.join(10)
    assert heard == {0: "parallel session 1 broke", 1: "parallel session 1 broke"}


def test_different_numbers_of_parallel_sessions_are_refused() -> None:
    with pytest.raises(TransportError, match=r"parallel sessions: got \d at .*; want \d, as at"):
        sockets({0: 2, 1: 2, 2: 2, CLIENT: 1}, timeout_s=1.5)


def test_links_of_one_parallel_session_refuse_more() -> None:
    with pytest.raises(ConfigError, match="want parallel_sessions=1"):
        MetaTransport(0).parallel_session(1)


@pytest.mark.parametrize("parties", [3, 4])
def test_role_assignments_are_all_and_even(parties: int) -> None:
    every = assignments(parties)
    assert len(set(every)) == len(every) == {3: 6, 4: 24}[parties]
    assert every[0] == tuple(range(parties))
    for party in range(parties):  # the first n: every role once
        assert sorted(cast[party] for cast in every[:parties]) == list(range(parties))
    links = Counter((cast.index(a), cast.index(b)) for cast in every for a, b in ((0, 2), (1, 2)))
    assert len(links) == parties * (parties - 1)
    assert len(set(links.values())) == 1


def test_without_permuting_everybody_plays_one_role() -> None:
    assert {assignment(3, parallel_session, rotate_roles=False) for parallel_session in range(9)} == {(0, 1, 2)}
    assert assignment(3, 7, rotate_roles=True) == assignment(3, 1, rotate_roles=True) == assignments(3)[1]


def test_links_by_role_reach_the_right_party_and_book_parties() -> None:
    mesh = LocalMesh(3, 4.0)
    cast = assignment(3, 1, rotate_roles=True)  # party 0 plays role 2, party 1 role 0, party 2 role 1
    assert cast == (2, 0, 1)
    ends = {cast[party]: parallel_session_links(mesh.transport(party), 3, 1, rotate_roles=True) for party in range(3)}
    client = parallel_session_links(mesh.transport(CLIENT), 3, 1, rotate_roles=True)
    assert [ends[role].me for role in range(3)] == [0, 1, 2]
    ends[0].send(2, "m", torch.arange(2))
    assert torch.equal(ends[2].recv(0, "m", (2,), *WORD), torch.arange(2))
    assert mesh.parallel_session(1).links[(1, 0)].items.empty()
    assert ends[0].ledger.cost().sent == {(1, 0): 16}
    client.send(1, "m", torch.arange(1))
    assert client.ledger.cost().sent == {(CLIENT, 2): 8}
    assert ends[1].recv(CLIENT, "m", (1,), *WORD) == torch.zeros(1)
    assert ends[0].name_of(2) == "party 0"
    assert client.name_of(CLIENT) == "the client"


def test_a_party_with_other_settings_is_named_whatever_its_role() -> None:
    mesh = LocalMesh(3, 4.0)
    client = parallel_session_links(mesh.transport(CLIENT), 3, 1, rotate_roles=True)
    for party in range(3):
        mesh.parallel_session(1).transport(party).send(
            CLIENT, "hello", torch.zeros(64 + TABLE_BYTES, dtype=torch.uint8)
        )
    with pytest.raises(ConfigError, match="party 1 runs other settings"):  # who plays role 0 there
        join_as_client(PrivateConfig(parallel_sessions=2, rotate_roles=True), client)


@pytest.mark.parametrize(
    "wrong",
    [
        {"parallel_sessions": 0},
        {"parallel_sessions": 65},
        {"rotate_roles": True},
        {"rotate_roles": True, "parallel_sessions": 2, "protocol": "dealer"},
    ],
)
def test_impossible_parallel_sessions(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"parallel_sessions: got|rotate_roles: want"):
        PrivateConfig.from_dict(wrong)


@pytest.mark.parametrize("name", ["lanes", "permute", "cache_policy"])
def test_errors_offer_no_setting_that_there_is_not(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key.s. {name}.*; known keys: (?!.*{name})"):
        PrivateConfig.from_dict({name: 3})
