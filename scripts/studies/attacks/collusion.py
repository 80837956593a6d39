"""All attacks of one set of nodes, each feeding the others, until nothing new is found; and what they cost at most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from attacks.partial_results import search_results
from attacks.row_matching import ALIKE, Attacked, flat, match_rows, one
from attacks.row_space import read_from_front, read_results
from attacks.sparse_totals import read_totals
from attacks.view import ALL, View, result_shards, visible
from attacks.vocab_matching import Progress, match_states, unknown_between
from private_llm.token_sharding import AttentionCall, ShardingPlan

ATTACKS = ("rows", "results", "algebra", "totals", "states")
"""rows: tokens from layer-0 rows (AttnNodes). results: Theorem 6.2. algebra: `row_space`. totals: `sparse_totals`.
states: vocab-matching."""


@dataclass
class Loot:
    """Tokens by position, how each was got ("known", "held" or the attack's name), and candidates by attack."""

    tokens: dict[int, int] = field(default_factory=dict)
    how: dict[int, str] = field(default_factory=dict)
    candidates: dict[str, int] = field(default_factory=dict)

    def add(self, tokens: Mapping[int, int], how: str, tried: int = 0) -> None:
        """Note what one attack found; what is known already stays."""
        for position, token in tokens.items():
            if position not in self.tokens:
                self.tokens[position], self.how[position] = token, how
        if tried:
            self.candidates[how] = self.candidates.get(how, 0) + tried

    def text(self, length: int, blank: int) -> list[int]:
        """The text as far as it is known, `blank` elsewhere."""
        return [self.tokens.get(position, blank) for position in range(length)]


def collude(
    seen: Sequence[tuple[View, Attacked]], vocabulary: Tensor, budget: int, attacks: Sequence[str] = ATTACKS,
    known: Mapping[int, int] | None = None, progress: Progress | None = None,
) -> Loot:  # fmt: skip
    """What nodes learn from their views of some layers, each with the model cut at that layer.

    vocabulary: ids that are tried. budget: candidates for each gap of a search at most. known: tokens that everybody
    knows (a beginning-of-text token, a chat template).
    """
    loot = Loot()
    loot.add(known or {}, "known")
    first = [(view, model) for view, model in seen if view.layer == 0]
    deeper = [(view, model) for view, model in seen if view.layer]
    for view, model in first:
        loot.add(view.tokens, "held")
        if "rows" in attacks:
            unread = {p: row for p, row in view.rows.items() if p not in loot.tokens}
            loot.add(match_rows(unread, model, vocabulary), "rows", len(unread) * len(vocabulary))
            if progress is not None:
                progress(len(unread) * len(vocabulary))
    while True:
        before = len(loot.tokens)
        for view, model in first:
            if "results" in attacks:
                loot.add(*_named(search_results(view, model, loot.tokens, vocabulary, budget, progress), "results"))
            if "algebra" in attacks:
                loot.add(*_named(read_results(view, model, loot.tokens, vocabulary, progress), "algebra"))
            if "totals" in attacks and ALL in view.shards:
                loot.add(*_named(read_totals(view, model, loot.tokens, vocabulary, progress=progress), "totals"))
        for view, model in deeper:
            _walk(loot, view, model, vocabulary, budget, attacks, bool(first), progress)
        if len(loot.tokens) == before:
            return loot


def _named(found: tuple[dict[int, int], int], how: str) -> tuple[dict[int, int], str, int]:
    tokens, tried = found
    return tokens, how, tried


def _walk(
    loot: Loot, view: View, model: Attacked, vocabulary: Tensor, budget: int, attacks: Sequence[str], opened: bool,
    progress: Progress | None,
) -> None:  # fmt: skip
    """From the front of the text: rows of this layer, and, where layer 0 was not seen, its results."""
    if "states" in attacks:
        got = match_states(
            {p: one(row) for p, row in view.rows.items()}, lambda text, tails: flat(model.rows(text, tails)),
            vocabulary, budget, loot.tokens, ALIKE, progress,
        )  # fmt: skip
        loot.add(dict(enumerate(got.tokens)), "states", got.candidates)
    if "algebra" in attacks and not opened:
        front: list[int] = []
        while len(front) in loot.tokens:
            front.append(loot.tokens[len(front)])
        more, tried = read_from_front(view, model, front, vocabulary, progress)
        loot.add({len(front) + i: token for i, token in enumerate(more)}, "algebra", tried)


def bounds(
    plan: ShardingPlan, nodes: Sequence[int], call: AttentionCall, length: int, vocabulary: int, layer: int,
    known: Sequence[int] = (),
) -> dict[str, list[int]]:  # fmt: skip
    """Candidates that each attack needs, one number for each gap or token, before anything is known of the text.

    layer: the first that the nodes see (0, or the split). Numbers beyond a budget are gaps that stop that attack.
    """
    comps = [node for node in nodes if node < plan.alpha]
    own = sorted({p for node in comps for p in plan.rows_of_comp(node, 0, length)})
    held = sorted({p for node in nodes for p in plan.held(node, length)})
    given = set(known) | (set(held) if layer == 0 else set())
    made: dict[str, list[int]] = {"states": [vocabulary**n for n in unknown_between(held, sorted(given)) if n]}
    if layer:
        made["algebra"] = [vocabulary] * sum(1 for p in range(own[-1] if own else 0) if p not in given)
        return made
    made["rows"] = [vocabulary] * len(set(held) - set(own) - set(known))
    made["results"], made["algebra"] = [], []
    for shard in result_shards(plan):
        keys = list(range(length)) if shard == ALL else plan.rows_of_shard(shard, 0, length)
        opened = set(given)
        for row in own:
            unknown = [p for p in visible(call, keys, row) if p not in opened]
            if unknown:
                made["results"].append(vocabulary ** len(unknown))
                made["algebra"] += [vocabulary] * len(unknown)
                opened.update(unknown)
    made["totals"] = list(made["algebra"]) if plan.masked else []
    return made
