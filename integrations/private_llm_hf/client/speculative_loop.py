"""The loop of speculative decoding at the client, in the place of generate()'s own.

1. The draft proposes a tree of tokens after the text; its paths become rows of a batch.
2. One pass of the private model reads the last token and the drafted ones of every row, on one shared cache.
3. `drafts.accept` keeps a path and draws the token after it. The cache goes on with the row of that path, cut back to
   what was kept. The parties see the numbers of rows and tokens of a pass, which row went on and how far it was cut
   back: under fixed counts (the default) the same in every pass, and if the text is to stay exact, which passes went on
   by nothing. Why that matters: arXiv 2411.01076 (When Speculation Spills Secrets).

A plaintext model's cache has the same methods: that is how tests compare.
"""

import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from private_llm_hf.client.drafts import ROOT, Draft, Tree, accept
from private_llm_hf.client.speculation import (
    DEFAULT_COUNTS,
    DraftLength,
    FixedCounts,
    SpeculationConfig,
    check_drafts,
    stateful,
)
from private_llm_hf.models.inputs import GENERATED, check_positions, max_positions
from private_llm_hf.transformers_versions import CACHE

_LOG = logging.getLogger(__name__)
_LONG = 1 << 30  # more than any text


def decoding(
    config: SpeculationConfig, streamer: BaseStreamer | None, beyond: bool = False
) -> Callable[..., Any]:  # fmt: skip
    """The loop as generate(custom_generate=...) takes it.

    beyond: with a length, let the last passes read as many tokens as the others, as far as the model has positions.
    It raises ConfigError, DomainError and UnsupportedOp for what it does not do, before anything is sent: beams,
    several prompts or a padded one, no cache, encoder-decoders, a draft of another vocabulary.
    """

    def decode(
        model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, **facts: Any,  # noqa: ANN401
    ) -> GenerateDecoderOnlyOutput | Tensor:  # fmt: skip
        _refuse(model, input_ids, generation_config, facts, config)
        text = Text(input_ids[0].tolist(), stopping_criteria, streamer)
        passes = Passes(model, facts[CACHE], logits_processor, generation_config.do_sample, text)
        draft = config.drafter(model.config, logits_processor, generation_config.do_sample)
        counts = config.counts
        if counts is None:
            past = (max_positions(model.config) or _LONG) if beyond else generation_config.max_length
            _open_counts(passes, draft, config, past)
        else:
            _fixed_counts(passes, draft, config.paths, counts, generation_config.max_length)
        if streamer is not None:
            streamer.end()
        return text.output(generation_config, passes.cache)

    return decode


def _refuse(
    model: PreTrainedModel, ids: Tensor, generation: GenerationConfig, facts: dict[str, Any], config: SpeculationConfig
) -> None:
    if len(ids) != 1 or (generation.num_beams or 1) > 1 or (generation.num_return_sequences or 1) > 1:
        raise ConfigError(f"speculation: got {len(ids)} rows, or beams; want one prompt, greedy or sampled")
    if model.config.is_encoder_decoder or facts.get("inputs_embeds") is not None:
        raise UnsupportedOp("speculation: want a decoder-only model and a prompt of token ids")
    if stateful(model):
        raise UnsupportedOp(f"speculation: {type(model).__name__} has states that cannot be put back; leave drafts out")
    if facts.get(CACHE) is None:
        raise ConfigError("speculation: needs a cache; leave use_cache=False and NoCache() out")
    if isinstance(facts[CACHE], StaticCache):
        raise ConfigError("speculation: got a static cache, which cannot forget drafts; leave cache_implementation out")
    counts = config.counts
    beyond = 0 if counts is None or counts.exact else counts.window
    policy, capacity = (getattr(facts[CACHE], name, None) for name in ("policy", "expert_capacity"))
    check_drafts(policy, generation.max_length + beyond, counts, capacity)
    mask = facts.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise DomainError("speculation: got a padded prompt; want one without padding (a single prompt needs none)")
    if ids.shape[1] <= facts[CACHE].get_seq_length():
        raise DomainError("speculation: the cache holds the whole prompt; want at least one token that it does not")


class Text:
    """The tokens so far, and whether they are all."""

    def __init__(self, ids: list[int], criteria: StoppingCriteriaList, streamer: BaseStreamer | None) -> None:
        self.ids, self.over = ids, False
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []
        self._criteria, self._streamer = criteria, streamer

    def push(self, token: int, scores: Tensor, logits: Tensor) -> None:
        """One token more, with its processed scores [V] and raw logits [V]; nothing once the text is over."""
        if self.over:
            return
        self.ids.append(token)
        self.scores.append(scores[None])
        self.logits.append(logits[None])
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        self.over = bool(self._criteria(torch.tensor([self.ids]), tuple(self.scores)).all())

    def output(self, config: GenerationConfig, cache: Any) -> GenerateDecoderOnlyOutput | Tensor:  # noqa: ANN401
        """As generate() returns it."""
        ids = torch.tensor([self.ids])
        if not config.return_dict_in_generate:
            return ids
        return GenerateDecoderOnlyOutput(
            sequences=ids, **{CACHE: cache},
            scores=tuple(self.scores) if config.output_scores else None,
            logits=tuple(self.logits) if config.output_logits else None,
        )  # fmt: skip


