"""A file that lists the groups of parties a gateway uses: one group a line, its hosts joined by commas.

It is read again when it changes: sessions spread over new groups, and leave those that are not listed any more, each as
soon as it serves no request.
"""

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

from private_llm_hf.client.party_groups import Hosts, PartyGroups

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.addresses import addresses_of
from private_llm.net.transport import CLIENT
from private_llm_gateway.pool import SessionPool

_LOG = logging.getLogger("private_llm")
_LOOK_S = 2.0


class GroupFile:
    """The groups in `path`, of parties as `config` describes. Raises ConfigError for none, or hosts that cannot be."""

    def __init__(self, path: Path, config: PrivateConfig) -> None:
        self._path, self._config = path, config
        self._text, self._told = self._read(), ""
        self.groups = PartyGroups(self._listed())
        if config.hosts not in self.groups.groups:
            raise ConfigError(f"groups: {path} does not list the group of --hosts; want all groups there")

    def follow(self, pool: SessionPool) -> None:
        """Keep the sessions of a pool where the file says, from a thread of its own, as long as this process runs."""
        threading.Thread(target=self._follow, args=(pool,), name="groups", daemon=True).start()

    def _follow(self, pool: SessionPool) -> None:
        while True:
            time.sleep(_LOOK_S)
            for step in (self._look, self.groups.call_again, pool.regroup):
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - this thread goes on
                    if str(error) != self._told:
                        _LOG.warning("%s; the gateway goes on with the groups it knows", error)
                    self._told = str(error)

    def _look(self) -> None:
        text = self._read()
        if text == self._text:
            return
        self._text = text
        listed = self._listed()
        self.groups.change(listed)
        _LOG.warning("groups of parties: %s", "; ".join(map(",".join, listed)))

    def _read(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"groups: cannot read {self._path} ({error}); want a text file") from None

    def _listed(self) -> list[Hosts]:
        lines = (line.partition("#")[0].strip() for line in self._text.splitlines())
        listed = [tuple(host.strip() for host in line.split(",")) for line in lines if line]
        for hosts in listed:
            if len(hosts) != len(self._config.hosts) or any(" " in host for host in hosts):
                want = f"{len(self._config.hosts)} hosts, joined by commas"
                raise ConfigError(f"groups: {self._path} has the line {','.join(hosts)!r}; want {want}")
            addresses_of(replace(self._config, hosts=hosts), CLIENT, hosts, b"")
        return listed
