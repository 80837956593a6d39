"""What a private model needs of those who compute for it, whoever they are.

Parties of secret sharing, parallel sessions of them, nodes of token sharding, both behind each other, and the stand-ins
that record a dry run or count what they would cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.ranges import UNKNOWN, Ranges
from private_llm.ring.ring import Ring
from private_llm_hf.client.costs import Costs
from private_llm_hf.wire.commands import CacheEdit, Call, CallOrEdit

Secret = Tensor | tuple[Tensor, int]
"""Ring elements, or token ids (int64) and the size of their vocabulary."""


class SessionClient(ABC):
    """One session as the client sees it. Thread-safe: one call at a time.

    What an implementation raises when its session fails is in its class.
    """

    config: PrivateConfig
    ring: Ring
    ranges: Ranges = UNKNOWN
    opened_positions: int = 0
    """Of calls so far, where a kept order serves a limited number (`CometConfig.positions`)."""

    @abstractmethod
    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """Run the model once: name of its output class and the opened outputs (float64).

        secrets: the inputs listed in call.secret, in that order: ring elements, or token ids with their vocabulary.
        Raises DomainError for a call that was not planned, while a plan is being followed.
        """

    @abstractmethod
    def command(self, edit: CacheEdit) -> None:
        """Change a cache, without an answer; an error surfaces at the next call."""

    @abstractmethod
    def new_handle(self) -> int:
        """A number for something that is kept where the model runs."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Forget a handle with the next call (callable from a finalizer: sends nothing itself)."""

    @abstractmethod
    def close(self) -> None:
        """Stop all. Idempotent."""

    @abstractmethod
    def keep_together(self, handle: int, rows: int) -> None:
        """Batch rows come in groups of `rows` that a cache may reorder among themselves (beams of one prompt)."""

    def preprocess(self, entries: list[CallOrEdit]) -> int:
        """Let the helping party run ahead for these requests; bytes stored. Raises ConfigError where none can."""
        raise ConfigError("preprocess: nobody can run ahead here; want a model whose parties run")

    def costs(self, reset: bool = False) -> Costs:
        """What everybody sent since the last reset (control messages apart).

        Raises ConfigError where nothing is counted.
        """
        raise ConfigError("cost: nothing is counted here; want a model whose parties run")
