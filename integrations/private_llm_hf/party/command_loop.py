"""What every endpoint that serves a client does: answer its commands, say that it is alive, pass on why it stops."""

import logging
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from private_llm.config import PrivateConfig
from private_llm.errors import PrivateLLMError, TransportError
from private_llm.net.ledger import Ledger
from private_llm.net.roles import HEARSAY, WHO, named
from private_llm.net.transport import CLIENT, Transport
from private_llm_hf.wire.answers import Alive, CostRows
from private_llm_hf.wire.codec import M
from private_llm_hf.wire.commands import MOST_BYTES, Stop, TellCosts, recv_message, send_message

_LOG = logging.getLogger("private_llm")
_REPORTED = re.compile(rf"{HEARSAY}(?:(?:{WHO}): \w+: |the client stopped)")


def serve_commands(
    transport: Transport, kinds: tuple[type[M], ...], obey: Callable[[M], None], heartbeat: "Heartbeat",
    most: int = MOST_BYTES,
) -> None:  # fmt: skip
    """Obey such commands, of `most` bytes, until the client stops. Raises what ended it otherwise, TransportError."""
    while True:
        transport.wait(CLIENT)
        command: M | Stop = recv_message(transport, CLIENT, (*kinds, Stop), most)
        if isinstance(command, Stop):
            return
        heartbeat.start()
        with torch.no_grad():
            obey(command)


def tell_costs(transport: Transport, ledger: Ledger, command: TellCosts) -> None:
    """Answer what was sent."""
    send_message(transport, CLIENT, CostRows.of(ledger))
    if command.reset:
        ledger.reset()


class Heartbeat:
    """Tells the client "still computing" while a long call makes progress, so that silence means a dead party."""

    def __init__(self, transport: Transport, every_s: float) -> None:
        self._transport, self._every = transport, every_s
        self._last = time.monotonic()

    def start(self) -> None:
        """A call begins."""
        self._last = time.monotonic()

    def watch(self, model: nn.Module) -> None:
        """Beat whenever a module starts and the last beat is long ago."""
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, inputs: self.beat())

    def beat(self) -> None:
        """There is progress: say so if the last time is long ago."""
        now = time.monotonic()
        if now - self._last > self._every:
            self._last = now
            send_message(self._transport, CLIENT, Alive())


def reported(config: PrivateConfig, number: int, transport: Transport, serve: Callable[[], None]) -> str | None:
    """Run `serve` as endpoint `number`. Returns None, or why it failed, which all others were told."""
    who = f"party {number}"
    try:
        serve()
    except PrivateLLMError as error:
        reason = f"{who}: {type(error).__name__}: {error}"
        if isinstance(error, TransportError) and _REPORTED.match(str(error)):
            reason = str(error)  # another endpoint's reason, passed on unchanged
    except Exception as error:  # noqa: BLE001 - the end of a session: whatever its client caused ends it, nothing else
        # The others wait for this endpoint, so they must learn that it stops. An unforeseen error's text might hold
        # values, so only its kind and place travel; the text stays in this endpoint's own log.
        _LOG.exception("%s stops", named(config, who))
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{who}: {type(error).__name__}: in {Path(where.filename).name}, line {where.lineno}"
    else:
        return None
    reason = named(config, reason)
    transport.abort(reason)
    return reason
