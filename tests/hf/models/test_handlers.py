"""A handler of a user's own: in a network of one's own, in every protocol, in processes, in the printed plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import copy_context
from functools import partial
from pathlib import Path

import pytest
import torch
from private_llm_cli import options
from private_llm_cli.app import app
from private_llm_hf import Network, PrivateConfig, patch
from torch import Tensor, nn
from typer.testing import CliRunner

from private_llm.errors import ConfigError, PatchMismatch
from tests.hf.conftest import PLAIN

FILE = '''
import torch
from torch import nn
from private_llm_hf import register_handler


class Gate(nn.Module):
    """x * sigmoid(scale * x + bias), which nobody has heard of."""

    def __init__(self, width, scale=1.0):
        super().__init__()
        self.width, self.scale = width, scale
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * torch.special.expit(self.scale * x + self.bias)


@register_handler(Gate, becomes="secret gate", public="its scale", settings=("width", "scale"))
class PrivateGate(nn.Module):
    def __init__(self, original):
        super().__init__()
        self.scale = original.scale
        self.register_parameter("bias", original.bias)

    def forward(self, x):
        return x * torch.sigmoid(x * self.scale + self.bias)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[nn.Module]]:
    """A file of a user's, imported by its name; gone afterwards."""
    (tmp_path / "my_gates.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    PrivateConfig(plugins=("my_gates",))
    kind = sys.modules["my_gates"].Gate
    yield kind
    from private_llm_hf import unregister_handler

    unregister_handler(kind)
    del sys.modules["my_gates"]


def network(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), kind(8, 2.0), nn.Linear(8, 3)).eval()
    nn.init.normal_(made[2].bias)
    return made, torch.randn(4, 3, 2, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("protocol", "mode"),
    [
        ("trio", "processes"), ("quad", "threads"),
        pytest.param("trio", "threads", marks=pytest.mark.full),
        pytest.param("quad", "processes", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_module_of_ones_own_is_computed_on_shares(plugin: type[nn.Module], protocol: str, mode: str) -> None:
    model, images = network(plugin)
    config = PrivateConfig(protocol=protocol, party_mode=mode, plugins=("my_gates",), timeout_s=60)
    with patch(model, config, images=images) as private, torch.no_grad():
        assert (private(images) - model(images)).abs().max() < 1e-3
        plan = str(private.patch_plan)
    assert "secret gate" in plan
    assert "its scale" in plan


def test_it_is_stored_with_its_settings(plugin: type[nn.Module], tmp_path: Path) -> None:
    model, images = network(plugin)
    Network.of(model).save_pretrained(tmp_path / "net")
    again = Network.from_pretrained(tmp_path / "net").eval()
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
    assert again.get_submodule("2").scale == 2.0


def test_a_handler_that_is_wrong_is_found_before_anything_is_sent(
    plugin: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["my_gates"].PrivateGate, "forward", lambda self, x: x * torch.sigmoid(x))
    model, _ = network(plugin)
    with pytest.raises(PatchMismatch, match=r"private result would be wrong.*differs is 2 \(Gate\)"):
        patch(Network.of(model, image_shape=(3, 2, 2)), PLAIN)


def test_without_a_handler_it_is_refused() -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if bool(x.sum() > 0) else -x

    with pytest.raises(PatchMismatch, match=r"register_handler|cannot be followed"):
        patch(nn.Sequential(nn.Linear(2, 2), Other()), PLAIN)


def test_twice_is_an_error(plugin: type[nn.Module]) -> None:
    from private_llm_hf import register_handler

    with pytest.raises(ConfigError, match="Gate has a handler"):
        register_handler(plugin, "again")(nn.Identity)


def test_a_missing_plugin_is_named() -> None:
    with pytest.raises(ConfigError, match=r"plugins: 'no_such_file_here' cannot be imported"):
        PrivateConfig(plugins=("no_such_file_here",))
    with pytest.raises(ConfigError, match=r"got the text 'my_gates'; want a list, \['my_gates'\]"):
        PrivateConfig(plugins="my_gates")  # type: ignore[arg-type]


def test_endpoints_with_other_plugins_refuse_each_other(plugin: type[nn.Module]) -> None:
    assert PrivateConfig(plugins=("my_gates",)).agreement() != PrivateConfig().agreement()


def test_the_command_line_imports_plugins_before_it_reads_options(
    plugin: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A protocol of a plugin's is a value of --protocol; a file that is not there is named by every command."""
    (tmp_path / "my_words.py").write_text("from private_llm_cli import options\noptions.CASCADE = 'of a plugin'\n")
    monkeypatch.setattr(options, "CASCADE", "cascade")  # put back afterwards
    invoke = partial(copy_context().run, CliRunner().invoke, app)  # the names of plug-ins end with this test
    refused = invoke(["--plugin", "my_words", "classify", "--protocol", "no such"])
    assert "of a plugin" in refused.output
    missing = invoke(["--plugin", "no_such_file", "doctor"])
    assert "'no_such_file' cannot be imported" in str(missing.exception)
