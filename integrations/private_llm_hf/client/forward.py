"""One forward call at the client: check everything, split it into public facts and secrets, run, rebuild the output."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, modeling_outputs
from transformers.modeling_outputs import ModelOutput

from private_llm.approximations import approximations_of
from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from private_llm.kv_cache.policies.policy import NoCache
from private_llm.tensor.range_check import require
from private_llm_hf.client.session_client import PrivateCache, PrivateEncoderOutput, Secret, SessionClient, check_cache
from private_llm_hf.kv_cache.model_checks import chunk_of
from private_llm_hf.models import inputs as check
from private_llm_hf.models.architectures import architecture, reads_first_token, shifts_prompts
from private_llm_hf.models.inputs import Labels
from private_llm_hf.transformers_versions import CACHE
from private_llm_hf.wire.answers import GUARD
from private_llm_hf.wire.commands import OPENED, Call, Encoded, Fact, Tokens, Values

if TYPE_CHECKING:
    from private_llm_hf.client.model import PrivateModel


_REFUSED = {
    "output_attentions": "attention weights stay at the parties",
    "output_hidden_states": "hidden states stay at the parties",
    "output_router_logits": "router logits stay at the parties",
    "head_mask": "masks of heads are not supported",
}
_GENERATE_S = ("tokenizer", "assistant_tokenizer", "is_first_iteration", "next_sequence_length")
"""Arguments of generate() itself (for stop strings, for its own steps), which it hands on to every forward."""


def spend_positions(parties: SessionClient, count: int) -> None:
    """Count positions opened in a kept order. Raises ConfigError for more than `CometConfig.positions`."""
    settings = parties.config.sparsity
    if settings is None or settings.positions is None:
        return
    if parties.opened_positions + count > settings.positions:
        raise ConfigError(
            f"sparsity: this call has {count} positions, and {parties.opened_positions} of positions="
            f"{settings.positions} were computed in this sharing's orders already; close this model and share it anew, "
            "which draws new orders"
        )
    parties.opened_positions += count


class ForwardCall:
    """The arguments of one call, sorted."""

    def __init__(self, model: "PrivateModel", given: dict[str, Any]) -> None:
        self.model = model
        model.asked += 1
        self.parties = model.parties
        self.config: PretrainedConfig = model.config
        self.given = {name: value for name, value in given.items() if value is not None and name not in _GENERATE_S}
        for name, value in self.given.items():
            check.check_values(name, value)
        self.public: dict[str, Fact] = {}
        self.listed: list[Tokens | Values] = []
        self.secrets: list[Secret] = []
        self.labels: Labels | None = None
        self.ids: Tensor | None = None

    def run(self) -> ModelOutput | tuple[object, ...]:
        """Check, send, open. Raises DomainError and UnsupportedOp before anything is sent."""
        as_dict = bool(self.given.pop("return_dict", True))
        for name, reason in _REFUSED.items():
            value = self.given.pop(name, None)
            if value is not None and value is not False:
                raise UnsupportedOp(f"{name}: {reason}")
        labels = self.given.pop("labels", None)
        if labels is not None:
            self.labels = Labels(self.model.original_class, self.config, self.parties.config.reveal, labels)
        output = self._decode() if self.config.is_encoder_decoder else self._single()
        return output if as_dict else output.to_tuple()

    # -- one stack: decoder-only, encoder-only, vision ------------------------------------------------------
    def _single(self) -> ModelOutput:
        rows, length = self.take_secret("")
        if self.labels is not None:
            self.labels.check(rows, length, self.given.get("logits_to_keep"))
        cache = self._cache(rows, length)
        past = cache.position if cache is not None else 0
        check.check_positions(self.config, past + length)
        mask = self.take_mask("attention_mask", rows, past + length)
        config, other = self.parties.config, approximations_of(self.parties.config.approximations)
        chooses = cache is not None and config.kv_cache.selection is not None
        if chooses and other is not None and other.squares and mask is not None and not bool(mask.all()):
            raise UnsupportedOp(
                f"attention_mask: got padding under kv_cache {config.kv_cache.name!r}, which chooses clusters, with "
                f"approximations={config.approximations!r}, whose softmax squares scores: padding in a chosen cluster, "
                "far below all others, would weigh most; want rows of one length, or another of the two settings"
            )
        self._positions(rows, length, mask)
        kind = architecture(self.config).kind
        if kind == "decoder" and type(self.model).__name__.endswith("ForSequenceClassification"):
            check.check_last_token(self.config, rows, mask, self.ids)
        if reads_first_token(self.model.original_class) and mask is not None and not bool(mask[:, 0].all()):
            raise DomainError(
                "attention_mask: got padding on the left, where this model reads its first token; want it on the right "
                "(padding_side='right')"
            )
        return self._call(cache, length, None)

    # -- two stacks ---------------------------------------------------------------------------------------------
    def _decode(self) -> ModelOutput:
        if self.labels is not None:  # a decoder without inputs of its own reads them, shifted after its start token
            if self.labels.of_tokens and not self._decodes:
                self.given["decoder_input_ids"] = self.model.shifted(self.labels.labels)
            for read in self._decodes[:1]:
                if isinstance(read, Tensor) and read.ndim > 1:  # what is not is refused as an input
                    self.labels.check(read.shape[0], read.shape[1], self.given.get("logits_to_keep"))
        encoded = self.given.pop("encoder_outputs", None)
        if encoded is None:
            prompt = {name: self.given.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask")}
            encoded = encode_prompt(self.model, **prompt)
            ids = prompt["input_ids"]
            if not self._decodes and isinstance(ids, Tensor) and shifts_prompts(self.model.original_class):
                self.given["decoder_input_ids"] = self.model.shifted(ids)  # BART's decoder and its like reads it
        if not isinstance(encoded, PrivateEncoderOutput) or encoded.keeper.parties is not self.parties:
            raise DomainError("encoder_outputs: want what this model's get_encoder() or generate() returned")
        for name in ("input_ids", "inputs_embeds"):
            self.given.pop(name, None)
        rows, length = self.take_secret("decoder_")
        if len(encoded.row_index) != rows:
            raise DomainError(f"encoder_outputs: got {len(encoded.row_index)} rows; want {rows}")
        cache = self._cache(rows, length)
        past = cache.position if cache is not None else 0
        self.take_mask("attention_mask", rows, encoded.length)
        self.take_mask("decoder_attention_mask", rows, past + length)
        output = self._call(cache, length, encoded)
        output["encoder_last_hidden_state"] = encoded.last_hidden_state
        return output

    @property
    def _decodes(self) -> list[object]:
        """The decoder's own inputs, if it has some."""
        return [self.given[n] for n in ("decoder_input_ids", "decoder_inputs_embeds") if n in self.given]

    # -- pieces ---------------------------------------------------------------------------------------------------
    def take_secret(self, prefix: str) -> tuple[int, int]:
        """The one secret input: encode it, return (rows, positions). Raises DomainError for none, two, or a bad one."""
        names = [f"{prefix}input_ids", f"{prefix}inputs_embeds", "pixel_values"]
        present = [name for name in names if name in self.given]
        if len(present) != 1:
            raise DomainError(f"inputs: got {present or 'none'}; want exactly one of {', '.join(names[:2])}")
        name = present[0]
        value = self.given.pop(name)
        if name.endswith("input_ids"):
            vocabulary = self.config.get_text_config().vocab_size
            ids = check.check_tokens(name, value, vocabulary)
            check.check_mask_tokens(name, ids, self.config)
            rows, length = ids.shape
            self.listed.append(Tokens(name, (rows, length), vocabulary))
            self.secrets.append((ids.reshape(-1), vocabulary))
            self.ids = ids
            return rows, length
        if name == "pixel_values":
            value = check.check_pixels(name, value, self.config)
            self.model.fit(value.shape)
            length = 0
        else:
            value = check.check_embeds(name, value, self.model.embedding_width)
            length = value.shape[1]
        self.listed.append(Values(name, tuple(value.shape)))
        try:
            self.secrets.append(self.parties.ring.encode(value, self.parties.config.frac_bits))
        except DomainError as error:  # NaN, infinite or too large
            raise DomainError(f"{name}: {error}") from None
        return value.shape[0], length

    def _cache(self, rows: int, length: int) -> PrivateCache | None:
        cache = self.given.pop(CACHE, None)
        caches = architecture(self.config).caches and CACHE in self.model.accepts
        wanted = self.given.pop("use_cache", getattr(self.config, "use_cache", False) and caches)
        wanted = wanted and not isinstance(self.parties.config.kv_cache, NoCache)
        if not caches:
            return None
        self.public["use_cache"] = bool(wanted) or cache is not None
        if cache is None:
            return PrivateCache(self.parties, rows) if wanted else None
        checked = check_cache(cache, self.parties)
        if checked.withheld:
            raise DomainError(
                f"{CACHE}: a value left its range in a call that filled this cache; start again without it"
            )
        if checked.position and checked.rows != rows:
            raise DomainError(f"{CACHE}: got a cache of {checked.rows} rows; want {rows}, as many as the inputs")
        return checked

    def take_mask(self, name: str, rows: int, length: int) -> Tensor | None:
        """A padding mask; one that masks nothing is left out."""
        mask = self.given.pop(name, None)
        if mask is None:
            return None
        checked = check.check_mask(name, mask, rows, length, architecture(self.config).kind == "decoder")
        if not bool(checked.all()):
            self.public[name] = checked
        return checked

    def _positions(self, rows: int, length: int, mask: Tensor | None) -> None:
        found: dict[str, Tensor] = {}
        for name in ("position_ids", "token_type_ids"):
            value = self.given.pop(name, None)
            if value is not None:
                found[name] = check.check_index(name, value, rows, length)
        if "position_ids" not in found and architecture(self.config).positions == "after padding":  # RoBERTa's
            seen, padding = torch.ones(rows, length, dtype=torch.int64), self.config.pad_token_id
            if self.ids is not None:  # as the plaintext model: by its tokens, whatever the mask says
                seen = (self.ids != padding).to(torch.int64)
            found["position_ids"] = torch.cumsum(seen, dim=1) * seen + padding
        if "position_ids" in found:
            check.check_position_values(self.config, found["position_ids"])
        self.public.update(found)

    def _call(self, cache: PrivateCache | None, length: int, encoded: PrivateEncoderOutput | None) -> ModelOutput:
        keep = self.given.pop("logits_to_keep", 0)
        if "logits_to_keep" in self.model.accepts:
            if not isinstance(keep, int) or keep < 0:
                raise DomainError(f"logits_to_keep: got {keep!r}; want a number of last positions, or 0 for all")
            self.public["logits_to_keep"] = keep
        self.given.pop("use_cache", None)
        empty = [name for name, value in self.given.items() if isinstance(value, dict | tuple | list) and not value]
        left = sorted(name for name, value in self.given.items() if value is not False and name not in empty)
        if left:
            raise UnsupportedOp(f"forward argument(s) {', '.join(left)}: no private rule; leave them out")
        read = None
        if encoded is not None:  # rows of it, unless it is all in order
            index = encoded.row_index
            plain = torch.equal(index, torch.arange(encoded.source_rows))
            read = Encoded(encoded.handle, None if plain else index)
        handle = None if cache is None else cache.handle
        asked = Call(self.public, tuple(self.listed), handle, read, None, OPENED)
        spend_positions(self.parties, asked.rows * length)
        kind, opened = self._run_chunks(asked, cache, length)
        values: dict[str, Any] = {name: value.to(torch.float32) for name, value in opened.items()}
        if "token" in values:
            values["logits"] = _as_logits(values.pop("token"), self.config.get_text_config().vocab_size)
        if "class" in values:
            values["logits"] = _as_logits(values.pop("class"), self.model.classes(asked.secret[0].shape))
        if self.labels is not None:
            values["loss"] = self.labels.loss(values["logits"])
        if cache is not None:
            values[CACHE] = cache
        home = sys.modules[self.model.original_class.__module__]
        made = getattr(modeling_outputs, kind, None) or getattr(home, kind, None)
        if not (isinstance(made, type) and issubclass(made, ModelOutput) and is_dataclass(made)):
            raise DomainError(f"the parties returned an unknown output class {kind!r}")
        names = {field.name for field in fields(made)}  # heads that do not generate hand no cache back
        return made(**{name: value for name, value in values.items() if name in names})

    def _run_chunks(self, asked: Call, cache: PrivateCache | None, length: int) -> tuple[str, dict[str, Tensor]]:
        """The output class and what is opened of a call, or of several that read a long prompt in chunks."""
        original, rows = self.model.original_class, asked.rows
        past = 0 if cache is None else cache.position
        size = chunk_of(original, self.config, self.parties.config, rows, length, past + length)
        by_token = not original.__name__.endswith("ForSequenceClassification")
        steps: Iterable[tuple[Call, list[Secret], int]] = [(asked, self.secrets, length)]
        if length > size:
            cache = PrivateCache(self.parties, rows) if cache is None else cache
            asked = replace(asked, cache=cache.handle, public={**asked.public, "use_cache": True})
            steps = chunks(asked, self.secrets, past, size, by_token)
        opened, read = list[dict[str, Tensor]](), 0
        for call, secrets, new in steps:
            kind, made = self.parties.forward(call, secrets)
            if cache is not None:
                cache.rows = rows
                cache.extend(new)
            try:
                require(made.pop(GUARD, torch.zeros(1)), architecture(self.config).kind == "vision")
            except DomainError:
                if cache is not None:
                    cache.withheld = True
                raise
            opened.append(made)
            read += new
            if length > size and self.model.on_chunk is not None:
                self.model.on_chunk(read, length)
        return kind, opened[0] if len(opened) == 1 else joined(opened, by_token)


