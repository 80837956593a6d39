"""What token sharding will cost, without weights or nodes: the client's own code, and formulas where the nodes stand.

The client is the ordinary one. A CompNode's model runs without values, which says what it multiplies and what it
returns; what travels between the nodes and what AttnNodes compute comes from `token_sharding/nodes/stage_costs.py`.
"""

import dataclasses
import inspect
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.config import PrivateConfig
from private_llm.net.ledger import CONTROL, Ledger
from private_llm.net.transport import CLIENT, MetaTransport
from private_llm.token_sharding import HELD, AttentionCall, Exchange, Sent, Stage, attention_stages, cache_bytes
from private_llm_hf.checkpoint.model_spec import describe
from private_llm_hf.checkpoint.weights import WeightList, skeleton
from private_llm_hf.client.costs import Costs, layer_of
from private_llm_hf.client.nodes import Due, Nodes, NodeStep
from private_llm_hf.party.model_description import Shapes
from private_llm_hf.party.node import CompNode, plan_of, reads_last_token
from private_llm_hf.token_sharding.attention_calls import attention_calls, shape_alone
from private_llm_hf.token_sharding.commands import LoadNode
from private_llm_hf.token_sharding.cut import Cut
from private_llm_hf.wire.answers import CostRows

AROUND = "input, head and output"  # what belongs to no layer


@dataclasses.dataclass(frozen=True)
class _NodeForward:
    """What one CompNode's forward is: class and shapes of its outputs, multiply-adds by layer, layers that attend."""

    kind: str
    outputs: dict[str, torch.Size]
    macs: Mapping[str, int]
    layers: tuple[str, ...]


