"""Protocol "assisted" with weights of 8 bits, a choice of speed over exactness that says its error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch, prepare_corrections
from private_llm_hf.client import launch
from private_llm_hf.client.product_servers import ProductServers
from private_llm_hf.party.product_server import ProductServer
from private_llm_hf.tools.estimate import estimate
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.assisted.fixed_point import IntegerWeight
from private_llm.errors import ConfigError, LowPrecision, PrivateLLMError, ProtocolAbort, ShareFileError
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, worst
from tests.hf.test_assisted import ASSISTED, ERROR
from tests.hf.test_remote import free_ports, running

EIGHT = replace(ASSISTED, weight_bits=8)
pytestmark = pytest.mark.filterwarnings("ignore::private_llm.errors.LowPrecision")


@contextmanager
def rounded(config: PrivateConfig) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """A tiny model whose linear layers have the weights that servers multiply by, and its assisted self."""
    plain, weights = tiny.build("llama"), {}
    load = ProductServers.load

    def noted(self: ProductServers, weight: IntegerWeight, name: str) -> int:
        weights[name] = weight.lines * weight.factors[:, None] * weight.column_scales
        return load(self, weight, name)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ProductServers, "load", noted)
        private = patch(plain, config)
    with private:
        for group, matrix in weights.items():
            layers = [plain.get_submodule(name) for name in group.split("+")]
            for layer, part in zip(layers, matrix.split([len(each.weight) for each in layers]), strict=True):
                assert 0 < worst(part.float(), layer.weight) < 0.01
                layer.weight.data.copy_(part)
        yield plain, private


def test_models_compute_what_a_plaintext_model_of_rounded_weights_does() -> None:
    with rounded(EIGHT) as (plain, private), torch.no_grad():
        assert worst(private(**BATCH).logits, plain(**BATCH).logits, BATCH["attention_mask"]) < ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), plain.generate(**BATCH, **GREEDY))
        private.cost(reset=True)
        private(torch.arange(7)[None] + 3)
        found = estimate(type(plain), plain.config, EIGHT, sequence=7)
        assert found.costs.bytes_total == private.cost().bytes_total
        wide = estimate(type(plain), plain.config, ASSISTED, sequence=7)
        assert 0.8 < found.costs.bytes_total / wide.costs.bytes_total < 0.82
        assert 2 * found.weight_bytes == wide.weight_bytes


@pytest.mark.parametrize("liar", [0, 1])
def test_a_wrong_product_names_the_server(liar: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ProductServer.product

    def lie(self: ProductServer, x: Tensor, weight: object, rows: int) -> Tensor:
        made = original(self, x, weight, rows)
        made[-2] ^= self.transport.me == liar  # of the last element
        return made

    monkeypatch.setattr(ProductServer, "product", lie)
    with (
        patch(tiny.build("llama"), EIGHT) as private,
        pytest.raises(ProtocolAbort, match=f"^party {liar} gave"),
    ):
        private(**BATCH)


def test_corrections_are_of_one_size_of_weights(tmp_path: Path) -> None:
    eight = replace(EIGHT, corrections=str(tmp_path / "8"))
    sixteen = replace(ASSISTED, corrections=str(tmp_path / "16"))
    for config in (eight, sixteen):
        prepare_corrections(tiny.build("llama"), config, 100)  # two blocks
    with rounded(eight) as (plain, private), torch.no_grad():
        assert worst(private(**BATCH).logits, plain(**BATCH).logits, BATCH["attention_mask"]) < ERROR
    for config, bits in ((replace(sixteen, weight_bits=8), 16), (replace(eight, weight_bits=16), 8)):
        for use in (patch, lambda *given: prepare_corrections(*given, 5)):
            with pytest.raises(ShareFileError, match=f"corrections for weights of {bits} bits, and weight_bits is"):
                use(tiny.build("llama"), config)


def test_servers_with_checkpoints_hold_the_same_weights(checkpoint: Path) -> None:
    remote = replace(EIGHT, party_mode="remote", hosts=free_ports(2), allow_plain_loopback=True)
    with (
        running(remote, [None, None], checkpoint=str(checkpoint)),
        AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), remote) as private,
    ):
        assert private.parties.stored
        private(**BATCH)


def test_servers_with_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = launch.run_party

    def run(config: PrivateConfig, number: int, *more: Any) -> str | None:
        return original(replace(config, weight_bits=16) if number else config, number, *more)

    monkeypatch.setattr(launch, "run_party", run)
    with pytest.raises(
        PrivateLLMError, match=r"weight_bits: (party 1.*|the client) has (16, this endpoint 8|8, this endpoint 16)"
    ):
        patch(tiny.build("llama"), EIGHT)


def test_the_error_is_said_once() -> None:
    with pytest.warns(LowPrecision, match=r"by 0\.\d\d% on average and by [01]\.\d\d% at most \('.*'\)") as told:
        patch(tiny.build("llama"), EIGHT).close()
    assert sum(each.category is LowPrecision for each in told) == 1


def test_other_protocols_and_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight_bits: protocol 'trio' has no such setting"):
        PrivateConfig(weight_bits=8)
    with pytest.raises(ConfigError, match="weight_bits"):
        PrivateConfig(protocol="assisted", weight_bits=4)
    assert EIGHT.agreement() != ASSISTED.agreement()
