"""What a plan protects: which tokens a set of nodes gains, by which attack and at what cost, and a verdict.

Costs are candidates V^g over a vocabulary of V tokens; rho is the smallest g that is out of an attacker's reach.
The repository has the attacks (attacks/collusion.py), and tests compare what they gain with what is said here.

1. Held tokens are known outright at layer 0 (an AttnNode tries V candidates each); after a split they count as unknown.
2. Rows of deeper layers (Cascade, section 4 and 6.2): from the front of the text, the next held position at which g
   tokens up to it are unknown costs V^g. Without a causal mask a row depends on the whole text.
3. Attention results that CompNodes receive. Open ones (partials="open") speak of one query shard each: V^g for g
   unknown tokens of it (Theorem 6.2), and V for each token by linear algebra as soon as there are g rows. Masked ones
   speak of all tokens at once: n rows with u unknown tokens before them are V^(u - n + 1) (at least V): a subset of
   that many tokens can be tested against the space that the rows span. With grouped queries a row counts
   several times. AttnNodes get no results.
4. Beyond searches: whatever the gaps, a node that tries works out other tokens by linear algebra (open results,
   attacks/row_space), sparse recovery (masked ones at layer 0, attacks/sparse_totals) or, after a split, by how likely
   a candidate makes what was received (attacks/likelihood). No plan prevents it: it is said beside the verdict.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from private_llm.errors import ConfigError, WeakProtection
from private_llm.token_sharding.plans import ShardingPlan

PERIODS = 4  # periods of delta positions that are examined; the pattern repeats from the second on

LONGEST = 1 << 12  # positions examined at most: a plan with longer periods shows in any text what it shows here

SETS = 1500  # pairs of nodes that `fewest` tries


@dataclass(frozen=True)
class Setting:
    """What nodes are up against.

    split: the first layers run under secret sharing. causal: whether a token sees earlier ones only. length: of the
    text (None: several periods of the plan). known: positions at its front that everybody knows (a
    beginning-of-text token, a chat template) or that are padding. queries: heads of the model that share a key head
    (grouped queries): each of them makes a row one more equation. Raises ConfigError for numbers that no text has.
    """

    split: bool = False
    causal: bool = True
    length: int | None = None
    known: int = 0
    queries: int = 1

    def __post_init__(self) -> None:
        if self.length is not None and (self.length < 1 or self.known > self.length):
            raise ConfigError(f"length: got {self.length}; want at least 1 and the {self.known} known positions")
        if self.known < 0:
            raise ConfigError(f"known prefix: got {self.known} positions; want 0 or more")
        if self.queries < 1:
            raise ConfigError(f"queries: got {self.queries} for each key head; want 1 or more")


@dataclass(frozen=True)
class Finding:
    """One set of nodes against a text of `length` tokens: `held` of them are its own, `gained` what it finds besides.

    opened: tokens of its own positions that it finds, V candidates each (after a split, where they are not told it).
    Gaps: the smallest search that gains another's token, as an exponent of V, from rows (hidden_gap) and from attention
    results (attention_gap); None: there is none. algebra: open results let it read tokens with V candidates each.
    """

    nodes: str
    length: int
    held: int
    opened: int
    gained: int
    hidden_gap: int | None
    attention_gap: int | None
    algebra: bool

    def broken(self, rho: int) -> bool:
        """Whether an attacker of fewer than V^rho candidates gains tokens, or holds them all anyway."""
        gaps = [gap for gap in (self.hidden_gap, self.attention_gap) if gap is not None]
        return self.held == self.length or (bool(gaps) and min(gaps) < rho)


@dataclass(frozen=True)
class Audit:
    """All findings; `str()` is the report."""

    plan: ShardingPlan
    rho: int
    setting: Setting
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether no examined set gains tokens within V^(rho - 1); see `notes` for what that leaves out."""
        return not any(finding.broken(self.rho) for finding in self.findings)

    @property
    def notes(self) -> list[str]:
        """What a verdict on searches does not say."""
        made = [] if self.setting.split else ["tokens that a node holds are known to it"]
        made.append(beyond_searches(self.plan, self.setting))
        if self.plan.masked and self.setting.queries == 1:
            made.append("rows count once, as in models without grouped queries; else give the queries of a key head")
        if not self.setting.causal and self.setting.length is None:
            made.append("without a causal mask a shard's tokens are those of the whole text: give the length")
        return made

    def __str__(self) -> str:
        plan, setting = self.plan, self.setting
        facts = ["after a split"] * setting.split + ["no causal mask"] * (not setting.causal)
        facts += [f"{setting.known} positions known"] * bool(setting.known)
        lines = [
            f"plan alpha={plan.alpha}, c={plan.c}, m={plan.m}, {plan.partials} results, front={plan.front} "
            f"(delta={plan.delta}, {plan.nodes} nodes) against an attacker of fewer than V^{self.rho} candidates, "
            f"{self.findings[0].length} positions" + "".join(f", {fact}" for fact in facts)
        ]
        lines += [
            f"  {_described(finding, setting)}{': BROKEN' * finding.broken(self.rho)}" for finding in self.findings
        ]
        verdict = "sound" if self.sound else "WEAK"
        lines.append(f"verdict: {verdict} against searches of fewer than V^{self.rho} candidates")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _described(finding: Finding, setting: Setting) -> str:
    verb, opened = "holds", ""
    if setting.split:
        verb, opened = "sees rows of", f" and finds {finding.opened} of these, V candidates each"
    return (
        f"{finding.nodes}: {verb} {finding.held} of {finding.length} tokens{opened}; cheapest gain from hidden states "
        f"{_power(finding.hidden_gap)}, from attention results {_power(finding.attention_gap)}"
        + ", by linear algebra V a token" * finding.algebra
        + f" (gains {finding.gained})" * bool(finding.gained)
    )


