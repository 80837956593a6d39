"""Speculative decoding as a user asks for it: what drafts, how much, and what the parties may see of it.

    private.generate(**inputs, speculation=SpeculationConfig())                        looked up in the text itself
    private.generate(**inputs, speculation=SpeculationConfig(draft="my_draft", paths=4))

A pass over several tokens has as many rounds as one over a single token, so drafted tokens are checked together. The
text is the one that the private model alone would write: the same when greedy, of the same distribution when sampled.
"""

import functools
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, PretrainedConfig, PreTrainedModel

from private_llm.errors import ConfigError, UnsupportedOp
from private_llm.kv_cache.policies.policy import CachePolicy
from private_llm.typed_settings import check_types
from private_llm_hf.client.drafts import Both, Draft, LookUp, ModelDraft
from private_llm_hf.models.experts import LEAST_PLACES

LOOKUP, MOST_PATHS = "lookup", 64


@dataclass(frozen=True)
class FixedCounts:
    """Every pass reads `window` tokens and goes on by `advance`, whatever the drafts were worth: counts stay hidden.

    reserve: so many of the prompt's last tokens are read again in the first window; a text may fall behind its schedule
    by as many tokens before it has to end early. Tokens that are known beyond the schedule add to it.
    exact: a text that falls behind is not ended: a pass of the same window goes on by nothing until enough is known,
    and passes end with the text. That keeps the text, and shows the parties how many passes there were and which of
    them waited; without it they see nothing.
    Raises ConfigError for a window smaller than the two together, and for numbers below 1 (reserve: 0).
    """

    advance: int = 2
    window: int = 12
    reserve: int = 4
    exact: bool = False

    def __post_init__(self) -> None:
        check_types(self, "FixedCounts.")
        if self.advance < 1 or self.reserve < 0 or self.window < self.advance + self.reserve:
            raise ConfigError(
                f"FixedCounts: got advance={self.advance}, window={self.window}, reserve={self.reserve}; want "
                "advance >= 1, reserve >= 0 and a window of at least both together"
            )

    def passes(self, new: int) -> int:
        """Passes after the prompt's for at most `new` tokens, public as that limit is."""
        return -(-(new - 1) // self.advance)


DEFAULT_COUNTS = FixedCounts(advance=2, window=8, reserve=0, exact=True)  # unless a user says otherwise


@dataclass(frozen=True)
class SpeculationConfig:
    """How `generate(speculation=...)` drafts.

    draft: "lookup" (what followed the last words where they occurred before; needs nothing), or a plaintext causal
    model of the same vocabulary, or its folder or hub id (`scripts/train_draft.py` makes one).
    look_up: whether a model's drafts are joined by looked-up ones.
    paths: ways to go on that a pass checks at once, as rows of a batch; at most MOST_PATHS.
    fixed_counts: what every pass reads and goes on by, so that the parties do not see how many tokens were accepted
    (`FixedCounts`); None: DEFAULT_COUNTS, which keeps the text as it is.
    open_counts: let the parties see how many were accepted (see docs/speculation.md for what that tells them), which
    takes fewer passes. Then
    length: drafted tokens in each path, or None: chosen before each pass from measured times and acceptance. A length
    alone means open counts.
    longest: at most so many then.
    Raises ConfigError for numbers below 1, more paths than that, and for fixed counts with a length or open counts.
    """

    draft: str | PreTrainedModel = LOOKUP
    look_up: bool = True
    paths: int = 1
    length: int | None = None
    longest: int = 12
    fixed_counts: FixedCounts | None = None
    open_counts: bool = False

    def __post_init__(self) -> None:
        check_types(self, "SpeculationConfig.")
        for name in ("paths", "length", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"SpeculationConfig.{name}: got {value}; want 1 or more")
        if self.paths > MOST_PATHS:
            raise ConfigError(
                f"SpeculationConfig.paths: got {self.paths}; want at most {MOST_PATHS}, because each is a row of "
                "every pass, with a cache of its own"
            )
        if self.fixed_counts is not None and (self.length is not None or self.open_counts):
            raise ConfigError(
                "SpeculationConfig: got fixed_counts with length or open_counts; the window of FixedCounts says how "
                "many tokens a pass reads, so leave one of them out"
            )

    @property
    def counts(self) -> FixedCounts | None:
        """What every pass reads and goes on by; None: as it comes, which the parties see."""
        open_ = self.open_counts or self.length is not None
        return None if open_ else self.fixed_counts or DEFAULT_COUNTS

    def drafter(self, config: PretrainedConfig, processors: LogitsProcessorList, sample: bool) -> Draft:
        """What drafts. Raises ConfigError for another vocabulary and unloadable models, UnsupportedOp if recurrent."""
        if self.draft == LOOKUP:
            return LookUp()
        model = _loaded(self.draft) if isinstance(self.draft, str) else self.draft
        kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
        if stateful(model) or not all("attention" in kind and "linear" not in kind for kind in kinds):
            raise UnsupportedOp(
                f"draft: got a {type(model).__name__}, whose state cannot be put back where drafts are wrong; want one "
                "of attention layers"
            )
        have, want = model.config.get_text_config().vocab_size, config.get_text_config().vocab_size
        if have != want:
            raise ConfigError(
                f"draft: got a model of {have} tokens; want {want}, the private model's own vocabulary: a "
                "smaller model of its family, or draft='lookup', which needs none"
            )
        made = ModelDraft(model, processors, sample)
        return Both(made) if self.look_up else made


def stateful(model: PreTrainedModel) -> bool:
    """Whether a model carries states from token to token that no cache can put back, as transformers says of it."""
    return bool(getattr(model, "_is_stateful", False))


@functools.lru_cache(maxsize=1)
def _loaded(source: str) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"draft: got {source!r}, which cannot be loaded ({str(error).splitlines()[0]}); want 'lookup', or the "
            "folder or hub id of a causal language model"
        ) from error


