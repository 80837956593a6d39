"""Several groups of parties behind one gateway: one is killed under load, others are added and left."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from private_llm_gateway import group_file
from private_llm_gateway.engine import publish
from private_llm_gateway.group_file import GroupFile
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_hf import AutoPrivateModelForCausalLM
from private_llm_hf.client import party_groups
from private_llm_hf.client.party_groups import PartyGroups

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from tests.gateway.small_gateway import CHAT, TOKEN, Gateway, greedy, plain_model, serving, text_of, tokenizer
from tests.hf.service.conftest import eventually
from tests.hf.service.test_product_service import Servers

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SESSIONS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    plain_model().save_pretrained(folder)
    return folder


@pytest.fixture
def groups(tmp_path: Path, checkpoint: Path) -> Iterator[list[Servers]]:
    made: list[Servers] = []
    for _ in range(4):
        made.append(Servers(tmp_path, checkpoint, SESSIONS, 20.0, made[0] if made else None))
    yield made
    for servers in made:
        for number in servers.services:
            servers.stop(number)


def hosts(servers: Servers) -> tuple[str, ...]:
    return servers.own[0].hosts


def right(gateway: Gateway, count: int) -> bool:
    with gateway.client() as client:
        made = client.chat.completions.create(model="small", messages=CHAT, max_tokens=count, temperature=0)
    return made.choices[0].message.content == text_of(greedy(count))


def test_requests_go_on_while_groups_die_join_and_leave(
    groups: list[Servers], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_file, "_LOOK_S", 0.1)
    monkeypatch.setattr(party_groups, "_AGAIN_S", 0.1)
    listed = tmp_path / "groups"
    listed.write_text("# three\n" + "".join(", ".join(hosts(each)) + "\n" for each in groups[:3]))
    one, two, three, four = map(hosts, groups)
    config = replace(next(iter(groups[0].users.values())), tls=groups[0].users["alice"].tls)
    file = GroupFile(listed, config)
    model = AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), config, start=file.groups)
    pool = SessionPool(model, SESSIONS, file.groups)
    file.follow(pool)
    served = Served("small", pool, tokenizer())
    with serving(served) as gateway, ThreadPoolExecutor(SESSIONS) as threads:
        assert all(threads.map(lambda _: right(gateway, 6), range(12)))
        assert eventually(lambda: set(file.groups.sessions().values()) == {2})
        load = [threads.submit(right, gateway, 30) for _ in range(12)]
        assert eventually(lambda: pool.in_use == SESSIONS)
        for number in groups[1].services:
            groups[1].stop(number)
        assert all(each.result() for each in load)
        assert file.groups.sessions()[two] == 0
        assert right(gateway, 4)
        listed.write_text(f"{','.join(three)}\n{','.join(four)}\n")
        found = file.groups.sessions
        assert eventually(lambda: found()[one] == found()[two] == 0 and found()[three] == found()[four])
        assert all(threads.map(lambda _: right(gateway, 4), range(SESSIONS)))
        assert served.about()["parties"][0]["host"] == f"{three[0]}, {four[0]}"
        assert f'group="{four[0]},{four[1]}"' in httpx.get(f"{gateway.url}/metrics", headers=HEADERS).text


def test_a_group_that_failed_is_called_again_and_gets_its_part(groups: list[Servers], checkpoint: Path) -> None:
    config, late = groups[0].users["alice"], groups[1]
    for number in late.services:
        late.stop(number)
    chosen = PartyGroups([hosts(each) for each in groups[:2]])
    made = AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), config, start=chosen)
    with made as model, model.open_session() as other:
        assert other.parties.config.hosts == hosts(groups[0])
        assert not chosen.must_move(other.parties), "the other group is dead"
        chosen._failed[hosts(late)] = -100.0
        chosen.call_again()
        assert not chosen.must_move(other.parties), "it still is"
        late.start(0)
        late.start(1)

        def called() -> bool:
            chosen._failed[hosts(late)] = -100.0
            chosen.call_again()
            return chosen.must_move(other.parties)

        assert eventually(called)
        other.reconnect()
        assert other.parties.config.hosts == hosts(late)
        assert not chosen.must_move(other.parties)


def test_a_group_that_cannot_be_used_takes_no_session_away(
    groups: list[Servers], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that holds another model; one whose places are taken; and a name that cannot be."""
    monkeypatch.setattr(party_groups, "_AGAIN_S", 0.0)
    torch.manual_seed(9)
    other = type(plain_model())(plain_model().config)
    other.save_pretrained(tmp_path / "other")
    wrong = Servers(tmp_path, tmp_path / "other", SESSIONS, 20.0, groups[0])
    full = Servers(tmp_path, checkpoint, 1, 20.0, groups[0])
    listed, config = tmp_path / "groups", groups[0].users["alice"]
    listed.write_text("".join(",".join(hosts(each)) + "\n" for each in (groups[0], wrong, full)))
    try:
        file = GroupFile(listed, config)
        taken = AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), full.users["alice"])
        model = AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), config, start=file.groups)
        pool = SessionPool(model, 3, file.groups)
        with taken, serving(Served("small", pool, tokenizer())) as gateway, ThreadPoolExecutor(3) as threads:
            for _ in range(3):
                assert all(threads.map(lambda _: right(gateway, 4), range(3)))
                file.groups.call_again()
                pool.regroup()
            assert file.groups.sessions()[hosts(groups[0])] == len(pool._idle) == len(pool._all) > 0
            assert file.groups.sessions().total() == len(pool._all)
            listed.write_text("a..b:7000,127.0.0.1:1")
            with pytest.raises(ConfigError, match=r"got 'a\.\.b:7000'; want host:port"):
                file._look()
    finally:
        for servers in (wrong, full):
            for number in servers.services:
                servers.stop(number)


