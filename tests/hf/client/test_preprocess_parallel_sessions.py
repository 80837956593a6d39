"""Preprocessing with parallel sessions: each stores a stream of its own, and online every helping party is silent."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from private_llm_hf import ForwardPlan, GeneratePlan, PrivateConfig, patch
from private_llm_hf.client.parallel_sessions import plan_parallel_sessions
from private_llm_hf.wire.commands import Call, SelectRows, Tokens

from private_llm.errors import DomainError
from private_llm.net.offline_store import OfflineStore
from private_llm.ring.prg import Seed
from tests.hf import tiny
from tests.hf.client.test_preprocess import stores as stores
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.conftest import TRIO

IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6], [50, 40, 30, 20]])
HOW = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
PLAN = GeneratePlan(prompt=4, new_tokens=3, batch=3)
TWO = replace(TRIO, parallel_sessions=2)
SETTINGS = {
    "trio": TWO, "permuted": replace(TRIO, parallel_sessions=3, rotate_roles=True),
    "quad": PrivateConfig(protocol="quad", parallel_sessions=2, rotate_roles=True, timeout_s=60),
    "dealer": PrivateConfig(protocol="dealer", parallel_sessions=2, timeout_s=60),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", ["opt", "t5"])
def test_generate_gives_the_same_tokens_while_every_helper_is_silent(name: str, family: str) -> None:
    model, config = tiny.build(family), SETTINGS[name]
    want = model.generate(IDS, **HOW)
    with patch(model, config) as private:
        done = private.preprocess(PLAN)
        before = private.cost(reset=True)
        assert torch.equal(private.generate(IDS, **HOW), want)
        online = private.cost(reset=True)
        assert torch.equal(private.generate(IDS, **HOW), want), "the plan is used up: as ever"
        merged = private.cost()
    assert done.stored_bytes >= before.bytes_total > 0
    assert before.cost.sent == before.preprocessing.sent
    assert before.rounds == 0
    assert online.preprocessing.total == 0
    assert online.rounds == merged.rounds
    assert (len(before.helpers), len(online.helpers)) == (config.parallel_sessions, config.parallel_sessions)
    if config.rotate_roles:
        assert len({frm for (frm, _), count in before.cost.sent.items() if count}) == config.parallel_sessions
    if name == "dealer":
        assert before.preprocessing == merged.preprocessing


def test_every_session_has_a_tape_of_its_own(stores: list[OfflineStore]) -> None:
    model = tiny.build("opt")
    with patch(model, TWO) as private, torch.no_grad():
        private.preprocess(ForwardPlan({"input_ids": (3, 4), "use_cache": False}))
        assert len(stores) == 2
        sizes = [store.nbytes for store in stores]
        assert min(sizes) > 0.3 * max(sizes)
        assert worst(private(IDS, use_cache=False).logits, model(IDS).logits) < LOGIT_ERROR
        private.cost()  # answered after the call is over at every party
        assert all(store._file.closed for store in stores)


def test_no_mask_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread (a party's session, or the client) takes a stream from a key under a label once, planned or not."""
    drawn: Counter[tuple[str, bytes, str]] = Counter()
    lock, stream = threading.Lock(), Seed.stream

    def spy(self: Seed, label: str, *more: object) -> object:
        with lock:
            drawn[threading.current_thread().name, self.raw(), label] += 1
        return stream(self, label, *more)  # type: ignore[arg-type]

    with patch(tiny.build("opt"), TWO) as private, torch.no_grad():
        monkeypatch.setattr(Seed, "stream", spy)
        plan = ForwardPlan({"input_ids": (3, 4), "use_cache": False}, times=2)
        for _ in range(2):
            private.preprocess(plan)
            private(IDS, use_cache=False)
            private(IDS, use_cache=False)
    planned = {key: count for key, count in drawn.items() if "plan" in key[2]}
    places = {found[0] for _, _, label in planned for found in re.findall(r"plan (\d) call (\d)", label)}
    assert places == {"1", "2"}, "both plans drew"
    assert set(planned.values()) == {1}
    keys = [{key for _, key, label in planned if label.endswith(f"plan 1 call {call}")} for call in (0, 1)]
    assert keys[0] == keys[1], "the same keys, under other labels"


def test_calls_of_other_shapes_harm_nothing_and_fewer_rows_leave_sessions_idle() -> None:
    model = tiny.build("opt")
    with patch(model, TWO) as private, torch.no_grad():
        private.preprocess(
            ForwardPlan({"input_ids": (1, 4), "use_cache": False}),
            ForwardPlan({"input_ids": (3, 4), "use_cache": False}),
            ForwardPlan({"input_ids": (1, 4), "use_cache": False}, times=2),
        )
        private.cost(reset=True)
        with pytest.raises(DomainError, match=r"request 1 of 4 was planned as input_ids \(1, 4\)"):
            private(IDS, use_cache=False)
        for rows in (1, 3, 1, 1):
            given = IDS[:rows]
            assert worst(private(given, use_cache=False).logits, model(given).logits) < LOGIT_ERROR
        assert private.cost(reset=True).preprocessing.total == 0
        private(IDS, use_cache=False)
        assert private.cost().preprocessing.total > 0


def test_planned_calls_of_several_threads_are_made_in_turn() -> None:
    model = tiny.build("opt")
    want = model(IDS).logits
    with patch(model, TWO) as private, torch.no_grad():
        private.preprocess(ForwardPlan({"input_ids": (3, 4), "use_cache": False}, times=4))
        private.cost(reset=True)
        errors: list[float] = []

        def ask() -> None:
            with torch.no_grad():
                errors.append(worst(private(IDS, use_cache=False).logits, want))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert private.cost().preprocessing.total == 0
    assert len(errors) == 4
    assert max(errors) < LOGIT_ERROR


@pytest.mark.full
def test_a_plan_that_was_thrown_away_leaves_the_sessions_as_before() -> None:
    model = tiny.build("opt")
    with patch(model, TWO) as private:
        private.preprocess(PLAN)
        private.preprocess()
        assert torch.equal(private.generate(IDS, **HOW), model.generate(IDS, **HOW))
        private.preprocess(PLAN)
        private.cost(reset=True)
        assert torch.equal(private.generate(IDS, **HOW), model.generate(IDS, **HOW))
        assert private.cost().preprocessing.total == 0


def test_rows_of_a_plan_follow_their_caches() -> None:
    def call(rows: int, cache: int | None) -> Call:
        public = {"attention_mask": torch.ones(rows, 4), "logits_to_keep": 1}
        return Call(public, (Tokens("input_ids", (rows, 4), 9),), cache, None, None, ())

    select = SelectRows(1, torch.tensor([0, 2, 4]))
    rows, parts = plan_parallel_sessions([call(5, 1), select, call(3, 1), call(1, None)], 2)
    assert rows == [[3, 2], [3, 2], [2, 1], [1, 0]]
    assert [[type(part) for part in parallel_session] for parallel_session in parts] == [[Call, SelectRows, Call, Call],
                                                                [Call, SelectRows, Call]]  # fmt: skip
    assert [part.index.tolist() for part in (parts[0][1], parts[1][1])] == [[0, 2], [1]]
    assert [tuple(part.public["attention_mask"].shape) for part in (parts[0][2], parts[1][2])] == [(2, 4), (1, 4)]
    assert [part.secret[0].shape for part in (parts[0][2], parts[1][2])] == [(2, 4), (1, 4)]
