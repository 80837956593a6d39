"""Every error a caller can act upon; one class per thing the caller can do about it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches


class PrivateLLMError(Exception):
    """Base of all errors raised by this library."""


class ConfigError(PrivateLLMError, ValueError):
    """A setting is unknown, out of range or contradicts another: correct the configuration."""


class PlaintextLeak(PrivateLLMError):
    """An operation would have moved a secret out of its sharing: keep it shared, or reveal it on purpose."""


class UnsupportedOp(PrivateLLMError, NotImplementedError):
    """No private rule exists for an operation: the message names it and the place to add one."""


class PatchMismatch(PrivateLLMError):
    """A model holds modules or parameters that no rule matches: the message lists them."""


class DomainError(PrivateLLMError, ValueError):
    """A value, shape or dtype lies outside what the ring or the model can represent."""


class TransportError(PrivateLLMError, ConnectionError):
    """A link to another party failed, timed out or delivered a malformed frame."""


class PartyFailed(TransportError):
    """Another party stopped or stalled: its name and the reason are in the message; restart the session."""


class PartiesBusy(TransportError):
    """The parties serve another client: try again later, or wait longer for them (`busy_wait_s`)."""


class ProtocolAbort(PrivateLLMError):
    """A consistency check between parties failed: nothing of this session may be trusted."""


class ShareFileError(PrivateLLMError, ValueError):
    """A share file is damaged, or belongs to another party, model, session or version."""


class CorrectionsUsedUp(PrivateLLMError):
    """Stored corrections do not reach for a call: the message says how many are left and how to make more."""


class LowPrecision(UserWarning):
    """Few digits are kept, of very small values or of weights: answers may differ from the plaintext model's."""


class TightRange(UserWarning):
    """Values come near to what the ring can hold; beyond it, answers are garbage."""


class NeedsDistillation(UserWarning):
    """A model will be run with functions that it was not trained with, and that are far from its own."""


class WeakProtection(UserWarning):
    """A sharding plan is used whose nodes, if they try, can work out tokens that they are not given."""


class UntestedVersion(UserWarning):
    """A library is newer than the newest one that this release was tested with: what it changed may not be known."""


def listed(names: Sequence[str], most: int = 20, between: str = ", ") -> str:
    """The first of some names, and how many more there are."""
    return between.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def meant(typed: Iterable[str], known: Iterable[str]) -> str:
    """ " (did you mean ...?)" with the names that are most like what was typed; "" if none is."""
    names = list(known)
    near = sorted({each for one in typed for each in get_close_matches(one, names, 2)})
    return f" (did you mean {', '.join(near)}?)" if near else ""


def refuse_unknown(found: Iterable[str], known: Iterable[str], where: str = "") -> None:
    """Raise ConfigError for settings that do not exist. where: what they are settings of, as "plan: "."""
    names = sorted(known)
    unknown = sorted(set(map(str, found)) - set(names))
    if unknown:
        raise ConfigError(
            f"{where}unknown key(s) {', '.join(unknown)}{meant(unknown, names)}; known keys: {', '.join(names)}"
        )


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if what is inside fails or is interrupted."""
    try:
        yield
    except BaseException:
        undo()
        raise
