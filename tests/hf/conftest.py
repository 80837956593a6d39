"""Common to all tests of the HuggingFace integration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from private_llm_hf import PrivateConfig
from transformers.utils import logging

from tests.hf import tiny


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Transformers' notes and progress bars off; one thread, as the machine has few cores."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PLAIN = PrivateConfig(protocol="plain", insecure=True, timeout_s=60)
TRIO = PrivateConfig(protocol="trio", timeout_s=60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in a folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny.build("llama").save_pretrained(folder)
    return folder
