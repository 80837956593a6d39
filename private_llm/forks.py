"""Which process made something: what one process drew, a fork of it must never use again.

A fork copies keys, counters of streams and open connections. A parent and a child that both use them mask two prompts
alike, and whoever sees both messages learns the difference of the prompts. So keys, streams, stores of masks,
connections and sessions remember the process that made them; in a fork they raise, and closing them ends nothing.
"""

import os

from private_llm.errors import ProtocolAbort


class _Process:
    """forks: how many times this process was copied on its way from the first one."""

    forks = 0

    def copied(self) -> None:
        self.forks += 1


process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=process.copied)


class Origin:
    """The process that made this object. forks: those before it, for a quick comparison with `process.forks`."""

    __slots__ = ("forks",)

    def __init__(self) -> None:
        self.forks = process.forks

    @property
    def here(self) -> bool:
        """Whether this is the process that made it, not a fork of that one."""
        return self.forks == process.forks

    def demand(self, what: str) -> None:
        """Raises ProtocolAbort in a fork of the process that made `what`."""
        if self.forks != process.forks:
            raise forked(what)


def forked(what: str) -> ProtocolAbort:
    """The error of a fork that wants to use what its parent uses."""
    return ProtocolAbort(
        f"{what} was made before this process was forked: its parent draws the same masks, and masks must never "
        "repeat; open the model in the process that uses it (model.reconnect() or model.open_session() do that where "
        "the parties outlive a session). The parent's session goes on"
    )
