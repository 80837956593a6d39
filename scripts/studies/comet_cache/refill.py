"""Which keys and values of a sparse attention block to compute at each step: Comet's KV cache manager (section 6).

A head that is not active at a step gets no keys and values there, so they are missing when it becomes active later. All
decisions here follow from public patterns of active heads (in the order in which the model's heads were shuffled) and
from lengths; nothing is sent. `refilling_cache.py` carries them out on shares.

A head that is active has all its entries afterwards. So what a head lacks is always the newest part of the cache: a
step is a range of positions for each head, all ranges end with the newest position, and of two ranges one holds the
other. That the patterns are in one order for the whole run, and so linked, is inherent: docs/studies/kv-refill.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError
from private_llm.protocols.registry import dealer_prices, protocol_spec
from private_llm.ring.ring import Ring


class Strategy(Enum):
    """PER_HEAD: a product for each head that lacks entries. MERGED: all in the step's own product.

    PREFETCH: as MERGED, and heads that are not active are filled where `RefillCost.worth` says so.
    """

    PER_HEAD = "per head"
    MERGED = "merged"
    PREFETCH = "prefetch"


@dataclass(frozen=True)
class RefillCost:
    """What a product of listed tokens and heads sends, in bytes over all links.

    weight: for each head listed, whatever the tokens (its key and value columns). token: for each token listed,
    whatever the heads. entry: for each key and value made.

    | protocol, head size D, hidden size N      | weight   | token  | entry   | prefetch from  |
    |-------------------------------------------|----------|--------|---------|----------------|
    | the paper's (section 6.2): keys and       | 2 D N 16 | 2 N 16 | 0       | D + 1 misses   |
    | values mask their tokens apart            |          |        |         |                |
    | dealer, matmul="remask": one mask of a    | 2 D N 16 | N 16   | outputs | 2 D + 1 misses |
    | token serves both (ring of 8 bytes)       |          |        |         |                |
    | trio, quad, dealer with masked weights:   | 0        | 0      | outputs | never          |
    | nothing travels for an operand            |          |        |         |                |

    Raises ConfigError for negative prices.
    """

    weight: float
    token: float
    entry: float = 0.0

    def __post_init__(self) -> None:
        for name in ("weight", "token", "entry"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"RefillCost.{name}: got {getattr(self, name)!r}; want bytes, from 0 up")

    @classmethod
    def of(cls, config: PrivateConfig, width: int, size: int) -> "RefillCost":
        """Of a session with these settings. Raises ConfigError for a protocol that states no prices."""
        prices, ring = protocol_spec(config.protocol).cost, Ring(config.ring)
        if prices is None:
            raise ConfigError(f"protocol={config.protocol!r} states no prices; give RefillCost(weight, token, entry)")
        many = 64  # whole words of packed bits
        entry = prices.product(ring, many * 2 * size, config.frac_bits).total / many
        if config.matmul != "remask":
            return cls(0.0, 0.0, entry)
        remask = dealer_prices.remask
        return cls(remask(ring, 2 * size * width).total, remask(ring, width).total, entry)

    def worth(self, missing: int, shared: int, listed: bool = False) -> bool:
        """Whether to fill a head now that is not active and lacks `missing` entries: L2 > w / x + max(0, L2 - L1).

        shared: how many of their tokens the product lists anyway, min(L1, L2). listed: the head's weights take part
        anyway (it is active in another row of the batch), so w = 0. The rule amounts to `shared` > w / x, so heads that
        are filled at the same step do not change each other's answer.
        """
        extra = missing - shared
        return self.token * missing > (0.0 if listed else self.weight) + self.token * extra


@dataclass(frozen=True, eq=False)
class RefillStep:
    """Keys and values to be made: of head g in row b, positions start[b, g] to stop[b, g] - 1; none where equal.

    start, stop: int64 [B, G]. Each (position, head) once.
    """

    start: Tensor
    stop: Tensor

    @property
    def listed(self) -> Tensor:
        """bool [B, G]: heads with entries to be made."""
        return self.stop > self.start

    @property
    def entries(self) -> int:
        """Keys and values to be made."""
        return int((self.stop - self.start).sum())

    @property
    def heads(self) -> int:
        """Heads whose weights take part, in any row."""
        return int(self.listed.any(0).sum())

    def first(self) -> Tensor:
        """int64 [B]: the first position that takes part in each row, `end()` where none does."""
        return torch.where(self.listed, self.start, self.end()[:, None]).amin(1)

    def end(self) -> Tensor:
        """int64 [B]: one after the last position that takes part."""
        return self.stop.amax(1)

    @property
    def tokens(self) -> int:
        """Tokens that take part, over all rows: ranges that overlap count once."""
        return int((self.end() - self.first()).sum())

    def bytes(self, cost: RefillCost) -> float:
        """What this sends as one product."""
        return cost.weight * self.heads + cost.token * self.tokens + cost.entry * self.entries

    def apart(self, old: int) -> "Iterator[RefillStep]":
        """As separate products: entries of new positions (from `old` on), then each row's head with older ones."""
        yield RefillStep(torch.where(self.listed, self.start.clamp(min=old), self.stop), self.stop)
        before = self.stop.clamp(max=old)
        for row, head in (self.start < before).nonzero().tolist():
            alone = before.clone()
            alone[row, head] = self.start[row, head]
            yield RefillStep(alone, before)


