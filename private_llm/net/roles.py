"""What endpoints are called where people read it.

Links know numbers ("party 3", as in `hosts`). Under `dealer` endpoint 0 computes nothing on data and is "the dealer";
a node of token sharding is called by what it does, with its number: "AttnNode (0, 2) (party 4)".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from private_llm.config import PrivateConfig
from private_llm.errors import PrivateLLMError

_NODE = r"(?:CompNode \d+|AttnNode \(\d+, \d+\))"
WHO = rf"the dealer|party \d+|{_NODE} \(party \d+\)"
"""Pattern of the names that `named` gives."""
_PLAIN = re.compile(rf"{_NODE} \(party \d+\)|\bparty (\d+)\b")


def named(config: PrivateConfig, text: str) -> str:
    """`text` as users of this protocol should read it; what is named already stays as it is."""
    return _PLAIN.sub(lambda found: found[0] if found[1] is None else called(config, int(found[1])), text)


def called(config: PrivateConfig, endpoint: int) -> str:
    """How one endpoint besides the client is called."""
    if config.protocol == "dealer" and endpoint == 0:
        return "the dealer"
    if config.plan is not None:
        node = endpoint - (config.endpoints - config.plan.nodes)
        if 0 <= node < config.plan.nodes:
            return f"{config.plan.describe(node)} (party {endpoint})"
    return f"party {endpoint}"


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
