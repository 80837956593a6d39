"""`private-llm audit`: the verdict on a sharding plan before anybody trusts it with a text."""

from __future__ import annotations

import dataclasses

from private_llm.commands.output import CONSOLE, emit_json
from private_llm.sharded.audit import audit as examine
from private_llm.sharding import ShardingPlan


def audit(plan: ShardingPlan, colluding: list[int], as_json: bool) -> None:
    """Print the audit of a plan, or of one set of colluding nodes."""
    found = examine(plan, colluding=colluding or None)
    if as_json:
        emit_json(
            {
                "name": "audit", **dataclasses.asdict(plan), "nodes": plan.nodes, "sound": found.sound,
                "findings": [dataclasses.asdict(finding) for finding in found.findings],
            }
        )  # fmt: skip
        return
    CONSOLE.print(str(found), highlight=False, markup=False)
