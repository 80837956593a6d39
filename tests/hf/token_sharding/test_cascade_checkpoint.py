"""CompNodes that read the public model from their own disk: clients need no weights, and all check each other."""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.checkpoint.weights import WeightsDigest
from private_llm_hf.client.launch import serve_party
from private_llm_hf.client.nodes import Nodes
from private_llm_hf.party import node as cascade_node
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from private_llm.errors import ConfigError, PatchMismatch, TransportError
from private_llm.net.transport import CLIENT
from tests.hf import tiny
from tests.hf.test_remote import free_ports
from tests.hf.token_sharding.test_cascade_hosts import HOW, IDS, PLAN, serving


@pytest.fixture(scope="module")
def client_folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Configuration and generation settings, no weights."""
    folder = tmp_path_factory.mktemp("client")
    for path in checkpoint.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    return str(folder)


@pytest.fixture
def loopback() -> dict[int, PrivateConfig]:
    """The same configuration for everybody, without TLS."""
    config = PrivateConfig(
        protocol="cascade", plan=PLAN, party_mode="remote", hosts=free_ports(PLAN.nodes), allow_plain_loopback=True,
        timeout_s=20,
    )  # fmt: skip
    return dict.fromkeys([*range(PLAN.nodes), CLIENT], config)


def test_a_client_without_weights_uses_those_of_the_nodes(
    checkpoint: Path, client_folder: str, loopback: dict[int, PrivateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two sessions of the same nodes; then with weights of the client's own that are the same."""
    wanted = tiny.build("llama").generate(IDS, **HOW)
    own = [str(checkpoint)] * PLAN.alpha
    monkeypatch.delattr(Nodes, "_send_weight")  # nobody uploads
    with serving(loopback, 3, own):
        for _ in range(2):
            with AutoPrivateModelForCausalLM.from_pretrained(client_folder, loopback[CLIENT]) as private:
                assert torch.equal(private.generate(IDS, **HOW), wanted)
        with AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), loopback[CLIENT]) as private:
            assert torch.equal(private.generate(IDS, **HOW), wanted)


def other(folder: Path, name: str) -> str:
    """A checkpoint that is not the one of `checkpoint`."""
    changes = {"weights": ("llama", {"seed": 1}), "settings": ("llama", {"rms_norm_eps": 0.1}), "model": ("gpt2", {})}
    kind, how = changes[name]
    tiny.build(kind, **how).save_pretrained(folder / name)
    return str(folder / name)


SECOND = r"CompNode 1 \(party 1\) holds "


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights", r"other weights than CompNode 0 \(party 0\); start all CompNodes with one checkpoint"),
        ("model", r"another model than CompNode 0 \(party 0\): a GPT2LMHeadModel, not this LlamaForCausalLM"),
        ("settings", r"another model than CompNode 0 .* or not of this configuration"),
        (None, r"no model, and CompNode 0 \(party 0\) does; start all"),
    ],
)
def test_nodes_that_hold_different_models(
    checkpoint: Path, tmp_path: Path, loopback: dict[int, PrivateConfig], name: str | None, message: str
) -> None:
    """The error names the node; nobody hangs, and the nodes wait for the next client."""
    second = None if name is None else other(tmp_path, name)
    with serving(loopback, 2, [str(checkpoint), second]) as lines:
        for _ in range(2):
            with pytest.raises(ConfigError, match=SECOND + message):
                AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), loopback[CLIENT])
    assert all(said[-1].startswith("session 2 ended: the client stopped") for said in lines.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weights", "the CompNodes hold other weights than the client; load their checkpoint, or its configuration"),
        ("model", "the CompNodes hold another model: a LlamaForCausalLM, not this GPT2LMHeadModel or not of this"),
    ],
)
def test_a_client_with_another_model(
    checkpoint: Path, loopback: dict[int, PrivateConfig], tmp_path: Path, name: str, message: str
) -> None:
    source = other(tmp_path, name)
    with serving(loopback, 2, [str(checkpoint)] * PLAN.alpha):
        with pytest.raises(ConfigError, match=message):
            AutoPrivateModelForCausalLM.from_pretrained(source, loopback[CLIENT])
        with pytest.raises(ConfigError, match=message):
            patch(AutoModelForCausalLM.from_pretrained(source), loopback[CLIENT])


def test_without_any_weights(client_folder: str, loopback: dict[int, PrivateConfig]) -> None:
    with serving(loopback), pytest.raises(OSError, match="no file named model"):
        AutoPrivateModelForCausalLM.from_pretrained(client_folder, loopback[CLIENT])


def test_what_a_node_cannot_hold(checkpoint: Path, tmp_path: Path, loopback: dict[int, PrivateConfig]) -> None:
    config = loopback[CLIENT]
    with pytest.raises(ConfigError, match=r"model: AttnNode \(0, 0\) \(party 2\) reads no checkpoint"):
        serve_party(config, 2, checkpoint=str(checkpoint))
    with pytest.raises(ConfigError, match="model: party 0 reads no checkpoint"):
        serve_party(PrivateConfig(hosts=free_ports(3)), 0, checkpoint=str(checkpoint))
    with pytest.raises(ConfigError, match="has public weights"):
        serve_party(config, 0, checkpoint / "party0.safetensors")
    with pytest.raises(ConfigError, match=r"configuration of '.*nowhere': no such folder"):
        serve_party(config, 0, checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(PatchMismatch, match="lacks 1 weight"):
        serve_party(config, 0, checkpoint=damaged(checkpoint, tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors at all")
    with pytest.raises(ConfigError, match=r"'.*model.safetensors' \(21 bytes\) cannot be read"):
        serve_party(config, 0, checkpoint=str(tmp_path))
    with pytest.raises(ConfigError, match=r"party: got 5; want 0 to 4"):
        serve_party(config, 5)


def damaged(checkpoint: Path, folder: Path) -> str:
    """The checkpoint without one of its weights."""
    weights = load_file(checkpoint / "model.safetensors")
    weights.pop("model.norm.weight")
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    "said", [{}, {"model": "a", "class_": None, "weights": "b"}, {"model": 1, "class_": "b", "weights": "c"}]
)
def test_a_node_that_does_not_say_what_it_holds(monkeypatch: pytest.MonkeyPatch, said: dict[str, object]) -> None:
    monkeypatch.setattr(cascade_node, "NodeModel", lambda *facts: make_dataclass("NodeModel", said)(**said))
    config = PrivateConfig(protocol="cascade", plan=PLAN, timeout_s=20)
    with pytest.raises(TransportError, match=r"from CompNode 0 \(party 0\): NodeModel"):
        patch(tiny.build("llama"), config)


def test_the_digest_of_weights_depends_on_each_of_them() -> None:
    """Order and precision do not matter; names, shapes and values do."""
    one, two = torch.arange(6.0).view(2, 3), torch.zeros(0)

    def digest(*named: tuple[str, torch.Tensor]) -> str:
        made = WeightsDigest()
        for name, tensor in named:
            made(name, tensor)
        return made.text()

    whole = digest(("a", one), ("b", two))
    assert whole == digest(("b", two), ("a", one.half()))
    changed = one.clone()
    changed[1, 2] += 1
    others = [
        digest(("a", one)), digest(("a", two), ("b", one)), digest(("a", one.view(3, 2)), ("b", two)),
        digest(("a", changed), ("b", two)), digest(("ab", one), ("", two)),
    ]  # fmt: skip
    assert len({whole, *others}) == 6
