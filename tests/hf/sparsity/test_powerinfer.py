from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_llm_hf.sparsity.powerinfer import read_powerinfer
from private_llm_hf.sparsity.predictor_set import PredictorSet
from private_llm_hf.sparsity.sites import Site, find_sites
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from private_llm.errors import ConfigError
from tests.hf.sparsity.models import batch, sparse


class Foreign(nn.Module):
    """The predictor as PowerInfer defines it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 20, bias=False), nn.Linear(20, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return sparse("opt")


@pytest.fixture(scope="module")
def sites(model: PreTrainedModel) -> list[Site]:
    return find_sites(model, batch("opt"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save(Foreign().state_dict(), tmp_path / "model_0.pt")
    save_file(Foreign().half().state_dict(), tmp_path / "model_1.safetensors")
    return tmp_path


def test_they_predict_as_they_did(model: PreTrainedModel, sites: list[Site], folder: Path, tmp_path: Path) -> None:
    found = read_powerinfer(folder, model, sites, "toy")
    assert [member.site.name for member in found] == [f"model.decoder.layers.{i}.fc1" for i in range(2)]
    foreign, x = Foreign(), torch.randn(3, 64)
    foreign.load_state_dict(torch.load(folder / "model_0.pt", weights_only=True))
    with torch.no_grad():
        torch.testing.assert_close(found["model.decoder.layers.0.fc1"].predictor(x), foreign(x))
    found.save_pretrained(tmp_path / "ours")
    again = PredictorSet.from_pretrained(tmp_path / "ours")
    again.check(model)
    member = again["model.decoder.layers.0.fc1"]
    assert member.predictor.config.hidden == "relu"
    assert not member.measures
    assert torch.equal(member.predictor.predict(x), foreign(x) > 0)


class Harmful:
    def __reduce__(self) -> object:
        return print, ("this must not run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"fc1.weight": torch.zeros(20, 63), "fc2.weight": torch.zeros(96, 20)},
            r"wants \[rank, 64\] and \[96, rank\]",
        ),
        ({"fc1.weight": torch.zeros(20, 64), "fc2.weight": torch.zeros(96, 21)}, r"wants \[rank, 64\]"),
        ({"fc1.weight": torch.zeros(20), "fc2.weight": torch.zeros(96, 20)}, r"wants \[rank, 64\]"),
        ({"fc1.weight": torch.zeros(20, 64)}, "got fc1.weight; want"),
        ({"fc1.weight": torch.zeros(20, 64), "fc2.weight": 3}, "want fc1.weight and fc2.weight"),
        ({"fc1.weight": torch.full((20, 64), torch.nan), "fc2.weight": torch.zeros(96, 20)}, "NaN"),
        (torch.zeros(3), "got Tensor; want"),
        (Harmful(), "cannot be read as tensors alone"),
    ],
)
def test_files_of_another_form_are_refused(
    model: PreTrainedModel, sites: list[Site], folder: Path, content: object, message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    torch.save(content, folder / "model_0.pt")
    with pytest.raises(ConfigError, match=message):
        read_powerinfer(folder, model, sites)
    assert "must not run" not in capsys.readouterr().out


def test_damaged_and_missing_files_are_refused(model: PreTrainedModel, sites: list[Site], folder: Path) -> None:
    (folder / "model_0.pt").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read as tensors alone"):
        read_powerinfer(folder, model, sites)
    (folder / "model_0.pt").unlink()
    with pytest.raises(ConfigError, match=r"files for layers \[1\]; want model_0.pt to model_1.pt"):
        read_powerinfer(folder, model, sites)