class Passes:
    """Passes of the model over drafted rows, and what of them becomes text."""

    def __init__(
        self, model: PreTrainedModel, cache: Any, processors: LogitsProcessorList, sample: bool, text: Text,  # noqa: ANN401
    ) -> None:  # fmt: skip
        self.cache, self.text, self.config = cache, text, model.config
        self._model, self._processors, self._sample = model, processors, sample
        self._short = "logits_to_keep" in inspect.signature(model.forward).parameters
        getattr(cache, "activate_past_recording", lambda: None)()  # older transformers have none
        self._records = any(getattr(layer, "record_past", False) for layer in cache.layers)

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return int(self.cache.get_seq_length())

    def read(self, rows: list[list[int]], keep: int) -> Tensor:
        """One pass over rows of equal length on the cache of one row: logits [R, keep, V] of the last `keep`."""
        if len(rows) > 1:
            self.cache.batch_repeat_interleave(len(rows))
        more = {"logits_to_keep": keep} if self._short else {}
        made = self._model(input_ids=torch.tensor(rows), **{CACHE: self.cache}, use_cache=True, **more)
        logits: Tensor = made.logits[:, -keep:].float()
        return logits

    def go_on(self, row: int, rows: int, forget: int) -> None:
        """Keep one row of the cache, without its last `forget` entries."""
        if rows > 1:
            self.cache.reorder_cache(torch.tensor([row]))
        if forget or self._records:  # which hold more than their window until then
            self.cache.crop(-forget)

    def take(self, tree: Tree, rows: "DraftRows", logits: Tensor) -> list[int]:
        """Accept nodes and the token after them into the text. logits: [R, 1 + length, V], from the last token on."""
        met: list[tuple[Tensor, Tensor]] = []
        prefix = list(self.text.ids)

        def chances(number: int) -> Tensor:
            if number != ROOT:
                prefix.append(tree.nodes[number].token)
            row, column = rows.places[number]
            raw = logits[row, column]
            scores: Tensor = self._processors(torch.tensor([prefix]), raw[None].clone())[0]
            met.append((scores, raw))
            if self._sample:
                return scores.softmax(-1)
            return torch.zeros_like(scores).scatter_(0, scores.argmax(-1, keepdim=True), 1.0)

        kept, following = accept(tree, chances)
        for token, (scores, raw) in zip([*(tree.nodes[each].token for each in kept), following], met, strict=True):
            self.text.push(token, scores, raw)
        return kept


class DraftRows:
    """The paths of a tree as rows of drafted tokens, filled up to the same number and length for every tree."""

    def __init__(self, tree: Tree, paths: int, length: int, filler: int) -> None:
        self.places = {ROOT: (0, 0)}  # row and column of the logits after each node
        self.tokens = [[filler] * length for _ in range(paths)]
        for row, leaf in enumerate(tree.leaves()):
            for column, number in enumerate(tree.path(leaf)):
                self.tokens[row][column] = tree.nodes[number].token
                self.places.setdefault(number, (row, column + 1))

    def row_of(self, kept: list[int]) -> int:
        """A row that begins with these nodes."""
        return self.places[kept[-1]][0] if kept else 0


def _open_counts(passes: Passes, draft: Draft, config: SpeculationConfig, limit: int) -> None:
    text, lengths = passes.text, DraftLength(config.paths, config.longest)
    while not text.over:
        new = text.ids[passes.cached :]
        paths = config.paths if passes.cached and len(new) == 1 else 1  # a prompt is read once
        length = min(config.length or lengths.choose(), max(limit - len(text.ids) - 1, 0))
        tree, before = Tree(), len(text.ids)
        if length:
            draft.add(tree, text.ids, paths, length)
        rows = DraftRows(tree, paths if length else 1, length, text.ids[-1])
        began = time.perf_counter()
        logits = passes.read([[*new, *row] for row in rows.tokens], length + 1)
        seconds = time.perf_counter() - began
        kept = passes.take(tree, rows, logits)
        held = passes.cached - (len(text.ids) - 1)  # more than nothing, if the text ended within what was kept
        passes.go_on(rows.row_of(kept), len(rows.tokens), held)
        if len(new) == 1 and length:
            lengths.ran(length, len(text.ids) - before - 1, len(rows.tokens) * (length + 1), seconds)


