"""A decode step under policies of the KV cache beside one with a full cache, in turns (MPCache's figures and tables).

    step        lengths and policies, attention part of a layer         Figure 10; dealer and quad: Figure 13
    ablation    from a full cache to MPCache, one step after the other  Figure 11
    hierarchy   sizes and shares of clusters                            Table 6
    gather      tokens or clusters, brought together in each way        Table 2
    memory      entries held by the share that stays
    layer       prompt and token of a whole layer, counted              Figure 1, prefill overhead, no cache
    alone       a token of a whole layer whose cache is empty           what policies do not change; LLaMA-2 takes 14 GB

Bytes and rounds are exact and do not depend on values. Seconds are those of parties as threads of this process.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import scripts_folder  # noqa: F401 - finds `bench`
from bench.link import LinkSpeed
from bench.measure import measure
from bench.rows import provenance
from bench.work import Shape
from cache_steps import AttentionShape, Counted, Figures, counted, timed
from layer_works import alone

from private_llm.config import PrivateConfig
from private_llm.kernels.parallel import threads_per_party
from private_llm.kv_cache.policies.papers import H2O, HeadMerging, InfLLM, LongCache, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy, Level

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import Estimate

MODELS: dict[str, tuple[str, Shape]] = {"llama-2": ("llama", (4096, 32, 11008)), "gpt2": ("gpt2", (768, 12, 3072))}
"""Model type; hidden size, heads, feed-forward size."""
TINY: Shape = (32, 4, 48)
LENGTHS = (512, 1024, 2048, 4096)
AIM_SECONDS, AIM_BYTES, AIM_PREFILL = 2.0, 5.0, 0.03
"""Of full by kept for the attention part at 2048 tokens under trio, and of a prompt's bytes beyond the full cache's."""
PROTOCOLS = ("trio", "dealer", "quad")
_LEVELS = (Level(32, 0.5), Level(16, 0.5))
HIERARCHIES = [
    (large, first, second)
    for large in (32, 64)
    for first, second in ((0.9, 0.22), (0.7, 0.28), (0.5, 0.40), (0.3, 0.67))
]
"""Size and share of large clusters, share of those of 16: Table 6."""
PAPER = MPCacheConfig.paper()
POLICIES: dict[str, CachePolicy] = {
    "MPCache, the paper's": PAPER, "MPCache": MPCacheConfig(), "LongCache": LongCache(kept=0.05),
    "SnapKV": SnapKV(gamma=0.25), "H2O": H2O(gamma=0.25), "InfLLM": InfLLM(kept=0.1), "head merging": HeadMerging(),
}  # fmt: skip
ABLATION: dict[str, CachePolicy] = {
    "dynamic selection of tokens": LongCache(kept=0.25, first=0),
    "+ static eviction": MPCacheConfig.paper(levels=(Level(1, 0.25),), shared_layers=1),
    "+ clusters, linearised": MPCacheConfig.paper(shared_layers=1),
    "+ layers share": PAPER,
}
"""Three quarters evicted, a quarter of the rest chosen, as in Figure 11."""
GATHERS = ("keys", "scores", "shuffled-scores")


@dataclass(frozen=True)
class Case:
    """A row: a kind, what it is called, a model at a length under a protocol, a policy; measured: seconds, too."""

    kind: str
    label: str
    model: str
    protocol: str
    tokens: int
    policy: CachePolicy
    measured: bool = False
    tiny: bool = False

    @property
    def sizes(self) -> Shape:
        """Hidden, heads, feed-forward."""
        return TINY if self.tiny else MODELS[self.model][1]

    @property
    def shape(self) -> AttentionShape:
        """Of its attention."""
        hidden, heads, _ = self.sizes
        return AttentionShape(heads, heads, hidden // heads, self.tokens)

    def run(
        self, repeat: int, progress: Callable[[], None] = lambda: None, speed: LinkSpeed | None = None
    ) -> dict[str, Any]:
        """The row as JSON. ratio_bytes, ratio_seconds: full by kept. speed: of the links of timed steps."""
        row: dict[str, Any] = {
            "name": "mpcache", "kind": self.kind, "label": self.label, "model": self.model, "protocol": self.protocol,
            "tokens": self.tokens, "heads": self.shape.heads, "depth": self.shape.depth,
            "policy": self.policy.to_dict(), **provenance(),
        }  # fmt: skip
        if self.kind == "alone":
            return {**row, **_alone(self, repeat, progress)}
        if self.kind == "layer":
            return {**row, **_whole_layer(self)}
        row |= _counts(self)
        if self.measured:
            row |= _seconds(self, repeat, progress, speed)
        return row


@lru_cache(maxsize=64)
def _counted(protocol: str, policy: CachePolicy, shape: AttentionShape) -> Counted:
    return counted(PrivateConfig(protocol=protocol), policy, shape, period=1 if policy == KEEP_ALL else 32)


def _counts(case: Case) -> dict[str, Any]:
    """Bytes and rounds of a token's attention part on average, of what comes after a prompt, memory."""
    full, kept = (_counted(case.protocol, policy, case.shape) for policy in (KEEP_ALL, case.policy))
    return {
        "entries": kept.entries, "held_bytes": kept.held_bytes, "full_held_bytes": full.held_bytes,
        "bytes": kept.mean[0], "rounds": kept.mean[1], "full_bytes": full.steps[0][0], "full_rounds": full.steps[0][1],
        "ratio_bytes": full.steps[0][0] / kept.mean[0], "evicting_bytes": kept.prompt[0] - full.prompt[0],
        "evicting_rounds": kept.prompt[1] - full.prompt[1], "ops": kept.ops, "full_ops": full.ops,
    }  # fmt: skip


