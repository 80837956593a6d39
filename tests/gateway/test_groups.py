"""Several groups of parties behind one gateway: one is killed under load, others are added and left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from private_llm_cli.commands import gateway
from private_llm_cli.using import GatewayChoices
from private_llm_gateway import group_file
from private_llm_gateway.engine import publish
from private_llm_gateway.group_file import GroupFile
from private_llm_gateway.pool import SessionPool, tried
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_hf import AutoPrivateModelForCausalLM
from private_llm_hf.client import party_groups
from private_llm_hf.client.party_groups import PartyGroups

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.net.addresses import hosts_of, open_listeners
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
        metrics = httpx.get(f"{gateway.url}/metrics", headers=HEADERS).text
        assert f'group="{four[0]},{four[1]}"' in metrics
        file.groups.change([three])
        assert eventually(lambda: file.groups.sessions().keys() == {three, four} and found()[four] == 0)
        file.groups.change([three])
        assert four[0] not in httpx.get(f"{gateway.url}/metrics", headers=HEADERS).text


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
        pool, model.reads = SessionPool(model, 3, file.groups), pytest.fail  # no weight is read again
        with taken, serving(Served("small", pool, tokenizer())) as gateway, ThreadPoolExecutor(3) as threads:
            for _ in range(3):
                assert all(threads.map(lambda _: right(gateway, 4), range(3)))
                file.groups.call_again()
                pool.regroup()
            assert file.groups.sessions()[hosts(groups[0])] == len(pool._idle) == len(pool._all) > 0
            assert file.groups.sessions().total() == len(pool._all)
            file.groups.change([hosts(wrong), hosts(full)])
            pool._opened += 1  # as who is about to open one
            with pytest.raises((ConfigError, TransportError)):  # no group is left that could be avoided
                pool._open()
            assert pool._opened == len(pool._all)
            listed.write_text("a..b:7000,127.0.0.1:1")
            with pytest.raises(ConfigError, match=r"got 'a\.\.b:7000'; want host:port"):
                file._look()
    finally:
        for servers in (wrong, full):
            for number in servers.services:
                servers.stop(number)


def test_a_gateway_starts_where_one_group_holds_another_model(
    groups: list[Servers], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type(plain_model())(plain_model().config).save_pretrained(tmp_path / "other")
    wrong = Servers(tmp_path, tmp_path / "other", SESSIONS, 20.0, groups[0])
    monkeypatch.setattr(gateway, "tokenizer_of", lambda _: tokenizer())
    listed, config = tmp_path / "groups", groups[0].users["alice"]
    listed.write_text("".join(",".join(hosts(each)) + "\n" for each in (wrong, groups[0])))
    try:
        with ExitStack() as stack:
            served = gateway.start_model(GatewayChoices(str(checkpoint), groups=listed), config, stack)
            assert served.pool.first.parties.config.hosts == hosts(groups[0])
    finally:
        for number in wrong.services:
            wrong.stop(number)


def test_settings_that_no_group_has_are_told(groups: list[Servers], checkpoint: Path) -> None:
    config = replace(groups[0].users["alice"], weight_bits=8)
    chosen, tries = PartyGroups([hosts(groups[0])]), []

    def begin() -> Any:
        tries.append(1)
        return chosen(config)

    with pytest.raises(ConfigError, match=r"weight_bits: .* has 16, this endpoint 8"):
        tried(begin, chosen)
    assert tries == [1], "another try would find the same"


class Session:
    """At a group, and a private model on it."""

    def __init__(self, config: PrivateConfig, begin: Callable[[PrivateConfig], Any]) -> None:
        self.config, self.over, self._begin = config, None, begin
        self.parties = self

    def open_session(self) -> Session:
        return self._begin(self.config)

    def close(self) -> None:
        self.over = "it was closed"


def test_groups_that_failed_or_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, wrong = (tuple(f"127.0.0.{place}:{n}" for n in (1, 2, 3)) for place in (1, 2, 3))

    def begin(config: PrivateConfig, mesh: object = None) -> Session:
        if config.hosts == wrong:
            raise ConfigError("other settings")
        return Session(config, chosen)

    monkeypatch.setattr(party_groups, "start_parties", begin)
    chosen = PartyGroups([wrong, one])
    config = PrivateConfig(party_mode="remote", hosts=one, allow_plain_loopback=True)
    models = [chosen(config), chosen(config)]
    assert [model.config.hosts for model in models] == [one, one]
    pool = SessionPool(models[0], 2, chosen)
    pool._idle, pool._all, pool._opened = list(models), list(models), 2
    chosen._failed.clear()
    assert chosen.must_move(models[0])
    pool.regroup()  # finds that the other one cannot be used
    assert {*pool._idle} == {*pool._all} == {*models}
    assert chosen.sessions().total() == 2
    chosen.change([one, two])
    pool.regroup()
    assert sorted(model.config.hosts for model in pool._idle) == [one, two]
    there = next(model for model in pool._idle if model.config.hosts == two)
    for full in (True, False):
        chosen._avoid(two, full)
        assert chosen.must_move(there) is not full, "where nobody gets in, sessions go on"
    with pool.session(1.0, fits=lambda model: int(model is there)) as model:
        assert model.config.hosts == one


def test_a_group_that_failed_is_the_last_that_is_asked() -> None:
    """Also before it is known which are live."""
    chosen = PartyGroups([("a:1",), ("b:1",)])
    chosen._avoid(("a:1",))
    assert [chosen._next(set()) for _ in range(2)] == [("b:1",)] * 2
    assert chosen._next({("b:1",)}) == ("a:1",)
    assert chosen._next({("a:1",), ("b:1",)}) is None


def test_a_group_that_is_frozen_stays_the_last_that_is_asked(
    groups: list[Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system accepts calls for a process that is stopped, as for one that never takes them."""
    monkeypatch.setattr(party_groups, "_AGAIN_S", 0.0)
    monkeypatch.setattr(party_groups, "_REACH_S", 0.5)
    frozen, live = open_listeners(2), hosts(groups[0])
    chosen = PartyGroups([hosts_of(frozen), live])
    made = chosen(groups[0].users["alice"])
    assert made.config.hosts == live
    assert chosen._failed.keys() == {hosts_of(frozen)}
    chosen._avoid(live)
    chosen.call_again()
    assert chosen._failed.keys() == {hosts_of(frozen)}, "the other one answers"
    assert chosen._next(set()) == live
    made.close()


def test_a_pool_that_closes_takes_a_session_along_that_has_just_begun(groups: list[Servers], checkpoint: Path) -> None:
    config, chosen = groups[0].users["alice"], PartyGroups([hosts(groups[0])])
    model = AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), config, start=chosen)
    pool, begin = SessionPool(model, 2, chosen), model.open_session
    chosen.change([hosts(groups[1])])

    def closing() -> Any:
        made = begin()
        pool.close()
        return made

    pool._opening = closing
    pool.regroup()
    assert eventually(lambda: chosen.sessions().total() == 0)


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
