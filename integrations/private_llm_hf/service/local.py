"""Party services as processes of this machine, for a gateway or a test that has no hosts.

They protect nobody from this machine's owner. They speak mutual TLS on loopback ports, so that all is as with hosts:
the certificates are made for the occasion, in a folder that only this user may open and that goes with them.
"""

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed, PrivateLLMError, undoing
from private_llm.forks import Origin
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.authority import make_certificates, user_folder
from private_llm.net.children import start_servers
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig
from private_llm_hf.checkpoint.share_files import share_path
from private_llm_hf.service.party_service import PartyService
from private_llm_hf.service.settings import Observer, ServiceSettings

_LOOK_S = 0.05


class LocalParties:
    """All parties of a service. `config`: with which clients on this machine reach them."""

    def __init__(
        self, config: PrivateConfig, models: Mapping[str, str | Path],
        users: Sequence[str] = (), ready_s: float = 900.0, tell: Callable[[str], None] = lambda text: None,
        **limits: Any,  # noqa: ANN401 - ServiceSettings'
    ) -> None:  # fmt: skip
        """models: folders of share files, by name. limits: settings of `ServiceSettings`. users: clients with a
        certificate each (see `config_of`; `config` is the first one's). ready_s: seconds that they may take to load the
        models and link; `tell` hears now and then who still does.

        When it returns, all parties are ready. Raises ConfigError for settings that a service does not have,
        PartyFailed if the parties do not start, or are not ready in time.
        """
        self._folder, self._origin = Path(tempfile.mkdtemp(prefix="private-llm-")), Origin()
        with undoing(self._remove):
            certificates = make_certificates(self._folder / "certs", config.endpoints, users=users)
            listeners = open_listeners(config.endpoints)
            self._remote = config = replace(config, party_mode="remote", hosts=hosts_of(listeners))
            self.config = self.config_of(users[0]) if users else replace(config, tls=certificates[CLIENT])
            ServiceSettings({name: Path(folder) for name, folder in models.items()}, **limits)
            extra = {
                "tls": [asdict(certificates[party]) for party in range(config.endpoints)],
                "models": {name: str(folder) for name, folder in models.items()},
                "limits": limits,
            }
            (self._folder / "state").mkdir()
            extra["state"] = str(self._folder / "state")
            self._stop = start_servers(config, "private_llm_hf.service.local:serve", extra, listeners)
            with undoing(self._stop):
                self._await(config.endpoints, ready_s, tell)

    def _await(self, parties: int, ready_s: float, tell: Callable[[str], None]) -> None:
        """Wait until all are ready. Raises PartyFailed if one cannot start, or they take longer than `ready_s`."""
        began, state = time.monotonic(), self._folder / "state"
        while missing := [party for party in range(parties) if not (state / f"up{party}").exists()]:
            for party in missing:
                if (state / f"failed{party}").exists():
                    raise PartyFailed(f"party {party} did not start: {(state / f'failed{party}').read_text()}")
            passed, names = time.monotonic() - began, ", ".join(f"party {party}" for party in missing)
            if passed >= ready_s:
                raise PartyFailed(f"{names}: not ready within {ready_s:g} s; give a larger model more time (ready_s)")
            tell(f"waiting for {names} (for {passed:.0f} s, {ready_s:g} s at most)")
            time.sleep(_LOOK_S)

    def config_of(self, user: str) -> PrivateConfig:
        """With which one of `users` reaches the parties. Raises ConfigError for a name that no user may have."""
        place = user_folder(self._folder / "certs", user)
        paths = (str(place / name) for name in ("client.pem", "client.key", "ca.pem"))
        return replace(self._remote, tls=TLSConfig(*paths))

    def close(self) -> None:
        """End the parties. Idempotent; nothing in a fork."""
        if self._origin.here:
            self._stop()
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "LocalParties":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    config: PrivateConfig, number: int, listener: socket.socket, tls: list[dict[str, Any]], models: dict[str, str],
    limits: dict[str, Any], state: str,
) -> None:  # fmt: skip
    """Be one of them, until its process ends."""
    values = {**config.to_dict(), "tls": tls[number]}
    try:
        paths = {name: share_path(Path(folder), number) for name, folder in models.items()}
        own, settings = PrivateConfig.from_dict(values), ServiceSettings(paths, **limits)
        observer = Observer()
        observer.links_up = (Path(state) / f"up{number}").touch  # type: ignore[method-assign] # `LocalParties` looks
        service = PartyService(own, number, settings, observer, listener)
    except Exception as error:
        told = Path(state) / f"telling{number}"
        told.write_text(str(error) if isinstance(error, PrivateLLMError) else type(error).__name__)
        told.rename(Path(state) / f"failed{number}")
        raise
    service.run()
