"""What is public of sparse blocks: checked wherever it comes from, with the orders that a sharing was made for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_llm_hf import api
from private_llm_hf.api import AutoPrivateModelForCausalLM, share_checkpoint
from private_llm_hf.checkpoint.share_files import share_path
from private_llm_hf.models import sparse_blocks

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PatchMismatch
from private_llm.sparsity_config import CometConfig
from tests.hf.sparsity.models import batch, sparse
from tests.hf.sparsity.test_private import answer, close, saved
from tests.hf.test_remote import free_ports, running
from tests.hf.tiny import build


@pytest.mark.parametrize(("change", "message"), [({"units": 0}, "sizes or names"), ({"budget": 999}, "sizes or names"),
                                                 ({"readers": ["model.decoder"]}, "no block"),
                                                 ({"kind": "x"}, "kind: got"),
                                                 ({"more": 1}, "not as this version"), ({"width": 63}, "other sizes"),
                                                 ({"hidden": "gelu"}, "one of 'linear', 'relu'"),
                                                 ({"activation": None}, "sizes or names"),
                                                 ({"rank": 65}, "sizes or names"),
                                                 ({"readers": ["x"] * 9}, "sizes or names"),
                                                 ({"name": "a\n", "readers": ["a\n"]}, r"no block 'a\\n'"),
                                                 ({"activation": "model.decoder"}, "has weights; want an activation"),
                                                 ({"activation": "model.decoder.layers.0.fc2"}, "two places"),
                                                 ({"kind": "heads", "activation": None, "units": 9}, "other sizes"),
                                                 ({"kind": "heads", "activation": None, "block": 2}, "sizes or names"),
                                                 ({"name": "x" * 9999, "readers": ["x" * 9999]}, "no block .x{80}'")],
)  # fmt: skip
def test_facts_from_another_endpoint_are_checked(change: dict[str, Any], message: str) -> None:
    model = build("opt")
    name = "model.decoder.layers.0.fc1"
    facts = {"name": name, "kind": "ffn", "width": 64, "units": 96, "block": 1, "rank": 4, "hidden": "linear",
             "budget": 9, "readers": [name], "writer": "model.decoder.layers.0.fc2",
             "activation": "model.decoder.layers.0.activation_fn"}  # fmt: skip
    model.config.private_sparsity = {"settings": {"orders": "kept"}, "blocks": [facts]}
    sparse_blocks.attach_predictors(model)
    assert model.get_submodule(f"{name}_predictor").fc2.weight.is_meta
    other = build("opt")
    other.config.private_sparsity = {"settings": {"orders": "kept"}, "blocks": [{**facts, **change}]}
    with pytest.raises(PatchMismatch, match=message):
        sparse_blocks.attach_predictors(other)
    twice = build("opt")
    twice.config.private_sparsity = {"settings": {"orders": "kept"}, "blocks": [facts, {**facts, "budget": 8}]}
    with pytest.raises(PatchMismatch, match="no block"):
        sparse_blocks.attach_predictors(twice)


def test_two_blocks_share_no_layer() -> None:
    model, found = build("llama"), []
    for layer in (0, 1):
        path = f"model.layers.{layer}.mlp"
        found.append({"name": f"{path}.gate_proj", "kind": "ffn", "width": 64, "units": 96, "block": 1, "rank": 4,
                      "hidden": "linear", "budget": 9, "readers": [f"{path}.gate_proj", "model.layers.0.mlp.up_proj"],
                      "writer": f"{path}.down_proj", "activation": f"{path}.act_fn"})  # fmt: skip
    model.config.private_sparsity = {"settings": {"orders": "kept"}, "blocks": found}
    with pytest.raises(PatchMismatch, match=r"model.layers.0.mlp.up_proj' has two places"):
        sparse_blocks.attach_predictors(model)


@pytest.mark.parametrize("orders", [None, "mine", ["kept"]])
def test_facts_say_how_units_are_ordered(orders: object) -> None:
    model = build("opt")
    settings = {} if orders is None else {"settings": {"orders": orders}}
    model.config.private_sparsity = {"blocks": [], **settings}
    with pytest.raises(PatchMismatch, match="not as this version"):
        sparse_blocks.attach_predictors(model)


def test_kept_orders_are_opened_only_where_the_owner_drew_them(tmp_path: Path) -> None:
    """Weights shared for fresh orders lie in the model's own order, where an opened pattern names its neurons."""
    model = sparse("opt")
    model.save_pretrained(tmp_path / "model")
    folder = saved(model, "opt", tmp_path / "predictors")
    settings = {"protocol": "trio"}
    fresh = PrivateConfig(**settings, sparsity=CometConfig(folder, neuron_budget=0.9))
    shared = tmp_path / "shared"
    share_checkpoint(str(tmp_path / "model"), shared, fresh)
    kept = PrivateConfig(**settings, sparsity=CometConfig(orders="kept"))
    with pytest.raises(ConfigError, match="was shared with orders='fresh'"):
        AutoPrivateModelForCausalLM.from_pretrained(str(shared / "client"), kept)
    facts = json.loads((shared / "client" / "config.json").read_text())
    party = sparse_blocks.check_sparsity
    model.config.private_sparsity = facts["private_sparsity"]
    with pytest.raises(ConfigError, match="was shared with orders='fresh'"):
        party(model, kept.sparsity)  # what each party asks before it opens anything
    party(model, CometConfig())


def test_a_client_that_asks_for_other_orders_is_refused_by_the_parties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over sockets, from share files: it does not check its own wishes; the next session is served."""
    model = sparse("opt")
    model.save_pretrained(tmp_path / "model")
    folder = saved(model, "opt", tmp_path / "predictors")
    remote = PrivateConfig(party_mode="remote", hosts=free_ports(3), allow_plain_loopback=True, timeout_s=30)
    for orders in ("fresh", "kept"):
        comet = CometConfig(folder, orders=orders, neuron_budget=0.9)  # type: ignore[arg-type]
        share_checkpoint(str(tmp_path / "model"), tmp_path / orders, replace(remote, sparsity=comet))
    kept = replace(remote, sparsity=CometConfig(orders="kept"))
    for orders, right in (("fresh", False), ("kept", True)):
        files: list[Path | None] = [share_path(tmp_path / orders, party) for party in range(3)]
        source = str(tmp_path / orders / "client")
        with monkeypatch.context() as lie, running(kept, files, sessions=2 if right else 1):
            if right:
                for _ in range(2):
                    with AutoPrivateModelForCausalLM.from_pretrained(source, kept) as private:
                        close(private(**batch("opt"))[0], answer(model, "opt"))
                continue
            lie.setattr(api, "check_sparsity", lambda *_: None)
            with pytest.raises(ConfigError, match="was shared with orders='fresh'"):
                AutoPrivateModelForCausalLM.from_pretrained(source, kept)
