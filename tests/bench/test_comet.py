"""`bench comet`: sparse and dense steps compute the same, and FC2's weights lie where single neurons are read."""

from __future__ import annotations

import json

import pytest
import torch
from private_llm_cli.app import app
from private_llm_cli.bench.comet import SETTINGS, WAYS, Case
from torch import nn
from typer.testing import CliRunner

from private_llm.config import PrivateConfig
from private_llm.nn.predicted import ActivityPredictor, SparseFeedForward
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor

SHAPE = (2, 5, 16, 2, 40)
LARGEST_ERROR = 1e-3


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_row_compares_a_sparse_step_with_the_dense_one(setting: str) -> None:
    row = Case(setting, "neurons, open levels", SHAPE, tiny=True).run(1)
    assert row["error_max"] < LARGEST_ERROR
    assert row["ratio"] == row["seconds"]["median"] / row["dense_seconds"]["median"]
    assert row["ratio_bytes"] == row["bytes_total"] / row["dense_bytes"]
    assert row["rounds"] > row["dense_rounds"] > 0


def test_a_budget_costs_more_than_open_levels_and_blocks_less_than_neurons() -> None:
    found = {way: Case("trio", way, SHAPE, tiny=True).run(1)["bytes_total"] for way in WAYS}
    assert found["neurons, open levels"] < found["neurons, budget"]
    assert found["blocks of 16, budget"] < found["neurons, budget"]


def test_the_command_prints_a_row_for_each_protocol_and_way() -> None:
    result = CliRunner().invoke(app, ["bench", "comet", "--tiny", "--repeat", "1", "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["setting"], row["way"]) for row in rows] == [(s, w) for s in SETTINGS for w in WAYS]


@pytest.mark.parametrize("options", [["--n", "3"], ["--protocol", "quad"], ["--bandwidth", "10"]])
def test_other_options_are_refused(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "comet", *options])
    assert result.exit_code != 0
    assert "table of its own" in str(result.exception or result.output)


def test_weights_of_fc2_lie_neuron_by_neuron() -> None:
    session = meta_session(PrivateConfig(protocol="trio"), 1)
    parts = tuple(torch.arange(6 * 8).view(6, 8) for _ in range(2))
    writer = nn.Linear(8, 6, bias=False)
    writer.weight = nn.Parameter(SecretTensor(Fixed(session, Share(parts), 18)), requires_grad=False)

    def sparse() -> tuple[torch.Tensor, ...]:
        reader = nn.Linear(4, 8)
        SparseFeedForward(ActivityPredictor(4, 2, 8), [reader], writer, 1, 2, "fc1", session.protocol.ledger)
        assert isinstance(writer.weight, SecretTensor)
        return writer.weight.raw.share.parts

    once = sparse()
    again = sparse()  # as another parallel session that takes the same memory
    assert all(part.t().is_contiguous() and torch.equal(part, own) for part, own in zip(once, parts, strict=True))
    assert [part.data_ptr() for part in again] == [part.data_ptr() for part in once]
