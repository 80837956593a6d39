"""Token sharding against the plaintext forward of the same model in the same run (Cascade, sections 7.2 and 7.3).

Private and plaintext forwards take turns, so that both meet the same machine; `ratio` is over such pairs. PAPER: the
mean seconds of its Tables 6 and 8 (16 cores of a 2.9 GHz Xeon and 2 Gbit/s between nodes) and the bytes of its
Table 7. Its plans and open partial results are weak and here for comparison; masked ones stand beside, and the same
model under secret sharing. Behind an emulated link there are rows of nodes and of secret sharing only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.link import LinkSpeed, SlowMesh
from bench.rows import Row, settings, spread
from timed_nodes import BUSY, SERIALISING, WAITING, TimedParties
from torch import Tensor
from undistributed import Undistributed

from private_llm.config import PrivateConfig
from private_llm.kernels.parallel import nodes_at_once, usable_cores
from private_llm.net.ledger import Ledger
from private_llm.net.transport import CLIENT
from private_llm.token_sharding import ForwardStep, ShardingPlan

if TYPE_CHECKING:
    from private_llm_hf.client.costs import Costs
    from transformers import PreTrainedModel

Split = dict[str, dict[str, float]]
"""Seconds of "computing", "waiting" and "serialising" by endpoint; they add up to the whole forward, or to more for a
node that still works when the client has its answer."""


@dataclass(frozen=True)
class ModelShape:
    """A text model with random weights; its forward makes hidden states."""

    family: Literal["bert", "llama"]
    hidden: int
    intermediate: int
    layers: int
    heads: int
    groups: int
    vocabulary: int

    def build(self) -> PreTrainedModel:
        """The model, the same for the same shape."""
        from transformers import AutoModel, BertConfig, LlamaConfig

        sizes = {
            "hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "vocab_size": self.vocabulary,
        }  # fmt: skip
        bert = self.family == "bert"
        torch.manual_seed(6)
        config = BertConfig(**sizes) if bert else LlamaConfig(**sizes, num_key_value_heads=self.groups)
        model: PreTrainedModel = AutoModel.from_config(config, dtype=torch.float32)
        return model.eval()


MODELS = {
    "bert-base": ModelShape("bert", 768, 3072, 12, 12, 12, 30522),
    "bert-large": ModelShape("bert", 1024, 4096, 24, 16, 16, 30522),
    "llama-1b": ModelShape("llama", 2048, 8192, 16, 32, 8, 32000),
}
"""llama-1b: Llama 3.2's smallest but for its vocabulary, which costs memory here and no time."""

