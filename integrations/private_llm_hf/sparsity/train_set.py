"""Predictors for all recorded sites of a model, one after the other; what is done already is not done again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from private_llm.errors import ConfigError
from private_llm_hf.checkpoint.model_spec import describe
from private_llm_hf.sparsity.measures import Measures
from private_llm_hf.sparsity.predictor import Predictor
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.recordings import Recording, recordings
from private_llm_hf.sparsity.settings import Kind, PredictorConfig, TrainingConfig
from private_llm_hf.sparsity.sites import Site
from private_llm_hf.sparsity.training import measure, split_rows, train_predictor

Step = Callable[[Site, int, float], None]
"""Called after each epoch: the site, the epoch, the best F1 so far."""


def train_set(
    model: PreTrainedModel, recorded: Path, configs: Mapping[Kind, PredictorConfig], training: TrainingConfig,
    checkpoints: Path | None = None, test: Path | None = None, budget_share: float | None = None, name: str = "",
    accelerator: Accelerator | None = None, step: Step | None = None,
) -> PredictorSet:  # fmt: skip
    """Train a predictor for each recording whose kind is in `configs`, and measure it on those of `test`.

    checkpoints: folder of one file a site, from which an interrupted run goes on. budget_share: give each layer the
    smallest budget that this share of the validation positions keeps to (`fit_budget`). Raises ConfigError for
    recordings of another model.
    """
    digest = describe(type(model), model.config).model
    members = []
    for recording in _of_model(recorded, digest):
        site = recording.site
        if site.kind not in configs:
            continue
        config = replace(configs[site.kind], rank=min(configs[site.kind].rank, site.width))
        if site.kind == "heads":
            config = replace(config, tolerance=recording.tolerance)

        def report(epoch: int, f1: float, site: Site = site) -> None:
            if step is not None:
                step(site, epoch, f1)

        checkpoint = None if checkpoints is None else checkpoints / f"{site.name}.safetensors"
        trained = train_predictor(recording, config, training, checkpoint, accelerator, report)
        predictor, validation = trained.predictor, trained.validation
        if budget_share is not None:
            predictor = fit_budget(predictor, recording, training, budget_share)
            validation = measure(predictor, recording, rows=split_rows(len(recording), training)[1])
        members.append(SitePredictor(site, predictor.eval(), {"validation": validation}))
    if not members:
        raise ConfigError(f"{recorded}: no recording of {', '.join(configs)}; record those kinds first")
    made = PredictorSet(fingerprint(model, name), members)
    if test is None:
        return made
    found = {recording.site.name: recording for recording in _of_model(test, digest)}
    return made.with_measures("test", {m.site.name: _tested(m, found) for m in made})


def fit_budget(predictor: Predictor, recording: Recording, training: TrainingConfig, share: float) -> Predictor:
    """The predictor with the smallest budget that at least `share` of the validation positions keep to.

    Raises ConfigError for a share outside (0, 1].
    """
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"budget share: got {share!r}; want a number above 0 and at most 1")
    _, held_out = split_rows(len(recording), training)
    free = predictor.with_config(replace(predictor.config, budget=None))
    with torch.no_grad():
        counts = torch.cat([free.predict(x).sum(1) for x, _ in recording.batches(held_out, 4096)])
    most = int(counts.sort().values[math.ceil(share * len(counts)) - 1])
    return free.with_config(replace(free.config, budget=min(1.0, (max(1, most) + 0.5) / free.units)))


def _of_model(folder: Path, digest: str) -> Iterator[Recording]:
    for recording in recordings(folder):
        if recording.model != digest:
            raise ConfigError(f"{folder}: recorded from another model; record this one, or give another folder")
        yield recording


def _tested(member: SitePredictor, found: Mapping[str, Recording]) -> Measures:
    if member.site.name not in found:
        raise ConfigError(f"site '{member.site.name}' was not recorded on the test text; record all sites of both")
    return measure(member.predictor, found[member.site.name])