def audit(
    plan: ShardingPlan, rho: int | None = None, colluding: Sequence[int] | None = None, setting: Setting | None = None
) -> Audit:
    """Examine every node alone, or one set of colluding nodes (endpoint numbers).

    Single nodes are listed by kind, with the worst that one can do. Raises ConfigError for a node that is not there.
    """
    rho = plan.rho if rho is None else rho
    setting = setting or Setting()
    if colluding is not None:
        wrong = [node for node in colluding if not 0 <= node < plan.nodes]
        if wrong or not colluding:
            raise ConfigError(f"colluding: got {list(colluding)}; want endpoints from 0 to {plan.nodes - 1}")
        name = " + ".join(plan.describe(node) for node in colluding)
        return Audit(plan, rho, setting, (examine(plan, colluding, name, rho, setting),))
    kinds = {"CompNode": range(plan.alpha), "AttnNode": range(plan.alpha, plan.nodes)}
    findings = (
        _worst(f"any one {kind} of {len(nodes)}", [examine(plan, [node], kind, rho, setting) for node in nodes])
        for kind, nodes in kinds.items()
    )
    return Audit(plan, rho, setting, tuple(findings))


def _worst(name: str, findings: Sequence[Finding]) -> Finding:
    """The most tokens held and gained and the cheapest gains among nodes of one kind."""
    hidden = [finding.hidden_gap for finding in findings if finding.hidden_gap is not None]
    attention = [finding.attention_gap for finding in findings if finding.attention_gap is not None]
    most = max(f.held for f in findings), max(f.opened for f in findings), max(f.gained for f in findings)
    return Finding(
        name, findings[0].length, *most,
        min(hidden, default=None), min(attention, default=None), any(f.algebra for f in findings),
    )  # fmt: skip


