"""Layers on several devices and on disk: the same results, for every architecture, and maps that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_llm_hf.checkpoint.offload import Offloaded
from private_llm_hf.party import placement
from private_llm_hf.party.model import build_party_model
from private_llm_hf.party.placement import DISK, Placement
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm.errors import ConfigError
from private_llm.protocols.session import Session
from private_llm.tensor.secret import SecretTensor
from tests.hf.party.parties import LOGIT_ERROR, description, error, ids, private_twin, tokens, weights_of
from tests.hf.tiny import ALL, ENCODERS, build
from tests.tensor.secrets import fixed, plain_session, secret


def on_disk(model: PreTrainedModel, session: Session, reads: list[str]) -> PreTrainedModel:
    """The party's model with weights that are made when they are read; `reads` collects their names."""

    def weight(name: str, value: Tensor) -> Offloaded:
        def read() -> Any:
            reads.append(name)
            return fixed(session, value) if session.config.weights == "secret" else value

        return Offloaded(tuple(value.shape), read)

    config, name = description(model)
    return build_party_model(config, name, {n: weight(n, w) for n, w in weights_of(model).items()}, session)


def run(model: PreTrainedModel, party: PreTrainedModel, session: Session, name: str) -> tuple[Tensor, Tensor]:
    """(private, plain) outputs for the same input."""
    if name == "vit":
        pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))
        return (
            party(pixel_values=secret(session, pixels)).last_hidden_state,
            model(pixel_values=pixels).last_hidden_state,
        )
    given = ids(2, 7)
    inputs: dict[str, Any] = {"input_ids": given}
    shares: dict[str, Any] = {"inputs_embeds": party.get_input_embeddings()(tokens(session, given))}
    if name == "t5":
        start = ids(2, 3, seed=4)
        inputs["decoder_input_ids"] = start
        shares["decoder_inputs_embeds"] = party.get_decoder().get_input_embeddings()(tokens(session, start))
    kind = "last_hidden_state" if name in ENCODERS else "logits"
    return party(**shares)[kind], model(**inputs)[kind]


@torch.no_grad()
@pytest.mark.parametrize("name", ALL)
def test_every_architecture_runs_from_disk(name: str) -> None:
    model, session, reads = build(name), plain_session(device_map={"": DISK}), list[str]()
    party = on_disk(model, session, reads)
    assert reads == []
    assert not any(isinstance(p, SecretTensor) for p in party.parameters())
    private, plain = run(model, party, session, name)
    assert error(private, plain) < LOGIT_ERROR
    assert set(reads) == set(weights_of(model))
    assert not any(isinstance(p, SecretTensor) for p in party.parameters())  # nothing stays


@torch.no_grad()
def test_public_weights_on_disk() -> None:
    model, session = build("opt"), plain_session(device_map={"": DISK}, weights="public")
    private, plain = run(model, on_disk(model, session, []), session, "opt")
    assert error(private, plain) < LOGIT_ERROR


@torch.no_grad()
def test_only_what_the_map_names_is_read_again() -> None:
    model, reads = build("opt"), list[str]()
    session = plain_session(device_map={"": "cpu", "model.decoder.layers.1": DISK})
    party = on_disk(model, session, reads)
    assert not any("layers.1." in name for name in reads)
    reads.clear()
    run(model, party, session, "opt")
    run(model, party, session, "opt")
    stored = [name for name in weights_of(model) if "layers.1." in name]
    assert sorted(reads) == sorted(2 * stored)  # once a forward each, query, key and value as one product


