"""What one service runs side by side: several models, of several kinds, and all ways of generating."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from private_llm.errors import PrivateLLMError, ShareFileError
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.service.conftest import Start, eventually
from tests.hf.service.test_party_service import ids_of, same, text_of

HOW = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {name: tiny.build(name) for name in ("llama", "bert", "t5", "opt")}


@pytest.mark.full
def test_several_models_at_the_same_time(start: Start, plain: dict[str, Any]) -> None:
    running = start(models=("llama", "bert", "t5"))
    found: dict[str, Any] = {}
    ids = torch.cat([ids_of(1), ids_of(2)])
    with (
        running.model(name="t5") as t5,
        running.model(name="bert") as bert,
        running.model() as llama,
    ):
        work = {
            "llama": lambda: text_of(llama, 1),
            "bert": lambda: bert(ids).last_hidden_state,
            "t5": lambda: t5.generate(ids, **HOW),
        }
        threads = [threading.Thread(target=lambda n=n, w=w: found.update({n: w()})) for n, w in work.items()]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert same(found["llama"], text_of(plain["llama"], 1))
    assert torch.equal(found["t5"], plain["t5"].generate(ids, **HOW))
    with torch.no_grad():
        base = plain["bert"].base_model
        assert worst(found["bert"], base(ids).last_hidden_state) < LOGIT_ERROR
    assert {facts.model for facts in running.watches[0].passes} == {"llama", "bert", "t5"}


def test_a_model_that_is_not_there(start: Start, shares: Any) -> None:
    running = start()
    running.shares["opt"] = shares("trio", "opt")
    with pytest.raises(ShareFileError, match="share files of another model"):
        running.model(name="opt")


@pytest.mark.full
def test_every_way_of_generating_beside_another_session(start: Start, plain: dict[str, Any]) -> None:
    running = start()
    ids, llama = ids_of(3), plain["llama"]
    stop = threading.Event()
    ways: dict[str, dict[str, Any]] = {
        "beams": {"num_beams": 3, "max_new_tokens": 4, "do_sample": False},
        "sampling": {"do_sample": True, "max_new_tokens": 4, "top_k": 5},
        "drafts from the prompt": {"prompt_lookup_num_tokens": 2, "max_new_tokens": 4, "do_sample": False},
        "several answers": {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 4},
    }
    with running.model() as model, model.open_session() as other:

        def chatter() -> None:
            while not stop.is_set():
                text_of(other, 2, new=3)

        thread = threading.Thread(target=chatter)
        thread.start()
        try:
            for name, how in ways.items():
                torch.manual_seed(7)
                got = model.generate(ids, pad_token_id=0, **how)
                torch.manual_seed(7)
                assert torch.equal(got, llama.generate(ids, pad_token_id=0, **how)), name
        finally:
            stop.set()
            thread.join()


@pytest.mark.full
def test_a_session_without_calls_ends(start: Start, plain: dict[str, Any]) -> None:
    running = start(idle_s=1.0)
    with running.model() as model:
        text_of(model, 1)
        assert eventually(lambda: all(watch.ended for watch in running.watches))
        with pytest.raises(PrivateLLMError, match="1 s"):
            text_of(model, 1)
        model.reconnect()
        assert same(text_of(model, 1), text_of(plain["llama"], 1))
