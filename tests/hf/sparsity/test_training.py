"""Training on recordings whose activity is a known function of the input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf.sparsity.predictor import Predictor
from private_llm_hf.sparsity.predictor_run import fit_budget
from private_llm_hf.sparsity.recordings import Recording
from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig
from private_llm_hf.sparsity.training import (
    balance,
    measure,
    split_rows,
    start_from_regression,
    train_predictor,
    weighted_loss,
)

from private_llm.errors import ConfigError
from tests.hf.sparsity.models import linear_activity, write

QUICK = TrainingConfig(epochs=4, batch=256, rate=2e-2)
LONGER = TrainingConfig(epochs=15, batch=256, rate=2e-2, patience=5)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return linear_activity(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return linear_activity(tmp_path_factory.mktemp("unseen"), seed=1, rows=3000)


def test_activity_that_is_linear_in_the_input_is_predicted(recording: Recording, unseen: Recording) -> None:
    trained = train_predictor(recording, PredictorConfig(rank=4, target_recall=0.99), LONGER)
    found = measure(trained.predictor, unseen)
    assert trained.validation.recall >= 0.99
    assert found.recall > 0.985
    assert found.precision > 0.97
    assert abs(found.predicted - found.activity) < 0.01


def test_too_low_a_rank_costs_precision_not_recall(recording: Recording, unseen: Recording) -> None:
    trained = train_predictor(recording, PredictorConfig(rank=1, target_recall=0.95), QUICK)
    found = measure(trained.predictor, unseen)
    assert found.recall > 0.94
    assert found.precision < 0.7


def test_training_improves_on_its_start(recording: Recording, unseen: Recording) -> None:
    config = PredictorConfig(rank=4)
    start = train_predictor(recording, config, replace(QUICK, epochs=0))
    trained = train_predictor(recording, config, LONGER)
    assert start.epochs == 0
    assert measure(trained.predictor, unseen).f1 > measure(start.predictor, unseen).f1 + 0.005


@pytest.mark.parametrize("hidden", ["linear", "relu"])
def test_the_start_is_better_than_chance_and_relu_learns_without_it(hidden: str, recording: Recording) -> None:
    trained = train_predictor(recording, PredictorConfig(rank=8, hidden=hidden), LONGER)
    assert trained.validation.recall >= 0.95
    assert trained.validation.precision > 0.8


def test_blocks_are_active_if_one_of_their_neurons_is(recording: Recording, unseen: Recording) -> None:
    trained = train_predictor(recording, PredictorConfig(rank=12, block=4), replace(QUICK, group=False))
    assert trained.predictor.units == 10
    found = measure(trained.predictor, unseen)
    active = unseen.read(torch.arange(len(unseen)))[1]
    assert found.activity == pytest.approx(float(active.unflatten(1, (10, 4)).any(2).float().mean()))
    with torch.no_grad():
        x, _ = unseen.read(torch.arange(len(unseen)))
        kept = trained.predictor.expand(trained.predictor.predict(x))
    assert found.recall == pytest.approx(float(kept[active].float().mean())), "of neurons, not of blocks"
    assert found.recall > 0.94


class Interrupted(Exception):
    pass


def test_an_interrupted_run_ends_as_one_that_was_not(recording: Recording, tmp_path: Path) -> None:
    config, path = PredictorConfig(rank=3), tmp_path / "checkpoint.safetensors"
    whole = train_predictor(recording, config, QUICK)

    def stop_after(last: int) -> object:
        def report(epoch: int, _: float) -> None:
            if epoch == last:
                raise Interrupted

        return report

    for last in (0, 2):
        with pytest.raises(Interrupted):
            train_predictor(recording, config, QUICK, path, report=stop_after(last))
    epochs: list[int] = []
    resumed = train_predictor(recording, config, QUICK, path, report=lambda epoch, _: epochs.append(epoch))
    assert epochs[0] == 3
    assert resumed.validation == whole.validation
    for name, value in whole.predictor.state_dict().items():
        assert torch.equal(value, resumed.predictor.state_dict()[name]), name
    again = train_predictor(recording, config, QUICK, path, report=lambda *_: pytest.fail("it is finished"))
    assert again.validation == whole.validation


def test_a_checkpoint_of_other_settings_is_refused(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    train_predictor(recording, PredictorConfig(rank=2), replace(QUICK, epochs=1), path)
    for config, training in ((PredictorConfig(rank=3), QUICK), (PredictorConfig(rank=2), replace(QUICK, epochs=2))):
        with pytest.raises(ConfigError, match="other settings or another site"):
            train_predictor(recording, config, training, path)


def test_the_best_epoch_is_kept(recording: Recording) -> None:
    config = PredictorConfig(rank=4)
    start = train_predictor(recording, config, replace(QUICK, epochs=0))
    harmful = train_predictor(recording, config, replace(QUICK, epochs=2, rate=50.0))
    assert harmful.epochs == 2
    assert harmful.validation == start.validation


def test_every_epoch_has_an_order_of_its_own(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sizes = Recording.read, []

    def watched(self: Recording, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(rows) == 2048:
            sizes.append(rows.tolist())
        return read(self, rows)

    monkeypatch.setattr(Recording, "read", watched)
    train_predictor(recording, PredictorConfig(rank=2), replace(QUICK, epochs=2, batch=2048, rate=1e-4))
    assert len(sizes) == 4, "two whole batches in each of two epochs"
    assert sizes[0] != sizes[2]


def test_it_stops_when_nothing_gets_better(recording: Recording) -> None:
    epochs: list[int] = []
    training = replace(QUICK, epochs=50, patience=2, rate=1e-12)
    train_predictor(recording, PredictorConfig(rank=2), training, report=lambda epoch, _: epochs.append(epoch))
    assert len(epochs) < 12


def test_a_layer_that_never_or_always_acts_is_predicted_too(tmp_path: Path) -> None:
    inputs = torch.randn(600, 6, generator=torch.Generator().manual_seed(0))
    for name, state in (("never", False), ("always", True)):
        recording = write(tmp_path / name, inputs, torch.full((600, 5), state))
        trained = train_predictor(recording, PredictorConfig(rank=2), QUICK)
        assert trained.validation.recall == 1.0
        assert trained.validation.predicted == float(state)


def test_neighbours_are_held_out_together() -> None:
    train, held_out = split_rows(100_000, TrainingConfig(validation=0.1))
    assert len(train) + len(held_out) == 100_000
    assert not set(train.tolist()) & set(held_out.tolist())
    assert 0.08 < len(held_out) / 100_000 < 0.12
    assert int((held_out.diff() > 1).sum()) < 25, "in runs"
    assert max(split_rows(100_000, TrainingConfig(most_rows=500))[0]) < 500
    with pytest.raises(ConfigError, match="too few"):
        split_rows(1, TrainingConfig())


def test_the_loss_weighs_active_units_by_their_neurons() -> None:
    scores, counts = torch.zeros(1, 4), torch.tensor([[3.0, 1.0, 0.0, 0.0]])
    one = torch.tensor(2.0).log()
    assert float(weighted_loss(scores, counts, 1.0)) == pytest.approx(float(one * (1.5 + 0.5 + 1 + 1) / 4))
    assert float(weighted_loss(scores, counts, 5.0)) == pytest.approx(float(one * (2 * 5 + 2) / 4))


def test_under_the_balanced_weight_the_bias_stays() -> None:
    chance = torch.Generator().manual_seed(0)
    scores = torch.randn(50, 6, generator=chance)
    counts = (torch.rand(50, 6, generator=chance) < 0.3) * torch.randint(1, 4, (50, 6), generator=chance).float()
    weight = balance(lambda: iter([(scores, counts)]))
    shift = torch.zeros(1, requires_grad=True)
    weighted_loss(scores + shift, counts, weight).backward()
    assert shift.grad is not None
    assert abs(float(shift.grad)) < 1e-6
    assert weight > 1.5, "active units are fewer"


def test_a_tight_budget_raises_the_threshold(recording: Recording) -> None:
    """Which of the predicted units a run computes is random, so fewer and surer ones are better."""
    loose = train_predictor(recording, PredictorConfig(rank=2), QUICK)
    tight = train_predictor(recording, PredictorConfig(rank=2, budget=0.1), QUICK)
    drawn = measure(loose.predictor.with_config(tight.predictor.config), recording).recall
    assert measure(tight.predictor, recording).recall > drawn + 0.03


def test_a_budget_covers_the_asked_share_of_positions(recording: Recording) -> None:
    trained = train_predictor(recording, PredictorConfig(rank=4), replace(QUICK, epochs=1))
    tight, all_of_it = (fit_budget(trained.predictor, recording, QUICK, share) for share in (0.5, 1.0))
    assert tight.most < all_of_it.most == trained.validation.most < trained.predictor.units
    _, held_out = split_rows(len(recording), QUICK)
    drawn = measure(all_of_it, recording, held_out)
    assert drawn.recall > trained.validation.recall, "what fills up finds some"
    assert replace(drawn, recall=trained.validation.recall) == trained.validation
    found = measure(tight, recording, held_out)
    assert found.most == tight.most
    assert found.recall < trained.validation.recall
    for share in (0.0, 1.1):
        with pytest.raises(ConfigError, match="budget share"):
            fit_budget(trained.predictor, recording, QUICK, share)


def test_recordings_of_another_kind_or_site_are_refused(recording: Recording) -> None:
    with pytest.raises(ConfigError, match="kind: got 'heads'"):
        train_predictor(recording, PredictorConfig(kind="heads"), QUICK)
    with pytest.raises(ConfigError, match="the predictor has 24 and 39"):
        measure(Predictor(24, 39, PredictorConfig(rank=2)), recording)


def test_the_start_is_the_best_linear_guess_of_its_rank() -> None:
    """At full rank it is least squares: features are uncorrelated, and so is what is left with the inputs."""
    chance = torch.Generator().manual_seed(3)
    x = torch.randn(500, 5, generator=chance).double() @ torch.randn(5, 5, generator=chance).double() + 2
    y = (x @ torch.randn(5, 8, generator=chance).double() > 0.5).double()
    predictor = Predictor(5, 8, PredictorConfig(rank=5))
    start_from_regression(predictor, [(x[:200], y[:200]), (x[200:], y[200:])])
    with torch.no_grad():
        features = predictor.fc1(x.float())
        torch.testing.assert_close(features.T.cov(correction=0), torch.eye(5), atol=1e-2, rtol=0)
        guess = torch.linalg.lstsq(torch.cat([x, torch.ones(500, 1).double()], 1), y).solution
        want = torch.cat([x, torch.ones(500, 1).double()], 1) @ guess
        for unit in range(8):
            pair = torch.stack([predictor(x.float())[:, unit].double(), want[:, unit]])
            assert float(pair.corrcoef()[0, 1]) > 0.9999
