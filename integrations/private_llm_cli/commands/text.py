"""Times of tokens, text as it comes, turns of a chat, agreement of two texts, and bytes by link."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, UnsupportedOp
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
    def each(self) -> float:
        """Seconds for each further token."""
        later = self.arrived[1:]
        return (later[-1] - later[0]) / (len(later) - 1) if len(later) > 1 else self.first


def is_text(given: str) -> bool:
    """Whether input is text: bytes that are not of its encoding come as lone surrogates, which tokenizers refuse."""
    return not any("\ud800" <= character <= "\udfff" for character in given)


class TextStream(TokenClock):
    """A streamer for generate() of one row: hands on text as soon as its tokens are there. write: takes each further
    piece of text. prompt: whether the prompt's text comes first, together with the first token's: until then others may
    write to the terminal. Half a character (a token may end within one) waits for the rest of its bytes, at most until
    `end`.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None], prompt: bool = False) -> None:  # noqa: ANN401
        super().__init__(lambda _: None)
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
        if self._prompt and len(self.arrived) == 1:
            return
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


def by_link(costs: "Costs", config: PrivateConfig) -> dict[str, int]:
    """Bytes by link, in words; the links of a sharding plan's nodes by what the nodes do (there may be thousands)."""
    found: Counter[str] = Counter()
    for (frm, to), count in sorted(costs.cost.sent.items()):
        if count:
            found[f"{_who(frm, config)} to {_who(to, config)}"] += count
    return dict(found)


def _who(endpoint: int, config: PrivateConfig) -> str:
    if endpoint == CLIENT:
        return "client"
    if config.plan is not None:
        node = endpoint - (config.endpoints - config.plan.nodes)
        if node >= 0:
            return "CompNodes" if node < config.plan.alpha else "AttnNodes"
    return called(config, endpoint)


class Conversation:
    """A private causal model, its tokenizer, and what was said, on one KV cache.

    Each turn sends only the tokens that the parties do not hold yet.

    A model with a chat template gets messages. One without continues the text of all that was said so far.

    new_tokens: of an answer, at most. sampling: further settings of generate(). Raises ConfigError for fewer than 1.
    """

    def __init__(self, model: Any, tokenizer: Any, new_tokens: int, sampling: dict[str, Any]) -> None:  # noqa: ANN401
        if new_tokens < 1:
            raise ConfigError(f"max-new-tokens: got {new_tokens}; want at least 1")
        self.model, self.tokenizer = model, tokenizer
        self._new_tokens, self._sampling = new_tokens, sampling
        self.messages: list[dict[str, str]] = []
        self._cache: Any = None
        self._held = torch.empty(0, dtype=torch.int64)

    @property
    def has_template(self) -> bool:
        """Whether the model knows turns."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    @property
    def cached(self) -> int:
        """Positions that the cache holds."""
        return 0 if self._cache is None else int(self._cache.get_seq_length())

    def reset(self) -> None:
        """Forget all that was said; the parties free the cache with the next call."""
        self.messages.clear()
        self._cache = None

    def renew(self, model: Any) -> None:  # noqa: ANN401 - a private model
        """Go on with this model on another session, whose parties hold nothing yet."""
        self.model, self._cache = model, None

    def ask(self, text: str) -> None:
        """The user's turn."""
        self.messages.append({"role": "user", "content": text})

    def take_back(self) -> None:
        """Forget the user's turn, which got no answer."""
        self.messages.pop()

    def answer(self, stream: TextStream, stopped: Callable[[], bool]) -> str:
        """The model's turn: "stop" if it came to its end, "length" at a limit, "stopped" if the user did. stream: takes
        the text; what it has already, of a call that failed, is gone on with. stopped: asked after each token. Raises
        DomainError if the model has no positions left, and what generate() raises; either way the user's turn is the
        last one then.
        """
        ids = torch.cat([self._prompt(), torch.tensor(stream.ids, dtype=torch.int64)])
        room = self._room(len(ids))
        limit = min(self._new_tokens - len(stream.ids), room)
        # a session may fail after the last token
        finish = "length" if limit < 1 else self._generate(ids, limit, stream, stopped)
        self.keep(stream)
        return finish

    def keep(self, stream: TextStream) -> None:
        """The answer is what there is of it."""
        stream.end()
        self.messages.append({"role": "assistant", "content": stream.text})

    def _generate(self, ids: Tensor, limit: int, stream: TextStream, stopped: Callable[[], bool]) -> str:
        from private_llm_hf.transformers_versions import CACHE

        cache, self._cache = self._continued(ids), None  # what a failed call leaves of a cache is not known
        stream.go_on()
        made = self.model.generate(
            ids.unsqueeze(0), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), **{CACHE: cache},
            max_new_tokens=limit, streamer=stream, return_dict_in_generate=True,
            stopping_criteria=[lambda row, _, **__: torch.full((len(row),), stopped())], **self._sampling,
        )  # fmt: skip
        self._cache, self._held = made[CACHE], made.sequences[0]
        if stopped():
            return "stopped"
        return "stop" if len(self._held) < len(ids) + limit or self._ended() else "length"

    def _ended(self) -> bool:
        end = self.model.generation_config.eos_token_id
        return int(self._held[-1]) in (end if isinstance(end, list) else [end])

    def _prompt(self) -> Tensor:
        """Token ids [S] of all that was said."""
        if self.has_template:
            turns = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            turns = self.tokenizer("\n".join(turn["content"] for turn in self.messages), return_tensors="pt")
        ids: Tensor = turns["input_ids"][0].to(torch.int64)
        if not len(ids):
            raise DomainError("the message: got no tokens; want at least one")
        return ids

    def _room(self, length: int) -> int:
        """New tokens that may follow `length` (the last one needs no position). Raises DomainError if none can."""
        from private_llm_hf.models.inputs import max_positions

        limit = max_positions(self.model.config)
        room = self._new_tokens if limit is None else limit - length + 1
        if room < 1:
            raise DomainError(
                f"the conversation has {length} tokens; the model has {limit} positions: begin a new one, or ask "
                "something shorter"
            )
        return room

    def _continued(self, ids: Tensor) -> Any:  # noqa: ANN401 - a handle, a cache of transformers, or None
        """The cache, cut back to what it has in common with `ids` less the last; None if it cannot be."""
        if self._cache is None:
            return None
        held = self._held[: self.cached]
        common = min(len(held), len(ids) - 1)
        differ = (held[:common] != ids[:common]).nonzero()
        common = int(differ[0]) if len(differ) else common
        try:
            if common < len(held):  # older versions of transformers take 0 as the length that is left
                self._cache.crop(common - len(held))
        except (DomainError, UnsupportedOp, RuntimeError, ValueError):  # entries before them were evicted
            return None
        return self._cache if common else None
