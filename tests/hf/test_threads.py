"""Parties that are threads share the cores of their process, and give them back."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf.client import launch
from private_llm_hf.client.launch import start_parties

from private_llm.config import PrivateConfig
from private_llm.kernels.parallel import threads_per_party, usable_cores
from private_llm.token_sharding import ShardingPlan


@pytest.fixture(autouse=True)
def _no_other_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_CORES", launch._Cores())


def test_torch_gets_its_threads_back_after_a_session() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_party(3) + 2)
    try:
        parties = start_parties(PrivateConfig(party_mode="threads"))
        during = torch.get_num_threads()
        parties.close()
        assert (during, torch.get_num_threads()) == (threads_per_party(3), threads_per_party(3) + 2)
    finally:
        torch.set_num_threads(before)


def test_one_compnode_computes_on_all_cores() -> None:
    """It waits while its AttnNode works: halves for both would lengthen both."""
    before = torch.get_num_threads()
    plan = ShardingPlan(1, 1, 1, accept_weak_plan=True)
    torch.set_num_threads(usable_cores() + 1)
    try:
        nodes = start_parties(PrivateConfig(protocol="cascade", plan=plan, party_mode="threads"))
        during = torch.get_num_threads()
        nodes.close()
        assert (during, torch.get_num_threads()) == (usable_cores(), usable_cores() + 1)
    finally:
        torch.set_num_threads(before)


def test_sessions_that_overlap_leave_torch_as_it_was() -> None:
    """Each remembered what it found, so the one that ended last left what another session had set."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores() + 1)
    try:
        first = start_parties(PrivateConfig(party_mode="threads"))
        second = start_parties(PrivateConfig(protocol="plain", insecure=True, party_mode="threads"))
        first.close()
        assert torch.get_num_threads() == threads_per_party(1), "the other goes on"
        second.close()
        assert torch.get_num_threads() == usable_cores() + 1
    finally:
        torch.set_num_threads(before)