def test_a_public_prefix_is_read_by_as_many_sessions_as_there_are(tmp_path: Path, checkpoint: Path) -> None:
    servers = Servers(tmp_path, checkpoint, 2, 20.0)
    model = AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), servers.users["alice"])
    served = Served("small", SessionPool(model, 4), tokenizer())
    try:
        publish(served, [5, 6, 7], GatewaySettings())
        assert [served.kept.begins(each, "key", [5, 6, 7, 8]) for each in served.pool._idle] == [3, 3]
    finally:
        served.pool.close()
        for number in servers.services:
            servers.stop(number)


def test_requests_wait_for_sessions_where_the_parties_let_no_more_in(tmp_path: Path, checkpoint: Path) -> None:
    servers = Servers(tmp_path, checkpoint, 2, 20.0)  # of two clients
    model = AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), servers.users["alice"])
    pool = SessionPool(model, 4)
    try:
        with serving(Served("small", pool, tokenizer())) as gateway, ThreadPoolExecutor(4) as threads:
            assert all(threads.map(lambda _: right(gateway, 8), range(8)))
            assert pool._opened == 2
            assert pool.healthy
    finally:
        for number in servers.services:
            servers.stop(number)


def test_mistakes_are_named(groups: list[Servers], tmp_path: Path) -> None:
    config, listed = groups[0].users["alice"], tmp_path / "groups"
    first, second = (",".join(hosts(each)) for each in groups[:2])
    for text, told in (
        ("", "groups: got 0; want one or more"), (f"{first}\n{first}", "groups: got 2; want one or more, each once"),
        (f"{first}\n{second},127.0.0.1:1", "want 2 hosts, joined by commas"), (second, "does not list the group of"),
        (f"{first}\nnothing,127.0.0.1:1", "'nothing'"), (f"{first}\n127.0.0.1:1 127.0.0.1:2", "want 2 hosts, joined"),
    ):  # fmt: skip
        listed.write_text(text)
        with pytest.raises(ConfigError, match=told):
            GroupFile(listed, config)
    with pytest.raises(ConfigError, match="groups: cannot read"):
        GroupFile(tmp_path / "none", config)
    nobody = PartyGroups([("127.0.0.1:1", "127.0.0.1:2")])
    with pytest.raises(TransportError, match="party 0"):
        nobody(PrivateConfig.from_dict({**config.to_dict(), "hosts": hosts(groups[0])}))


def test_a_file_that_breaks_while_it_is_read_changes_nothing(groups: list[Servers], tmp_path: Path) -> None:
    config, listed = groups[0].users["alice"], tmp_path / "groups"
    listed.write_text(",".join(hosts(groups[0])))
    file = GroupFile(listed, config)
    for text in ("nothing", ""):
        listed.write_text(text)
        with pytest.raises(ConfigError):
            file._look()
    assert file.groups.groups == (hosts(groups[0]),)
