"""Real processes that die or fall silent: every other endpoint stops, and says who failed."""

import os
import signal

import pytest
import torch

from private_llm.net.transport import CLIENT

from .mesh import Processes

TIMEOUT = 2.0


def compute(transport):
    """Parties 1 and 2 work together for ever, party 0 helps party 2, the client waits for the answer of party 1."""
    step = torch.zeros(100, dtype=torch.int64)
    if transport.me == CLIENT:
        transport.recv(1, "reveal", (1,), torch.int64)
    while True:
        if transport.me == 0:
            transport.recv(2, "go on", (1,), torch.int64)
            transport.send(2, "help", step)
        elif transport.me == 1:
            transport.exchange(2, "mul", step)
        else:
            transport.send(0, "go on", step[:1])
            transport.recv(0, "help", (100,), torch.int64)
            transport.exchange(1, "mul", step)


def stop_by_exception(transport):
    if transport.me == 2:
        transport.exchange(1, "mul", torch.zeros(100, dtype=torch.int64))
        raise ValueError("out of memory, say")
    return compute(transport)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_process_is_named_everywhere_at_once(victim):
    with Processes(dict.fromkeys([0, 1, 2, CLIENT], compute), timeout=60.0) as run:
        run.processes[victim].kill()
        for me in {0, 1, 2, CLIENT} - {victim}:
            kind, text = run.result(me, 20)  # far below the timeout of 60 s
            assert kind == "PartyFailed"
            assert f"party {victim} stopped: its connection" in text
            assert "awaited" in text or "was sent" in text


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_silent_process_is_named_everywhere(victim):
    with Processes(dict.fromkeys([0, 1, 2, CLIENT], compute), timeout=TIMEOUT) as run:
        os.kill(run.processes[victim].pid, signal.SIGSTOP)
        for me in {0, 1, 2, CLIENT} - {victim}:
            kind, text = run.result(me, 3 * TIMEOUT + 10)
            assert kind == "PartyFailed"
            assert f"party {victim} was silent for {TIMEOUT:g} s" in text
            assert "awaited" in text


def test_the_client_may_vanish():
    with Processes(dict.fromkeys([0, 1, 2, CLIENT], idle), timeout=60.0) as run:
        run.processes[CLIENT].kill()
        for party in (0, 1, 2):
            kind, text = run.result(party, 20)
            assert kind == "PartyFailed"
            assert "the client stopped: its connection" in text


def idle(transport):
    """Parties wait for the client's next request."""
    transport.wait(CLIENT if transport.me != CLIENT else 0)