def _seconds(case: Case, repeat: int, progress: Callable[[], None], speed: LinkSpeed | None) -> dict[str, Any]:
    config = PrivateConfig(protocol=case.protocol, calibrate=False)
    full, kept = timed(config, [KEEP_ALL, case.policy], case.shape, repeat, progress, speed)
    return {
        "bandwidth_mbit": None if speed is None else speed.bandwidth_mbit,
        "latency_ms": None if speed is None else speed.latency_ms,
        "seconds": kept.seconds, "full_seconds": full.seconds, "repeat": repeat,
        "seconds_first": kept.first_seconds, "full_seconds_first": full.first_seconds,
        "ratio_seconds": full.seconds["median"] / kept.seconds["median"],
        "evicting_seconds": kept.prompt_seconds - full.prompt_seconds,
        "threads": threads_per_party(config.parties), "aim_ratio": AIM_SECONDS,
    }  # fmt: skip


def _alone(case: Case, repeat: int, progress: Callable[[], None]) -> dict[str, Any]:
    """A token through a whole layer whose cache is empty: what is common to all policies."""
    config = PrivateConfig(protocol=case.protocol, calibrate=False)
    kind: Literal["llama", "gpt2"] = "gpt2" if case.model == "gpt2" else "llama"
    row = measure(alone(kind, case.sizes), config, repeat, progress=progress)
    return {
        "seconds": row.seconds, "full_seconds": row.seconds, "ratio_seconds": 1.0, "ratio_bytes": 1.0,
        "seconds_first": row.seconds_first, "full_seconds_first": row.seconds_first,
        "bytes": row.bytes_total, "full_bytes": row.bytes_total, "rounds": row.rounds, "full_rounds": row.rounds,
        "repeat": repeat, "threads": row.threads,
    }  # fmt: skip


