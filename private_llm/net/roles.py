"""What endpoint 0 is called where people read it: under `dealer` it computes nothing on data and is "the dealer"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from private_llm.config import PrivateConfig
from private_llm.errors import PrivateLLMError


def named(config: PrivateConfig, text: str) -> str:
    """`text` as users of this protocol should read it."""
    return re.sub(r"\bparty 0\b", "the dealer", text) if config.protocol == "dealer" else text


@contextmanager
def named_errors(config: PrivateConfig) -> Iterator[None]:
    """Let the library's errors leave with the names that users know."""
    try:
        yield
    except PrivateLLMError as error:
        text = named(config, str(error))
        if text == str(error):
            raise
        raise type(error)(text) from None
