"""Blocks of neurons that are active together: the grouping itself, its way through files, and a run that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from private_llm_hf import patch
from private_llm_hf.sparsity.predictor import Predictor, block_counts, measures_of
from private_llm_hf.sparsity.predictor_run import predicted_only
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig
from private_llm_hf.sparsity.sites import find_sites
from private_llm_hf.sparsity.training import group, grouping_of, split_rows, train_predictor
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.sparsity_config import CometConfig
from tests.hf.sparsity.models import batch, linear_activity, sparse, write


def clustered(rows: int = 400, clusters: int = 6, size: int = 4, noise: float = 0.0) -> Tensor:
    """Neurons j, j + clusters, j + 2 clusters, .. are active together, a fifth of the time."""
    chance = torch.Generator().manual_seed(3)
    together = torch.rand(rows, clusters, generator=chance) < 0.2
    return together.repeat(1, size) ^ (torch.rand(rows, clusters * size, generator=chance) < noise)


def active_share(active: Tensor, order: Tensor, block: int) -> float:
    return float((block_counts(active[:, order.long()], block) > 0).float().mean())


def slowly(active: Tensor, block: int) -> list[int]:
    """The rule as it is written, from sets."""
    rows = [set(column.nonzero()[:, 0].tolist()) for column in active.T]
    left, found, there = set(range(len(rows))), [], set[int]()
    while left:
        there = set() if len(found) % block == 0 else there
        found.append(min(left, key=lambda neuron: (len(rows[neuron] - there), neuron)))
        left.remove(found[-1])
        there |= rows[found[-1]]
    return found


@pytest.mark.parametrize("block", [1, 3, 8, 50])
def test_a_grouping_is_a_permutation_made_by_the_rule(block: int) -> None:
    active = clustered(noise=0.1)
    found = group(active, block)
    assert found.dtype == torch.int32
    assert sorted(found.tolist()) == list(range(24))
    assert found.tolist() == slowly(active, block)
    assert torch.equal(found, group(active, block))


def test_neurons_that_are_active_together_share_a_block() -> None:
    found = group(clustered(), 4)
    assert [set((run % 6).tolist()) for run in found.view(6, 4)] == [{int(run[0] % 6)} for run in found.view(6, 4)]
    assert active_share(clustered(), found, 4) == pytest.approx(float(clustered().float().mean()))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("block", [2, 4, 8])
def test_blocks_are_active_no_more_often_than_those_of_neighbours(noise: float, block: int) -> None:
    active = clustered(noise=noise)
    assert active_share(active, group(active, block), block) <= active_share(active, torch.arange(24), block)


def test_neurons_that_are_never_or_always_active_are_grouped_too() -> None:
    active = torch.zeros(50, 8, dtype=torch.bool)
    active[:, [0, 3, 4, 7]] = True
    assert group(active, 4).tolist() == [1, 2, 5, 6, 0, 3, 4, 7]


def test_a_recording_is_grouped_by_its_training_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm_hf.sparsity.training.MOST_ROWS", 100)
    active = clustered()
    recording = write(tmp_path, torch.zeros(400, 3), active)
    rows = torch.arange(150, 350)
    assert torch.equal(grouping_of(recording, rows, 4), group(active[150:350:2], 4))


def test_a_trained_predictor_counts_and_expands_in_its_grouping(tmp_path: Path) -> None:
    recording = linear_activity(tmp_path)
    training = TrainingConfig(epochs=1, batch=256)
    trained = train_predictor(recording, PredictorConfig(rank=6, block=4), training)
    train, held_out = split_rows(len(recording), training)
    order = grouping_of(recording, train, 4)
    assert trained.predictor.grouping is not None
    assert torch.equal(trained.predictor.grouping, order)
    x, active = recording.read(held_out)
    assert trained.validation.activity == pytest.approx(active_share(active, order, 4))
    alone = torch.zeros(1, 10, dtype=torch.bool)
    alone[0, 2] = True
    assert trained.predictor.expand(alone)[0].nonzero()[:, 0].tolist() == sorted(order[8:12].tolist())
    with torch.no_grad():
        chosen = trained.predictor.predict(x)
    kept = trained.predictor.expand(chosen)
    assert measures_of([(chosen, trained.predictor.counts(active))]).recall == pytest.approx(
        float(kept[active].float().mean())
    )
    plain = train_predictor(recording, PredictorConfig(rank=6, block=4), TrainingConfig(epochs=0, group=False))
    assert plain.predictor.grouping is None
    assert plain.validation.activity > trained.validation.activity
    assert train_predictor(recording, PredictorConfig(rank=6), TrainingConfig(epochs=0)).predictor.grouping is None


def grouped(model: PreTrainedModel, block: int = 4) -> PredictorSet:
    """Predictors of the neurons with random weights, in groups of their own for each layer."""
    members = []
    for number, site in enumerate(find_sites(model, batch("opt"), ("ffn",))):
        chance = torch.Generator().manual_seed(number)
        order = torch.randperm(site.units, generator=chance).int()
        made = Predictor(site.width, site.units, PredictorConfig(rank=5, block=block), number, order)
        with torch.no_grad():
            made.fc2.bias.copy_(8.0 * torch.randint(0, 2, (made.units,), generator=chance) - 4.0)
        members.append(SitePredictor(site, made))
    return PredictorSet(fingerprint(model), members)


def test_groupings_are_saved_and_read(tmp_path: Path) -> None:
    model = sparse("opt")
    made = grouped(model)
    made.save_pretrained(tmp_path)
    found = PredictorSet.from_pretrained(tmp_path)
    for member, want in zip(found, made, strict=True):
        assert member.predictor.grouping is not None
        assert want.predictor.grouping is not None
        assert member.predictor.grouping.dtype == torch.int32
        assert torch.equal(member.predictor.grouping, want.predictor.grouping)


def test_sets_of_the_first_version_are_read_and_have_no_grouping(tmp_path: Path) -> None:
    model = sparse("opt")
    site = find_sites(model, batch("opt"), ("ffn",))[0]
    made = Predictor(site.width, site.units, PredictorConfig(rank=5, block=4), 1)
    PredictorSet(fingerprint(model), [SitePredictor(site, made)]).save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "predictors.json").read_text())
    assert facts["version"] == 2
    (tmp_path / "predictors.json").write_text(json.dumps({**facts, "version": 1}))
    found = PredictorSet.from_pretrained(tmp_path)[site.name].predictor
    assert found.grouping is None
    assert torch.equal(found.fc2.weight, made.fc2.weight)
    grouped(model).save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "predictors.json").read_text())
    (tmp_path / "predictors.json").write_text(json.dumps({**facts, "version": 1}))
    with pytest.raises(ConfigError, match=r"unknown tensors: .*grouping"):
        PredictorSet.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda order: order.clamp_max(7), lambda order: order[:-1], lambda order: order.long()]
)
def test_a_grouping_that_is_no_permutation_is_refused(tmp_path: Path, damage: object) -> None:
    made = grouped(sparse("opt"))
    made.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "predictors.safetensors")
    name = next(name for name in tensors if name.endswith("grouping"))
    tensors[name] = damage(tensors[name])  # type: ignore[operator]
    save_file(tensors, tmp_path / "predictors.safetensors")
    with pytest.raises(ConfigError, match=r"belong together|want an int32 permutation"):
        PredictorSet.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="want an int32 permutation of 96 neurons"):
        Predictor(64, 96, PredictorConfig(rank=5, block=4), grouping=tensors[name])


@pytest.mark.parametrize("protocol", ["plain", "trio"])
@pytest.mark.parametrize("orders", ["kept", "fresh"])
def test_a_private_run_computes_the_predicted_groups(protocol: str, orders: str, tmp_path: Path) -> None:
    model = sparse("opt")
    made = grouped(model)
    made.save_pretrained(tmp_path)
    given = batch("opt")
    with torch.no_grad():
        dense = model(**given).logits
        with predicted_only(model, made):
            want = model(**given).logits
    more = {"levels": "open"} if orders == "kept" else {"levels": "noisy", "epsilon": 0.5}
    sparsity = CometConfig(str(tmp_path), heads=False, orders=orders, **more)  # type: ignore[arg-type]
    with patch(model, PrivateConfig(protocol=protocol, insecure=protocol == "plain", sparsity=sparsity)) as private:
        found = private(**given).logits
    assert float((found - want).abs().max()) < 1e-2 < float((found - dense).abs().max())