def _whole_layer(case: Case) -> dict[str, Any]:
    """Exact bytes and rounds of a layer for the prompt and for a token, by the estimator; of layers that share, half
    the sum of both.
    """
    from private_llm_hf.tools.estimate import estimate, model_class_of
    from transformers import AutoConfig

    kind = MODELS[case.model][0]
    hidden, heads, wide = case.sizes
    names = ("n_embd", "n_head", "n_inner", "n_layer", "n_positions") if kind == "gpt2" else (
        "hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers", "max_position_embeddings"
    )  # fmt: skip
    settings = dict(zip(names, (hidden, heads, wide, 4, case.tokens + 2), strict=True))
    config = AutoConfig.for_model(kind, vocab_size=8, bos_token_id=0, eos_token_id=0, **settings)
    made = {}
    for name, policy in (("full", KEEP_ALL), ("kept", case.policy)):
        private = PrivateConfig(protocol=case.protocol, kv_cache=policy, prompt_chunk=None)  # as MPCache's must be
        found = estimate(model_class_of(config), config, private, case.tokens, 2)
        made[name] = [_of_pair(part) for part in (found.prompt, found) if part is not None]
    (full, whole), (prompt, both_kept) = made["full"], made["kept"]
    token, full_token = both_kept[0] - prompt[0], whole[0] - full[0]
    return {
        "prompt_bytes": prompt[0], "full_prompt_bytes": full[0], "prompt_rounds": prompt[1],
        "full_prompt_rounds": full[1], "prefill_overhead": prompt[0] / full[0] - 1, "aim_overhead": AIM_PREFILL,
        "bytes": token, "full_bytes": full_token, "rounds": both_kept[1] - prompt[1], "full_rounds": whole[1] - full[1],
        "ratio_bytes": full_token / token, "no_cache_bytes": full[0],
    }  # fmt: skip


def _of_pair(found: "Estimate") -> Figures:
    """Bytes and rounds of one of the two layers after the first two, on average."""
    pair = [layer for layer in found.layers() if layer.name.endswith((".2", ".3"))]
    return sum(layer.bytes_total for layer in pair) / 2, sum(layer.rounds for layer in pair) / 2


def cases(protocols: tuple[str, ...] = PROTOCOLS, tiny: bool = False) -> Iterator[Case]:
    """All rows, those first that aims speak of."""
    made = list(_tiny(protocols) if tiny else _usual(protocols))
    yield from (replace(case, tiny=tiny) for case in made)


def _usual(protocols: tuple[str, ...]) -> Iterator[Case]:
    for protocol in protocols:
        trio = protocol == "trio"
        for tokens in (2048, 512, 1024, 4096):
            for model in MODELS:
                for label, policy in POLICIES.items():
                    main = label.startswith(("MPCache", "LongCache"))
                    if trio or main:
                        measured = tokens < LENGTHS[-1] and (main if trio else label != "MPCache" and tokens != 1024)
                        yield Case(
                            "step", label, model, protocol, tokens, policy, measured or (trio and tokens == 2048)
                        )
        if trio:
            for label, policy in ABLATION.items():
                yield Case("ablation", label, "llama-2", protocol, 1024, policy, measured=True)
            yield from _gathers(protocol, 1024)
        for large, first, second in HIERARCHIES if trio else ():
            policy = replace(PAPER, levels=(Level(large, first), Level(16, second)))
            yield Case("hierarchy", f"s{large}({first}), s16({second})", "llama-2", protocol, 1024, policy)
        for gamma in (1.0, 0.5, 0.25, 0.1) if trio else ():
            yield Case("memory", f"gamma {gamma}", "llama-2", protocol, 2048, MPCacheConfig(gamma=gamma))
        for model in MODELS if trio else ("gpt2",):
            yield Case("alone", "beside the cache", model, protocol, 1, KEEP_ALL, measured=True)
        for tokens in (512, 1024, 2048):
            for model in MODELS:
                for label in ("MPCache, the paper's", "MPCache"):
                    yield Case("layer", label, model, protocol, tokens, POLICIES[label])


def _gathers(protocol: str, tokens: int) -> Iterator[Case]:
    for size, what in ((1, "tokens"), (16, "clusters of 16")):
        for gather in GATHERS:
            policy = MPCacheConfig.paper(gamma=1.0, levels=(Level(size, 0.25),), shared_layers=1, gather=gather)
            yield Case("gather", f"{what}, {gather}", "gpt2", protocol, tokens, policy, measured=True)


def _tiny(protocols: tuple[str, ...]) -> Iterator[Case]:
    small = MPCacheConfig.paper(gamma=0.5, least=16, recent=3, levels=(Level(8, 0.5), Level(4, 0.5)))
    for protocol in protocols:
        yield Case("step", "MPCache", "llama-2", protocol, 64, small, measured=True)
        yield Case("layer", "MPCache", "gpt2", protocol, 32, small)
        yield Case("alone", "beside the cache", "gpt2", protocol, 1, KEEP_ALL, measured=True)
