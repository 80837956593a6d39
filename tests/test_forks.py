"""A fork of a process that opened a session draws none of its masks, and ends nothing, however it leaves."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf import ForwardPlan, patch
from private_llm_hf.client.preprocess import CallPlan
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import PlaintextLeak, ProtocolAbort
from private_llm.forks import Origin, process
from private_llm.net.local import LocalMesh
from private_llm.net.offline_store import OfflineStore
from tests.hf import tiny

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

IDS = torch.tensor([[5, 6, 7, 8]])
ONCE: CallPlan = ForwardPlan({"input_ids": (1, 4), "use_cache": False})


def in_fork(ask: Callable[[], object]) -> None:
    """`ask` raises in a child of os.fork, as whatever needs the masks of its parent."""
    child = os.fork()
    if not child:
        right = False
        try:
            right = refused(ask)
        finally:
            os._exit(not right)
    ends = time.monotonic() + 30
    while not (left := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
        time.sleep(0.02)
    if not left[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert left == (child, 0)


def refused(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except ProtocolAbort as error:
        return "before this process was forked" in str(error)
    return False


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


@pytest.fixture(
    scope="module",
    params=[{"rotate_roles": False, "parallel_sessions": 2}, {"party_mode": "processes", "protocol": "quad"}],
    ids=["threads", "processes"],
)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    with patch(tiny.build("llama"), replace(PrivateConfig(timeout_s=60), **request.param)) as made:
        yield made


@pytest.mark.sampled(2)
def test_a_child_uses_and_ends_nothing_of_its_parent(model: PreTrainedModel) -> None:
    """The second call is preprocessed: its masks are derived when it runs, so no stream was there at the fork."""
    want = logits(model)
    model.preprocess(ONCE)
    for ask in (lambda: logits(model), model.cost, lambda: model.preprocess(ONCE), lambda: model.generate(IDS)):
        in_fork(ask)

    def close() -> None:
        model.close()
        model.__exit__(None, None, None)
        model._end()
        gc.collect()
        logits(model)  # raises, as the session is its parent's, not closed

    in_fork(close)
    torch.testing.assert_close(logits(model), want, atol=0.02, rtol=0)  # as planned
    torch.testing.assert_close(logits(model), want, atol=0.02, rtol=0)


def test_a_child_of_a_thread_does_not_wait_for_the_call_of_another(model: PreTrainedModel) -> None:
    """A lock that a thread of the parent held at the fork would be held for ever."""
    for ask in (lambda: logits(model), lambda: (model.close(), logits(model))):
        with model.parties.lock, ThreadPoolExecutor(1) as pool:
            pool.submit(in_fork, ask).result()
    logits(model)


class Asking(Dataset[bool]):
    """Samples that ask the private model, as a data set that embeds its texts does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        return refused(lambda: logits(self.model))


def _worker(answers: multiprocessing.queues.Queue[bool], model: PreTrainedModel) -> None:
    answers.put(refused(lambda: logits(model)))


def test_workers_of_libraries(model: PreTrainedModel) -> None:
    """DataLoader and multiprocessing, whose workers run exit handlers."""
    assert all(all(batch) for batch in DataLoader(Asking(model), num_workers=2, multiprocessing_context="fork"))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    worker = context.Process(target=_worker, args=(answers, model))
    worker.start()
    assert answers.get(timeout=30)
    worker.join(30)
    assert worker.exitcode == 0
    with pytest.raises(PlaintextLeak):
        copy.deepcopy(model)
    logits(model)


def test_a_store_of_masks_is_its_makers(tmp_path: Path) -> None:
    """The place in the file is shared, so a child that read would leave its parent at a wrong one."""
    store, x = OfflineStore(tmp_path), torch.arange(5)
    store.append("x", x.dtype, 5, [x])
    in_fork(lambda: store.append("x", x.dtype, 5, [x]))
    store.append("y", x.dtype, 5, [x])
    in_fork(lambda: (store.close(), gc.collect(), store.rewind()))
    in_fork(store.rewind)
    store.end_call()
    store.rewind()
    in_fork(lambda: store.next("x", (5,), torch.int64))
    in_fork(store.finish_call)
    assert torch.equal(store.next("x", (5,), torch.int64), x)
    assert torch.equal(store.next("y", (5,), torch.int64), x)
    store.finish_call()


def test_a_child_of_a_child_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "forks", 0)
    of_parent = Origin()
    process.copied()
    of_child = Origin()
    assert of_child.here
    process.copied()
    assert not of_child.here
    assert not of_parent.here


def test_an_abort_of_a_child_wakes_nobody() -> None:
    """Counters of messages belong to the operating system, which shares them with a child."""
    mesh = LocalMesh(2, timeout=5)
    here, there = mesh.transport(0), mesh.transport(1)
    in_fork(lambda: (here.abort("the child ends"), mesh.abort("the child ends"), here.wait(1)))
    in_fork(lambda: here.send(1, "x", torch.arange(3)))
    in_fork(lambda: there.recv(0, "x", (3,), torch.int64))
    here.send(1, "x", torch.arange(3))
    assert torch.equal(there.recv(0, "x", (3,), torch.int64), torch.arange(3))