_TINY = {
    name: replace(shape, hidden=32, intermediate=64, layers=2, heads=4, groups=min(4, shape.groups // 4), vocabulary=50)
    for name, shape in MODELS.items()
}
_AIM = 1.1
"""Of the ratio where nothing is distributed."""

_PAPER_SECONDS: dict[tuple[str, str, int], tuple[float, float | None]] = {
    ("alone", "bert-base", 1): (0.109, 0.091), ("alone", "bert-large", 1): (0.320, 0.273),
    ("nodes", "bert-base", 1): (0.32, 0.09), ("nodes", "bert-large", 1): (1.01, 0.27),
    ("nodes", "bert-base", 4): (0.59, 0.09), ("nodes", "bert-large", 4): (1.57, 0.27),
    ("nodes", "bert-base", 8): (0.74, 0.09), ("nodes", "bert-large", 8): (1.58, 0.27),
    ("size", "bert-base", 2): (0.70, None), ("size", "bert-large", 2): (1.33, None),
    ("size", "llama-1b", 2): (2.67, None),
}  # fmt: skip
"""(Cascade, vanilla) by part of the table, model and alpha."""
_PAPER_BYTES = {
    ("bert-base", 1): 9_000_000, ("bert-base", 4): 38_000_000, ("bert-base", 8): 76_000_000,
    ("bert-large", 1): 25_000_000, ("bert-large", 4): 101_000_000, ("bert-large", 8): 203_000_000,
}  # fmt: skip
"""Table 7, numbers of two bytes."""


Part = Literal["alone", "overhead", "nodes", "size", "bytes", "link", "trio"]


@dataclass(frozen=True)
class Case:
    """A model under a plan, or (part "trio") under three-party secret sharing.

    part: "alone" (what all nodes compute, without links), "overhead" (one CompNode and one AttnNode as threads),
    "nodes" (processes), "size" (of the model), "bytes" (numbers of two bytes, as in the paper's Table 7) or "link"
    (nodes as threads behind an emulated link). weights: of part "trio"; nodes have public ones. speed: of the link.
    """

    part: Part
    model: str
    shape: ModelShape
    plan: ShardingPlan | None
    tokens: int
    weights: Literal["public", "secret"] = "public"
    speed: LinkSpeed | None = None

    @property
    def label(self) -> str:
        """For people."""
        plan = self.plan
        how = f"trio, {self.weights} weights" if plan is None else f"{plan.alpha},{plan.c},{plan.m} {plan.partials}"
        return f"{self.model} {how}"

    @property
    def config(self) -> PrivateConfig:
        """The settings it runs under."""
        if self.plan is None:
            return PrivateConfig(protocol="trio", weights=self.weights, party_mode=self.mode)
        return PrivateConfig(protocol="cascade", plan=self.plan, party_mode=self.mode)

    @property
    def mode(self) -> Literal["threads", "processes"]:
        """Where the nodes are: threads share one copy of the weights."""
        return "processes" if self.part == "nodes" else "threads"

    @property
    def paper(self) -> dict[str, float | None]:
        """What the paper says of this model under this plan, as columns of a row."""
        alpha, c = (0, 0) if self.plan is None else (self.plan.alpha, self.plan.c)
        key = (self.part, self.model, alpha)
        known = self.shape == MODELS.get(self.model) and c == 1
        ours, vanilla = _PAPER_SECONDS.get(key, (None, None)) if known else (None, None)
        size = _PAPER_BYTES.get(key[1:]) if known and self.part == "bytes" else None
        return {"paper_seconds": ours, "paper_vanilla_seconds": vanilla, "paper_bytes": size}

    def runs(self, repeat: int) -> int:
        """Timed pairs: bytes need one, a ratio near one needs many."""
        return {"alone": 4 * repeat, "overhead": 4 * repeat, "bytes": 1}.get(self.part, repeat)

    def run(self, repeat: int, progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Measure, and make the row of it as JSON. progress is called after each pair of forwards."""
        from private_llm_hf import patch

        config, model = self.config, self.shape.build()
        if self.part == "alone" and self.plan is not None:
            with torch.no_grad():
                pairs = _Pairs(model, _Alone(model, self.plan), None, self.tokens)
                return self._row(pairs, config, self.runs(repeat), progress)
        nodes = TimedParties() if self.part == "nodes" else None
        mesh = None
        if self.speed is not None:
            at_once = None if self.plan is None else nodes_at_once(config.parties)
            mesh = SlowMesh(config.parties, config.timeout_s, self.speed, "control", at_once)
        private: Any = patch(model, config, mesh) if nodes is None else patch(model, config, start=nodes)
        with closing(private), torch.no_grad():
            return self._row(_Pairs(model, private, nodes, self.tokens), config, self.runs(repeat), progress)

    def _row(self, pairs: _Pairs, config: PrivateConfig, repeat: int, progress: Callable[[], None]) -> dict[str, Any]:
        costs = pairs.warm_up()
        for _ in range(repeat):
            pairs.run()
            progress()
        plan = self.plan
        split = None if plan is None else pairs.split(plan.alpha)
        mode = "alone" if self.part == "alone" else self.mode
        how = {**settings(config, self.speed), "threads": usable_cores(), "party_mode": mode}
        row = Row(
            **how,
            name=f"cascade-{self.part}", shape=(1, self.tokens), repeat=repeat,
            seconds=spread(pairs.private), bytes_total=costs.bytes_total,
            bytes_per_party=costs.to_dict()["bytes_per_party"], rounds=costs.rounds, error_max=pairs.error,
        )  # fmt: skip
        return {
            **row.to_dict(), "label": self.label, "model": self.model,
            "partials": None if plan is None else plan.partials, "wire": None if plan is None else plan.wire,
            "plan": None if plan is None else [plan.alpha, plan.c, plan.m], "weights": config.weights,
            "parameters": pairs.parameters,
            "vanilla_seconds": spread(pairs.vanilla),
            "ratio": spread([ours / theirs for ours, theirs in zip(pairs.private, pairs.vanilla, strict=True)]),
            "aim_ratio": _AIM if self.part == "alone" else None, "split": split,
            "bytes_nodes": sum(n for link, n in costs.cost.sent.items() if CLIENT not in link),
            **self.paper,
        }  # fmt: skip


WEIGHTS: tuple[Literal["public", "secret"], ...] = ("public", "secret")
_COPIES_OF_SHARES = {"public": 14, "secret": 17}
"""What three parties as threads need at most, weights and a pass over them, in copies of the plaintext's weights
(measured on BERT-base: peaks of 6.9 and 8.1 GB with the two copies besides)."""


class _Alone:
    """A model whose attention goes through all nodes of a plan in this thread; it sends nothing."""

    def __init__(self, model: PreTrainedModel, plan: ShardingPlan) -> None:
        from private_llm_hf.token_sharding.attention_calls import attention_calls, cascade_config, listen

        self._nodes = Undistributed(plan, attention_calls(type(model), model.config))
        self._model = type(model)(cascade_config(model.config)).eval()
        self._model.load_state_dict(model.state_dict(), assign=True)
        listen(self._model, self._attend)

    def _attend(self, module: object, rows: tuple[Tensor, Tensor, Tensor], *_: object) -> Tensor:
        return self._nodes.attend(*rows)

    def __call__(self, input_ids: Tensor, **inputs: Any) -> Any:  # noqa: ANN401 - the model's own
        """As the model's forward."""
        batch, length = input_ids.shape
        self._nodes.begin(ForwardStep(None, batch, 0, length))
        return self._model(input_ids=input_ids, **inputs)

    def cost(self, reset: bool) -> Costs:
        """Nothing was sent."""
        from private_llm_hf.client.costs import Costs

        return Costs((Ledger(CLIENT),))


class _Pairs:
    """Private and plaintext forwards of one text in turns."""

    def __init__(self, model: PreTrainedModel, private: Any, nodes: TimedParties | None, tokens: int) -> None:  # noqa: ANN401 - a private model
        self._model, self._private, self._nodes = model, private, nodes
        random = np.random.default_rng(4)
        self._ids = torch.from_numpy(random.integers(0, model.config.vocab_size, (1, tokens)))
        self.parameters = sum(weight.numel() for weight in model.parameters())
        self.private: list[float] = []
        self.vanilla: list[float] = []
        self.error = 0.0
        self._mine: dict[str, float] = {WAITING: 0.0, SERIALISING: 0.0}

    def warm_up(self) -> Costs:
        """One pair that does not count, and what it sent."""
        self._private.cost(reset=True)
        self.run()
        costs: Costs = self._private.cost(reset=True)
        self.private.clear()
        self.vanilla.clear()
        self._mine = dict.fromkeys(self._mine, 0.0)
        return costs

    def run(self) -> None:
        """One pair."""
        before = self._clock()
        seconds, made = _timed(self._private, self._ids)
        self.private.append(seconds)
        for name, now in self._clock().items():
            self._mine[name] += now - before[name]
        shared = torch.get_num_threads()  # with nodes that are threads; those that run already keep theirs
        torch.set_num_threads(usable_cores())
        try:
            seconds, truth = _timed(self._model, self._ids)
        finally:
            torch.set_num_threads(shared)
        self.vanilla.append(seconds)
        self.error = max(self.error, float((made - truth).abs().max()))

    def _clock(self) -> dict[str, float]:
        """What the client's links have measured so far."""
        seconds = {} if self._nodes is None else self._nodes.client.ledger.seconds
        return {name: seconds.get(name, 0.0) for name in self._mine}

    def split(self, alpha: int) -> Split | None:
        """Mean seconds of a forward: the CompNode that works most, all AttnNodes on average, the client."""
        if self._nodes is None:
            return None
        runs, whole = len(self.private), sum(self.private) / len(self.private)
        ledgers = {ledger.party: ledger for ledger in self._private.cost().ledgers}
        works = {node: _work(ledger, runs) for node, ledger in ledgers.items() if node != CLIENT}
        comps = [works[node] for node in range(alpha)]
        attns = [work for node, work in works.items() if node >= alpha]
        mean = (sum(computing for computing, _ in attns) / len(attns), sum(made for _, made in attns) / len(attns))
        waited, made = (self._mine[name] / runs for name in (WAITING, SERIALISING))
        chosen = {"comp": max(comps, key=sum), "attn": mean, "client": (whole - waited - made, made)}
        return {
            name: {"computing": computing, "waiting": max(0.0, whole - computing - made), "serialising": made}
            for name, (computing, made) in chosen.items()
        }


def _timed(model: Any, ids: Tensor) -> tuple[float, Tensor]:  # noqa: ANN401 - a private model or its original
    started = time.perf_counter()
    found: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    return time.perf_counter() - started, found


def _work(ledger: Ledger, runs: int) -> tuple[float, float]:
    """Seconds of a run that a node computed, and spent on messages."""
    seconds = ledger.seconds
    computing = seconds[BUSY] - seconds[WAITING] - seconds[SERIALISING]
    return max(0.0, computing) / runs, seconds[SERIALISING] / runs


def cases(tiny: bool = False, speed: LinkSpeed | None = None) -> Iterator[Case]:
    """Every row of the table, or those behind an emulated link. tiny: models of two small layers, few nodes."""
    tokens, models = (24, _TINY) if tiny else (128, MODELS)
    berts = ("bert-base",) if tiny else ("bert-base", "bert-large")

    def made(part: Part, model: str, plan: ShardingPlan) -> Case:
        return Case(part, model, models[model], plan, tokens, speed=speed)

    if speed is not None:
        yield from (made("link", berts[0], plan) for plan in ([_paper_plan(2)] if tiny else _plans(berts[0])))
    else:
        yield from (made("alone", bert, _paper_plan(1)) for bert in berts)
        yield from (made("overhead", bert, _paper_plan(1)) for bert in berts)
        for bert in berts:
            yield from (made("nodes", bert, plan) for plan in ([_paper_plan(2)] if tiny else _plans(bert)))
        yield from (made("size", model, _paper_plan(2)) for model in models)
        for bert in berts:
            yield from (made("bytes", bert, replace(_paper_plan(alpha), wire="float16")) for alpha in (1, 4, 8))
    for weights in WEIGHTS:
        yield Case("trio", berts[0], models[berts[0]], None, tokens, weights, speed)


def _plans(model: str) -> list[ShardingPlan]:
    """Of the rows as processes; starting the largest takes longest, so BERT-large has fewer."""
    large = model == "bert-large"
    masked = [ShardingPlan(alpha, 4, 1, accept_weak_plan=True) for alpha in ((8,) if large else (4, 8))]
    return [_paper_plan(alpha) for alpha in ((2, 4, 8) if large else (1, 2, 4, 8))] + masked


def _paper_plan(alpha: int) -> ShardingPlan:
    """The plans of Table 6: clusters of one token, open partial results (weak: for comparison only)."""
    return ShardingPlan(alpha, 1, 1, partials="open", accept_weak_plan=True)


def memory_needed(case: Case) -> int:
    """Bytes for all copies of the weights: the plaintext model's, one on its way, and each process's or party's."""
    copies = 2 + (case.plan.alpha if case.plan is not None and case.mode == "processes" else 0)
    if case.plan is None:
        copies += _COPIES_OF_SHARES[case.weights]
    with torch.device("meta"):
        model = case.shape.build()
    weights: int = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    return copies * weights
