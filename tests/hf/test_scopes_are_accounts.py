"""What is booked under which name changes the account alone: not what is sent or computed, and no error's text."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from private_llm_hf import patch
from private_llm_hf.client.costs import Costs
from private_llm_hf.tools.compare import compare
from torch import Tensor
from torch.utils._pytree import tree_leaves

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Ledger
from private_llm.tensor.secret import SecretTensor
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def by_operation(ledger: Ledger) -> tuple[Counter[Any], Counter[Any], int]:
    """What was sent, rounds and multiply-adds, without the scopes that they were booked under."""
    sent, rounds = Counter[Any](), Counter[Any]()
    for counter, booked in ((sent, ledger.sent), (rounds, ledger.rounds)):
        for (_, *what), count in booked.items():  # type: ignore[attr-defined]
            counter[tuple(what)] += count
    return sent, rounds, sum(ledger.macs.values())


def run(name: str, replay: bool) -> tuple[Tensor, Costs]:
    with patch(tiny.build(name), PrivateConfig(party_mode="threads", replay=replay)) as private:
        made = private.generate(
            IDS, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return torch.cat(made.logits), private.cost()


def book_every_operation(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Give every operation of secret tensors a scope of its own; the names, which fill as operations run."""
    called, scopes = SecretTensor.__torch_function__.__func__, set[str]()  # type: ignore[attr-defined]

    def booked(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SecretTensor)]
        if not found:
            return called(cls, function, types, args, kwargs)
        scope = f"profiling {getattr(function, '__name__', function)}"
        with found[0].session.protocol.ledger.scope(scope):
            scopes.add(scope)
            return called(cls, function, types, args, kwargs)

    monkeypatch.setattr(SecretTensor, "__torch_function__", classmethod(booked))
    return scopes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("replay", [False, True], ids=("plain", "replay"))
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_every_operation_in_a_scope_of_its_own(name: str, replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With calibrated ranges, which say by module how many bits a product keeps."""
    wanted, before = run(name, replay)
    scopes = book_every_operation(monkeypatch)
    made, after = run(name, replay)
    assert len(scopes) > 5
    assert (after.bytes_total, after.rounds) == (before.bytes_total, before.rounds)
    assert [by_operation(ledger) for ledger in after.ledgers] == [by_operation(ledger) for ledger in before.ledgers]
    assert (made - wanted).abs().max() < LOGIT_ERROR
    assert any(scope == name for ledger in after.ledgers for scope, *_ in ledger.sent for name in scopes)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_a_debug_run_names_the_module_whatever_the_scope_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(1e9)

    def error() -> str:
        stopped = compare(model, IDS, PrivateConfig()).stopped
        assert stopped is not None
        return stopped

    wanted, scopes = error(), book_every_operation(monkeypatch)
    assert error() == wanted
    assert f"in module '{name}'" in wanted
    assert len(scopes) > 5
