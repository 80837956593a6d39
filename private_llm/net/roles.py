"""What endpoints and users are called where people read it, and in certificates.

Links know numbers ("party 3", as in `hosts`). A protocol's dealer, endpoint 0, computes nothing on data and is "the
dealer"; a node of token sharding is called by what it does, with its number: "AttnNode (0, 2) (party 4)".

A client's common name is `client` (anybody with that certificate) or `client:NAME`. A party with a list admits only
names that are on it; the list's file is read anew at every handshake, so that removing a name keeps its user out from
then on (a session that runs is not ended).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PrivateLLMError, TransportError
from private_llm.protocol_facts import CLIENT

_NODE = r"(?:CompNode \d+|AttnNode \(\d+, \d+\))"
WHO = rf"the dealer|party \d+|{_NODE} \(party \d+\)"  # pattern of the names that `named` gives
PASSES_ON = " passes on: "  # between the name of an endpoint and what it claims that another one said
HEARSAY = rf"(?:(?:{WHO}|the client){PASSES_ON})*"  # pattern of those through whom a reason came
_NAMES = re.compile(rf"{WHO}|the client|\bparty \d+\b")
_PLAIN = re.compile(rf"{_NODE} \(party \d+\)|\bparty (\d+)\b")


def named(config: PrivateConfig, text: str) -> str:
    """`text` as users of this protocol should read it; what is named already stays as it is."""
    return _PLAIN.sub(lambda found: found[0] if found[1] is None else called(config, int(found[1])), text)


def attributed(endpoint: int, reason: str) -> str:
    """The reason of `endpoint` for an end; what it says of another is marked as passed on, since none speaks for it."""
    if endpoint == CLIENT:
        own, name = "the client ", "the client"
    else:
        dealer = "|the dealer" if endpoint == 0 else ""
        own, name = rf"(?:party {endpoint}{dealer}|{_NODE} \(party {endpoint}\)): ", f"party {endpoint}"
    if re.match(own, reason) or not _NAMES.search(reason):
        return reason
    return f"{name}{PASSES_ON}{reason}"


def legible(text: str) -> str:
    """`text` from another endpoint as it may be printed: one line, without control characters and lone surrogates."""
    return "".join(c if c.isprintable() else " " for c in text)


def endpoint_name(endpoint: int) -> str:
    """How links call an endpoint."""
    return "the client" if endpoint == CLIENT else f"party {endpoint}"


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


_CLIENT = "client"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,56}")
"""With `client:` in front it fits the 64 characters of a common name."""


def check_user(name: str) -> str:
    """The name, or ConfigError if it can be none."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"user: got {name!r}; want 1 to 57 of the characters A-Z a-z 0-9 . _ @ -, no sign first")
    return name


def client_name(user: str | None) -> str:
    """The common name in the certificate of a user, or of all who share one (None)."""
    return _CLIENT if user is None else f"{_CLIENT}:{user}"


def is_client(common_name: str) -> bool:
    """Whether a common name belongs to a client."""
    word, colon, user = common_name.partition(":")
    return word == _CLIENT and (not colon or _NAME.fullmatch(user) is not None)


def common_name(endpoint: int) -> str:
    """The common name in an endpoint's certificate (of clients: the one without a user's name)."""
    return client_name(None) if endpoint == CLIENT else f"party{endpoint}"


class Users:
    """The users that a party admits."""

    def __init__(self, listed: str) -> None:
        """listed: path of a file (with a slash in it), a name a line, `#` begins a comment; or names with commas."""
        self._file = Path(listed) if "/" in listed else None
        self._names = frozenset(part.strip() for part in listed.split(","))

    def verify(self) -> None:
        """Raise ConfigError if the list cannot be read now, or holds something that is no name."""
        for name in self._admitted():
            check_user(name)

    def check(self, common_name: str) -> None:
        """Raise TransportError unless the client with this certificate may come in now."""
        word, _, user = common_name.partition(":")
        try:
            admitted = self._admitted()
        except ConfigError:
            raise TransportError("this party cannot read its list of users, so nobody is admitted for now") from None
        if not user:
            raise TransportError(f"the certificate {word!r} names no user, and this party admits users by name")
        if user not in admitted:
            raise TransportError(f"user {user!r} is not on this party's list; ask who runs it")

    def _admitted(self) -> frozenset[str]:
        if self._file is None:
            return self._names
        try:
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"allow: no list of users can be read at {self._file} ({type(error).__name__})") from None
        return frozenset(filter(None, (line.partition("#")[0].strip() for line in text.splitlines())))