def encode_prompt(model: "PrivateModel", **given: Tensor | None) -> PrivateEncoderOutput:
    """Run an encoder on `input_ids` or `inputs_embeds`, and a mask, at the parties; the client gets a handle."""
    call = ForwardCall(model, given)
    rows, length = call.take_secret("")
    check.check_positions(model.config, length)
    call.take_mask("attention_mask", rows, length)
    encoded = PrivateEncoderOutput.of(model.parties, rows, length)
    asked = Call(call.public, tuple(call.listed), None, None, encoded.handle, ())
    spend_positions(model.parties, rows * length)
    _, opened = model.parties.forward(asked, call.secrets)
    require(opened.pop(GUARD, torch.zeros(1)))
    return encoded


def _as_logits(index: Tensor, count: int) -> Tensor:
    """Logits that say no more than the revealed arg max: 0 there, minus infinity elsewhere."""
    index = index.to(torch.int64)
    if bool(((index < 0) | (index >= count)).any()):
        raise DomainError("the parties revealed an index out of range; their shares do not fit together")
    logits = torch.full((*index.shape, count), float("-inf"))
    return logits.scatter_(-1, index.unsqueeze(-1), 0.0)


# -- a long prompt as calls of a chunk each on one KV cache ----------------------------------------------------------
# The largest arrays of a call at a party are its scores, [heads, queries, keys]: in chunks they grow with the prompt,
# not with its square. Chunks have one size, so that their programs are the same for all prompts; the rest comes first.
def chunks(
    call: Call, secrets: Sequence[Secret], past: int, size: int, by_token: bool
) -> Iterator[tuple[Call, list[Secret], int]]:  # fmt: skip
    """The calls of a prompt, with secrets and numbers of tokens. size: tokens of each but the first. past: positions
    cached before. by_token: outputs are of each token. Only those that are wanted are opened and made.
    """
    length = call.secret[0].shape[1]
    kept = call.public.get("logits_to_keep", 0) or length
    start = 0
    while start < length:
        stop = start + (((length - start) % size) or size)
        wanted = min(stop - start, stop - length + int(kept)) if by_token else int(stop == length)
        public = {name: x[:, start:stop] if isinstance(x, Tensor) else x for name, x in call.public.items()}
        mask = call.public.get("attention_mask")  # of all positions so far
        if isinstance(mask, Tensor):
            public["attention_mask"] = mask[:, : past + stop]
        if "logits_to_keep" in public:
            public["logits_to_keep"] = max(wanted, 1)
        if isinstance(mask, Tensor) and bool(mask[:, : past + stop].all()):
            del public["attention_mask"]
        yield (
            replace(
                call, public=public, outputs=call.outputs if wanted > 0 else (), more=stop < length,
                secret=tuple(replace(x, shape=(x.shape[0], stop - start, *x.shape[2:])) for x in call.secret),
            ),
            [part_of(secret, call.rows, (slice(None), slice(start, stop))) for secret in secrets],
            stop - start,
        )  # fmt: skip
        start = stop


def part_of(secret: Secret, rows: int, part: slice | tuple[slice, slice]) -> Secret:
    """Some rows, or positions of all rows, of an input of a call with `rows` rows."""
    if isinstance(secret, Tensor):
        return secret[part]
    ids, vocabulary = secret
    return ids.view(rows, -1)[part].reshape(-1), vocabulary


def joined(opened: Sequence[dict[str, Tensor]], by_token: bool) -> dict[str, Tensor]:
    """The outputs of all chunks as those of one call."""
    last = opened[-1]
    if not by_token:
        return last
    return {name: torch.cat([each[name] for each in opened if name in each], dim=1) for name in last}
