"""Language models whose parties are far apart: seconds to the first token and for each further one.

    measured   whole models, their parties as processes in shaped network namespaces, or threads behind simulated links
    modelled   exact bytes and rounds of the estimator, compute time of measured layers, put together by `Spent`

A network is one latency (ms, one way between parties) and one bandwidth (Mbit/s, each direction of every machine's
link). Comparisons and functions run by what `adder="auto"` finds faster on it.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import scripts_folder  # noqa: F401 - finds `bench`
from bench.link import LinkSpeed
from bench.measure import measure
from bench.rows import provenance, spread
from bench.work import Shape, Work
from layer_works import llama_decode, llama_layer
from wan_models import PROMPT, TINY_PROMPT, WanModel, wan_model
from wan_run import DRAFTS, Place, measured_passes

from private_llm.config import PrivateConfig
from private_llm.kernels.parallel import threads_per_party
from private_llm.protocol_facts import ASSISTED
from private_llm.token_sharding import cards

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import Estimate, LayerCost

PROTOCOLS = ("trio", "quad", "dealer")
LATENCIES = (0.2, 1.0, 20.0)
BANDWIDTHS = (100.0, 1000.0, 10_000.0)
_USUAL_LATENCY, _USUAL_BANDWIDTH = 1.0, 1000.0
LOOPBACK = LinkSpeed(1e6, 0.0)
"""Sockets of this machine; the bandwidth stands for none."""
MEASURED, MODELLED = ("gpt2", "smollm2"), ("gpt2", "smollm2", "llama-7b", "llama-13b")
_TINY_MODELS = ("demo",)
WIDTHS: tuple[Shape, ...] = ((512, 4, 1376), (1024, 8, 2752))
"""Hidden size, heads, feed-forward size of the layers whose time is measured: LLaMA's own proportions."""
_TINY_WIDTHS: tuple[Shape, ...] = ((32, 2, 48), (64, 4, 96))


