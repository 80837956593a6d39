"""Running a party until it is told to stop: service, operator port, logs, certificates, signals.

SIGTERM or SIGINT: no session begins any more, those that run may end (`drain_s`), exit code 0. A second signal ends the
process at once, with 128 and its number, as shells say. A crash leaves no core dump, which would hold shares.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from private_llm_hf.service.settings import Observer, ServiceSettings

from private_llm.config import VERSION, PrivateConfig
from private_llm_hosting.check import ExpiryWatch
from private_llm_hosting.logs import LOGGER, configure_logs
from private_llm_hosting.observers import LogObserver, Observers, PartyMetrics
from private_llm_hosting.operator_port import OperatorPort
from private_llm_hosting.settings import HostingSettings

if TYPE_CHECKING:
    from private_llm_hf.service.party_service import PartyService

_LOG = logging.getLogger(LOGGER)
_TICK_S = 0.5


MakeService = Callable[[PrivateConfig, int, ServiceSettings, Observer], "PartyService"]


def run_party(settings: HostingSettings, make: MakeService) -> None:
    """Be a party until a signal comes or the service ends. Call it in the main thread.

    Raises ConfigError for an operator port that is taken, and what `make` and the service raise.
    """
    configure_logs(f"party{settings.party}", settings.log_format, settings.log_level)
    _forbid_core_dumps()
    metrics = PartyMetrics(settings.party, settings.config.protocol, settings.service.models)
    with contextlib.ExitStack() as stack:
        stops = stack.enter_context(_Stops())
        _LOG.info("version %s starts", VERSION, extra={"event": "start"})
        state = _State(metrics)
        if settings.operator is not None:
            port = OperatorPort(settings.operator, state.why_not_ready, metrics.text)
            stack.callback(port.close)
        if settings.config.tls is not None:
            stack.callback(ExpiryWatch(settings.config.tls, metrics).close)
        state.service = make(settings.config, settings.party, settings.service, Observers(metrics, LogObserver()))
        stops.service = state.service
        _serve(state.service)
    _LOG.info("stopped", extra={"event": "stop"})


def _forbid_core_dumps() -> None:
    try:
        import resource
    except ImportError:  # not POSIX: no such limit
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _State:
    """What the operator port tells of readiness."""

    def __init__(self, metrics: PartyMetrics) -> None:
        self._metrics = metrics
        self.service: PartyService | None = None

    def why_not_ready(self) -> str | None:
        """None when sessions may begin."""
        if self._metrics.is_draining:
            return "draining"
        if self.service is None or not self.service.ready:
            return "loading models" if self._metrics.links_are_up else self._metrics.awaits or "starting"
        return None if self._metrics.links_are_up else "the links to the other parties are down"


class _Stops:
    """Handlers of the signals that stop a party, put back afterwards."""

    def __init__(self) -> None:
        self.service: PartyService | None = None
        self._asked = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> _Stops:
        for each in (signal.SIGTERM, signal.SIGINT):
            self._before[each] = signal.signal(each, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._asked or self.service is None:
            _LOG.warning("%s: ending at once", name, extra={"event": "stop"})
            logging.shutdown()
            os._exit(128 + number)
        self._asked = True
        _LOG.info("%s: draining; a second signal ends at once", name, extra={"event": "signal"})
        self.service.drain()


def _serve(service: PartyService) -> None:
    """Run the service in a thread, so that this one, where signals arrive, holds none of its locks."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            service.run()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            raised.append(error)

    thread = threading.Thread(target=run, name="service", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_TICK_S)
    if raised:
        raise raised[0]
