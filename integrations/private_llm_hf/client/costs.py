"""What a call or a whole generation cost: bytes by link, rounds, multiply-adds, by module and by operation; seconds."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from private_llm.net.ledger import Cost, Ledger, merge, size
from private_llm.net.roles import endpoint_name
from private_llm_hf.wire.answers import CostRows

Name = TypeVar("Name", str, tuple[str, str])
Grouping = Callable[[str, str], Name]  # a name for a scope and an operation
Total = TypeVar("Total", int, float)

_SHOWN = 12  # lines of a printed part; what is not among the dearest goes into one line


@dataclass(frozen=True)
class PartCost:
    """What a module, or all modules of one kind, cost.

    bytes_total: over all links. bytes_sent: by the endpoint that sent most. rounds: of the party that waited most.
    seconds: of the slowest party from start to end, waiting included, modules within this one not; of parallel sessions
    the slowest. Times say nothing of values and differ from run to run, so costs that are equal may differ in them.
    """

    bytes_total: int
    bytes_sent: int
    rounds: int
    seconds: float = field(compare=False)

    @property
    def gbit_per_s(self) -> float:
        """What the endpoint that sent most sent in these seconds, in 10^9 bits a second."""
        return self.bytes_sent * 8e-9 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, repr=False)
class Costs:
    """The ledgers of all endpoints of a session; prints as a summary, what costs most first."""

    ledgers: tuple[Ledger, ...]
    helpers: tuple[Ledger, ...] = ()
    """Those of them whose parties work in preprocessing only."""
    kinds: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Class of each module."""

    @classmethod
    def from_rows(cls, rows: list[CostRows], helper: int | None = None) -> "Costs":
        """Rebuild ledgers from their rows; row number `helper` is of the party that works in preprocessing only."""
        ledgers = []
        for row in rows:
            ledger = Ledger(row.party)
            for scope, op, to, n in row.sent:
                ledger.sent[(scope, op, to)] += n
            for scope, op, n in row.rounds:
                ledger.rounds[(scope, op)] += n
            for scope, n in row.macs:
                ledger.macs[scope] += n
            for scope, seconds in row.spent:
                ledger.spent[scope] += seconds
            ledger.seconds.update(row.seconds)
            ledgers.append(ledger)
        return cls(tuple(ledgers), () if helper is None else (ledgers[helper],))

    @property
    def cost(self) -> Cost:
        """Bytes by link and the rounds of the party that waited most."""
        return merge(list(self.ledgers))

    @property
    def preprocessing(self) -> Cost:
        """What the helping party (or the dealer) sent: it depends on shapes alone and may be sent ahead; no rounds."""
        return Cost(merge(list(self.helpers)).sent)

    @property
    def online(self) -> Cost:
        """Everything that needs the data."""
        helped = {id(ledger) for ledger in self.helpers}
        return Cost(merge([ledger for ledger in self.ledgers if id(ledger) not in helped]).sent, self.rounds)

    @property
    def bytes_total(self) -> int:
        """Bytes over all links, the client's included."""
        return self.cost.total

    @property
    def rounds(self) -> int:
        """Online rounds, one after the other."""
        return self.cost.rounds

    def by_module(self) -> dict[str, tuple[int, int]]:
        """(bytes, rounds) per module; "" holds what belongs to none (inputs, opening)."""
        return self.sums(lambda scope, op: scope)

    def by_op(self) -> dict[str, tuple[int, int]]:
        """(bytes, rounds) per operation."""
        return self.sums(lambda scope, op: op)

    def modules(self) -> dict[str, PartCost]:
        """Every module's bytes, rounds and seconds; "" holds what belongs to none (inputs, opening).

        After `model.preprocess` the helping party's seconds are those of the phase before.
        """
        return self._parts(lambda scope, op: scope)

    def layer_kinds(self) -> dict[str, PartCost]:
        """The same for all modules of one class together, what took longest first."""
        # siblings that are one product (`q_proj+k_proj`) are of one class
        parts = self._parts(lambda scope, op: self.kinds.get(scope.partition("+")[0], scope or layer_of(scope)))
        return dict(sorted(parts.items(), key=lambda part: part[1].seconds, reverse=True))

    def sums(self, group: "Grouping[Name]") -> dict[Name, tuple[int, int]]:
        """(bytes, rounds) by the names that `group` gives modules and operations."""
        parts = self._parts(group, timed=False)
        return {name: (part.bytes_total, part.rounds) for name, part in parts.items()}

    def _parts(self, group: "Grouping[Name]", timed: bool = True) -> dict[Name, PartCost]:
        """By the names that `group` gives scopes and operations. timed: with what took time alone, too."""
        sent, rounds, seconds = [], [], []  # of each ledger by name
        for ledger in self.ledgers:
            sent.append(_added((group(scope, op), n) for (scope, op, _), n in ledger.sent.items()))
            rounds.append(_added((group(scope, op), n) for (scope, op), n in ledger.rounds.items()))
            seconds.append(_added((group(scope, ""), s) for scope, s in ledger.spent.items()) if timed else {})
        parties: dict[int, list[dict[Name, int]]] = {}
        for ledger, each in zip(self.ledgers, sent, strict=True):
            parties.setdefault(ledger.party, []).append(each)
        return {
            name: PartCost(
                sum(each.get(name, 0) for each in sent),
                max(sum(each.get(name, 0) for each in own) for own in parties.values()),
                max(each.get(name, 0) for each in rounds), max(each.get(name, 0.0) for each in seconds),
            )
            for name in sorted(set[Name]().union(*sent, *rounds, *seconds))
        }  # fmt: skip

    def __repr__(self) -> str:
        ahead = self.preprocessing.total
        apart = f" ({size(ahead)} of it preprocessing)" if ahead else ""
        return f"{size(self.bytes_total)} over all links{apart}, {self.rounds} rounds"

    def __str__(self) -> str:
        links = {f"{endpoint_name(a)} to {endpoint_name(b)}": (n, 0) for (a, b), n in self.cost.sent.items() if n}
        layers: dict[str, tuple[int, int]] = {}
        for name, (sent, rounds) in self.by_module().items():
            before = layers.get(layer_of(name), (0, 0))
            layers[layer_of(name)] = (before[0] + sent, before[1] + rounds)
        parts = (("link", links), ("layer", layers), ("operation", self.by_op()))
        told = [line for title, rows in parts for line in _lines(title, rows)]
        kinds = {name: part for name, part in list(self.layer_kinds().items())[:_SHOWN] if part.seconds}
        width = max(map(len, kinds), default=0)
        told += ["by kind, slowest party"] if kinds else []
        told += [
            f"  {name:<{width}} {part.seconds:>9.3f} s {size(part.bytes_total):>11} {part.gbit_per_s:>7.3f} Gbit/s"
            for name, part in kinds.items()
        ]
        return "\n".join([repr(self), *told])

    def to_dict(self) -> dict[str, Any]:
        """For JSON output."""
        per_party: dict[str, int] = {}
        for ledger in self.ledgers:
            name = "client" if ledger.party == 255 else str(ledger.party)
            per_party[name] = per_party.get(name, 0) + ledger.cost().total
        return {
            "bytes_total": self.bytes_total, "bytes_preprocessing": self.preprocessing.total,
            "bytes_online": self.online.total, "bytes_per_party": per_party, "rounds": self.rounds,
        }  # fmt: skip


def _added(pairs: Iterable[tuple[Name, Total]]) -> dict[Name, Total]:
    found: dict[Name, Total] = {}
    for name, count in pairs:
        found[name] = found.get(name, 0) + count
    return found


def layer_of(scope: str) -> str:
    """`model.layers.3.mlp.up_proj` belongs to `model.layers.3`; what has no number keeps its name."""
    found = re.match(r"(.*?\.\d+)(\.|$)", scope)
    return found[1] if found else scope or "input and output"


def _lines(title: str, rows: dict[str, tuple[int, int]]) -> list[str]:
    ranked = sorted(rows.items(), key=lambda row: row[1], reverse=True)
    shown, rest = ranked[:_SHOWN], [row for _, row in ranked[_SHOWN:]]
    if rest:
        shown.append((f"{len(rest)} more", (sum(sent for sent, _ in rest), sum(rounds for _, rounds in rest))))
    width = max((len(name) for name, _ in shown), default=0)
    rounds = [f"{count:>9} rounds" if count else "" for _, (_, count) in shown]
    told = [
        f"  {n:<{width}} {size(sent):>11}{count}".rstrip() for (n, (sent, _)), count in zip(shown, rounds, strict=True)
    ]
    return [f"by {title}", *told] if told else []
