"""Who waits for a session at a gateway: what a full queue, a long wait and an interrupt tell clients."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from sse_starlette.sse import AppStatus

from private_llm.config import PrivateConfig
from tests.gateway.small_gateway import Gateway, greedy, serving, small, text_of
from tests.gateway.test_errors import ASKED, HEADERS, told
from tests.hf.service.conftest import eventually


@contextmanager
def waiting(gateway: Gateway) -> Iterator[None]:
    """A request that waits for the only session, which somebody else has."""
    pool = gateway.models["small"].pool
    done: list[Any] = []
    with gateway.client() as client:
        with pool.session(5):
            thread = threading.Thread(target=lambda: done.append(client.chat.completions.create(**ASKED)))
            thread.start()
            assert eventually(lambda: 'private_llm_requests_in_flight{model="small"} 1.0' in metrics(gateway))
            yield
        thread.join(30)
    assert done[0].choices[0].message.content == text_of(greedy(2)), "who waits is served"


def metrics(gateway: Gateway) -> str:
    return httpx.get(f"{gateway.url}/metrics", headers=HEADERS).text


def test_a_full_queue_says_when_to_come_again() -> None:
    with serving(small(), max_waiting=0, retry_after_s=3) as gateway, waiting(gateway), gateway.client() as client:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as refused:
                client.chat.completions.create(**ASKED, stream=stream)
            found = told(refused.value)
            assert (found["type"], found["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert refused.value.response.headers["retry-after"] == "3"


def test_nobody_waits_for_ever() -> None:
    with serving(small(), wait_s=0.2) as gateway, gateway.client() as client:
        with (
            gateway.models["small"].pool.session(5),
            pytest.raises(openai.RateLimitError, match="no session came free"),
        ):
            client.chat.completions.create(**ASKED)
        assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "length"


def test_the_official_client_comes_again_by_itself() -> None:
    with serving(small(), max_waiting=0, retry_after_s=1) as gateway, gateway.client() as client:
        busy = waiting(gateway)
        busy.__enter__()
        threading.Timer(0.5, lambda: busy.__exit__(None, None, None)).start()
        made = client.with_options(max_retries=3).chat.completions.create(**ASKED)
    assert made.choices[0].message.content == text_of(greedy(2))


@pytest.mark.parametrize("stream", [True, False])
def test_an_interrupt_is_told_to_those_who_wait(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AppStatus, "should_exit", False)  # a signal ends the streams of all servers of a process
    asked = {**ASKED, "max_tokens": 100}
    served = small(PrivateConfig(party_mode="threads", timeout_s=60, calibrate=False))
    with serving(served) as gateway, gateway.client() as client:
        if stream:
            parts = client.chat.completions.create(**asked, stream=True)
            text = "".join(next(parts).choices[0].delta.content or "" for _ in range(4))
            gateway.server.handle_exit(signal.SIGINT, None)
            with pytest.raises(openai.APIError, match="the gateway was stopped"):
                list(parts)
            assert text
            assert text_of(greedy(100)).startswith(text)
            return
        with ThreadPoolExecutor(1) as threads:
            made = threads.submit(client.chat.completions.create, **asked)
            assert eventually(lambda: served.pool.in_use == 1)
            gateway.server.handle_exit(signal.SIGINT, None)
            with pytest.raises(openai.InternalServerError, match="the gateway was stopped"):
                made.result(30)
