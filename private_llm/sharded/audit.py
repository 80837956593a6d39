"""What a plan protects against vocab-matching: gaps, cost bounds and a verdict, for one node or a colluding set.

Three attacks, all on causal models, all counted in candidates V^g over a vocabulary of V tokens (rho: the smallest g
that is out of reach):

1. Hidden states (Cascade, section 4 and 6.2). From the rows that a set of nodes holds, tokens are recovered from the
   front: reaching the next known row at distance g costs V^g. The first g >= rho ends it. Tokens that lie in the
   gaps before that are lost besides those the nodes hold.
2. Layer 0, attention results (Theorem 6.2). For each foreign query shard k a CompNode receives partial attention of its
   rows; between two of its rows it depends on the g unknown tokens of shard k in between: V^g candidates, shard by
   shard. Every such g must be 0 or at least rho.
3. Tokens that the nodes hold are known outright at layer 0: no plan hides them (use MPC for the first layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from private_llm.errors import ConfigError
from private_llm.sharding import ShardingPlan

PERIODS = 4
"""Periods of delta positions that are examined; the pattern repeats from the second on."""


@dataclass(frozen=True)
class Finding:
    """One set of nodes: the smallest search that gains it a token, as an exponent of V (None: no search does)."""

    nodes: str
    held: int
    hidden_gap: int | None
    attention_gap: int | None

    def broken(self, rho: int) -> bool:
        """Whether an attacker of fewer than V^rho candidates gains tokens."""
        gaps = [gap for gap in (self.hidden_gap, self.attention_gap) if gap is not None]
        return bool(gaps) and min(gaps) < rho


@dataclass(frozen=True)
class Audit:
    """All findings; `str()` is the report."""

    plan: ShardingPlan
    rho: int
    length: int
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether no examined set gains tokens within V^(rho - 1)."""
        return not any(finding.broken(self.rho) for finding in self.findings)

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"plan alpha={plan.alpha}, c={plan.c}, m={plan.m} (delta={plan.delta}, {plan.nodes} nodes) against an "
            f"attacker of fewer than V^{self.rho} candidates, {self.length} positions"
        ]
        lines += [
            f"  {f.nodes}: holds {f.held} tokens; cheapest gain from hidden states {_power(f.hidden_gap)}, from "
            f"attention results {_power(f.attention_gap)}{': BROKEN' if f.broken(self.rho) else ''}"
            for f in self.findings
        ]
        verdict = "sound" if self.sound else "WEAK"
        return "\n".join([*lines, f"verdict: {verdict} (statistical, not cryptographic; held tokens are known)"])


def audit(plan: ShardingPlan, rho: int | None = None, colluding: Sequence[int] | None = None) -> Audit:
    """Examine every node alone, or one set of colluding nodes (endpoint numbers), as if all text were unknown to them.

    Single nodes are listed by kind, with the worst that one of them can do. Raises ConfigError for a node that the
    plan does not have.
    """
    rho = plan.rho if rho is None else rho
    length = PERIODS * plan.delta
    if colluding is not None:
        wrong = [node for node in colluding if not 0 <= node < plan.nodes]
        if wrong or not colluding:
            raise ConfigError(f"colluding: got {list(colluding)}; want endpoints from 0 to {plan.nodes - 1}")
        name = " + ".join(plan.describe(node) for node in colluding)
        return Audit(plan, rho, length, (_examine(plan, list(colluding), name, rho, length),))
    kinds = {"CompNode": range(plan.alpha), "AttnNode": range(plan.alpha, plan.nodes)}
    findings = (
        _worst(f"any one {kind} of {len(nodes)}", [_examine(plan, [node], kind, rho, length) for node in nodes])
        for kind, nodes in kinds.items()
    )
    return Audit(plan, rho, length, tuple(findings))


def _worst(name: str, findings: Sequence[Finding]) -> Finding:
    """The most tokens held and the cheapest gains among nodes of one kind."""
    hidden = [finding.hidden_gap for finding in findings if finding.hidden_gap is not None]
    attention = [finding.attention_gap for finding in findings if finding.attention_gap is not None]
    held = max(finding.held for finding in findings)
    return Finding(name, held, min(hidden, default=None), min(attention, default=None))


def refuse_weak(plan: ShardingPlan) -> None:
    """Raise ConfigError for a plan whose audit fails, unless its user accepts that."""
    found = audit(plan)
    if not found.sound and not plan.accept_weak_plan:
        raise ConfigError(
            f"this plan gives tokens away:\n{found}\nraise c / m and alpha c (delta - c and c / m must reach rho), or "
            "pass accept_weak_plan=True"
        )


def _examine(plan: ShardingPlan, nodes: list[int], name: str, rho: int, length: int) -> Finding:
    held = sorted(set().union(*(plan.held(node, length) for node in nodes)))
    rows = sorted(set().union(*(plan.held(node, length) for node in nodes if node < plan.alpha)))
    return Finding(name, len(held), _hidden_gap(held, rho), _attention_gap(plan, rows, frozenset(held)))


def _hidden_gap(held: Sequence[int], rho: int) -> int | None:
    """The cheapest gap that wins a token before the first gap of rho or more ends the attack; else that one."""
    known = -1
    gained: list[int] = []
    for position in held:
        gap = position - known
        if gap >= rho:
            return min(gained, default=gap)
        if gap > 1:
            gained.append(gap)
        known = position
    return min(gained, default=None)


def _attention_gap(plan: ShardingPlan, rows: Sequence[int], known: frozenset[int]) -> int | None:
    """The fewest unknown tokens of one shard between two rows of the CompNodes (or before their first)."""
    fewest = None
    before = -1
    for row in rows:
        counts: dict[int, int] = {}
        for position in range(before + 1, row):
            if position not in known:
                shard = plan.shard_of(position)
                counts[shard] = counts.get(shard, 0) + 1
        fewest = min([*counts.values(), *([] if fewest is None else [fewest])], default=None)
        before = row
    return fewest


def _power(gap: int | None) -> str:
    return "none" if gap is None else f"V^{gap}"
