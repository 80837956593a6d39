"""Preprocessing apart from the online phase: same results, same bytes, a silent helper, and no mask used twice."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_cli.commands.models import demo_model
from private_llm_hf import AutoPrivateModelForCausalLM, ForwardPlan, GeneratePlan, PrivateConfig, patch
from transformers import AutoModelForCausalLM, AutoTokenizer

from private_llm.errors import ConfigError, DomainError, ProtocolAbort, ShareFileError
from private_llm.kv_cache.policies.papers import TOVA, MPCacheConfig
from private_llm.kv_cache.policies.policy import CachePolicy
from private_llm.net.offline_store import OfflineStore, OfflineTransport
from private_llm.protocols.quad.records import QuadParty
from tests.hf import tiny
from tests.hf.compare import BATCH, LOGIT_ERROR, MASK, worst
from tests.hf.conftest import PLAIN, TRIO
from tests.hf.test_remote import free_ports, running

DEALER = PrivateConfig(protocol="dealer", timeout_s=60)
GREEDY = {"max_new_tokens": 4, "do_sample": False}
PLAN = GeneratePlan(prompt=5, new_tokens=4, batch=2, attention_mask=MASK)
IDS = torch.tensor([[5, 6, 7, 8]])
QUAD = PrivateConfig(protocol="quad", timeout_s=60)
KEYS = PrivateConfig(adder="keys", timeout_s=60)
every = pytest.mark.parametrize("config", [TRIO, DEALER, QUAD, KEYS], ids=["trio", "dealer", "quad", "keys"])


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[OfflineStore]:
    """Every store that a party (a thread of this process) makes."""
    made: list[OfflineStore] = []
    original = OfflineStore.__init__

    def spy(self: OfflineStore, folder: str | None = None) -> None:
        original(self, folder)
        made.append(self)

    monkeypatch.setattr(OfflineStore, "__init__", spy)
    return made


@pytest.mark.sampled(9)
@every
@pytest.mark.parametrize("name", ["opt", "llama", "t5"])
def test_generate_gives_the_same_tokens_while_the_helper_is_silent(config: PrivateConfig, name: str) -> None:
    model = tiny.build(name)
    want = model.generate(**BATCH, **GREEDY)
    with patch(model, config) as private:
        done = private.preprocess(PLAN)
        before = private.cost(reset=True)
        assert torch.equal(private.generate(**BATCH, **GREEDY), want)
        online = private.cost(reset=True)
        assert torch.equal(private.generate(**BATCH, **GREEDY), want)  # the plan is used up: as ever
        merged = private.cost()
    assert done.calls == (5 if name == "t5" else 4)
    assert done.stored_bytes >= before.bytes_total > 0
    assert before.cost.sent == before.preprocessing.sent
    assert {frm for frm, _ in before.cost.sent} == {config.helper}
    assert before.rounds == 0
    assert online.preprocessing.total == 0
    assert all(count == 0 for (frm, _), count in online.cost.sent.items() if frm == config.helper)
    assert online.rounds == merged.rounds
    if config is DEALER:  # to the byte; trio's merged lookups use other keys
        assert before.preprocessing == merged.preprocessing
        assert online.online == merged.online
    assert merged.preprocessing.total + merged.online.total == merged.bytes_total


@pytest.mark.full
def test_the_bundled_model_with_parties_as_processes() -> None:
    source = demo_model()
    prompt = AutoTokenizer.from_pretrained(source)("The sea was", return_tensors="pt")
    how = {"max_new_tokens": 3, "do_sample": False}
    want = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).generate(**prompt, **how)
    config = replace(DEALER, party_mode="processes")
    with AutoPrivateModelForCausalLM.from_pretrained(source, config) as private:
        private.preprocess(GeneratePlan(prompt=prompt["input_ids"].shape[1], new_tokens=3))
        private.cost(reset=True)
        assert torch.equal(private.generate(**prompt, **how), want)
        assert private.cost().preprocessing.total == 0


@pytest.mark.sampled(3)
@every
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_forwards_of_encoders(config: PrivateConfig, name: str) -> None:
    model = tiny.build(name)
    inputs = {"pixel_values": torch.linspace(-2, 2, 768).view(1, 3, 16, 16)} if name == "vit" else {"input_ids": IDS}
    shapes = {key: tuple(value.shape) for key, value in inputs.items()}
    with patch(model, config) as private, torch.no_grad():
        assert private.preprocess(ForwardPlan(shapes, times=2)).calls == 2
        private.cost(reset=True)
        for scale in (1, -1) if name == "vit" else (1,):
            given = {key: value * scale for key, value in inputs.items()}
            assert worst(private(**given).last_hidden_state, model(**given).last_hidden_state) < LOGIT_ERROR
        assert private.cost().preprocessing.total == 0


@pytest.mark.sampled(4)
@every
@pytest.mark.parametrize("settings", [{"reveal": "token"}, {"weights": "public"}, {"truncation": "exact"}])
def test_other_settings(config: PrivateConfig, settings: dict[str, str]) -> None:
    model = tiny.build("opt")
    with patch(model, replace(config, **settings)) as private:  # type: ignore[arg-type]
        private.preprocess(GeneratePlan(prompt=4, new_tokens=2))
        private.cost(reset=True)
        how = {"max_new_tokens": 2, "do_sample": False}
        assert torch.equal(private.generate(input_ids=IDS, **how), model.generate(input_ids=IDS, **how))
        assert private.cost().preprocessing.total == 0


def test_remote_hosts_keep_tapes_where_they_like(tmp_path: Path, stores: list[OfflineStore]) -> None:
    model = tiny.build("llama")
    config = replace(
        DEALER, party_mode="remote", hosts=free_ports(3), allow_plain_loopback=True, offline_folder=str(tmp_path)
    )
    with running(config, [None] * 3), patch(model, config) as private:
        private.preprocess(PLAN)
        (store,) = stores
        assert os.readlink(f"/proc/self/fd/{store._file.fileno()}").startswith(str(tmp_path))
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
        assert store._file.closed
        private.close()


def test_a_folder_that_is_not_there() -> None:
    text = "party 2: store folder '/nowhere/at/all': No such file"
    config = replace(TRIO, offline_folder="/nowhere/at/all")
    with patch(tiny.build("opt"), config) as private, pytest.raises(ConfigError, match=text):
        private.preprocess(ForwardPlan({"input_ids": (1, 4)}))


# -- plans and calls that differ ------------------------------------------------------------------------------
def test_a_call_that_was_not_planned_teaches_and_harms_nothing() -> None:
    model = tiny.build("opt")
    with patch(model, TRIO) as private, torch.no_grad():
        private.preprocess(ForwardPlan({"input_ids": (1, 4), "use_cache": False}))
        text = r"request 1 of 1 was planned as input_ids \(1, 4\).*got input_ids \(1, 3\).*model.preprocess"
        with pytest.raises(DomainError, match=text):
            private(IDS[:, :3], use_cache=False)
        with pytest.raises(DomainError, match="attention_mask"):
            private(IDS, attention_mask=torch.tensor([[0, 1, 1, 1]]), use_cache=False)
        want = model(IDS).logits
        assert worst(private(IDS, use_cache=False).logits, want) < LOGIT_ERROR
        assert worst(private(IDS, use_cache=False).logits, want) < LOGIT_ERROR


def test_a_generation_that_ends_early_leaves_a_rest_that_can_be_thrown_away(stores: list[OfflineStore]) -> None:
    model = tiny.build("opt")
    want = model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
    with patch(model, TRIO) as private:
        private.preprocess(GeneratePlan(prompt=4, new_tokens=5))
        assert torch.equal(private.generate(input_ids=IDS, max_new_tokens=2, do_sample=False), want)
        with pytest.raises(DomainError, match="request 3 of 5"):
            private.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
        assert private.preprocess().calls == 0
        assert stores[0]._file.closed
        assert torch.equal(private.generate(input_ids=IDS, max_new_tokens=2, do_sample=False), want)
        private.preprocess(GeneratePlan(prompt=4, new_tokens=2, times=2))
        for _ in range(2):
            assert torch.equal(private.generate(input_ids=IDS, max_new_tokens=2, do_sample=False), want)


def test_a_cache_does_not_outlive_its_plan() -> None:
    model = tiny.build("opt")
    with patch(model, TRIO) as private, torch.no_grad():
        private.preprocess(ForwardPlan({"input_ids": (1, 4), "use_cache": True}))
        out = private(IDS, use_cache=True)
        with pytest.raises(DomainError, match="filled by preprocessed calls and ends with them"):
            private(IDS[:, :1], past_key_values=out.past_key_values)
        merged = private(IDS, use_cache=True)
        private.preprocess(ForwardPlan({"input_ids": (1, 4), "use_cache": True}))
        with pytest.raises(DomainError, match="was planned as"):
            private(IDS, past_key_values=merged.past_key_values)


def test_beams_are_not_what_was_planned() -> None:
    with patch(tiny.build("opt"), TRIO) as private:
        private.preprocess(GeneratePlan(prompt=4, new_tokens=2))
        with pytest.raises(DomainError, match="request 1 of 2"):
            private.generate(input_ids=IDS, max_new_tokens=2, num_beams=2, do_sample=False)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (GeneratePlan(prompt=0, new_tokens=1), "prompt=0"),
        (GeneratePlan(prompt=4, new_tokens=1, attention_mask=MASK), r"attention_mask \(2, 5\); want \(1, 4\)"),
        (GeneratePlan(prompt=4, new_tokens=1, times=0), "times of at least 1"),
        ({"input_ids": (1, 4)}, "want GeneratePlan or ForwardPlan"),
    ],
)
def test_plans_that_make_no_sense(plan: GeneratePlan, text: str) -> None:
    with patch(tiny.build("opt"), TRIO) as private, pytest.raises(ConfigError, match=text):
        private.preprocess(plan)


@pytest.mark.parametrize(
    ("policy", "prompt", "new"),
    [(MPCacheConfig(least=24), 26, 2), (MPCacheConfig(every=2, least=24), 20, 12), (TOVA(least=24), 20, 12)],
)
def test_evictions_are_refused_before_anything_runs(policy: CachePolicy, prompt: int, new: int) -> None:
    """And harm nothing; a plan that evicts nothing runs."""
    with patch(tiny.build("llama"), replace(TRIO, kv_cache=policy)) as private:
        with pytest.raises(ConfigError, match=r"preprocess: kv_cache .* evicts"):
            private.preprocess(GeneratePlan(prompt, new))
        private.preprocess(GeneratePlan(prompt=4, new_tokens=2))
        assert private.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape == (1, 6)


def test_an_encoder_does_not_generate() -> None:
    with patch(tiny.build("bert"), TRIO) as private, pytest.raises(ConfigError, match="does not generate"):
        private.preprocess(GeneratePlan(prompt=4, new_tokens=1))


def test_where_there_is_nothing_to_separate() -> None:
    with (
        patch(tiny.build("opt"), PLAIN) as private,
        pytest.raises(ConfigError, match="want protocol 'trio', 'quad' or 'dealer'"),
    ):
        private.preprocess(GeneratePlan(prompt=4, new_tokens=1))


# -- a party that lies when it runs ahead (quad) --------------------------------------------------------------
@pytest.mark.parametrize("receiver", [0, 2])
@pytest.mark.parametrize("number", [0, 3])
def test_a_lie_told_ahead_is_caught_online(monkeypatch: pytest.MonkeyPatch, receiver: int, number: int) -> None:
    original = OfflineTransport.send
    told: list[str] = []

    def lie(self: OfflineTransport, to: int, tag: str, payload: torch.Tensor) -> None:
        if to == receiver:
            told.append(tag)
            if len(told) == number + 1:
                payload = payload.clone()
                payload.view(-1)[0] ^= 1
        original(self, to, tag, payload)

    monkeypatch.setattr(OfflineTransport, "send", lie)
    with patch(tiny.build("opt"), QUAD) as private:
        private.preprocess(ForwardPlan({"input_ids": (1, 4)}))
        assert len(told) > number
        with pytest.raises(ProtocolAbort, match="deviated from the protocol"):
            private(IDS)


@pytest.mark.parametrize("given", [[], ["00" * 32]])
def test_false_digests_given_ahead_open_nothing(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.setattr(QuadParty, "take_digests", lambda self: given)
    with patch(tiny.build("opt"), QUAD) as private:
        private.preprocess(ForwardPlan({"input_ids": (1, 4)}))
        with pytest.raises(ProtocolAbort, match="do not use this session"):
            private(IDS)


# -- masks are used once --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("made", "claimed"), [(1, 0), (0, 1)])
def test_parties_compute_planned_requests_in_order_and_once(made: int, claimed: int) -> None:
    """Of a client that forgot, and of one that skips what it planned."""
    with patch(tiny.build("opt"), TRIO) as private, torch.no_grad():
        private.preprocess(ForwardPlan({"input_ids": (1, 4), "use_cache": False}, times=2))
        for _ in range(made):
            private(IDS, use_cache=False)
        private.parties._schedule._next = claimed
        with pytest.raises(ProtocolAbort, match="masks must never repeat"):
            private(IDS, use_cache=False)


def test_parties_refuse_to_prepare_a_plan_twice() -> None:
    with patch(tiny.build("opt"), TRIO) as private:
        private.preprocess(ForwardPlan({"input_ids": (1, 4)}))
        private.parties._plans = iter([1])
        with pytest.raises(ProtocolAbort, match="plan 1 was prepared before"):
            private.preprocess(ForwardPlan({"input_ids": (1, 4)}))


def test_the_end_of_a_session_is_the_end_of_its_tape(stores: list[OfflineStore]) -> None:
    with patch(tiny.build("opt"), DEALER) as private:
        private.preprocess(ForwardPlan({"input_ids": (1, 4)}))
        assert not stores[0]._file.closed
    assert stores[0]._file.closed


def test_a_damaged_tape_ends_the_session(stores: list[OfflineStore]) -> None:
    with patch(tiny.build("opt"), DEALER) as private:
        private.preprocess(ForwardPlan({"input_ids": (1, 4)}))
        number = stores[0]._file.fileno()
        os.pwrite(number, bytes([os.pread(number, 1, 200)[0] ^ 1]), 200)
        with pytest.raises(ShareFileError, match="party 2: the store is damaged; preprocess again"):
            private(IDS)
    assert stores[0]._file.closed
