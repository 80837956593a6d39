"""Users by name: what a client's certificate says, and the list of those that a party lets in.

A client's common name is `client` (anybody with that certificate) or `client:NAME`. A party with a list admits only
names that are on it; the list's file is read anew at every handshake, so that removing a name keeps its user out from
then on (a session that runs is not ended).
"""

from __future__ import annotations

import re
from pathlib import Path

from private_llm.errors import ConfigError, TransportError
from private_llm.net.transport import CLIENT

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
