"""A gateway on a free port in a thread, over the bundled model or another, and the official client before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from fastapi import FastAPI
from openai import OpenAI
from private_llm_gateway.app import bound_socket, create_app, server_of
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_hf import patch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from private_llm.config import PrivateConfig

TOKEN = "a-token-of-tests"
BUNDLED = str(resources.files("private_llm_hf").joinpath("demo_model"))
PLAIN = PrivateConfig(protocol="plain", insecure=True, party_mode="threads", timeout_s=60)


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


@cache
def plain_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(BUNDLED).eval()


def bundled(config: PrivateConfig = PLAIN, name: str = "demo") -> Served:
    return Served(name, SessionPool(patch(plain_model(), config), 1), tokenizer())


@dataclass(frozen=True)
class Gateway:
    url: str
    app: FastAPI
    models: dict[str, Served]

    def client(self, token: str = TOKEN, **more: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=60, **more)


@contextmanager
def serving(*models: Served, **settings: Any) -> Iterator[Gateway]:
    listening = bound_socket(GatewaySettings(port=0, token=TOKEN))
    chosen = GatewaySettings(port=listening.getsockname()[1], **{"token": TOKEN, **settings})
    known = {served.name: served for served in models}
    app = create_app(known, chosen)
    server = server_of(app, chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield Gateway(chosen.url, app, known)
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        for served in models:
            served.pool.close()
        assert not thread.is_alive()