@dataclass(frozen=True)
class Counted:
    """What some passes cost. card: bytes through the busiest machine's link in its busier direction."""

    bytes_total: int
    card: int
    rounds: int
    per_party: Mapping[int, int]

    @classmethod
    def of(cls, sent: Mapping[tuple[int, int], int], rounds: int) -> Counted:
        """sent: bytes from one endpoint to another."""
        links = cards(sent)
        most = max((card.most for card in links.values()), default=0)
        return cls(sum(sent.values()), most, rounds, {end: card.out for end, card in links.items()})

    def columns(self, first: Counted, tokens: int = 1) -> dict[str, Any]:
        """Of a row: for one of `tokens` further tokens, and for the first pass."""
        return {
            "bytes_total": self.bytes_total // tokens, "bytes_busiest_link": self.card // tokens,
            "bytes_per_party": {str(end): count // tokens for end, count in self.per_party.items()},
            "rounds": self.rounds // tokens, "bytes_first_token": first.bytes_total,
            "bytes_busiest_link_first": first.card, "rounds_first_token": first.rounds,
        }  # fmt: skip


@dataclass(frozen=True)
class Spent:
    """Modelled seconds, one after the other: computing, waiting for messages, and filling the busiest link."""

    compute: float
    latency: float
    wire: float

    @classmethod
    def of(cls, compute: float, counted: Counted, network: LinkSpeed) -> Spent:
        """compute + rounds x latency + bytes / bandwidth."""
        return cls(compute, counted.rounds * network.latency, network.seconds(counted.card))

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.latency + self.wire


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer: `fixed` and, for each multiply-add, `each`."""

    fixed: float
    each: float

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> LayerTime:
        """The line through two measured layers, (multiply-adds, seconds).

        Proportional to the larger one where the line would start below 0, or fall.
        """
        each = (large[1] - small[1]) / (large[0] - small[0])
        fixed = small[1] - each * small[0]
        if each <= 0 or fixed < 0:
            return cls(0.0, large[1] / large[0])
        return cls(fixed, each)

    def seconds(self, layers: Sequence[LayerCost]) -> float:
        """Of a whole model: what stands in no numbered layer (embedding, head) has its multiply-adds alone."""
        whole = [layer for layer in layers if layer.name.rsplit(".", 1)[-1].isdecimal()]
        return len(whole) * self.fixed + self.each * sum(_macs(layer) for layer in layers)


def _macs(layer: LayerCost) -> int:
    """Multiply-adds of the party that has most."""
    return max(layer.macs.values(), default=0)


def wan_config(network: LinkSpeed, protocol: str = "trio") -> PrivateConfig:
    """Settings of a session over this network."""
    if protocol == ASSISTED:  # which has nothing to choose by the network
        return PrivateConfig(protocol=ASSISTED, timeout_s=600.0)
    return PrivateConfig.from_dict({
        "protocol": protocol, "adder": "auto", "bandwidth_mbit": network.bandwidth_mbit,
        "latency_ms": network.latency_ms, "timeout_s": 600.0,
    })  # fmt: skip


# -- modelled ------------------------------------------------------------------------------------------------------
def estimated(model: WanModel, config: PrivateConfig, prompt: int, batch: int = 1) -> tuple[Estimate, Estimate]:
    """Estimates of the pass over the prompts of a batch, and of that with one further token each."""
    from private_llm_hf.tools.estimate import estimate

    whole = estimate(*model.shape(), config, prompt, 2, batch, ranges=model.ranges(config))
    if whole.prompt is None:
        raise TypeError(f"{model.name}: the estimate has no prompt")
    return whole.prompt, whole


def counted_both(first: Estimate, whole: Estimate) -> tuple[Counted, Counted]:
    """Of the prompt's pass, and of one further token."""
    before, after = first.costs.cost, whole.costs.cost
    later = {link: count - before.sent.get(link, 0) for link, count in after.sent.items()}
    return Counted.of(before.sent, before.rounds), Counted.of(later, after.rounds - before.rounds)


def _differences(first: Estimate, whole: Estimate) -> list[LayerCost]:
    """Layers of the further token alone."""
    from private_llm_hf.tools.estimate import LayerCost

    before = {layer.name: layer.macs for layer in first.layers()}
    return [
        LayerCost(layer.name, {}, 0, {p: n - before.get(layer.name, {}).get(p, 0) for p, n in layer.macs.items()})
        for layer in whole.layers()
    ]


@lru_cache(maxsize=16)
def layer_times(
    config: PrivateConfig, prompt: int, widths: tuple[Shape, ...], repeat: int
) -> tuple[LayerTime, LayerTime]:
    """Of a layer's pass over the prompt, and of a further token over a cache of it, measured here without delays.

    Processor seconds of all parties by the number of parties, the least of `repeat` runs: what a party computes on a
    core of its own, whatever else runs on this machine.
    """
    made = []
    for work in (llama_layer, llama_decode):
        points = []
        for hidden, heads, wide in widths:
            seconds = _processor_seconds(work((1, prompt, hidden, heads, wide)), config, repeat)
            macs = _layer_macs(config, prompt, (hidden, heads, wide), work is llama_decode)
            points.append((macs, seconds / config.parties))
        made.append(LayerTime.through(points[0], points[1]))
    return made[0], made[1]


def _processor_seconds(work: Work, config: PrivateConfig, repeat: int) -> float:
    """Of all parties, threads of this process, in the run that took least."""
    ends: list[float] = []
    measure(work, config, repeat, progress=lambda: ends.append(time.process_time()))
    gc.collect()  # parties' modules refer to themselves, and hold their weights until this
    return min(end - start for start, end in itertools.pairwise(ends))


def _layer_macs(config: PrivateConfig, prompt: int, width: Shape, decode: bool) -> int:
    """Multiply-adds of one such layer, by the estimator."""
    from private_llm_hf.tools.estimate import estimate
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, heads, wide = width
    shape = LlamaConfig(
        vocab_size=8, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=wide,
        num_hidden_layers=1, max_position_embeddings=prompt + 2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    whole = estimate(LlamaForCausalLM, shape, config, prompt, 2)
    first = whole if whole.prompt is None else whole.prompt
    layers = _differences(first, whole) if decode else first.layers()
    return next(_macs(layer) for layer in layers if layer.name.endswith(".0"))


# -- rows ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One row. how: "measured" or "modelled"; way: "plain", or "drafts" (guesses looked up in the prompt)."""

    model: str
    how: str
    network: LinkSpeed
    way: str = "plain"
    protocol: str = "trio"
    tiny: bool = False

    @property
    def label(self) -> str:
        """For a progress bar."""
        return f"{self.model}, {self.how}, {self.network.latency_ms:g} ms, {self.network.bandwidth_mbit:g} Mbit/s"

    def run(self, repeat: int, place: Place | None = None) -> dict[str, Any]:
        """The row. repeat: further tokens that are timed, with drafts three times as many.

        place: where parties run (None: as this machine allows).
        Seconds are of one further token: smallest, median, largest pass, and `seconds_per_token`, the mean. load: the
        system's average over the minute before the end, this run's own processes included.
        Raises ConfigError for a model that is not installed.
        """
        config = wan_config(self.network, self.protocol)
        row: dict[str, Any] = {
            "name": "wan", "model": self.model, "how": self.how, "way": self.way, "protocol": self.protocol,
            "ring": config.ring, "parties": config.parties, "adder": config.adder, **asdict(self.network),
        }  # fmt: skip
        made = self._modelled(config, repeat) if self.how == "modelled" else self._measured(config, repeat, place)
        return {**row, **made, "threads": threads_per_party(config.parties), **provenance()}

    def _measured(self, config: PrivateConfig, repeat: int, place: Place | None) -> dict[str, Any]:
        prompt, place = self._prompt, place or self._place
        drafts = DRAFTS if self.way == "drafts" else 0
        new = 1 + (3 * repeat if drafts else repeat)
        found = measured_passes(wan_model(self.model), config, self.network, prompt, new, drafts, place)
        first, later = Counted.of(*found.first), Counted.of(*found.later)
        tokens = sum(found.tokens)
        return {
            "network": place.words, "party_mode": place.party_mode, "shape": [1, prompt, new],
            "seconds": spread([s / n for s, n in zip(found.seconds, found.tokens, strict=True)]),
            "seconds_per_token": sum(found.seconds) / tokens, "seconds_first_token": found.first_seconds,
            "tokens_per_pass": tokens / len(found.tokens), "repeat": repeat,
            **later.columns(first, tokens), "error_max": found.error, "equal": found.equal, "load": os.getloadavg()[0],
        }  # fmt: skip

    def _modelled(self, config: PrivateConfig, repeat: int) -> dict[str, Any]:
        usual = wan_config(LinkSpeed(_USUAL_BANDWIDTH, self.network.latency_ms), self.protocol)
        of_prompt, of_token = layer_times(usual, self._prompt, _TINY_WIDTHS if self.tiny else WIDTHS, min(repeat, 3))
        estimates = estimated(wan_model(self.model), config, self._prompt)
        first, later = counted_both(*estimates)
        prompt = Spent.of(of_prompt.seconds(estimates[0].layers()), first, self.network)
        token = Spent.of(of_token.seconds(_differences(*estimates)), later, self.network)
        return {
            "network": "formula", "party_mode": "none", "shape": [1, self._prompt, 2],
            "seconds": spread([token.total]), "seconds_per_token": token.total, "seconds_first_token": prompt.total,
            "tokens_per_pass": 1.0, "repeat": min(repeat, 3),
            **later.columns(first), "error_max": None, "equal": None, "parts": asdict(token),
            "parts_first_token": asdict(prompt),
        }  # fmt: skip

    @property
    def _place(self) -> Place:
        """Where it runs: links of party services can be slowed down, those of servers of products be simulated."""
        if self.protocol != ASSISTED:
            return Place.here()
        return Place("simulated" if self.network.latency_ms else "loopback")

    @property
    def _prompt(self) -> int:
        return TINY_PROMPT if self.tiny else PROMPT


def assisted_cases(tiny: bool = False) -> list[Case]:
    """Protocol "assisted" on this machine's loopback, and at each latency at 1 Gbit/s between client and servers."""
    asked = (LOOPBACK, *(LinkSpeed(_USUAL_BANDWIDTH, latency) for latency in LATENCIES if latency >= 1))
    model = _TINY_MODELS[0] if tiny else "smollm2"
    return [Case(model, "measured", network, protocol=ASSISTED, tiny=tiny) for network in asked[: 2 if tiny else None]]


def networks(latency: float | None = None, bandwidth: float | None = None) -> tuple[LinkSpeed, ...]:
    """All latencies at all bandwidths, or those that are asked for. Raises ConfigError for impossible ones."""
    latencies = LATENCIES if latency is None else (latency,)
    bandwidths = BANDWIDTHS if bandwidth is None else (bandwidth,)
    return tuple(LinkSpeed(mbit, ms) for ms in latencies for mbit in bandwidths)


def is_measured(network: LinkSpeed, asked: Sequence[LinkSpeed]) -> bool:
    """Whether whole models run on this network: on any that is asked for alone, else at 1 ms or at 1 Gbit/s."""
    usual = network.latency_ms == _USUAL_LATENCY or network.bandwidth_mbit == _USUAL_BANDWIDTH
    return len(asked) == 1 or usual


def cases(
    asked: Sequence[LinkSpeed], protocol: str = "trio", tiny: bool = False, models: Sequence[str] = (),
    installed: Callable[[str], bool] = lambda name: wan_model(name).missing() is None,
) -> Iterator[Case]:  # fmt: skip
    """Modelled rows first, then measured ones of the models that are installed. models: only these (default: all)."""
    names = _TINY_MODELS if tiny else tuple(dict.fromkeys((*MODELLED, *MEASURED)))
    wanted = [name for name in names if (not models or name in models) and installed(name)]
    for name in wanted:
        if tiny or name in MODELLED:
            for network in asked:
                yield Case(name, "modelled", network, protocol=protocol, tiny=tiny)
    for name in wanted:
        if tiny or name in MEASURED:
            for network in asked:
                if is_measured(network, asked):
                    yield Case(name, "measured", network, protocol=protocol, tiny=tiny)
                if wan_model(name).text and (tiny or network.bandwidth_mbit == _USUAL_BANDWIDTH):
                    yield Case(name, "measured", network, "drafts", protocol, tiny)
