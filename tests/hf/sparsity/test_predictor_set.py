"""Predictors in a folder: read back as they were; refused for another model, or if the folder was tampered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf.sparsity.predictor_run import train_set
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.recordings import record
from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig
from private_llm_hf.sparsity.sites import find_sites
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTModel

from private_llm.errors import ConfigError
from tests.hf.sparsity.models import batch, sparse

CONFIGS = {"ffn": PredictorConfig(rank=6), "heads": PredictorConfig(rank=2, kind="heads", tolerance=0.3)}
TRAINING = TrainingConfig(epochs=1, batch=32)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    model = sparse("opt")
    sites = find_sites(model, batch("opt"))
    for part, rows in (("train", 8), ("test", 3)):
        record(model, sites, [batch("opt", rows, 30)], folder / part, tolerance=0.3)
    return folder


@pytest.fixture(scope="module")
def made(recorded: Path) -> PredictorSet:
    return train_set(sparse("opt"), recorded / "train", CONFIGS, TRAINING, test=recorded / "test", name="toy")


@pytest.fixture
def folder(made: PredictorSet, tmp_path: Path) -> Path:
    made.save_pretrained(tmp_path)
    return tmp_path


def test_every_site_gets_a_predictor_with_measures(made: PredictorSet) -> None:
    assert [member.site.kind for member in made] == ["heads", "ffn"] * 2
    assert {member.predictor.config.rank for member in made} == {2, 6}
    for member in made:
        assert set(member.measures) == {"validation", "test"}
        assert member.measures["validation"].recall >= 0.95
        assert member.measures["test"].rows == 90


def test_a_saved_set_is_read_back_as_it_was(made: PredictorSet, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["predictors.json", "predictors.safetensors"]
    found = PredictorSet.from_pretrained(folder)
    assert len(found) == len(made)
    assert found.model == made.model
    for member in found:
        want = made[member.site.name]
        assert (member.site, member.predictor.config, member.measures) == (
            want.site, want.predictor.config, want.measures,
        )  # fmt: skip
        x = torch.randn(5, 64)
        assert torch.equal(member.predictor.predict(x), want.predictor.predict(x))
    with pytest.raises(ConfigError, match="no predictor for 'lm_head'"):
        found["lm_head"]


def test_the_set_prints_as_a_table(made: PredictorSet) -> None:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(made)
    text = captured.get()
    assert "predictors of toy" in text
    member = next(iter(made))
    assert f"{100 * member.measures['test'].recall:.1f} %" in text


def test_the_model_itself_is_accepted(folder: Path) -> None:
    found = PredictorSet.from_pretrained(folder)
    found.check(sparse("opt"))
    found.check(sparse("opt").config)
    with torch.device("meta"):
        found.check(type(sparse("opt"))(sparse("opt").config))


def test_other_models_are_refused(folder: Path) -> None:
    found = PredictorSet.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"another model \(toy\).*ffn_dim is 128, theirs was 96"):
        found.check(OPTConfig(**{**sparse("opt").config.to_dict(), "ffn_dim": 128}))
    with pytest.raises(ConfigError, match="predictors of a OPTForCausalLM; got a OPTModel"):
        found.check(OPTModel(sparse("opt").config))
    with pytest.raises(ConfigError, match="another model"):
        found.check(sparse("llama").config)
    with pytest.raises(ConfigError, match="other weights"):
        found.check(sparse("opt", seed=1))
    almost = sparse("opt")
    with torch.no_grad():
        almost.model.decoder.layers[1].fc1.bias[0] += 1e-3
    with pytest.raises(ConfigError, match="other weights"):
        found.check(almost)


def test_recordings_of_another_model_are_refused(recorded: Path) -> None:
    with pytest.raises(ConfigError, match="recorded from another model"):
        train_set(sparse("llama"), recorded / "train", CONFIGS, TRAINING)
    with pytest.raises(ConfigError, match="no recording of"):
        train_set(sparse("opt"), recorded / "train", {}, TRAINING)


def test_a_rank_above_the_width_is_cut_and_budgets_are_per_layer(recorded: Path) -> None:
    configs = {"ffn": PredictorConfig(rank=1000)}
    found = train_set(sparse("opt"), recorded / "train", configs, TRAINING, budget_share=0.9)
    assert {member.predictor.config.rank for member in found} == {64}
    for member in found:
        assert member.predictor.config.budget is not None
        assert member.measures["validation"].most == member.predictor.most


def test_an_interrupted_set_goes_on_with_the_next_site(recorded: Path, tmp_path: Path, made: PredictorSet) -> None:
    class Stop(Exception):
        pass

    sites: list[str] = []

    def step(site: Any, epoch: int, _: float) -> None:
        if site.layer == 1 and epoch == 0:
            raise Stop
        sites.append(site.name)

    with pytest.raises(Stop):
        train_set(sparse("opt"), recorded / "train", CONFIGS, TRAINING, tmp_path, step=step)
    assert len(sites) == 4, "two sites, two calls each"
    done = list(sites)
    resumed = train_set(
        sparse("opt"), recorded / "train", CONFIGS, TRAINING, tmp_path, recorded / "test",
        step=lambda site, *_: sites.append(site.name),
    )  # fmt: skip
    assert not set(sites[4:]) & set(done)
    for member in resumed:
        for name, value in member.predictor.state_dict().items():
            assert torch.equal(value, made[member.site.name].predictor.state_dict()[name])
        assert member.measures == made[member.site.name].measures


def edit(folder: Path, change: Any) -> None:
    path = folder / "predictors.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def forged(folder: Path, name: str, value: torch.Tensor | None) -> None:
    """Another tensor, under a digest that fits it."""
    from private_llm_hf.sparsity import predictor_set

    tensors = load_file(folder / "predictors.safetensors")
    tensors = {key: v for key, v in {**tensors, name: value}.items() if v is not None}
    save_file(tensors, folder / "predictors.safetensors")
    edit(folder, lambda facts: facts.update(tensors=predictor_set._digest(tensors)))


FIRST = "model.decoder.layers.0.fc1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts.update(format="other"), "not of format"),
        (lambda facts: facts.update(version=3), "version 3; this private-llm reads 1 and 2"),
        (lambda facts: facts.update(model=None), "model: got 'None'; want an object"),
        (lambda facts: facts["model"].update({"class": 7}), "class: got '7'; want a text"),
        (lambda facts: facts["model"].pop("weights"), "weights: is not there; want a text"),
        (lambda facts: facts.update(predictors=None), "predictors: got 'None'; want a list"),
        (lambda facts: facts["predictors"].append(None), "predictor: got 'None'; want an object"),
        (lambda facts: facts["predictors"][0].update(site=[]), r"site: got '\[\]'; want an object"),
        (lambda facts: facts["predictors"][0]["site"].update(units=10**12), r"fc2.weight is .*; want .*1000000000000"),
        (lambda facts: facts["predictors"][0]["site"].update(width="64"), "width: got '64'; want a whole number"),
        (lambda facts: facts["predictors"][0]["config"].update(rank=10**12), "fc1.weight is .*; want .*1000000000000"),
        (lambda facts: facts.update(more=1), "unknown key.*more"),
        (lambda facts: facts.pop("predictors"), "predictors: is not there; want a list"),
        (lambda facts: facts["predictors"][0].update(more=1), "unknown key.*more"),
        (lambda facts: facts["predictors"][0]["config"].update(rank=0), "rank: got 0"),
        (lambda facts: facts["predictors"][0]["config"].update(threshold=float("nan")), "threshold: got nan"),
        (lambda facts: facts["predictors"][0]["config"].update(ranks=1), "unknown key.*ranks"),
        (lambda facts: facts["predictors"][0]["config"].update(rank=3), "fc1.weight is .* want"),
        (lambda facts: facts["predictors"][0]["site"].update(units=5), "fc2.weight is .* want"),
        (lambda facts: facts["predictors"][0]["site"].pop("writer"), "writer: is not there"),
        (lambda facts: facts["predictors"].pop(), "unknown tensors"),
        (lambda facts: facts["predictors"].append(facts["predictors"][0]), "not as this version writes it"),
        (lambda facts: facts.update(tensors="0"), "do not belong together"),
    ],
)
def test_a_changed_description_is_refused(folder: Path, change: Any, message: str) -> None:
    edit(folder, change)
    with pytest.raises(ConfigError, match=message):
        PredictorSet.from_pretrained(folder)


def test_changed_tensors_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "predictors.safetensors")
    tensors[f"{FIRST}.fc1.bias"] += 1
    save_file(tensors, folder / "predictors.safetensors")
    with pytest.raises(ConfigError, match="do not belong together"):
        PredictorSet.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{FIRST}.fc1.bias", torch.full((6,), float("nan")), "NaN or infinity"),
        (f"{FIRST}.fc1.bias", torch.zeros(6, dtype=torch.float16), "torch.float16"),
        (f"{FIRST}.fc1.bias", None, "not as this version writes it"),
        ("other.fc1.bias", torch.zeros(6), "unknown tensors: other"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    forged(folder, name, value)
    with pytest.raises(ConfigError, match=message):
        PredictorSet.from_pretrained(folder)


def test_folders_of_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no predictors\.json"):
        PredictorSet.from_pretrained(tmp_path / "nowhere")
    (folder / "predictors.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ConfigError, match="cannot be read"):
        PredictorSet.from_pretrained(folder)
    (folder / "predictors.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        PredictorSet.from_pretrained(folder)
    (folder / "predictors.json").write_text("[]")
    with pytest.raises(ConfigError, match="not of format"):
        PredictorSet.from_pretrained(folder)


def test_predictors_must_fit_their_sites(made: PredictorSet) -> None:
    heads, neurons = list(made)[:2]
    with pytest.raises(ConfigError, match="named twice"):
        PredictorSet(made.model, [heads, heads])
    with pytest.raises(ConfigError, match=r"got a predictor of \('heads', 64, 4\); want \('ffn', 64, 96\)"):
        PredictorSet(made.model, [SitePredictor(neurons.site, heads.predictor)])


def test_a_fingerprint_tells_models_apart() -> None:
    first, other = fingerprint(sparse("opt"), "a"), fingerprint(sparse("opt", seed=1), "b")
    assert first["model"] == other["model"]
    assert first["weights"] != other["weights"]
    assert fingerprint(sparse("opt"))["weights"] == first["weights"]
    assert fingerprint(sparse("opt").half().float())["weights"] != first["weights"]
