"""PIGEON's table: every line can be measured, costs what its protocol says, and stands beside the published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.rows import Row
from bench_pigeon import app, print_table
from pigeon_rows import IMAGENET, LINES, REFERENCE_MACHINE, jobs
from typer.testing import CliRunner

from private_llm.config import PrivateConfig


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_all_lines_of_both_protocols() -> None:
    todo = list(jobs(PrivateConfig(), tiny=False))
    assert [job.protocol for job in todo] == ["trio"] * len(LINES) + ["quad"] * len(LINES)
    assert [job.work.shape for job in todo] == [line.shape for line in LINES] * 2
    assert {job.config.relu_bits for job in todo} == {32, 64}  # comparisons over the whole ring, as the reference's


@pytest.mark.parametrize("asked", [{"adder": "ripple"}, {"relu_bits": 20}, {"relu_low": 2}])
def test_other_circuits_are_not_compared_with_the_reference(asked: dict[str, Any]) -> None:
    usual, other = (next(jobs(PrivateConfig(**values))) for values in ({}, asked))
    assert usual.comparable
    assert not other.comparable
    assert {name: getattr(other.config, name) for name in asked} == asked


def test_imagenet_lines_are_asked_for_and_compared_with_nothing() -> None:
    more = [job for job in jobs(PrivateConfig(), imagenet=True) if job.line in IMAGENET]
    assert [(job.protocol, job.work.name) for job in more] == [
        (protocol, name) for protocol in ("trio", "quad") for name in ("resnet50", "vgg16-imagenet")
    ]
    assert not any(job.line in IMAGENET for job in jobs(PrivateConfig()))
    row = Row(
        "resnet50", "trio", 32, more[0].work.shape, 3, dict.fromkeys(("min", "median", "max"), 7.0), 10**6, {}, 5, 0.0,
        1, "threads", 1,
    )  # fmt: skip
    made = more[0].to_dict(row)
    assert made["label"] == "ResNet-50, ImageNet, batch 1"
    assert {made[f"{kind}_{unit}"] for kind in ("aim", "reference") for unit in ("seconds", "bytes")} == {None}


@pytest.mark.parametrize("protocol", ["trio", "quad"])
def test_rows_carry_the_figures_they_are_compared_with(protocol: str, tmp_path: Path) -> None:
    picture = tmp_path / "table.svg"
    how = ("--tiny", "--repeat", "1", "--json", "--protocol", protocol, "--plot", str(picture))
    rows = [json.loads(line) for line in run(*how).splitlines()]
    assert [(row["name"], row["ring"]) for row in rows] == [(f"pigeon-{line.work}", line.ring) for line in LINES]
    for row, line in zip(rows, LINES, strict=True):
        assert row["protocol"] == protocol
        assert row["reference_seconds"] is row["aim_seconds"] is None  # not at these shapes
        assert row["bytes_total"] == sum(row["bytes_per_party"].values()) > row["bytes_preprocessing"] > 0
        assert row["error_max"] < 2e-2, line
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize("tiny", [False, True])
def test_the_reference_stands_under_the_name_of_its_own_machine(
    tiny: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nowhere beside other shapes than its own."""
    job = next(job for job in jobs(PrivateConfig(), tiny=tiny) if job.line.label.startswith("LeNet"))
    row = Row(
        "lenet", "trio", 32, job.work.shape, 3, dict.fromkeys(("min", "median", "max"), 7.0), 10**6, {}, 5, 0.0, 1,
        "threads", 1,
    )  # fmt: skip
    monkeypatch.setattr("private_llm_cli.commands.output.CONSOLE.width", 200)
    print_table([(job, row)])
    told = " ".join(capsys.readouterr().out.split())
    assert ("0.035" in told) is (REFERENCE_MACHINE in told) is (LINES[4].label in told) is not tiny
    assert (job.to_dict(row)["reference_seconds"] is None) is tiny


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(("--repeat", "0"), "at least 1"), (("--protocol", "plain"), "one of trio, quad"),
     (("--adder", "keys"), "compares circuits"), (("--plot", "table.txt"), "a name that ends in")],
)  # fmt: skip
def test_impossible_options_raise(wrong: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["--tiny", *wrong])
    assert result.exit_code != 0
    assert says in str(result.exception)
