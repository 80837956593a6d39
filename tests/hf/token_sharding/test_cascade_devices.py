"""Nodes on a GPU: no GPU is needed to see that everything is moved where it is used, PyTorch's fake tensors check it.

Fake tensors have shapes and devices but no values, and an operation on two devices is an error, as on a real GPU.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.api import describe
from private_llm_hf.party.node import CompNode
from private_llm_hf.token_sharding.attention_calls import attention_calls
from private_llm_hf.token_sharding.commands import CompForward, LoadNode
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from private_llm.errors import PrivateLLMError
from private_llm.net.transport import PlacedTransport, Staging, Transport
from private_llm.token_sharding import AttnNode, Exchange, ForwardStep, ShardingPlan
from private_llm.token_sharding.nodes import attn_node
from private_llm.token_sharding.nodes.floats import ZeroShares
from tests.hf import tiny

GPU = torch.device("cuda:0")
PLAN = ShardingPlan(2, 3, 1, accept_weak_plan=True)
STEP = ForwardStep(None, 2, 0, 12)


class NoGuards(TorchFunctionMode):
    """Methods of tensors that ask for a real device before fake tensors get a word, by other operations."""

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is Tensor.contiguous:
            return torch.clone(args[0], memory_format=torch.contiguous_format)
        if func is Tensor.__getitem__ and args[0].is_cuda:
            return taken(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if func is Tensor.__float__:
            return 0.0  # a range that is checked
        return func(*args, **(kwargs or {}))


def taken(tensor: Tensor, index: tuple) -> Tensor:
    """tensor[index]."""
    dim = 0
    for done, part in enumerate(index):
        if part is Ellipsis:
            dim = tensor.dim() - sum(later is not None for later in index[done + 1 :])
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
        elif part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(part, slice):
            tensor, dim = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1), dim + 1
        else:
            tensor, dim = tensor.index_select(dim, part.to(tensor.device)), dim + 1  # the CPU's will do
    return tensor


class Wire(Transport):
    """Takes and gives tensors of main memory."""

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        assert payload.device.type == "cpu", tag

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def wait(self, frm: int) -> None:
        """Nothing to wait for."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    def to(self: PreTrainedModel, device: torch.device) -> PreTrainedModel:
        """As `nn.Module.to`, which cannot exchange fake parameters."""
        for module in self.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(value.to(device), requires_grad=False))
            for name, value in list(module.named_buffers(recurse=False)):
                module._buffers[name] = value.to(device)
        return self

    monkeypatch.setattr(PreTrainedModel, "to", to)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(Staging, "out", lambda staging, x: x.cpu())
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("name", ["llama", "opt", "gemma3_text", "bert"])
def test_a_comp_node_moves_what_it_needs(fake: FakeTensorMode, name: str) -> None:
    model = tiny.build(name)
    kind = type(model)
    accepts = tuple(sorted(inspect.signature(kind.forward).parameters))
    loaded = LoadNode(describe(kind, model.config), False, None, tuple(attention_calls(kind, model.config)), accepts)
    wire = Wire(0)
    exchange = Exchange(PLAN, PlacedTransport(wire, lambda: GPU), loaded.calls)
    config = PrivateConfig(protocol="cascade", plan=PLAN)
    rows = PLAN.rows_of_comp(0, 0, STEP.total)
    with fake, NoGuards(), torch.no_grad():
        weights = tiny.build(name).state_dict()
        node = CompNode(config, wire, loaded, exchange, weights, GPU)
        assert {value.device for value in [*node.model.parameters(), *node.model.buffers()]} == {GPU}
        positions = torch.zeros(2, len(rows), dtype=torch.int64)
        _, outputs = node.run(CompForward(STEP, "tokens", len(rows), positions, tuple(rows), None))
    assert {value.device.type for value in outputs.values()} == {"cpu"}


@pytest.mark.parametrize("shards", [(0, 0), (0, 1)])
def test_an_attn_node_keeps_its_cache_on_its_gpu(
    fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch, shards: tuple[int, int]
) -> None:
    """Two steps, so that new rows meet the cache, and beams that reorder it."""
    rule = attn_node.allowed

    def allowed(*facts: object) -> Tensor | None:
        with unset_fake_temporarily():  # it looks at values
            return rule(*facts)

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: object) -> tuple[Tensor, Tensor]:
        """In place of the Triton kernel, which wants values."""
        assert {tensor.device for tensor in (q, k, v, *more) if isinstance(tensor, Tensor)} == {GPU}
        return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])

    def masked(self: ZeroShares, numbers: Tensor) -> Tensor:
        """In place of real streams."""
        assert numbers.device == GPU
        return numbers

    monkeypatch.setattr(ZeroShares, "add_to", masked)
    monkeypatch.setattr(attn_node, "allowed", allowed)
    monkeypatch.setattr(attn_node, "attend", attend)
    model = tiny.build("llama")
    wire = Wire(PLAN.attn_endpoint(*shards))
    calls = attention_calls(type(model), model.config)
    with fake, NoGuards(), torch.no_grad():
        node = AttnNode(PLAN, PlacedTransport(wire, lambda: GPU), calls)
        node.run(ForwardStep(1, 2, 0, 12))
        node.run(ForwardStep(1, 2, 12, 6))
        kept = [tensor for pair in node._kept[1].values() for tensor in pair]
        assert {tensor.device for tensor in kept} == {GPU}
        node.select(1, torch.tensor([1, 0]))
        node.crop(1, 14)
        assert {tensor.device for pair in node._kept[1].values() for tensor in pair} == {GPU}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda"}, "device: got 'cuda'; this process sees 0 GPU"),
        ({"device_map": "auto"}, "device_map: a node keeps its model, or its cache, on one device"),
    ],
)
def test_settings_that_a_node_cannot_follow(change: dict[str, str], message: str) -> None:
    config = PrivateConfig.from_dict({"protocol": "cascade", "plan": PLAN, "timeout_s": 20, **change})
    with pytest.raises(PrivateLLMError, match=rf"(CompNode|AttnNode) .* \(party \d\): ConfigError: {message}"):
        patch(tiny.build("llama"), config)
