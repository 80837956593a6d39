from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from private_llm_hf.api import share_checkpoint

from private_llm.config import PrivateConfig
from tests.gateway.small_gateway import Gateway, plain_model, serving, small, tokenizer


@pytest.fixture(scope="package")
def gateway() -> Iterator[Gateway]:
    with serving(small()) as made:
        yield made


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with gateway.client() as made:
        yield made


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    plain_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    share_checkpoint(str(folder / "model"), folder / "shares", PrivateConfig())
    return folder / "shares"
