"""What endpoints are called where people read it.

Links know numbers ("party 3", as in `hosts`). A protocol's dealer, endpoint 0, computes nothing on data and is "the
dealer"; a node of token sharding is called by what it does, with its number: "AttnNode (0, 2) (party 4)".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from private_llm.config import PrivateConfig
from private_llm.errors import PrivateLLMError
from private_llm.net.transport import CLIENT

_NODE = r"(?:CompNode \d+|AttnNode \(\d+, \d+\))"
WHO = rf"the dealer|party \d+|{_NODE} \(party \d+\)"
"""Pattern of the names that `named` gives."""
PASSES_ON = " passes on: "
"""Between the name of an endpoint and what it claims that another one said."""
HEARSAY = rf"(?:(?:{WHO}|the client){PASSES_ON})*"
"""Pattern of those through whom a reason came."""
_NAMES = re.compile(rf"{WHO}|the client|\bparty \d+\b")
_PLAIN = re.compile(rf"{_NODE} \(party \d+\)|\bparty (\d+)\b")


def named(config: PrivateConfig, text: str) -> str:
    """`text` as users of this protocol should read it; what is named already stays as it is."""
    return _PLAIN.sub(lambda found: found[0] if found[1] is None else called(config, int(found[1])), text)


def attributed(endpoint: int, reason: str) -> str:
    """A reason that `endpoint` gave for the end of a session, as others may read it.

    What it says of itself stays; what names another is marked as passed on, so that nobody can put words into
    another's mouth.
    """
    if endpoint == CLIENT:
        own, name = "the client ", "the client"
    else:
        dealer = "|the dealer" if endpoint == 0 else ""
        own, name = rf"(?:party {endpoint}{dealer}|{_NODE} \(party {endpoint}\)): ", f"party {endpoint}"
    if re.match(own, reason) or not _NAMES.search(reason):
        return reason
    return f"{name}{PASSES_ON}{reason}"


def called(config: PrivateConfig, endpoint: int) -> str:
    """How one endpoint besides the client is called."""
    if config.facts is not None and config.facts.dealer and endpoint == config.helper:
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
