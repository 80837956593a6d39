"""Which requests run next, and what the parties must agree upon."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

from private_llm_hf.party.agreement import agree, digest, tally
from private_llm_hf.service.scheduler import RequestSize, Scheduler
from private_llm_hf.service.settings import ServiceSettings


def request(
    name: str, kind: str | None = "step", rows: int = 1, since: float = 0.0, number: int = 1, user: str = ""
) -> Any:
    session = SimpleNamespace(id=name, user=user, model=None, cut=lambda reason: None)
    return SimpleNamespace(
        session=session, number=number, call=SimpleNamespace(rows=rows), kind=kind, since=since, error=None,
        prepares=False,
    )  # fmt: skip


def scheduler(**limits: Any) -> Scheduler:
    return Scheduler(ServiceSettings({"m": "m"}, gather_s=0.0, **limits))  # type: ignore[dict-item]


def names(found: list[Any]) -> list[str]:
    return [each.session.id for each in found]


def size_of(each: Any) -> RequestSize:
    return RequestSize(each.kind, 1)


def test_the_oldest_decides_and_its_kind_comes_along() -> None:
    queue = scheduler()
    for each in (request("d", since=4), request("c", "prompt", since=2), request("a", since=3), request("b", since=5)):
        queue.add_request(each)
    assert names(queue.schedule(0, size_of, 100)) == ["c"]
    assert names(queue.schedule(0, size_of, 100)) == ["a", "b", "d"]
    assert queue.schedule(0, size_of, 100) == []


def test_what_is_only_planned_waits_until_nobody_else_does() -> None:
    queue = scheduler()
    ahead = request("a", None)
    ahead.prepares = True
    for each in (ahead, request("c", since=2), request("b", None, since=1)):
        queue.add_request(each)
    assert [names(queue.schedule(0, size_of, 100)) for _ in range(3)] == [["b"], ["c"], ["a"]]


def test_a_request_of_no_kind_runs_alone() -> None:
    queue = scheduler()
    for name in "ab":
        queue.add_request(request(name, None))
    assert [len(queue.schedule(0, size_of, 100)) for _ in range(3)] == [1, 1, 0]


def test_a_pass_has_so_many_rows() -> None:
    queue = scheduler(rows=3)
    for place, (name, rows) in enumerate((("a", 2), ("b", 2), ("c", 1))):
        queue.add_request(request(name, rows=rows, since=place))
    assert names(queue.schedule(0, size_of, 100)) == ["a", "c"]
    assert names(queue.schedule(0, size_of, 100)) == ["b"]


def test_a_pass_waits_for_the_sessions_of_the_last_one() -> None:
    queue = scheduler()
    queue.update_from_batch([request("a"), request("b")], seconds=40.0)  # a quarter of it is patience enough
    queue.add_request(request("a"))
    threading.Timer(0.05, lambda: queue.add_request(request("b"))).start()
    assert names(queue.schedule(5, size_of, 100)) == ["a", "b"]
    queue.update_from_batch([request("a"), request("b")], seconds=0.0)
    queue.add_request(request("a"))
    assert names(queue.schedule(5, size_of, 100)) == ["a"]
    queue.update_from_batch([request("a"), request("b")], seconds=40.0)
    queue.finish_session(request("b").session)
    queue.add_request(request("a"))
    began = time.monotonic()
    assert names(queue.schedule(5, size_of, 100)) == ["a"]
    assert time.monotonic() - began < 2


def test_who_is_put_back_waits_a_little_and_not_for_ever() -> None:
    queue = scheduler()
    told: list[str] = []
    late = request("a", since=time.monotonic())
    queue.requeue(late, patience=5.0)
    assert queue.schedule(0, size_of, 100) == []
    assert names(queue.schedule(1, size_of, 100)) in ([], ["a"])
    old = request("b", since=time.monotonic() - 6)
    old.session.cut = told.append
    queue.requeue(old, patience=5.0)
    assert told
    assert "b" not in names(queue.schedule(0.1, size_of, 100))


def test_a_party_finds_what_it_has_and_what_comes_in_time() -> None:
    queue = scheduler()
    first = request("a", number=2)
    queue.add_request(first)
    assert queue.find_requests([("a", 2), ("b", 1)], 0.0) == [first, None]
    assert queue.find_requests([("a", 3)], 0.0) == [None]
    second = request("b", number=2)
    threading.Timer(0.05, lambda: queue.add_request(second)).start()
    assert queue.find_requests([("a", 2), ("b", 2)], 5.0) == [first, second]
    queue.remove_requests([first])
    assert queue.find_requests([("a", 2)], 0.0) == [None]
    assert len(queue) == 1


def test_nothing_stays_of_a_session_that_is_over() -> None:
    queue = scheduler()
    queue.update_from_batch([request("a")], seconds=1.0)
    queue.add_request(request("a", since=1.0))
    last = request("a", since=time.monotonic())
    queue.requeue(last, patience=5.0)
    queue.finish_session(request("a").session)  # another one of that number
    assert len(queue) == 1
    queue.finish_session(last.session)
    assert len(queue) == 0
    assert not queue._turns
    assert not queue._not_before
    assert not queue._expected


def test_who_had_least_of_the_passes_comes_first() -> None:
    queue = scheduler(rows=2)
    queue.update_from_batch([request("a", rows=3, user="eve"), request("z", user="bob")], seconds=4.0)
    for place, (name, user) in enumerate((("a", "eve"), ("b", "eve"), ("c", "eve"), ("z", "bob"), ("y", "carol"))):
        queue.add_request(request(name, since=place, user=user))
    assert names(queue.schedule(0, size_of, 100)) == ["y", "z"]
    assert names(queue.schedule(0, size_of, 100)) == ["a", "b"]
    queue.update_from_batch([request("z", user="bob")], seconds=3.0)
    assert queue._had["eve"] < 3.0 < 3.5 < queue._had["bob"]
    queue.update_from_batch([request("z", user="bob")], seconds=1000.0)
    assert {*queue._had} == {"bob"}


def test_a_pass_has_so_many_elements() -> None:
    queue = scheduler()
    for place, name in enumerate("abcd"):
        queue.add_request(request(name, since=place))
    sizes = {"a": 50, "b": 60, "c": 50, "d": 1}
    found = queue.schedule(0, lambda each: RequestSize(each.kind, sizes[each.session.id]), 100)
    assert names(found) == ["a", "c"]


def test_who_tells_party_0_first_is_offered_ever_later() -> None:
    queue = scheduler()
    late = request("a", since=time.monotonic())
    for seconds in (0.01, 0.02, 0.04):
        queue.requeue(late, patience=60.0)
        assert queue._late["a"] == seconds
        assert not queue.schedule(0, size_of, 100)
        queue._not_before.clear()
        assert queue.schedule(0, size_of, 100) == [late]
    queue.add_request(late)
    assert not queue.schedule(0, size_of, 100)
    assert queue.schedule(5.0, size_of, 100) == [late]
    queue.update_from_batch([late], 1.0)
    queue.update_from_batch([late], 1.0)
    assert queue._late["a"] == 0.01
    queue.update_from_batch([late], 1.0)
    assert not queue._late


def test_a_request_that_was_awaited_in_vain_is_not_awaited_again() -> None:
    queue = scheduler()
    waits: list[float] = []
    wait_for = queue._changed.wait_for
    queue._changed.wait_for = lambda true, seconds: waits.append(0.0 if true() else seconds) or wait_for(true, 0.0)  # type: ignore[method-assign, func-returns-value]
    queue.add_request(request("b"))
    for _ in range(2):
        assert [each is None for each in queue.find_requests([("a", 1), ("b", 1)], 7.0)] == [True, False]
    queue.find_requests([("a", 2)], 7.0)
    assert waits == [7.0, 0.0, 7.0]


def test_parties_agree_where_they_say_the_same_of_the_same() -> None:
    assert agree([{"call": "1", "mask 0": "x"}, {"call": "1", "mask 1": "y"}])
    assert not agree([{"call": "1"}, {"call": "1"}, {"call": "2"}])
    votes = [[{"call": "1"}, None, {"call": "3"}], [{"call": "1"}, {"call": "2"}, {"call": "4"}]]
    assert tally(votes, [{"call": "1"}, {"call": "2"}, {"call": "3"}]) == [True, None, False]
    assert tally([vote[:1] for vote in votes], [{"call": "2"}]) == [False], "party 0's own counts, too"


def test_digests_tell_where_a_piece_ends() -> None:
    assert digest(b"ab", b"c") != digest(b"a", b"bc")
    assert digest(b"ab") == digest(memoryview(b"ab"))
