"""Preprocessing ahead of the data: which calls are planned, and whether the calls that come are those.

What the helping party contributes to a call depends on public facts alone: shapes, masks, positions, which cache is
continued. A plan is made by a dry run of the user's own program (`generate()`, or one forward) against a stand-in for
the parties that answers zeros and writes down what was asked. The parties run ahead for exactly these requests, and the
client compares each later one with the next of them (`Schedule`) before anything is sent.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from private_llm.errors import ConfigError, DomainError
from private_llm.typed_settings import check_types
from private_llm_hf.client.session_client import Secret, SessionClient
from private_llm_hf.wire.codec import text_of
from private_llm_hf.wire.commands import CacheEdit, Call, CallOrEdit, Encoded

if TYPE_CHECKING:
    from private_llm_hf.client.model import PrivateModel


@dataclass(frozen=True)
class GeneratePlan:
    """`times` runs of generate() for `batch` prompts of `prompt` tokens, each followed by up to `new_tokens`.

    attention_mask [batch, prompt] if prompts are padded (on the left). Greedy decoding and sampling, no beams.
    """

    prompt: int
    new_tokens: int
    batch: int = 1
    times: int = 1
    attention_mask: Tensor | None = None

    def run(self, model: "PrivateModel") -> None:
        """Generate on the model of the dry run. Raises ConfigError for numbers below 1, or a mask of another shape."""
        if min(self.prompt, self.new_tokens, self.batch) < 1:
            raise ConfigError(
                f"preprocess: got prompt={self.prompt}, new_tokens={self.new_tokens}, batch={self.batch}; want at "
                "least 1 each"
            )
        ids = torch.zeros((self.batch, self.prompt), dtype=torch.int64)
        mask = torch.ones_like(ids) if self.attention_mask is None else self.attention_mask
        if tuple(mask.shape) != tuple(ids.shape):
            raise ConfigError(f"preprocess: got an attention_mask {tuple(mask.shape)}; want {tuple(ids.shape)}")
        with torch.no_grad():
            model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=self.new_tokens, do_sample=False, num_beams=1,
                pad_token_id=0,
            )  # fmt: skip


@dataclass(frozen=True)
class ForwardPlan:
    """`times` calls of the model with inputs of these shapes, for instance {"input_ids": (1, 128)}.

    What is public (attention_mask, position_ids, token_type_ids, use_cache) is given as it will be.
    """

    inputs: Mapping[str, Any]
    times: int = 1

    def run(self, model: "PrivateModel") -> None:
        """Call the model of the dry run once."""
        given = {}
        for name, value in self.inputs.items():
            if isinstance(value, (tuple, list, torch.Size)):
                dtype = torch.int64 if name.endswith(("_ids", "_mask")) else torch.float32
                value = torch.full(tuple(value), int(name.endswith("_mask")), dtype=dtype)
            given[name] = value
        with torch.no_grad():
            try:
                model(**given)
            except _Noted:
                return


CallPlan = GeneratePlan | ForwardPlan


@dataclass(frozen=True)
class Preprocessed:
    """What `model.preprocess` did: how many requests to the parties it covers, bytes that were stored."""

    calls: int
    stored_bytes: int


class _Noted(Exception):
    """The call was written down; what would come back does not matter."""


class DryRun(SessionClient):
    """Stands where the link to the parties stands, and writes down what is asked of them."""

    def __init__(self, parties: SessionClient, generating: bool, model: PretrainedConfig) -> None:
        self.config, self.ring = parties.config, parties.ring
        self.entries: list[CallOrEdit] = []
        self._parties, self._generating, self._model = parties, generating, model
        self._held: dict[int, tuple[int, int]] = {}  # by cache: entries, positions

    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """As `SessionClient.forward`, with token 0. Raises ConfigError for calls that evict: helpers need what opens"""
        self.entries.append(call)
        policy = self.config.kv_cache
        if call.cache is not None and policy.eviction is not None:
            new = call.secret[0].shape[1]
            held, position = (each + new for each in self._held.get(call.cache, (0, 0)))
            if policy.ranked(held, position, new) < held:
                raise ConfigError(
                    f"preprocess: kv_cache {policy.name!r} evicts entries after a call of {new} tokens at position "
                    f"{position}, and the helping party, which would run ahead, has to be told which places of a "
                    "secret order stay; leave preprocess out, keep all entries (KeepAll()), or plan texts from which "
                    "nothing is evicted"
                )
            self._held[call.cache] = held, position
        kind = "Seq2SeqLMOutput" if self._model.is_encoder_decoder else "CausalLMOutputWithPast"
        if call.encode_to is not None or call.more:
            return kind, {}
        if not self._generating:
            raise _Noted
        rows, length = call.secret[0].shape[:2]
        shown = min(int(call.public.get("logits_to_keep", 0)) or length, length)
        if self.config.reveal == "token":
            return kind, {"token": torch.zeros(rows, shown)}
        return kind, {"logits": torch.zeros(rows, shown, self._model.get_text_config().vocab_size)}

    def command(self, edit: CacheEdit) -> None:
        """As `SessionClient.command`."""
        self.entries.append(edit)

    def new_handle(self) -> int:
        """As `SessionClient.new_handle`: a number that nothing else has."""
        return self._parties.new_handle()

    def release(self, handle: int) -> None:
        """The schedule releases its handles itself."""

    def close(self) -> None:
        """Nothing runs."""


def dry_run(model: "PrivateModel", plans: tuple[CallPlan, ...]) -> list[CallOrEdit]:
    """The requests that these plans will make, in order. Raises ConfigError, and whatever the calls would raise."""
    made: list[CallOrEdit] = []
    generation = copy.deepcopy(getattr(model, "generation_config", None))
    if generation is not None:
        generation.eos_token_id = None  # nothing ends early
    for plan in plans:
        if isinstance(plan, GeneratePlan | ForwardPlan):
            check_types(plan, f"preprocess: {type(plan).__name__}.")
        if not isinstance(plan, GeneratePlan | ForwardPlan) or plan.times < 1:
            raise ConfigError(f"preprocess: got {plan!r}; want GeneratePlan or ForwardPlan with times of at least 1")
        if isinstance(plan, GeneratePlan) and generation is None:
            raise ConfigError(f"preprocess: {model.original_class.__name__} does not generate; want a ForwardPlan")
        for _ in range(plan.times):
            stand_in = DryRun(model.parties, isinstance(plan, GeneratePlan), model.config)
            plan.run(type(model)(model.config, stand_in, model.patch_plan, copy.deepcopy(generation)))
            made += stand_in.entries
    return made


# -- Whether the requests that come are those that were planned -------------------------------------------------------
_HANDLES = ("cache", "encode_to", "encoded", "handle", "to")


class Schedule:
    """The requests that were preprocessed, and how far they were made."""

    def __init__(self, number: int, entries: list[CallOrEdit]) -> None:
        self.number, self.entries = number, entries
        self._next = 0
        self._handles: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        """Whether every request was made."""
        return self._next == len(self.entries)

    def take(self, message: CallOrEdit, known: set[int]) -> int:
        """The place of the next request. known: handles of other calls. Raises DomainError if another was planned."""
        want = self.entries[self._next]
        named = dict(self._handles)
        fresh = all(
            named.setdefault(real, planned) == planned and (real in self._handles or real not in known)
            for real, planned in zip(handles_of(message), handles_of(want), strict=False)
        )
        one_to_one = len(set(named.values())) == len(named)
        renamed = _renamed(message, lambda handle: named.get(handle, 0))  # of one that nobody planned 0, which none is
        if not (fresh and one_to_one and text_of(renamed, ordered=True) == text_of(want, ordered=True)):
            raise DomainError(
                f"preprocessing: request {self._next + 1} of {len(self.entries)} was planned as {_words(want)}; got "
                f"{_words(message)}. Make the planned calls in their order, or plan again with model.preprocess(...), "
                "which throws the rest away; model.preprocess() without a plan only throws it away"
            )
        self._handles = named
        self._next += 1
        return self._next - 1


def handles_of(message: CallOrEdit) -> list[int]:
    """The handles in a request, in a fixed order."""
    held = (getattr(message, each, None) for each in _HANDLES)
    return [each.handle if isinstance(each, Encoded) else each for each in held if each is not None]


def _renamed(message: Any, name: Callable[[int], int]) -> Any:  # noqa: ANN401 - a request, or the encoder output in it
    found = {each: held for each in _HANDLES if (held := getattr(message, each, None)) is not None}
    return replace(message, **{k: name(v) if isinstance(v, int) else _renamed(v, name) for k, v in found.items()})


def _words(message: CallOrEdit) -> str:
    if not isinstance(message, Call):
        return f"'{type(message).__name__}'"
    inputs = ", ".join(f"{item.name} {item.shape}" for item in message.secret)
    facts = [
        f"{name}={value}" if not isinstance(value, Tensor) else f"{name} {tuple(value.shape)}"
        for name, value in sorted(message.public.items())
    ]
    place = "no cache" if message.cache is None else f"cache number {message.cache}"
    return "; ".join([inputs, place, *facts])
