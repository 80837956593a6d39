"""Which node sees which tokens: (c, delta)-sharding with m-split query shards (Cascade, sections 6 and 6.4).

Positions are dealt in clusters of c to alpha CompNodes in turn (delta = alpha c), for ever: a position's node never
depends on the length of the text, so that no decode step closes a gap. Each CompNode's clusters are cut into m blocks
of neighbouring positions; block x of CompNode i is query shard j = i m + x, beta = alpha m in all. AttnNode (j, k), j
<= k, holds the queries, keys and values of shards j and k; it stands for (j, k) and (k, j) of the paper.

The paper takes every c-th position into a block; neighbouring positions are stronger at equal cost, because what
a CompNode receives of one foreign block is then about c / m tokens at once (see `audit`).

The first `front` positions of a text belong to the first block beside its own. The attention of a row is a combination
of the tokens before it, so n rows together must have at least n + rho - 1 unknown tokens before them: CompNode 1 has
c + front before its first c rows. (AttnNodes get no attention results; what they could compute is not counted here.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from private_llm.errors import ConfigError, refuse_unknown
from private_llm.typed_settings import check_types, settings_of

if TYPE_CHECKING:
    from private_llm.token_sharding.plans.audit import Audit, Setting


@dataclass(frozen=True)
class ShardingPlan:
    """alpha CompNodes, clusters of c positions, m query shards for each CompNode.

    wire: numbers between the nodes, "float32" or "float16" (half the bytes; results differ by about 1e-3).
    partials: what a CompNode gets of a row's attention: "masked" (the sum over all shards, see
    `token_sharding.nodes.floats`) or "open" (a result for each shard, as in the paper). front: positions at the start
    of a text that count as the first one does; None: block + rho - 1 under masks, 0 without them.
    rho: the vocab-matching threshold: an attacker is taken to search fewer than V^rho candidates, V the vocabulary.
    accept_weak_plan: use the plan although its audit says that fewer suffice.
    Raises ConfigError for numbers or words that make no plan.
    """

    alpha: int = 8
    c: int = 8
    m: int = 2
    rho: int = 3
    accept_weak_plan: bool = False
    wire: Literal["float32", "float16"] = "float32"
    partials: Literal["masked", "open"] = "masked"
    front: int | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "c", "m", "rho"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"plan.{name}: got {value!r}; want a positive integer")
        check_types(self, "plan.", but=("alpha", "c", "m", "rho", "front"))
        if self.c % self.m:
            raise ConfigError(f"plan.m: got {self.m} blocks for clusters of {self.c}; want a divisor of c")
        front = self.front
        if front is None:
            object.__setattr__(self, "front", self.block + self.rho - 1 if self.masked else 0)
        elif not isinstance(front, int) or isinstance(front, bool) or front < 0:
            raise ConfigError(f"plan.front: got {front!r}; want 0 or a positive integer")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ShardingPlan":
        """Build from a mapping (for instance JSON); unknown keys raise ConfigError."""
        refuse_unknown(values, settings_of(cls), "plan: ")
        return cls(**values)

    @property
    def masked(self) -> bool:
        """Whether partial results are masked; the one owner of all rows needs no masks."""
        return self.partials == "masked" and self.beta > 1

    @property
    def delta(self) -> int:
        """Positions from one cluster of a CompNode to its next."""
        return self.alpha * self.c

    @property
    def beta(self) -> int:
        """Query shards."""
        return self.alpha * self.m

    @property
    def block(self) -> int:
        """Neighbouring positions of a query shard."""
        return self.c // self.m

    @property
    def attn_nodes(self) -> int:
        """AttnNodes, symmetric ones merged."""
        return self.beta * (self.beta + 1) // 2

    @property
    def nodes(self) -> int:
        """CompNodes and AttnNodes: endpoints 0 .. alpha - 1, and the rest."""
        return self.alpha + self.attn_nodes

    @property
    def kinds(self) -> str:
        """How many nodes there are of each kind, in words."""
        return f"{self.alpha} CompNodes and {self.attn_nodes} AttnNodes"

    def audit(
        self, rho: int | None = None, colluding: Sequence[int] | None = None, setting: "Setting | None" = None
    ) -> "Audit":
        """What this plan protects against searches, and what else is known: print it. See `plans.audit`."""
        from private_llm.token_sharding.plans.audit import audit  # it examines plans, so it imports this class

        return audit(self, rho, colluding, setting)

    # -- who holds what -------------------------------------------------------------------------------------
    def comp_of(self, position: int) -> int:
        """The CompNode of a position (counted from 0)."""
        return self._counted(position) // self.c % self.alpha

    def shard_of(self, position: int) -> int:
        """The query shard of a position."""
        return self.comp_of(position) * self.m + self._counted(position) % self.c // self.block

    def owner(self, shard: int) -> int:
        """The CompNode that a query shard belongs to."""
        return shard // self.m

    def rows_of_comp(self, comp: int, start: int, stop: int) -> list[int]:
        """Positions of a CompNode in start .. stop - 1, ascending."""
        return self._repeated(comp * self.c, self.c, start, stop)

    def rows_of_shard(self, shard: int, start: int, stop: int) -> list[int]:
        """Positions of a query shard in start .. stop - 1, ascending."""
        return self._repeated(shard * self.block, self.block, start, stop)

    def first_of_shard(self, shard: int) -> int:
        """The first position of a query shard; in a shorter text it has none."""
        return shard * self.block + (self._front if shard else 0)

    @property
    def _front(self) -> int:
        return self.front or 0

    def _counted(self, position: int) -> int:
        """A position's number in the repeated pattern, which begins after the front."""
        return max(position - self._front, 0)

    def _repeated(self, first: int, width: int, start: int, stop: int) -> list[int]:
        """`width` neighbours from `first` on, again every delta, all after the front, within start .. stop - 1."""
        early = list(range(start, min(stop, self._front))) if first == 0 else []
        low, high = self._counted(start), self._counted(stop)
        begin = first + max(0, (low - first) // self.delta) * self.delta
        starts = range(begin, high, self.delta)
        return early + [p + self._front for base in starts for p in range(max(base, low), min(base + width, high))]

    # -- endpoints --------------------------------------------------------------------------------------------
    def attn_endpoint(self, j: int, k: int) -> int:
        """Endpoint number of the AttnNode of shards j and k, in either order."""
        low, high = sorted((j, k))
        return self.alpha + low * self.beta - low * (low - 1) // 2 + high - low

    def attn_shards(self, endpoint: int) -> tuple[int, int]:
        """The shards (j, k), j <= k, of an AttnNode's endpoint. Raises ConfigError for another endpoint."""
        left = endpoint - self.alpha
        for j in range(self.beta):
            if left < self.beta - j:
                return j, j + left
            left -= self.beta - j
        raise ConfigError(f"endpoint: got {endpoint}; want {self.alpha} to {self.nodes - 1} for an AttnNode")

    def describe(self, endpoint: int) -> str:
        """How a node is called in messages."""
        if endpoint < self.alpha:
            return f"CompNode {endpoint}"
        j, k = self.attn_shards(endpoint)
        return f"AttnNode ({j}, {k})"

    def held(self, endpoint: int, length: int) -> frozenset[int]:
        """Positions below `length` whose hidden states, or their projections, a node sees."""
        if endpoint < self.alpha:
            return frozenset(self.rows_of_comp(endpoint, 0, length))
        return frozenset(p for shard in self.attn_shards(endpoint) for p in self.rows_of_shard(shard, 0, length))