@torch.no_grad()
@pytest.mark.parametrize("name", ["opt", "llama", "t5"])
def test_inputs_move_to_the_device_of_each_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second device that is not there: hooks are asked for it, and moving is left out."""
    model, session = build(name), plain_session(device_map={"": "cpu"})
    layer = {"opt": "model.decoder.layers.1", "llama": "model.layers.1", "t5": "decoder.block.1"}[name]
    object.__setattr__(session.config, "device_map", {"": "cpu", layer: "meta"})
    asked: list[torch.device] = []
    monkeypatch.setattr(placement, "send_to_device", lambda what, device: (asked.append(device), what)[1])
    party = private_twin(model, session)
    private, plain = run(model, party, session, name)
    assert error(private, plain) < LOGIT_ERROR
    hooked = {path for path, module in party.named_modules() if hasattr(module, "_hf_hook")}
    assert hooked == {path for path, _ in party.named_modules()}
    moved = {p: m._hf_hook._device.type for p, m in party.named_modules()}
    assert {path for path, where in moved.items() if where == "meta"} == {
        path for path in hooked if path == layer or path.startswith(f"{layer}.")
    }
    assert {device.type for device in asked} == {"cpu", "meta"}


def test_a_hook_moves_plain_and_secret_inputs() -> None:
    """Plain tensors really move; a secret is asked to (what it does then: tests/protocols/test_devices.py)."""
    seen: list[Any] = []

    class Sees(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            seen.extend([*args, *kwargs.values()])

    module = placement.add_hook_to_module(Sees(), placement._PlacementHook(torch.device("meta"), True, {}))
    module(torch.ones(2), [torch.ones(3)], mask=(torch.ones(1), None), name="x")
    assert seen[0].is_meta
    assert seen[1][0].is_meta
    assert seen[2][0].is_meta
    assert seen[2:] == [seen[2], "x"]


# -- maps -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["auto", "balanced", "sequential"])
def test_a_planned_map_counts_the_bytes_of_shares(kind: str) -> None:
    """Eight bytes an element in a cleartext session: twice what the float32 model takes, and not a byte less."""
    model = build("opt")
    room = sum(8 * p.numel() for p in model.parameters())
    for memory, places in ((room, {"cpu"}), (room - 8, {"cpu", "disk"}), (room // 2, {"disk"})):
        session = plain_session(device_map=kind, max_memory={"cpu": memory})
        assert set(placement.planned_map(model, session).values()) == places


@torch.no_grad()
def test_a_planned_map_runs() -> None:
    model, reads = build("llama"), list[str]()
    room = sum(8 * p.numel() for p in model.parameters())
    session = plain_session(device_map="auto", max_memory={"cpu": room * 9 // 10})
    party = on_disk(model, session, reads)
    loaded = len(reads)
    private, plain = run(model, party, session, "llama")
    assert error(private, plain) < LOGIT_ERROR
    assert 0 < loaded < len(weights_of(model))


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"": "cpu", "model.decoder.layer.0": "cpu"}, "no module model.decoder.layer.0"),
        ({"model.decoder.layers": "cpu"}, "no device for model.decoder.embed_tokens"),
        ({"": "disk"}, "offload_folder"),
        ({"": 0}, "sees 0 GPU"),
        ({"": "cpu", "model.decoder.layers.0.self_attn.k_proj": "disk"}, "one product"),
    ],
)
def test_maps_that_do_not_fit_are_refused(
    device_map: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    session = plain_session(device_map=device_map)
    model = build("opt")
    with pytest.raises(ConfigError, match=message):
        on_disk(model, session, []) if "k_proj" in str(device_map) else private_twin(model, session)


def test_the_longest_name_decides() -> None:
    places = Placement(
        build("opt"), plain_session(device_map={"": DISK, "model": "cpu", "model.decoder.layers.1": DISK})
    )
    assert places.where("model.decoder.layers.1.fc1.weight") == DISK
    assert places.where("model.decoder.layers.0.fc1.weight") == "cpu"
    assert places.where("lm_head.weight") == DISK
    assert places.device("lm_head") == torch.device("cpu")


def test_plain_inputs_come_to_plain_weights_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are made in main memory; secret weights look after their inputs themselves."""
    hooked: list[nn.Module] = []
    monkeypatch.setattr(placement, "add_hook_to_module", lambda module, hook: hooked.append(module))
    for gpu, weights in ((True, 1), (False, 0)):
        model = nn.Sequential(nn.Embedding(4, 2), nn.ReLU())
        found = Placement.__new__(Placement)
        found._places, found._devices, found._offloaded, found._grouped = {"": "x"}, {}, {}, set()
        monkeypatch.setattr(found, "device", lambda path, gpu=gpu: torch.device("cuda:0" if gpu else "cpu"))
        hooked.clear()
        found.attach(model)
        assert hooked == [model[0]] * weights
