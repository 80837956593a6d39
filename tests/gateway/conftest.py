from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.gateway.small_gateway import Gateway, serving, small


@pytest.fixture(scope="package")
def gateway() -> Iterator[Gateway]:
    with serving(small()) as made:
        yield made


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with gateway.client() as made:
        yield made