def refuse_weak(plan: ShardingPlan, setting: Setting | None = None) -> None:
    """Raise ConfigError for a plan whose audit fails, unless its user accepts that."""
    if plan.accept_weak_plan:
        return
    found = audit(plan, setting=setting)
    if not found.sound:
        front = _sound_front(plan, setting)
        longer = "" if front is None else f"pass front={front}, which is enough, or "
        raise ConfigError(
            f"this plan gives tokens away:\n{found}\n{longer}raise c / m and alpha c (delta - c and c / m must reach "
            "rho; with grouped queries alpha must exceed their number by 2 and more), or pass accept_weak_plan=True"
        )


def _sound_front(plan: ShardingPlan, setting: Setting | None) -> int | None:
    """A longer first cluster with which a masked plan is sound, in steps of c; None if none of 16 steps is."""
    longer = (dataclasses.replace(plan, front=(plan.front or 0) + step * plan.c) for step in range(1, 17))
    return next((p.front for p in longer if plan.masked and audit(p, setting=setting).sound), None)


def beyond_searches(plan: ShardingPlan, setting: Setting) -> str:
    """What a node that tries gets although every search is too long."""
    if setting.split and not setting.causal:
        return "beyond searches: a CompNode can rank other tokens by the likelihood of what it receives"
    if setting.split:
        how = "the likelihood of what it receives" if plan.masked else "linear algebra on what it receives"
        return f"beyond searches: from the front of the text a CompNode can work out other tokens by {how}"
    how = "sparse recovery from its attention" if plan.masked else "linear algebra on partial attention results"
    return f"beyond searches: a CompNode can work out other tokens at layer 0 by {how}"


def warn_weak(plan: ShardingPlan, setting: Setting | None = None) -> None:
    """Warn (WeakProtection) of attacks beyond searches, unless the plan's user has accepted weakness."""
    if not plan.accept_weak_plan:
        said = beyond_searches(plan, setting or Setting())
        warnings.warn(
            f"token sharding protects from nodes that do not attack; {said}. Use 'trio', 'quad' or 'dealer' if a node "
            "may be curious; accept_weak_plan=True silences this",
            WeakProtection,
            stacklevel=2,
        )


def fewest(plan: ShardingPlan, rho: int | None = None, setting: Setting | None = None) -> list[int]:
    """A smallest set of nodes found that gains tokens or holds all of them: one node, a pair, or nodes for all shards.

    Single nodes are all tried, of pairs the first `SETS`; after that, nodes that together hold every shard.
    """
    rho = plan.rho if rho is None else rho
    setting = setting or Setting()
    pairs = itertools.islice(itertools.combinations(range(plan.nodes), 2), SETS)
    for nodes in itertools.chain(((node,) for node in range(plan.nodes)), pairs):
        if examine(plan, nodes, "", rho, setting).broken(rho):
            return list(nodes)
    if plan.m >= 2:
        return list(range(plan.alpha))
    return [plan.attn_endpoint(shard, min(shard + 1, plan.beta - 1)) for shard in range(0, plan.beta, 2)]


# -- one set of nodes ----------------------------------------------------------------------------------------------
def examine(plan: ShardingPlan, nodes: Sequence[int], name: str, rho: int, setting: Setting) -> Finding:
    """What one set of nodes holds and gains: the cheapest step by rows and by results, and all steps below rho."""
    length = min(PERIODS * plan.delta, LONGEST) if setting.length is None else setting.length
    held = {p for node in nodes for p in plan.held(node, length)}
    own = sorted({p for node in nodes if node < plan.alpha for p in plan.rows_of_comp(node, 0, length)})
    given = set(range(setting.known)) | (set() if setting.split else held)
    known = set(given)
    cheapest: dict[str, int | None] = {"hidden": None, "attention": None}
    algebra = False
    while True:
        steps = {
            "hidden": list(_row_steps(sorted(held), known, length, setting)),
            "attention": list(_result_steps(plan, nodes, held, own, known, length, setting)),
        }
        for kind, found in steps.items():
            gaining = [(gap, solved) for gap, unknown, solved in found if not unknown <= held]
            before = cheapest[kind]
            cheapest[kind] = min([*(gap for gap, _ in gaining), *([] if before is None else [before])], default=None)
            algebra = algebra or any(solved for _, solved in gaining)
        won = set().union(*(unknown for found in steps.values() for gap, unknown, _ in found if gap < rho))
        if not won:
            new = known - given
            counts = len(held), len(new & held), len(new - held)
            return Finding(name, length, *counts, cheapest["hidden"], cheapest["attention"], algebra)
        known |= won