@dataclass
class DraftLength:
    """Chooses how many tokens to draft, so that most tokens a second are expected.

    With chance a that a drafted token is accepted after accepted ones, a pass that drafts k gives (1 - a^(k+1)) /
    (1 - a) tokens and takes base + slope * (tokens read) seconds. a is the share of tries that succeeded so far, with
    as much weight on a first guess of 1/2 as two tries have; base and slope fit the fastest pass of each size. The
    choice is a function of public sizes, of times that the parties see, and of accepted counts, which they see too.
    """

    paths: int
    longest: int
    tried: int = 2
    succeeded: int = 1
    fastest: dict[int, float] = field(default_factory=dict)

    def ran(self, length: int, accepted: int, tokens: int, seconds: float) -> None:
        """A pass over `tokens` tokens, in paths of `length` drafted ones, of which `accepted` were kept."""
        self.succeeded += accepted
        self.tried += min(accepted + 1, length)
        self.fastest[tokens] = min(seconds, self.fastest.get(tokens, seconds))

    @property
    def acceptance(self) -> float:
        """The chance that a drafted token is accepted."""
        return min(self.succeeded / self.tried, 0.99)

    def expected(self, length: int) -> float:
        """Tokens that a pass with so many drafted ones gives."""
        return (1.0 - self.acceptance ** (length + 1)) / (1.0 - self.acceptance)

    def choose(self) -> int:
        """The number of tokens to draft next; the first two passes measure two sizes."""
        if len(self.fastest) < 2:
            return min(4 + 2 * len(self.fastest), self.longest)
        # least squares through the fastest passes; neither number below 0, so that noise cannot turn the choice
        sizes = torch.tensor([float(size) for size in self.fastest], dtype=torch.float64)
        times = torch.tensor(list(self.fastest.values()), dtype=torch.float64)
        apart = sizes - sizes.mean()
        slope = max(0.0, float((apart * (times - times.mean())).sum() / apart.square().sum()))
        base = max(float(times.mean() - slope * sizes.mean()), 0.0) + 1e-9
        lengths = range(1, self.longest + 1)
        return max(lengths, key=lambda k: self.expected(k) / (base + slope * self.paths * (k + 1)))


# -- Which policies of the KV cache drafts may run under: those whose text stays that of single tokens ----------------
# A pass over drafts reads several tokens at once. Its queries choose no clusters, see what a window of single tokens
# would have evicted by then, and give their attention to evictions, drafts that are rejected as well.
def check_drafts(policy: object, limit: int, counts: FixedCounts | None, capacity: float | None = None) -> None:
    """Raise ConfigError where drafts could change the text. limit: the most tokens that the cache will hold. counts:
    how passes read; None: as many drafts as they like, the first of them in the prompt's pass. capacity: of experts.
    """
    apart = counts is not None and not counts.reserve and counts.window <= LEAST_PLACES
    if capacity is not None and limit > LEAST_PLACES and not apart:
        raise ConfigError(
            f"drafts: with expert_capacity={capacity} drafts in the prompt's pass, and tokens of it that are read "
            "again, would take other places of experts, so the text would change; want "
            f"speculation=SpeculationConfig() with fixed counts, reserve=0 and a window of at most {LEAST_PLACES}, or "
            "no drafts (leave speculation, assistant_model and prompt_lookup_num_tokens out)"
        )
    if not isinstance(policy, CachePolicy):
        return
    chosen = policy.selection is not None and policy.selection.shape(limit) is not None
    if not chosen and policy.ranked(limit, limit, limit) == limit == policy.ranked(limit, limit, 1):
        return  # every query of such a text sees all before it, however passes cut it
    evicts = policy.eviction is not None and policy.selection is None and policy.newest is not None
    alone = counts is not None and not counts.reserve and (policy.newest or 0) >= counts.window
    if evicts and alone and policy.ranked(_LONG, _LONG, 1) == _LONG:
        return  # the prompt alone evicts, in a pass of its own, and no pass over drafts does
    raise ConfigError(
        f"drafts: kv_cache {policy.name!r} evicts or chooses entries of a text of up to {limit} tokens, and a pass "
        "over several drafted tokens does so otherwise than passes over single ones, so the text would change. Drafts "
        "work with KeepAll and HeadMerging, with every policy while nothing is left out of a text of that length, "
        "and with mpcache without levels and snapkv for speculation=SpeculationConfig() with fixed counts, reserve=0, "
        "every=None and recent of at least the tokens of a window; want one of these, or no drafts (leave speculation, "
        "assistant_model and prompt_lookup_num_tokens out)"
    )


_LONG = 1 << 20  # tokens of a text, longer than any