class RefillManager:
    """Which entries exist of B rows and G key heads of one layer, and what each step has to add.

    filled: int64 [B, G], head g of row b has the entries 0 to filled[b, g] - 1 of `length`.
    """

    def __init__(self, batch: int, heads: int, prefetch: RefillCost | None = None) -> None:
        """prefetch: the cost by which heads that are not active are filled, too; None: only active ones are."""
        self.length = 0
        self.filled = torch.zeros((batch, heads), dtype=torch.int64)
        self._prefetch = prefetch

    def step(self, active: Tensor, new: int = 1) -> RefillStep:
        """`new` more positions of which the heads `active`, bool [B, G], will read everything so far.

        Their missing entries, and those of heads that are worth it, count as filled from now on. Raises DomainError for
        another shape.
        """
        if active.dtype != torch.bool or active.shape != self.filled.shape or new < 1:
            raise DomainError(
                f"refill: got a pattern {active.dtype} {tuple(active.shape)} for {new} positions; want bool "
                f"{tuple(self.filled.shape)} for one or more"
            )
        active, old = active.cpu(), self.length
        self.length += new
        stop = torch.where(active | self._worth(active, old - self.filled), self.length, self.filled)
        made = RefillStep(self.filled, stop)
        self.filled = stop
        return made

    def _worth(self, active: Tensor, missing: Tensor) -> Tensor:
        """bool [B, G]: heads to prefetch. missing: older entries that they lack, as the rule counts."""
        chosen = torch.zeros_like(active)
        if self._prefetch is None:
            return chosen
        known = torch.where(active, missing, 0).amax(1, keepdim=True)  # L1 of each row
        rest = torch.where(active, 0, missing)
        lacking, shared = rest.sum(0).tolist(), rest.minimum(known).sum(0).tolist()
        for head, listed in enumerate(active.any(0).tolist()):
            chosen[:, head] = self._prefetch.worth(lacking[head], shared[head], listed)
        return chosen & (rest.minimum(known) > 0)

    def keep(self, index: Tensor) -> None:
        """After an eviction: the entries `index`, ascending, int64 [B or 1, kept], are left, the same for all heads."""
        self.filled = (index[:, None, :] < self.filled[:, :, None]).sum(-1)
        self.length = index.shape[-1]

    def crop(self, length: int) -> None:
        """Only the first `length` entries are left."""
        self.length = min(self.length, length)
        self.filled = self.filled.clamp(max=self.length)

    def select(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows."""
        self.filled = self.filled[index]
