"""Logs for operators: one line per event, with UTC time, party, session and user; never a secret.

What others chose (names, reasons) is made legible, cut and, as text, quoted, so that nobody can forge a line or a
field. Of an exception the log keeps class and places in the code; its words only if the library wrote them.
"""

import json
import logging
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, TextIO

from private_llm.errors import PrivateLLMError
from private_llm.net.roles import legible

LOGGER = "private_llm"
FIELDS = ("event", "session", "user", "reason", "seconds", "model", "requests", "rows", "tokens", "suppressed")
"""What a record may carry besides its message (`extra=`)."""
_LONGEST = {"user": 80, "session": 12}
_LONG = 500
_FRAMES = 12
_CAUSES = 4
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@:/+-")


def shortened(text: str, most: int = _LONG) -> str:
    """Others' words as they may stand in a log: one line, printable, at most `most` characters."""
    text = legible(text[: 2 * most])
    return text if len(text) <= most else f"{text[: most - 3]}..."


class LogFormatter(logging.Formatter):
    """One line a record: a JSON object, or time, level and party, then name=value, the message at the end."""

    def __init__(self, party: str, as_json: bool) -> None:
        super().__init__()
        self._party, self._as_json = party, as_json

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """Everything that is told of a record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        found: dict[str, object] = {"time": time, "level": record.levelname.lower(), "party": self._party}
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                found[name] = (
                    value if isinstance(value, (int, float)) else shortened(str(value), _LONGEST.get(name, _LONG))
                )
        found["message"] = shortened(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            found["error"] = " <- ".join(_told(record.exc_info[1]))
        return found

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        found = self.fields(record)
        if self._as_json:
            return json.dumps(found)
        head = f"{found.pop('time')} {str(found.pop('level')).upper():<7} {found.pop('party')}"
        message = found.pop("message")
        return " ".join([head, *(f"{name}={_quoted(value)}" for name, value in found.items()), f"-- {message}"])


def configure_logs(
    party: str, log_format: Literal["text", "json"], level: str, stream: TextIO | None = None
) -> logging.Handler:
    """Send what the library logs, and Python's warnings, to `stream` (default: stderr). Returns the handler."""
    handler = _LogHandler(stream or sys.stderr)
    handler.setFormatter(LogFormatter(party, log_format == "json"))
    logging.captureWarnings(True)
    for name in (LOGGER, "py.warnings"):
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        logger.handlers[:] = [handler]
        logger.propagate = False
    return handler


class _LogHandler(logging.StreamHandler[TextIO]):
    """A stream that may be gone: that does not end the party."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Nothing: a line is lost."""


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and set(text) <= _BARE else json.dumps(text)


def _told(error: BaseException) -> Iterator[str]:
    """An exception and its causes: class, places, and the words of errors of this library."""
    seen: BaseException | None = error
    for _ in range(_CAUSES):
        if seen is None:
            return
        words = f": {shortened(str(seen))}" if isinstance(seen, PrivateLLMError) else ""
        frames = traceback.extract_tb(seen.__traceback__)[-_FRAMES:]
        places = " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames)
        yield f"{type(seen).__name__}{words} [{places}]"
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
