"""The estimate of token sharding is the ledger of a real run: every byte on every link, for prefill and decoding."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.client.costs import Costs
from private_llm_hf.tools.estimate import estimate, named_shape
from private_llm_hf.tools.estimate_nodes import AROUND
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, DomainError, PatchMismatch
from private_llm.token_sharding import AttnNode, ShardingPlan
from tests.hf import tiny
from tests.hf.tools.test_estimate import real

PLAN = ShardingPlan(3, 3, 1, accept_weak_plan=True)  # for models with grouped queries


def settings(plan: ShardingPlan = PLAN) -> PrivateConfig:
    return PrivateConfig(protocol="cascade", plan=plan, timeout_s=30)


def text(length: int) -> torch.Tensor:
    return torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(5))


def sent(costs: Costs) -> dict[tuple[str, int, int], int]:
    """Bytes by what they are and link."""
    found: dict[tuple[str, int, int], int] = defaultdict(int)
    for ledger in costs.ledgers:
        for (_, what, to), count in ledger.sent.items():
            found[what, ledger.party, to] += count
    return dict(found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "new", "plan"),
    [
        ("llama", 9, PLAN),
        ("mistral", 4, ShardingPlan(2, 4, 2, accept_weak_plan=True)),
        ("opt", 0, PLAN),
        ("opt", 3, ShardingPlan(4, 3, 1, partials="open", accept_weak_plan=True)),
        ("gpt2", 3, ShardingPlan(2, 6, 2, accept_weak_plan=True, wire="float16")),
        ("bert", 0, PLAN),
        ("modernbert", 0, ShardingPlan(1, 4, 1, accept_weak_plan=True)),
    ],
    ids=str,
)
def test_every_link_and_the_rounds(name: str, new: int, plan: ShardingPlan) -> None:
    model = tiny.build(name)
    found = estimate(type(model), model.config, settings(plan), sequence=13, new_tokens=new, batch=2)
    run = real(model, settings(plan), 13, new)
    assert sent(found.costs) == sent(run)
    assert found.costs.rounds == run.rounds
    assert sum(layer.bytes_total for layer in found.layers()) == found.costs.bytes_total


@pytest.mark.parametrize(("name", "new"), [("llama", 5), ("gpt2", 0), ("bert", 0)])
def test_work_and_memory_are_those_of_a_real_model(name: str, new: int) -> None:
    """A plaintext model counts its own products; AttnNodes are asked how much they keep."""
    model = tiny.build(name)
    plan = ShardingPlan(2, 4, 1, accept_weak_plan=True)
    found = estimate(type(model), model.config, settings(plan), sequence=11, new_tokens=new, batch=2)
    assert found.weight_bytes == 4 * sum(p.numel() for p in model.parameters())
    counted: dict[str, int] = defaultdict(int)
    hooks = []

    def count(where: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        counted[where] += output.numel() * inputs[0].shape[-1]

    for where, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            hooks.append(module.register_forward_hook(partial(count, where)))
    ids = text(11)
    with torch.no_grad():
        if new:
            model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        else:
            model(ids)
    for hook in hooks:
        hook.remove()
    comps = {layer.name: sum(layer.macs.get(node, 0) for node in range(plan.alpha)) for layer in found.layers()}
    around = comps.pop(AROUND)
    for layer, macs in comps.items():
        assert macs == sum(n for where, n in counted.items() if where.startswith(f"{layer}."))
    outside = sum(counted.values()) - sum(comps.values())
    assert around == outside * (plan.alpha if name == "bert" else 1) > 0  # every CompNode pools its first row
    assert found.cache_bytes == (kept(model, plan, new) if name != "bert" else 0)


def kept(model: PreTrainedModel, plan: ShardingPlan, new: int) -> int:
    """Bytes of the fullest AttnNode's cache after a real generation (new 0: after one forward)."""
    nodes: list[AttnNode] = []
    made = AttnNode.__init__

    def note(self: AttnNode, *args: object, **more: object) -> None:
        made(self, *args, **more)  # type: ignore[arg-type]
        nodes.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AttnNode, "__init__", note)
        with patch(model, settings(plan)) as private, torch.no_grad():
            if new:
                private.generate(text(11), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
            else:
                held = private(text(11))  # noqa: F841 - its cache lives as long as it does
            return max(
                sum(k.numel() * k.element_size() + v.numel() * v.element_size() for k, v in held.values())
                for node in nodes
                for held in node._kept.values()
            )


def test_what_a_run_refuses_the_estimate_refuses() -> None:
    model = tiny.build("llama")
    with pytest.raises(ConfigError, match="gives tokens away"):
        estimate(type(model), model.config, settings(ShardingPlan(3, 1, 1)), sequence=13)
    single = tiny.build("gpt2")
    with pytest.raises(DomainError, match="too short"):
        estimate(type(single), single.config, settings(ShardingPlan(3, 3, 1)), sequence=3)
    with pytest.raises(DomainError, match="64"):
        estimate(type(model), model.config, settings(), sequence=65)
    picture = tiny.build("vit")
    with pytest.raises(PatchMismatch, match="this is vision"):
        estimate(type(picture), picture.config, settings(), sequence=13)
    split = PrivateConfig(plan=PLAN, split=2)
    with pytest.raises(ConfigError, match="split: got 2"):
        estimate(type(model), model.config, split, sequence=13)


@pytest.mark.full
def test_a_large_model_on_many_nodes_is_counted_without_weights() -> None:
    shape = named_shape("llama-13b")
    assert shape is not None
    plan = ShardingPlan(8, 8, 2, partials="open")
    found = estimate(*shape, settings(plan), sequence=128, new_tokens=3)
    layers = [layer for layer in found.layers() if layer.rounds]
    assert [layer.rounds for layer in layers] == [3] * 40
    assert len({layer.bytes_total for layer in layers}) == 1
    # Each CompNode has 16 rows of the prompt; two tokens more go to CompNode 0, whose positions 128 and 129 are.
    weights = 4 * 5120 * 5120 + 3 * 5120 * 13824
    assert {layer.macs[0] for layer in layers} == {(16 + 2) * weights}
    assert {layer.macs[1] for layer in layers} == {16 * weights}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "protocol", "new"), [("llama", "trio", 4), ("opt", "quad", 2), ("gpt2", "dealer", 0), ("bert", "trio", 0)]
)
def test_a_split_costs_its_parties_and_its_nodes(name: str, protocol: str, new: int) -> None:
    model = tiny.build(name)
    config = PrivateConfig.from_dict(
        {"protocol": protocol, "plan": PLAN, "split": 1, "timeout_s": 60, "calibrate": False}
    )
    found = estimate(type(model), model.config, config, sequence=13, new_tokens=new, batch=2)
    run = real(model, config, 13, new)
    assert sent(found.costs) == sent(run)
    assert found.costs.rounds == run.rounds
    assert found.costs.preprocessing.total == run.preprocessing.total
    layers = found.layers()
    assert sum(layer.bytes_total for layer in layers) == found.costs.bytes_total
    attending = [layer.name for layer in layers if layer.stages and layer.rounds]
    assert len(attending) == 1
    assert [layer.name for layer in layers if layer.name in attending] == attending
