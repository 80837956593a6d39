"""A model that a gateway serves: its sessions, its tokenizer, and what clients may know of it."""

import gc
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

from private_llm_hf.checkpoint.sentence_vectors import SentenceVectors
from private_llm_hf.client.speculation import SpeculationConfig
from private_llm_hf.models.architectures import architecture
from private_llm_hf.models.inputs import max_positions

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.addresses import parse_address
from private_llm.protocol_facts import ASSISTED, CASCADE
from private_llm_gateway.call_formats import MARKS, CallFormat, format_of
from private_llm_gateway.constrained import TokenTable
from private_llm_gateway.decoding import TokenTexts
from private_llm_gateway.kept_prompts import KeptPrompts
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.settings import is_loopback

PLAIN_CHAT = "none: messages are joined by line ends and continued"
OWN_CHAT = "the model's own"


@dataclass(frozen=True)
class Served:
    """A model by its name. vectors: of an encoder. kept: of sessions. speculation: drafts of single greedy answers
    (None: none). Raises ConfigError for models without a place in this API.
    """

    name: str
    pool: SessionPool
    tokenizer: Any
    vectors: SentenceVectors = field(default_factory=SentenceVectors)
    kept: KeptPrompts = field(default_factory=KeptPrompts, repr=False, compare=False)
    speculation: SpeculationConfig | None = None
    _encoding: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    _tabling: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = architecture(self.pool.first.config).kind
        if kind not in ("decoder", "encoder") or (kind == "decoder") != bool(self.pool.first.can_generate()):
            raise ConfigError(
                f"model {self.name!r}: got {type(self.pool.first).__name__}; a gateway serves decoders that generate "
                "and encoders that give hidden states (AutoPrivateModel)"
            )
        if kind == "encoder" and not type(self.pool.first).__name__.endswith("Model"):
            raise ConfigError(
                f"model {self.name!r}: got {type(self.pool.first).__name__}, which gives no hidden states; want one "
                "of AutoPrivateModel"
            )

    @property
    def kind(self) -> Literal["decoder", "encoder"]:
        """What it does: writes text, or gives vectors."""
        return "decoder" if architecture(self.pool.first.config).kind == "decoder" else "encoder"

    @property
    def config(self) -> PrivateConfig:
        """How it runs."""
        config: PrivateConfig = self.pool.first.parties.config
        return config

    @property
    def vocabulary(self) -> int:
        """Token ids are below."""
        return int(self.pool.first.config.get_text_config().vocab_size)

    @property
    def context(self) -> int | None:
        """Tokens of prompt and answer together, or None if there is no limit."""
        limits = [limit for limit in (max_positions(self.pool.first.config), self.vectors.longest) if limit is not None]
        return min(limits, default=None)

    @property
    def size(self) -> int:
        """Entries of an encoder's vectors."""
        return self.vectors.size(int(self.pool.first.config.get_text_config().hidden_size))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        found = getattr(self.pool.first.generation_config, "eos_token_id", None)
        listed = found if isinstance(found, list) else [found, self.tokenizer.eos_token_id]
        return tuple(dict.fromkeys(int(token) for token in listed if token is not None))

    @property
    def pad(self) -> int:
        """What stands after a text that ended while others go on."""
        found = self.tokenizer.pad_token_id
        return int(found) if found is not None else (self.ends or (0,))[0]

    @property
    def chat(self) -> str:
        """How messages become a prompt."""
        return OWN_CHAT if self.chat_template else PLAIN_CHAT

    @property
    def chat_template(self) -> str:
        """The model's own; of several, that for tools. Empty if it has none."""
        found = self.tokenizer.chat_template
        return str((found.get("tool_use") or found.get("default") if isinstance(found, dict) else found) or "")

    @cached_property
    def texts(self) -> TokenTexts:
        """What each token adds to a text."""
        return TokenTexts(self.tokenizer)

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls of functions, if its chat template says so in a known way."""
        return format_of(self.chat_template) if self.knows_tools else None

    @property
    def knows_tools(self) -> bool:
        """Whether its chat template says something of functions."""
        return re.search(r"\btools\b", self.chat_template) is not None

    @property
    def reads_calls(self) -> bool:
        """Whether its tokenizer finds calls in answers itself (transformers' `response_template`)."""
        return getattr(self.tokenizer, "response_template", None) is not None

    @property
    def thoughts(self) -> frozenset[str]:
        """What else than content and calls its tokenizer finds in answers, such as `thinking`."""
        template = getattr(self.tokenizer, "response_template", None)
        named = template.get("fields", ()) if isinstance(template, dict) else getattr(template, "fields", ())
        return frozenset(named) - {"content", "tool_calls"}

    @cached_property
    def call_texts(self) -> TokenTexts:
        """As `texts`, with the special tokens that stand around calls."""
        marks = (self.special_token(mark) for mark in MARKS)
        kept = self.texts.special if self.reads_calls else frozenset(token for token in marks if token is not None)
        return TokenTexts(self.tokenizer, kept - {*self.ends})

    def special_token(self, text: str) -> int | None:
        """The special token of that name, if there is one."""
        token = self.tokenizer.convert_tokens_to_ids(text) if text else None
        known = token in self.texts.special and self.tokenizer.convert_ids_to_tokens(token) == text
        return token if known else None

    @cached_property
    def table(self) -> TokenTable:
        """`texts`, as grammars take them. It may take seconds, so that requests together make one."""
        with self._tabling:
            if "table" not in self.__dict__:
                self.__dict__["table"] = TokenTable(self.texts, self.vocabulary, self.ends)
                if gc.get_freeze_count():  # as `serve` does: it stays, and is large
                    gc.freeze()
            return cast("TokenTable", self.__dict__["table"])

    def encode(self, text: str, special: bool = True) -> list[int]:
        """All tokens of a text, none cut off. `special`: with those that the model wants around it."""
        text = self.vectors.text(text)
        with self._encoding:  # a tokenizer that pads or cuts by default is changed for a moment
            return list(self.tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"])

    def about(self) -> dict[str, Any]:
        """What the page shows: model, protocol, parties, and a sentence on what is protected."""
        config, here = self.config, self.one_machine
        return {
            "model": self.name, "protocol": config.protocol, "parties": self._parties(), "sentence": self.sentence,
            "one_machine": here, "weights": config.weights, "chat_template": self.chat,
        }  # fmt: skip

    @property
    def one_machine(self) -> bool:
        """Whether all parties run where the gateway does, or are all called by loopback addresses."""
        return self.config.party_mode != "remote" or all(
            is_loopback(parse_address(host)[0]) for hosts in self._groups for host in hosts
        )

    @property
    def _groups(self) -> Sequence[tuple[str, ...]]:
        """Hosts of each group of parties."""
        return (self.config.hosts,) if self.pool.groups is None else self.pool.groups.groups

    @property
    def sentence(self) -> str:
        """What is protected, for people."""
        config = self.config
        if config.protocol == CASCADE or config.plan is not None:
            return "Each node sees a part of the tokens in the clear, and nobody all of them: a statistical protection."
        if config.facts is not None and not config.facts.hides:
            return "Nothing is protected: this protocol computes in the clear, for tests."
        what = "your text and the model's weights" if config.weights == "secret" else "your text"
        told = "Your text leaves this machine as random shares only; any one of the parties alone learns nothing of "
        told += f"{what}, and two that put their shares together learn all."
        if config.protocol == ASSISTED:
            told += " This machine checks each product of theirs, and ends an answer with a wrong one."
        if self.one_machine:
            told += " Here all parties run on one machine, so its owner can see everything."
        return told

    def _parties(self) -> list[dict[str, str]]:
        config, holds = self.config, "random shares of your text"
        if config.weights == "secret":
            holds += " and of the weights"
        if config.protocol == CASCADE or (config.facts is not None and not config.facts.hides):
            holds = "text and weights in the clear" if config.protocol != CASCADE else "some tokens, and the weights"
        facts, made = config.facts, []
        of_servers = ("the key of the masks", "masked rows")  # an only one gets rows
        for number in range(config.endpoints):
            host = ", ".join(hosts[number] for hosts in self._groups) if config.hosts else "this machine"
            deals = facts is not None and facts.dealer and number == facts.helper
            what = "masks only: it deals random numbers" if deals else holds
            if config.protocol == ASSISTED:
                what = f"{of_servers[number - config.endpoints]}, and the model's weights, which are public"
            made.append({"name": f"party {number}", "host": host, "holds": what})
        return made
