"""A gateway on a free port in a thread, over a small model, and the official client before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from openai import OpenAI
from private_llm_gateway.app import Server, create_app, server_of
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings, bound_socket
from private_llm_hf import patch
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from private_llm.config import PrivateConfig

TOKEN = "a-token-of-tests"
BUNDLED = str(resources.files("private_llm_hf").joinpath("demo_model"))
PLAIN = PrivateConfig(protocol="plain", insecure=True, party_mode="threads", timeout_s=60, calibrate=False)
PROMPT = "The history of the city begins with"
CHAT = [{"role": "user", "content": PROMPT}]
LOGIT_ERROR = 2e-3
"""Of log-probabilities of the small model with 18 fractional bits."""


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED)


@cache
def plain_model() -> OPTForCausalLM:
    """Small, with the bundled model's vocabulary, and weights that make it choose different tokens."""
    torch.manual_seed(5)
    config = OPTConfig(
        vocab_size=4096, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0, init_std=0.3,
    )  # fmt: skip
    return OPTForCausalLM(config).eval().requires_grad_(False)


def prompt_ids() -> torch.Tensor:
    return tokenizer()(PROMPT, return_tensors="pt")["input_ids"]


@cache
def greedy(count: int) -> list[int]:
    made = plain_model().generate(prompt_ids(), max_new_tokens=count, do_sample=False)
    return made[0, prompt_ids().shape[1] :].tolist()


def text_of(tokens: list[int]) -> str:
    """As it stands behind the prompt."""
    before = tokenizer().decode(prompt_ids()[0], skip_special_tokens=True)
    whole = tokenizer().decode([*prompt_ids()[0].tolist(), *tokens], skip_special_tokens=True)
    return whole[len(before) :]


def small(config: PrivateConfig = PLAIN, name: str = "small") -> Served:
    return Served(name, SessionPool(patch(plain_model(), config), 1), tokenizer())


def bundled(config: PrivateConfig) -> Served:
    """All of the demo model."""
    whole = OPTForCausalLM.from_pretrained(BUNDLED).float().eval()
    return Served("demo", SessionPool(patch(whole, config), 1), tokenizer())


@dataclass(frozen=True)
class Gateway:
    url: str
    app: FastAPI
    models: dict[str, Served]
    server: Server

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
        yield Gateway(chosen.url, app, known, server)
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        for served in models:
            served.pool.close()
        assert not thread.is_alive()


def watch_crowd(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, most: int) -> list[int]:
    """How many calls of a function were inside it when each came: each waits a moment for one more than `most`."""
    inside: list[int] = []
    seen: list[int] = []
    more, real = threading.Event(), getattr(holder, name)

    def call(*args: Any) -> Any:
        inside.append(1)
        seen.append(len(inside))
        if len(inside) > most:
            more.set()
        more.wait(0.2)
        inside.pop()
        return real(*args)

    monkeypatch.setattr(holder, name, call)
    return seen
