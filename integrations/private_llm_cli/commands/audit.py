"""`private-llm audit`: the verdict on a sharding plan before anybody trusts it with a text."""

from __future__ import annotations

import dataclasses

from private_llm.token_sharding import Setting, ShardingPlan, fewest
from private_llm.token_sharding import audit as examine
from private_llm_cli.commands.output import CONSOLE, emit_json


def audit(plan: ShardingPlan, colluding: list[int], setting: Setting, as_json: bool) -> None:
    """Print the audit of a plan and the fewest nodes that break it, or the audit of one set of colluding nodes."""
    found = examine(plan, colluding=colluding or None, setting=setting)
    breakers = [] if colluding else fewest(plan, setting=setting)
    if as_json:
        emit_json(
            {
                "name": "audit", **dataclasses.asdict(plan), "nodes": plan.nodes,
                "setting": dataclasses.asdict(setting), "sound": found.sound, "notes": found.notes,
                "findings": [dataclasses.asdict(finding) for finding in found.findings],
                "fewest": breakers,
            }
        )  # fmt: skip
        return
    CONSOLE.print(str(found), highlight=False, markup=False)
    if breakers:
        names = " + ".join(plan.describe(node) for node in breakers)
        CONSOLE.print(f"the fewest nodes found that break it: {names}", highlight=False, markup=False)