_SearchStep = tuple[int, frozenset[int], bool]  # a search: exponent of V, positions won, by linear algebra as well?


def _row_steps(held: Sequence[int], known: set[int], length: int, setting: Setting) -> Iterator[_SearchStep]:
    """From the front, the first held position up to which something is unknown."""
    if not setting.causal:
        everything = frozenset(range(length)) - known
        if held and everything:
            yield len(everything), everything, False
        return
    for position in held:
        unknown = frozenset(p for p in range(position + 1) if p not in known)
        if unknown:
            yield len(unknown), unknown, False
            return


def _result_steps(
    plan: ShardingPlan, nodes: Sequence[int], held: set[int], own: Sequence[int], known: set[int], length: int,
    setting: Setting,
) -> Iterator[_SearchStep]:  # fmt: skip
    """Searches of attention results; after a split only what the text before decides can be tried."""
    if setting.split and not setting.causal:
        return
    if plan.masked:
        foreign = [p for p in range(length) if p not in known and p not in held]
        for comps, shards in _sums(plan, nodes):
            summed = [p for p in foreign if plan.shard_of(p) in shards]
            rows = [row for row in own if plan.shard_of(row) in comps]
            rows = [row for row in rows if not setting.causal or (summed and summed[0] < row)]
            for count, row in enumerate(rows, 1):
                unknown = frozenset(p for p in summed if p < row or not setting.causal)
                if unknown:
                    yield max(1, len(unknown) - count * setting.queries + 1), unknown, False
        return
    yield from _open(plan, own, known, length, setting)


def _sums(plan: ShardingPlan, nodes: Sequence[int]) -> Iterator[tuple[set[int], set[int]]]:
    """What masked results are sums of: (shards of the rows, shards of the keys), for CompNodes among `nodes`.

    All shards; and, with two or more AttnNodes of a row's own shard among the colluding ones, each section of the
    ring of masks between them (token_sharding.nodes.floats).
    """
    mine = {shard for shard in range(plan.beta) if plan.owner(shard) in nodes}
    yield mine, set(range(plan.beta))
    for shard in sorted(mine):
        colluding = [other for other in range(plan.beta) if plan.attn_endpoint(shard, other) in nodes]
        for place, begin in enumerate(colluding if len(colluding) > 1 else []):
            steps = (colluding[(place + 1) % len(colluding)] - begin) % plan.beta
            if steps > 1:
                yield {shard}, {(begin + step) % plan.beta for step in range(1, steps)}


def _open(
    plan: ShardingPlan, own: Sequence[int], known: set[int], length: int, setting: Setting
) -> Iterator[_SearchStep]:
    """By shard, the first unknown tokens that a row of `own` speaks of; solved if as many rows speak of just these."""
    front = next((p for p in range(length) if p not in known), length)
    for shard in range(plan.beta):
        keys = [p for p in plan.rows_of_shard(shard, 0, length) if p not in known]
        counts: dict[int, int] = {}
        for row in own:
            seen = sum(1 for p in keys if p <= row) if setting.causal else len(keys)
            counts[seen] = counts.get(seen, 0) + 1
        for seen in sorted(counts):
            unknown = keys[:seen]
            if not unknown:
                continue
            if not setting.split or (unknown[0] == front and unknown[-1] - front == len(unknown) - 1):
                yield len(unknown), frozenset(unknown), counts[seen] * setting.queries >= len(unknown)
            break


def _power(gap: int | None) -> str:
    return "none" if gap is None else f"V^{gap}"
