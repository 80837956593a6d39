"""Running a party until it is told to stop: service, operator port, logs, certificates, signals.

SIGTERM or SIGINT: no session begins any more, those that run may end (`drain_s`), exit code 0. A second signal ends the
process at once, with 128 and its number, as shells say. A crash leaves no core dump, which would hold shares.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType
from typing import TYPE_CHECKING, Any

from private_llm_hf.service.settings import Observer, ServiceSettings
from prometheus_client import CONTENT_TYPE_LATEST

from private_llm.config import VERSION, PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.addresses import Address
from private_llm_hosting.logs import LOGGER, configure_logs
from private_llm_hosting.observers import ExpiryWatch, LogObserver, Observers, PartyMetrics
from private_llm_hosting.settings import PartySettings

if TYPE_CHECKING:
    from private_llm_hf.service.party_service import PartyService
    from private_llm_hf.service.product_service import ProductService

_LOG = logging.getLogger(LOGGER)
_TICK_S = 0.5


MakeService = Callable[[PrivateConfig, int, ServiceSettings, Observer], "PartyService | ProductService"]


def run_service(settings: PartySettings, make: MakeService) -> None:
    """Serve several clients, in the main thread, until a signal or the service's end. Raises ConfigError for an
    operator port that is taken and settings without a service, and what `make` and the service raise.
    """
    if settings.service is None:
        raise ConfigError("clients: got 1; want more for a service")
    configure_logs(f"party{settings.party}", settings.log_format, settings.log_level)
    _forbid_core_dumps()
    metrics = PartyMetrics(settings.party, settings.config.protocol, settings.service.models)
    with contextlib.ExitStack() as stack:
        stops = stack.enter_context(_Stops())
        _LOG.info("version %s starts", VERSION, extra={"event": "start"})
        if settings.operator is not None:
            port = OperatorPort(settings.operator, lambda: why_not_ready(metrics, stops.service), metrics.text)
            stack.callback(port.close)
        if settings.config.tls is not None:
            stack.callback(ExpiryWatch(settings.config.tls, metrics).close)
        stops.service = make(settings.config, settings.party, settings.service, Observers(metrics, LogObserver()))
        _serve(stops.service)
    _LOG.info("stopped", extra={"event": "stop"})


def _forbid_core_dumps() -> None:
    try:
        import resource
    except ImportError:  # not POSIX: no such limit
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def why_not_ready(metrics: PartyMetrics, service: PartyService | ProductService | None) -> str | None:
    """What the operator port tells of readiness: None when sessions may begin."""
    if metrics.is_draining:
        return "draining"
    if service is None or not service.ready:
        return "loading models" if metrics.links_are_up else metrics.awaits or "starting"
    return None if metrics.links_are_up else "the links to the other parties are down"


class _Stops:
    """Handlers of the signals that stop a party, put back afterwards."""

    def __init__(self) -> None:
        self.service: PartyService | ProductService | None = None
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


def _serve(service: PartyService | ProductService) -> None:
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


# -- the operator port: whether the party lives, whether it is ready, and its figures, over plain HTTP --------------
#    GET /live     200 while the process answers
#    GET /ready    200 when sessions may begin, else 503 with the reason in a line
#    GET /metrics  figures for Prometheus
# There is no authentication and nothing but public facts: keep it on loopback or on a network of operators.
_TIMEOUT_S = 5.0  # seconds that a caller may take for its request
_CALLERS = 16  # callers at a time; one more is turned away
_TEXT = "text/plain; charset=utf-8"

HttpAnswer = tuple[HTTPStatus, str, bytes]


class OperatorPort:
    """Answers at an address, in threads of its own, until it is closed. Raises ConfigError if the port is taken."""

    def __init__(self, address: Address, why_not_ready: Callable[[], str | None], metrics: Callable[[], bytes]) -> None:
        """why_not_ready: None when sessions may begin. metrics: the figures as text."""

        def answer(path: str) -> HttpAnswer:
            if path == "/live":
                return HTTPStatus.OK, _TEXT, b"live\n"
            if path == "/ready":
                reason = why_not_ready()
                status = HTTPStatus.OK if reason is None else HTTPStatus.SERVICE_UNAVAILABLE
                return status, _TEXT, f"{reason or 'ready'}\n".encode()
            if path == "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, metrics()
            return HTTPStatus.NOT_FOUND, _TEXT, b"want /live, /ready or /metrics\n"

        try:
            self._server = _PortServer(address, answer)
        except OSError as error:
            raise ConfigError(
                f"operator.address: cannot listen at {address[0]}:{address[1]} ({error.strerror}); "
                "choose a free port, such as PRIVATE_LLM_PARTY__OPERATOR__ADDRESS=127.0.0.1:9101"
            ) from None
        self.address: Address = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="operator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _PortServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, address: Address, answer: Callable[[str], HttpAnswer]) -> None:
        self.answer, self._places = answer, threading.BoundedSemaphore(_CALLERS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _PortHandler)

    def server_bind(self) -> None:
        """As the base class, but looks up no name of this host, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - of the base class
        """In a thread, if there is a place for one more."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads for the moment
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - of the base class
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - of the base class
        """A caller that went away is nobody's business."""


class _PortHandler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server: _PortServer

    def do_GET(self) -> None:
        status, kind, body = self.server.answer(self.path.partition("?")[0])
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def version_string(self) -> str:
        """What the header Server says: no versions."""
        return "private-llm"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: scrapes would fill the log."""