def _fixed_counts(passes: Passes, draft: Draft, paths: int, counts: FixedCounts, limit: int) -> None:
    """The prompt, then passes of one shape, as many as `limit` says; what they bring is known to the client alone.

    Every pass reads the window after the cache: tokens that are known, then drafted ones. Row 0 goes on with the first
    `advance` of them. They must be the text's. If it knows fewer, it ends there, and passes go on over anything; in the
    end the cache is cut back to where they began, whose entries are the prompt's. With exact counts the pass goes on by
    nothing instead, the last windows end where the text must, and there are no more passes than the text needs.
    """
    text = passes.text
    prompt = len(text.ids)
    if not counts.exact:
        check_positions(passes.config, limit + counts.window, GENERATED)
    logits = passes.read([text.ids[passes.cached :]], 1)
    passes.take(Tree(), DraftRows(Tree(), 1, 0, text.ids[-1]), logits)
    passes.go_on(0, 1, min(counts.reserve, passes.cached - 1))
    if counts.exact:
        while not text.over:
            window = min(counts.window, limit - 1 - passes.cached)  # the last token is not read
            start = passes.cached
            right = _pass(passes, draft, paths, counts, window)
            ahead = right and start + counts.advance < len(text.ids)  # one token is left for the next pass to read
            passes.go_on(0, paths, window - (counts.advance if ahead else 0))
        return
    first = passes.cached
    for _ in range(counts.passes(limit - prompt)):
        ahead = _pass(passes, draft, paths, counts, counts.window)
        passes.go_on(0, paths, counts.window - counts.advance)
        if not text.over and not ahead:
            text.over = True
            _LOG.warning(
                "speculation: the drafts fell behind their schedule, so the text ends after %d of %d tokens; want a "
                "smaller FixedCounts.advance or a larger reserve", len(text.ids) - prompt, limit - prompt,
            )  # fmt: skip
    passes.go_on(0, 1, passes.cached - first)


def _pass(passes: Passes, draft: Draft, paths: int, counts: FixedCounts, window: int) -> bool:
    """Read the window after the cache, and accept proposals; whether row 0 begins with `advance` text tokens."""
    text, start, drafted = passes.text, passes.cached, Tree()
    known = text.ids[start : start + window]
    # The draft takes the steps of a whole window, so that its time does not tell how many are used.
    draft.add(drafted, text.ids, paths, window)
    free = window - len(known)
    tree = drafted.cut(free)
    rows = DraftRows(tree, paths, free, text.ids[-1])
    fed = [[*known, *row] for row in rows.tokens]
    logits = passes.read(fed, window)
    if known and len(text.ids) - start <= window and not text.over:
        passes.take(tree, rows, logits[:, len(known) - 1 :])
    return fed[0][: counts.advance] == text.ids[start : start + counts.advance]


# -- Whether drafts pay over the network of a session ------------------------------------------------------------------
_LOOKED_UP = 1.2  # tokens that a pass gives with looked-up drafts where a text does not repeat (docs/studies/drafts.md)
_TRIES = 6  # passes of each size at most: programs that later ones repeat are recorded and compiled in the first three
_LEAST_TRIES, _MEASURED_S = 2, 60.0  # and at least, where they take so many seconds


@torch.no_grad()
def look_ups_pay(model: PreTrainedModel, ids: list[int]) -> tuple[bool, str]:
    """Whether looked-up drafts with DEFAULT_COUNTS save time on a private model's session, and why.

    They do where waiting for exchanges takes most of a pass, so that a pass over a window takes hardly longer than one
    over a token. Both run after `ids`, the tokens of a public text, some times, and the fastest of each count. Raises
    errors of the library.
    """
    if model.parties.config.corrections:
        return False, "every drafted token would use up a stored correction"
    cache = model(input_ids=torch.tensor([ids]), use_cache=True)[CACHE]
    passes = Passes(model, cache, LogitsProcessorList(), False, Text(ids, StoppingCriteriaList(), None))
    window, rounds, started = DEFAULT_COUNTS.window, 0, time.perf_counter()
    fastest = {1: float("inf"), window: float("inf")}
    for attempt in range(_TRIES):
        if attempt >= _LEAST_TRIES and time.perf_counter() - started > _MEASURED_S:
            break
        for size in fastest:
            model.cost(reset=True)
            began = time.perf_counter()
            passes.read([ids[:1] * size], size)
            fastest[size] = min(time.perf_counter() - began, fastest[size])
            rounds = model.cost().rounds if size == 1 else rounds
            passes.go_on(0, 1, size)
    ratio = fastest[window] / fastest[1]
    each = f", {fastest[1] / rounds * 1e3:.3g} ms each" if rounds else ""
    told = f"a pass over {window} tokens takes {ratio:.2f} times one over 1 token ({rounds} rounds{each}), "
    if ratio <= _LOOKED_UP:
        return True, f"{told}so rounds decide, and drafts save some"
    return False, f"{told}and looked-up drafts give {_LOOKED_UP} tokens a pass where a text does not repeat"
