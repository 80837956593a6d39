"""Nodes that die, stall, start late or disagree: every endpoint stops, the error names the node, nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.client import launch
from torch import Tensor, nn

from private_llm.errors import PartyFailed, PrivateLLMError, TransportError
from private_llm.net import children
from private_llm.net.transport import Transport
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.test_processes import parties
from tests.hf.test_remote import free_ports
from tests.hf.wire.raw import send_raw

PLAN = ShardingPlan(2, 3, 1, accept_weak_plan=True)
CONFIG = PrivateConfig(protocol="cascade", plan=PLAN, timeout_s=60)
IDS = torch.arange(3, 20).view(1, -1)


class Signal:
    """Sends `what` to a process when the third token has come."""

    def __init__(self, pid: int, what: signal.Signals) -> None:
        self._pid, self._what, self._left = pid, what, 4  # the prompt counts as one

    def put(self, value: Tensor) -> None:
        self._left -= 1
        if not self._left:
            os.kill(self._pid, self._what)

    def end(self) -> None:
        """Nothing to flush."""


@pytest.mark.full
@pytest.mark.parametrize(("victim", "name"), [(1, r"CompNode 1 \(party 1\)"), (4, r"AttnNode \(1, 1\) \(party 4\)")])
def test_a_process_killed_in_the_middle_of_generate(victim: int, name: str) -> None:
    before = set(parties())
    private = patch(tiny.build("llama"), replace(CONFIG, party_mode="processes"))
    mine = [pid for pid in parties() if pid not in before]
    assert len(mine) == PLAN.nodes
    start = time.monotonic()
    with pytest.raises(PartyFailed, match=rf"{name} stopped: its connection (closed|broke)"):
        private.generate(
            IDS, max_new_tokens=40, min_new_tokens=40, do_sample=False, streamer=Signal(mine[victim], signal.SIGKILL)
        )
    assert time.monotonic() - start < 30  # half the timeout
    private.close()
    assert not set(parties()) & set(mine)


@pytest.mark.full
def test_a_process_that_stalls_is_named_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_EXIT_S", 0.5)
    before = set(parties())
    private = patch(tiny.build("llama"), replace(CONFIG, party_mode="processes", timeout_s=3))
    mine = [pid for pid in parties() if pid not in before]
    try:
        with pytest.raises(PartyFailed, match=r"AttnNode \(0, 1\) \(party 3\) was silent for 3 s"):
            private.generate(
                IDS, max_new_tokens=40, min_new_tokens=40, do_sample=False,
                streamer=Signal(mine[3], signal.SIGSTOP),
            )  # fmt: skip
    finally:
        with contextlib.suppress(ProcessLookupError):  # killed when it did not end by itself
            os.kill(mine[3], signal.SIGCONT)
        private.close()


# -- nodes that disagree -------------------------------------------------------------------------------------------
def with_other(change: dict[str, object], number: int) -> Callable[..., str | None]:
    """`run_party`, of which node `number` has other settings."""
    original = launch.run_party

    def run(config: PrivateConfig, mine: int, transport: Transport) -> str | None:
        return original(replace(config, **change) if mine == number else config, mine, transport)

    return run


@pytest.mark.parametrize("plan", [ShardingPlan(2, 4, 1, accept_weak_plan=True), replace(PLAN, wire="float16")], ids=str)
def test_a_node_with_another_plan(monkeypatch: pytest.MonkeyPatch, plan: ShardingPlan) -> None:
    monkeypatch.setattr(launch, "run_party", with_other({"plan": plan}, 4))
    said = r"AttnNode \(1, 1\) \(party 4\)(: .*plan: .*)? has another than this endpoint"  # by the client, or of it
    with pytest.raises(PrivateLLMError, match=said):
        patch(tiny.build("llama"), CONFIG)


def test_a_node_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrivateConfig.agreement

    def other(self: PrivateConfig) -> bytes:
        mine = original(self)
        return mine[::-1] if threading.current_thread().name == "party 1" else mine

    monkeypatch.setattr(PrivateConfig, "agreement", other)
    with pytest.raises(PrivateLLMError, match=r"CompNode 1 \(party 1\).* runs other settings or another version"):
        patch(tiny.build("llama"), CONFIG)


def test_a_tensor_of_the_wrong_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """An AttnNode whose results are a number short: the CompNode that waits for them says so."""
    send = Transport.send

    def short(self: Transport, to: int, tag: str, payload: Tensor) -> None:
        cut = self.me == 3 and tag == "partial"
        send(self, to, tag, payload.view(-1)[:-1] if cut else payload)

    private = patch(tiny.build("llama"), CONFIG)
    monkeypatch.setattr(Transport, "send", short)
    with pytest.raises(
        TransportError, match=r"^CompNode [01] \(party [01]\): from AttnNode \(0, 1\) \(party 3\): got .*; want "
    ):
        private.generate(IDS, max_new_tokens=2)
    private.close()


def test_a_node_that_starts_late() -> None:
    """The client names the node that it does not reach; the nodes that run wait, and serve once all are there."""
    remote = replace(CONFIG, party_mode="remote", hosts=free_ports(PLAN.nodes), allow_plain_loopback=True)
    ended: list[str] = []

    def serve(numbers: Sequence[int]) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=launch.serve_party, args=(remote, n, None, 1, ended.append), daemon=True)
            for n in numbers
        ]
        for thread in threads:
            thread.start()
        return threads

    threads = serve([0, 1, 2, 3])
    model = tiny.build("llama")
    with pytest.raises(TransportError, match=r"^AttnNode \(1, 1\) \(party 4\) at .*:\d+ was not reached within 1 s"):
        patch(model, replace(remote, timeout_s=1))
    threads += serve([4])
    with patch(model, remote) as private:
        assert torch.equal(private.generate(IDS, max_new_tokens=2), model.generate(IDS, max_new_tokens=2))
    for thread in threads:
        thread.join(20)
    assert ended.count("session 1 ended") == PLAN.nodes


@pytest.mark.full
def test_a_long_computation_is_not_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CompNode that computes for longer than the timeout says that it does."""
    forward = nn.Linear.forward

    def slow(self: nn.Linear, values: Tensor) -> Tensor:
        if threading.current_thread().name == "party 0":
            time.sleep(0.1)
        return forward(self, values)

    model = tiny.build("llama", num_hidden_layers=6)
    with patch(model, replace(CONFIG, timeout_s=2)) as private:
        monkeypatch.setattr(nn.Linear, "forward", slow)
        start = time.monotonic()
        private(IDS)
        assert time.monotonic() - start > 2 * 2


@pytest.mark.parametrize(
    "step", [[1, 0, 10**12], [1, -1, 12], [0, 0, 12], [1, 12], [1, 0, "12"], [1, 1 << 20, 1], [1, 0, True]]
)
def test_a_client_that_asks_for_the_impossible(step: list[object]) -> None:
    private = patch(tiny.build("llama"), CONFIG)
    transport = private.parties.transport
    sizes = dict(zip(("batch", "past", "new"), step, strict=False))
    facts = {"message": "ForwardStep", "handle": None, **sizes, "padding": None}
    send_raw(transport, 3, {"message": "AttnForward", "step": facts, "free": []})
    text = r"^AttnNode \(0, 1\) \(party 3\): control message from the client: AttnForward.*step.*: (got|missing) "
    with pytest.raises(TransportError, match=text):
        private(IDS)
    private.close()