class _MetaComp(CompNode):
    """A CompNode that notes which modules attend and how much its matrices multiply."""

    def __init__(self, config: PrivateConfig, loaded: LoadNode, shapes: Shapes) -> None:
        links = MetaTransport(0)
        meta = torch.device("meta")
        weights = {name: torch.empty(shape, device=meta) for name, shape in shapes.items()}
        super().__init__(config, links, loaded, Exchange(plan_of(config), links, loaded.calls), weights, meta)
        self._names = {module: name for name, module in self.model.named_modules()}
        self._attended: list[str] = []
        self._macs: dict[str, int] = defaultdict(int)
        for module in self.model.modules():
            if isinstance(module, (nn.Linear, Conv1D)):
                module.register_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._macs[layer_of(self._names[module])] += output.numel() * inputs[0].shape[-1]

    def _attend(self, module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], *_: object) -> Tensor:
        self._attended.append(layer_of(self._names[module]))
        return shape_alone(module, rows)

    def look(self, source: str, batch: int, rows: int, wanted: int) -> _NodeForward:
        """One forward on so many rows, with logits of so many of them."""
        self._attended.clear()
        self._macs.clear()
        numbers = torch.zeros(batch, rows, dtype=torch.int64, device="meta")
        given = {"input_ids": numbers, "attention_mask": numbers}
        if source == "values":
            given["inputs_embeds"] = torch.empty(batch, rows, self._width, device="meta")
            del given["input_ids"]
        elif self._stand_in is not None:
            self._stand_in.rows = torch.empty(batch, rows, self._stand_in.width, device="meta")
        if "position_ids" in self._accepts:
            given["position_ids"] = numbers
        with torch.no_grad():
            kind, outputs = self._forward(given, torch.zeros(wanted, dtype=torch.int64, device="meta"))
        shapes = {name: value.shape for name, value in outputs.items()}
        return _NodeForward(kind, shapes, dict(self._macs), tuple(self._attended))


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Stages of each forward, memory of a CompNode and of the fullest AttnNode. calls: attentions of one forward."""

    forwards: Sequence[Sequence[Stage]]
    calls: Sequence[AttentionCall]
    weight_bytes: int
    cache_bytes: int


class MetaNodes(Nodes):
    """The client's link to nodes that are formulas; answers every call with zeros of the right shape."""

    def __init__(
        self, config: PrivateConfig, kind: type[PreTrainedModel], settings: PretrainedConfig,
        progress: Callable[[], None], cut: Cut | None = None,
    ) -> None:  # fmt: skip
        """cut: where a split begins, if there is one."""
        super().__init__(config, MetaTransport(CLIENT), lambda: None)
        self._first = config.endpoints - self.plan.nodes
        self.calls = attention_calls(kind, settings)[0 if cut is None else cut.count :]
        self._last_only = reads_last_token(kind, settings)
        whole = WeightList.of(skeleton(kind, settings))
        kept = {name: shape for name, shape in whole.shapes.items() if cut is None or not cut.belongs_before(name)}
        accepts = tuple(sorted(inspect.signature(kind.forward).parameters))
        loaded = LoadNode(describe(kind, settings), False, cut, tuple(self.calls), accepts)
        self._comp = _MetaComp(config, loaded, kept)
        self._known: dict[tuple[str, int, int, int], _NodeForward] = {}
        self._progress = progress
        self._kept: dict[int, tuple[int, int]] = {}
        self._weight_bytes = HELD * sum(torch.Size(shape).numel() for shape in kept.values())
        self._forwards: list[list[Stage]] = []
        self._source, self._before = "", self._sent()

    def run(self, step: NodeStep, source: str, feed: Callable[[int, list[int]], None]) -> tuple[str, dict[str, Tensor]]:
        """As `Nodes.run`."""
        self._source, self._before = source, self._sent()
        with self.transport.ledger.scope(AROUND):
            return super().run(step, source, feed)

    def _sent(self) -> Counter[tuple[int, int]]:
        """What the client has sent so far, without commands."""
        sent: Counter[tuple[int, int]] = Counter()
        for (_, what, to), count in self.transport.ledger.sent.items():
            if what != CONTROL:
                sent[CLIENT, to] += count
        return sent

    def _outputs(self, step: NodeStep) -> tuple[str, list[tuple[Due, dict[str, Tensor]]]]:
        """Zeros in place of answers, after the forward was counted."""
        looks = {node: self._look(step, node) for node in step.rows}
        self._forwards.append(self._stages(step, self._sent() - self._before, looks))
        if step.at.handle is not None:
            self._kept[step.at.handle] = (step.at.batch, step.at.total)
        self._progress()
        zero = torch.zeros(())
        found = [
            (step.due(rows), {name: zero.expand(shape) for name, shape in looks[node].outputs.items()})
            for node, rows in step.rows.items()
        ]
        return next(iter(looks.values())).kind, found

    def _look(self, step: NodeStep, node: int) -> _NodeForward:
        """Costs depend on how many rows there are and how many are wanted, not on which."""
        due = step.due(step.rows[node])
        size = (self._source, step.at.batch, len(due.rows), len(due.wanted))
        if size not in self._known:
            self._known[size] = self._comp.look(*size)
        return self._known[size]

    def _stages(self, step: NodeStep, given: Sent, looks: Mapping[int, _NodeForward]) -> list[Stage]:
        """One forward: inputs, two stages for each attention, outputs with what is computed outside the layers."""
        made: dict[AttentionCall, tuple[Stage, Stage]] = {}
        macs = {self._first + node: dict(look.macs) for node, look in looks.items()}
        stages = [Stage(AROUND, "input", given)] if given else []
        for call, layer in zip(self.calls, next(iter(looks.values())).layers, strict=True):
            if call not in made:
                out, back = attention_stages(self.plan, call, step.at)
                made[call] = self._numbered(out), self._numbered(back)
            out, back = made[call]
            work = {node: layers.pop(layer, 0) for node, layers in macs.items()}
            stages += [dataclasses.replace(out, layer=layer, macs=work), dataclasses.replace(back, layer=layer)]
        answers = {
            (self._first + node, CLIENT): HELD * sum(size.numel() for size in look.outputs.values())
            for node, look in looks.items()
        }
        rest = {node: sum(layers.values()) for node, layers in macs.items()}
        return [*stages, Stage(AROUND, "outputs", answers, rest)]

    def _numbered(self, stage: Stage) -> Stage:
        """With the numbers of endpoints in place of nodes."""
        first = self._first
        sent = {(frm + first, to + first): count for (frm, to), count in stage.sent.items()}
        return dataclasses.replace(stage, sent=sent, macs={node + first: n for node, n in stage.macs.items()})

    def costs(self, reset: bool = False) -> Costs:
        """Everything since the start; the client's ledger is the last."""
        ledgers = {node: Ledger(node) for node in range(self._first, self._first + self.plan.nodes)}
        for stage in itertools.chain(*self._forwards):
            for (frm, to), count in stage.sent.items():
                if frm != CLIENT:
                    ledgers[frm].sent[(stage.layer, stage.what, to)] += count
            for node, count in stage.macs.items():
                ledgers[node].macs[stage.layer] += count
            if stage.what == "rows":
                for node in {frm for frm, _ in stage.sent}:
                    ledgers[node].rounds[(stage.layer, "attention")] += 1
        return Costs.from_rows([CostRows.of(ledger) for ledger in (*ledgers.values(), self.transport.ledger)])

    def sharded(self) -> Sharded:
        """What was counted."""
        held = [cache_bytes(self.plan, self.calls, *kept) for kept in self._kept.values()]
        most = max((count for one in held for count in one.values()), default=0)
        return Sharded(tuple(self._forwards), self.calls, self._weight_bytes, most)
