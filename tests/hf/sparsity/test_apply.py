from __future__ import annotations

import pytest
import torch
from private_llm_hf.sparsity.predictor import Predictor
from private_llm_hf.sparsity.predictor_run import predicted_only
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.settings import PredictorConfig
from private_llm_hf.sparsity.sites import Site, find_sites
from transformers import PreTrainedModel

from private_llm.errors import ConfigError
from tests.hf.sparsity.models import RELU, batch, sparse


def constant(site: Site, active: list[int], block: int = 1) -> Predictor:
    """Predicts these units, whatever it reads."""
    made = Predictor(site.width, site.units, PredictorConfig(rank=1, kind=site.kind, block=block))
    with torch.no_grad():
        made.fc2.weight.zero_()
        made.fc2.bias.fill_(-1.0)
        made.fc2.bias[active] = 1.0
    return made


def exact(model: PreTrainedModel, site: Site) -> Predictor:
    """FC1 itself: rank of the width."""
    layer = model.get_submodule(site.name)
    made = Predictor(site.width, site.units, PredictorConfig(rank=site.width))
    with torch.no_grad():
        made.fc1.weight.copy_(torch.eye(site.width))
        made.fc1.bias.zero_()
        made.fc2.weight.copy_(layer.weight if isinstance(layer, torch.nn.Linear) else layer.weight.T)
        made.fc2.bias.copy_(torch.zeros(site.units) if layer.bias is None else layer.bias)
    return made


def answer(model: PreTrainedModel, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(name))[0]


@pytest.mark.parametrize("name", RELU)
def test_right_predictions_change_nothing(name: str) -> None:
    model = sparse(name)
    before = answer(model, name)
    sites = find_sites(model, batch(name))
    right = [SitePredictor(site, exact(model, site)) for site in sites if site.kind == "ffn"]
    right += [SitePredictor(site, constant(site, [0, 1, 2, 3])) for site in sites if site.kind == "heads"]
    with predicted_only(model, PredictorSet(fingerprint(model), right)):
        torch.testing.assert_close(answer(model, name), before)


def test_neurons_and_heads_that_are_not_predicted_count_as_zero() -> None:
    model = sparse("opt")
    before = answer(model, "opt")
    sites = find_sites(model, batch("opt"))
    heads, neurons = (next(site for site in sites if site.kind == kind) for kind in ("heads", "ffn"))
    members = [SitePredictor(heads, constant(heads, [0, 3])), SitePredictor(neurons, constant(neurons, [2], block=4))]
    found = PredictorSet(fingerprint(model), members)
    with predicted_only(model, found):
        left_out = answer(model, "opt")
    assert torch.equal(answer(model, "opt"), before)
    layer = model.model.decoder.layers[0]
    with torch.no_grad():
        layer.self_attn.out_proj.weight[:, 16:48] = 0.0
        layer.fc2.weight[:, :8] = 0.0
        layer.fc2.weight[:, 12:] = 0.0
    torch.testing.assert_close(answer(model, "opt"), left_out)
    with pytest.raises(ConfigError, match="other weights"), predicted_only(model, found):
        pass
