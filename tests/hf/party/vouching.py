"""A party 0 of quad that vouches for whatever others did, and keeps quiet about what it was told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from private_llm_hf.party.agreement import Told, Transcript
from private_llm_hf.wire.commands import recv_message, send_message

from private_llm.net.transport import Transport
from private_llm.protocols.quad import records


def vouch(patch: pytest.MonkeyPatch) -> None:
    """Party 0 finds all records equal, and states and compares nothing."""
    compare = Transcript.compare

    def silent(self: Transcript, links: Transport, parties: Iterable[int], facts: Mapping[str, str]) -> None:
        others = [party for party in parties if party]
        if links.me:
            compare(self, links, parties, facts)
            return
        for other in others:
            send_message(links, other, Told({}))
        for other in others:
            recv_message(links, other, (Told,))

    patch.setattr(Transcript, "compare", silent)
    patch.setattr(records, "same", lambda theirs, mine: True)
