"""What a session's calls cost: of batches that served others too, its part of the bytes by its rows, and all rounds."""

from __future__ import annotations

from private_llm.net.ledger import CONTROL, Ledger


class SessionCosts:
    """The account of one session at one party, as a ledger."""

    def __init__(self, party: int) -> None:
        self.ledger = Ledger(party)

    def add(self, of_pass: Ledger, rows: int, total: int) -> None:
        """Book a batch in which this session had `rows` of `total` rows; bytes are rounded to whole ones."""
        mine = self.ledger
        for key, count in of_pass.sent.items():
            if key[1] != CONTROL:
                mine.sent[key] += round(count * rows / total)
        for where, count in of_pass.rounds.items():
            mine.rounds[where] += count
        for scope, count in of_pass.macs.items():
            mine.macs[scope] += round(count * rows / total)
        for scope, seconds in of_pass.spent.items():
            mine.spent[scope] += seconds
