"""How a gateway listens and what it allows."""

import ipaddress
import re
import socket
from dataclasses import dataclass, field

from private_llm.errors import ConfigError

_NAME, _VISIBLE = re.compile(r"[\w.-]+|\[?[0-9a-fA-F:.]*:[0-9a-fA-F:.]+\]?"), re.compile(r"[!-~]+")


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of one gateway. Raises ConfigError for those out of range or unsafe.

    host, port: where it listens. token: what clients send as `Authorization: Bearer` (None: nothing, which only
    loopback addresses allow). allowed_hosts: names by which clients may call it, besides `host` (on loopback:
    localhost); at another address than loopback any name will do if none is given, since a token is wanted there.
    max_waiting: requests that may wait for a session, beyond which 429 is answered after `retry_after_s`. wait_s: how
    long one waits. max_body: bytes of a request; body_s: seconds in which they must arrive. max_choices: answers to one
    request (`n` times prompts). rows: texts that run side by side on one session, as the parties allow. connections:
    open at a time, idle ones included.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    max_waiting: int = 16
    retry_after_s: int = 5
    wait_s: float = 600.0
    max_body: int = 4 << 20
    body_s: float = 30.0
    max_choices: int = 64
    rows: int = 32
    connections: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port: got {self.port}; want 0 (any that is free) to 65535")
        if self.token is None and not self.loopback:
            raise ConfigError(
                f"token: got none for host {self.host!r}, which others can reach; want a token, or host 127.0.0.1"
            )
        for name in self.allowed_hosts:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"allowed_hosts: got {name!r}; want a name or an address alone, as my.site")
        if self.token is not None and (len(self.token) < 8 or not _VISIBLE.fullmatch(self.token)):
            raise ConfigError("token: want at least 8 ASCII characters without spaces")
        for name in ("retry_after_s", "wait_s", "max_body", "body_s", "max_choices", "rows", "connections"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}; want a positive number")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting: got {self.max_waiting}; want 0 or more")

    @property
    def loopback(self) -> bool:
        """Whether only programs of this machine can connect."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(settings: GatewaySettings) -> socket.socket:
    """A socket that listens where `settings` say. Raises ConfigError if another program does, or for a wrong name."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((settings.host, settings.port))
        made.listen(settings.connections)
    except OSError as error:
        made.close()
        if isinstance(error, socket.gaierror):
            raise ConfigError(f"host: got {settings.host!r}; want an address of this machine, as 127.0.0.1") from None
        raise ConfigError(
            f"port: cannot listen at {settings.host}:{settings.port} ({error.strerror}); another gateway may run "
            "there: stop it, or give another --port"
        ) from None
    return made
