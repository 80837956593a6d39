"""Times of tokens, text as it comes, agreement of two texts, and bytes by link."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.roles import called
from private_llm.net.transport import CLIENT

if TYPE_CHECKING:
    from private_llm_hf.client.costs import Costs


@dataclass
class TokenClock:
    """A streamer for generate(): notes when each token arrives and steps a progress bar."""

    step: Callable[[str], None]
    started: float = field(default_factory=time.perf_counter)
    arrived: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """The prompt comes first, then one token at a time."""
        self.arrived.append(time.perf_counter())
        if len(self.arrived) > 1:
            self.step("generating on shares")

    def end(self) -> None:
        """Generation is over."""

    @property
    def first(self) -> float:
        """Seconds until the first new token (the prompt's pass)."""
        return self.arrived[1] - self.started if len(self.arrived) > 1 else 0.0

    @property
    def last(self) -> tuple[float, float]:
        """When the computation of the last token began and ended."""
        return self.arrived[-2], self.arrived[-1]

    @property
    def each(self) -> float:
        """Seconds for each further token."""
        later = self.arrived[1:]
        return (later[-1] - later[0]) / (len(later) - 1) if len(later) > 1 else self.first


def is_text(given: str) -> bool:
    """Whether what was typed or piped is text: bytes that are not of its encoding come as lone surrogates, which
    tokenizers do not take.
    """
    return not any("\ud800" <= character <= "\udfff" for character in given)


class TextStream(TokenClock):
    """A streamer for generate() of one row: hands on text as soon as its tokens are there.

    write: takes each further piece of text. prompt: whether the prompt's text comes first. Half a character (a token
    may end within one) waits for the rest of its bytes, at most until `end`.
    """

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - a transformers tokenizer
        write: Callable[[str], None],
        prompt: bool = False,
        step: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(step)
        self._tokenizer, self._write, self._prompt = tokenizer, write, prompt
        self.ids: list[int] = []
        self._written = 0
        self._prompt_next = True

    @property
    def text(self) -> str:
        """All text so far."""
        return str(self._tokenizer.decode(self.ids, skip_special_tokens=True))

    def put(self, value: Tensor) -> None:
        """The prompt comes first, then one token at a time."""
        skipped, self._prompt_next = self._prompt_next and not self._prompt, False
        if skipped and self.arrived:
            return
        super().put(value)
        if skipped:
            return
        self.ids += value.flatten().tolist()
        text = self.text
        if not text.endswith("\ufffd"):
            self._hand_on(text)

    def go_on(self) -> None:
        """Another call of generate() goes on with the text; its prompt holds what there is."""
        self._prompt_next = True

    def end(self) -> None:
        """Generation is over, or failed: what waited is handed on as it is. Idempotent."""
        if self.ids:
            self._hand_on(self.text)

    def _hand_on(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


def agreement(private: Tensor, plain: Tensor) -> tuple[int, int]:
    """How many leading tokens of two sequences are equal, and how many the longer one has."""
    count = min(len(private), len(plain))
    different = (private[:count] != plain[:count]).nonzero()
    equal = int(different[0]) if len(different) else count
    return equal, max(len(private), len(plain))


def margin(model: Any, ids: Tensor) -> float:  # noqa: ANN401 - a transformers model
    """Difference of the plaintext model's two largest logits after `ids` [S]."""
    with torch.no_grad():
        top = model(input_ids=ids.unsqueeze(0)).logits[0, -1].topk(2).values
    return float(top[0] - top[1])


def by_link(costs: Costs, config: PrivateConfig) -> dict[str, int]:
    """Bytes by link, in words; the links of a sharding plan's nodes by what the nodes do (there may be thousands)."""
    found: dict[str, int] = {}
    for (frm, to), count in sorted(costs.cost.sent.items()):
        if count:
            name = f"{_who(frm, config)} to {_who(to, config)}"
            found[name] = found.get(name, 0) + count
    return found


def _who(endpoint: int, config: PrivateConfig) -> str:
    if endpoint == CLIENT:
        return "client"
    if config.plan is not None:
        node = endpoint - (config.endpoints - config.plan.nodes)
        if node >= 0:
            return "CompNodes" if node < config.plan.alpha else "AttnNodes"
    return called(config, endpoint)
