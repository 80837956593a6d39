"""Which entries of a KV cache stay, and which of them a new token attends to: what a policy says, and all parties do.

A policy is a frozen dataclass of public numbers, with up to two declarations that others carry out (the parties on
shares: `kv_cache/evicting.py` and `selecting.py`; a plaintext model: `scripts/long_context`):

    eviction    after a call, entries are ranked by the attention that they got, and the least are dropped
    selection   for one query, clusters of entries are ranked by a likeness to it, and the best are attended to

How many stay is a function of public lengths (`entries`), the same for all rows, heads and layers: the client knows it
without being told, and no shape depends on a secret. Which ones stay is secret. Policies that choose by positions alone
(`SlidingWindow`) declare neither, and answer with public indices instead.

All endpoints must agree upon the settings (`PrivateConfig.agreement`); names are those in `policies.POLICIES`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from private_llm.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor  # settings are read without PyTorch, which takes a second to import


@dataclass(frozen=True, eq=False)
class CacheFacts:
    """What is public of one layer's cache when a policy that chooses by positions is asked.

    layer: its number. position: the number of the next position. positions: those of the entries held, int64
    [B or 1, G or 1, held], ascending. padding: bool [B, position], True where a token counts; None: everywhere.
    """

    layer: int
    position: int
    positions: Tensor
    padding: Tensor | None


@dataclass(frozen=True)
class Eviction:
    """Entries that stay after a call: the `first` and the `recent` newest, and of the others those of most attention.

    Attention is the sum of probabilities over the last queries (`CachePolicy.mass_queries`) and the query heads that
    share a key head; each key head ranks for itself. Entries keep their order. Padding ranks last, and is neither among
    the first nor the newest while tokens are left for these places.

    recent_share: that share of what stays is for the newest entries, if it is more than `recent`.
    pool: an odd number of neighbours over which an entry's attention is averaged before ranking (1: none).
    memory: whose queries count: those of this "call", of all calls "since" entries were last evicted, or "always".
    drop: False keeps every entry in memory and in the computation, under a secret mask: a baseline that saves nothing.
    """

    first: int = 0
    recent: int = 0
    recent_share: float = 0.0
    pool: int = 1
    memory: Literal["call", "since", "always"] = "call"
    drop: bool = True

    def newest(self, kept: int) -> int:
        """How many of `kept` entries are the newest ones, whatever attention they got."""
        return max(self.recent, int(self.recent_share * kept))


@dataclass(frozen=True)
class Level:
    """Clusters of `size` neighbouring entries, of which the share `kept` (above 0, at most 1, rounded up) goes on."""

    size: int
    kept: float


Representative = Literal["extremes", "mean", "heavy", "unit"]


@dataclass(frozen=True)
class Selection:
    """What one query attends to: the `first` entries, the newest ones, and the best clusters of those between.

    Levels go from large clusters to small ones, whose sizes divide each other; at each level the clusters within those
    that are left are ranked by q . representative, summed over the query heads that share a key head. The newest
    entries that fill no cluster of the first level, and at least `recent`, are always attended to. Calls with several
    queries attend to everything. Padding shares no cluster with tokens, and its clusters rank last.

    represent: what stands for a cluster's keys: "extremes", alpha r_max + (1 - alpha) r_min (elementwise largest and
    smallest; MPCache, equation 6); their "mean"; the sum of the `heavy` keys of most attention (InfLLM); or a "unit"
    vector along the sum (for clusters of one key, cosine similarity: LongCache).
    gather: how the chosen entries are brought together on shares, "scores" or "keys" (`kv_cache/selecting.py`).
    """

    levels: tuple[Level, ...]
    represent: Representative = "extremes"
    alpha: float = 0.6
    heavy: int = 4
    first: int = 0
    recent: int = 0
    gather: Literal["auto", "scores", "shuffled-scores", "keys"] = "auto"

    def shape(self, held: int) -> ClusterShape | None:
        """Clusters among `held` entries; None where nothing would be left out."""
        size = self.levels[0].size
        clusters = max(0, held - self.first - self.recent) // size
        there, kept, left = [], [], clusters
        for place, level in enumerate(self.levels):
            there.append(left)
            kept.append(math.ceil(level.kept * left))
            smaller = self.levels[place + 1].size if place + 1 < len(self.levels) else level.size
            left = kept[-1] * (level.size // smaller)
        if not clusters or kept == there:
            return None
        sizes = tuple(level.size for level in self.levels)
        return ClusterShape(self.first, sizes, tuple(there), tuple(kept), held - self.first - clusters * size)


@dataclass(frozen=True)
class ClusterShape:
    """Entries `first`, clusters, `tail`; public. By level: `sizes` of clusters, how many are `there` and `kept`."""

    first: int
    sizes: tuple[int, ...]
    there: tuple[int, ...]
    kept: tuple[int, ...]
    tail: int

    @property
    def clustered(self) -> int:
        """Entries in clusters."""
        return self.there[0] * self.sizes[0]

    @property
    def chosen(self) -> int:
        """Entries of clusters that a query attends to."""
        return self.kept[-1] * self.sizes[-1]


@dataclass(frozen=True)
class LayerSharing:
    """Groups of `layers` layers, after `apart` single ones, use the choices (kept, attended) of their first."""

    layers: int = 1
    apart: int = 0

    def leader(self, number: int, windowed: frozenset[int] = frozenset()) -> int:
        """The layer whose choices layer `number` uses; layers in `windowed` choose nothing, and lead none."""
        first = number if number < self.apart else number - (number - self.apart) % self.layers
        return next((other for other in range(first, number) if other not in windowed), number)


ALONE = LayerSharing()


@dataclass(frozen=True)
class CachePolicy:
    """Decides how many entries stay after a call; see the module's header for what else it may declare."""

    name: ClassVar[str]  # what it is called in JSON and on the command line

    def entries(self, held: int, position: int, queries: int) -> int:
        """How many of `held` entries stay after a call of `queries` new tokens, which `held` and `position` include.

        position: the number of the next position; at the first call, of an empty cache, it is queries. Default: all.
        """
        return held

    @property
    def newest(self) -> int | None:
        """So many newest entries always stay and may be cropped (drafts do); None: all. Policies that evict say it."""
        return None

    def ranked(self, held: int, position: int, queries: int) -> int:
        """As `entries`: how many are not evicted, which may still be held under a secret mask (`Eviction.drop`)."""
        return self.entries(held, position, queries)

    def mass_queries(self, queries: int) -> int:
        """The attention of so many of a call's last `queries` counts; 0, the default: of none."""
        return 0

    @property
    def eviction(self) -> Eviction | None:
        """How entries are ranked that are evicted by secrets; None: none are."""
        return None

    @property
    def selection(self) -> Selection | None:
        """Which entries a single query attends to; None: all that are held."""
        return None

    @property
    def in_secret(self) -> bool:
        """Whether anything is chosen by secrets, which layers with a window of their own cannot follow."""
        return self.eviction is not None or self.selection is not None

    @property
    def sharing(self) -> LayerSharing:
        """Which layers choose for others."""
        return ALONE

    @property
    def merged_heads(self) -> int:
        """So many neighbouring heads attend as one, by the mean of their scores; 1: each for itself."""
        return 1

    def after_prefill(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        """As `after_step`, after the call that filled an empty cache; the same unless a policy says otherwise."""
        return self.after_step(facts, mass)

    def after_step(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        """Without `eviction`: ascending public indices of entries, int64 [kept] or [B or 1, G or 1, kept]; None: all.

        mass: a `SecretTensor` [B, G, held], the attention that entries got from the queries that `mass_queries` asked
        for, in this call; None if it asked for none.
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class BudgetedPolicy(CachePolicy):
    """Keeps a share of the text so far.

    gamma: the share of all positions whose entries stay (above 0; 1 evicts nothing). least, most: never fewer, nor more
    (None: no bound) entries; nothing is evicted of a text no longer than `least`. recent: so many of the newest entries
    always stay; a call of more new tokens (a prompt, a turn of a chat) evicts. every: shorter calls evict once so many
    entries are held beyond the budget (None: never, so the cache grows by one entry a token). first: so many of the
    first entries always stay. Raises ConfigError, also if first and recent leave nothing to choose within `least`.
    """

    gamma: float = 0.5
    least: int = 64
    most: int | None = None
    recent: int = 16
    every: int | None = None
    first: int = 0

    def __post_init__(self) -> None:
        share(self, "gamma")
        whole(self, least=1, recent=0, first=0)
        for key in ("most", "every"):
            if getattr(self, key) is not None:
                whole(self, **{key: 1})
        if self.most is not None and self.most < self.least:
            raise ConfigError(f"kv_cache: most: got {self.most}; want at least {self.least}, the setting `least`")
        if self.first + self.recent >= self.least:
            raise ConfigError(
                f"kv_cache: first and recent: got {self.first} and {self.recent}; want less together than "
                f"least={self.least}, the entries that stay of a short text"
            )

    def budget(self, position: int) -> int:
        """How many entries stay of a text of `position` tokens."""
        wanted = max(self.least, math.ceil(self.gamma * position))
        return wanted if self.most is None else min(wanted, self.most)

    def entries(self, held: int, position: int, queries: int) -> int:
        """The budget after a long call, or once `every` entries are held beyond it; else all."""
        budget = self.budget(position)
        if queries > self.recent:
            return min(held, budget)
        full = self.every is not None and held >= budget + self.every
        return budget if full else held

    @property
    def newest(self) -> int | None:
        """The recent ones; all, if nothing is ever evicted."""
        return None if self.gamma == 1 and self.most is None else self.recent


@dataclass(frozen=True)
class KeepAll(CachePolicy):
    """Nothing is evicted."""

    name = "keep-all"


KEEP_ALL = KeepAll()  # the default


@dataclass(frozen=True)
class NoCache(CachePolicy):
    """Nothing is cached: every token runs the whole text again, as `use_cache=False` does. For comparison."""

    name = "no-cache"

    def entries(self, held: int, position: int, queries: int) -> int:
        """None."""
        return 0

    @property
    def newest(self) -> int:
        """None."""
        return 0


@dataclass(frozen=True)
class SlidingWindow(CachePolicy):
    """The first `first` tokens of each row and the last `recent` positions stay (StreamingLLM: attention sinks).

    Padding on the left does not count as first tokens. Entries keep the positions that they were made at; StreamingLLM
    numbers them anew within the cache, which lets a text outgrow the model's positions; here it cannot. A query sees
    what was held before its call, and its call: a prompt is read whole. Raises ConfigError for recent < 1 or first < 0.
    """

    name = "sliding-window"
    recent: int = 256
    first: int = 4

    def __post_init__(self) -> None:
        whole(self, recent=1, first=0)

    def entries(self, held: int, position: int, queries: int) -> int:
        """At most `first + recent`."""
        return min(held, self.first + self.recent)

    @property
    def newest(self) -> int:
        """The recent ones."""
        return self.recent

    def after_step(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        """Of a row with fewer tokens than fit, the padding before them stays too: all rows are of one length."""
        import torch  # settings do without, and it takes a second to import

        kept = self.first + self.recent
        if facts.positions.shape[-1] <= kept:
            return None
        start = torch.zeros(1, dtype=torch.int64)
        if facts.padding is not None:  # a row of padding alone, so far, starts after it
            start = torch.where(facts.padding.any(-1), facts.padding.int().argmax(-1), facts.position)
        start = start.clamp(max=facts.position - kept).view(-1, 1, 1)
        positions = facts.positions
        stays = (positions >= start) & (positions < start + self.first) | (positions >= facts.position - self.recent)
        return stays.nonzero()[:, -1].view(*stays.shape[:2], -1)


def whole(policy: CachePolicy, **least: int) -> None:
    """Raise ConfigError unless each of these settings is a whole number of at least so much."""
    for key, bound in least.items():
        value = getattr(policy, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < bound:
            raise ConfigError(f"kv_cache: {key}: got {value!r}; want a whole number, at least {bound}")


def share(policy: CachePolicy, *keys: str) -> None:
    """Raise ConfigError unless each of these settings is a share: above 0, at most 1."""
    for key in keys:
        value = getattr(policy, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ConfigError(f"kv_cache: {key}: got {value!r}; want a share above 0 and at most 1")
        object.__setattr__(policy, key, float(value))  # 1 and 1.0 are one setting, whoever writes it


def check_pool(policy: CachePolicy, pool: int) -> None:
    """Raise ConfigError unless `pool` is an odd whole number."""
    whole(policy, pool=1)
    if pool % 2 == 0:
        raise ConfigError(f"kv_cache: pool: got {pool}; want an odd number of neighbours")
