from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_llm_hf.sparsity.predictor import HeadActivity
from private_llm_hf.sparsity.recordings import Recording, RecordingWriter, record, recordings
from private_llm_hf.sparsity.sites import find_sites

from private_llm.errors import ConfigError, DomainError
from tests.hf.sparsity.models import RELU, batch, linear_activity, site, sparse


@pytest.mark.parametrize("name", RELU)
def test_what_is_recorded_is_what_the_model_does(name: str, tmp_path: Path) -> None:
    model, given = sparse(name), batch(name)
    sites = find_sites(model, given)
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        model.get_submodule(module).register_forward_pre_hook(
            lambda _, args, module=module: seen.setdefault(module, []).append(args[0].flatten(0, -2))
        )
        for found in sites
        for module in (found.readers[0], found.writer)
    ]
    rows = record(model, sites, [given, given], tmp_path, tolerance=0.3)
    for handle in handles:
        handle.remove()
    found = recordings(tmp_path)
    assert [recording.site for recording in found] == sites
    assert max(len(recording) for recording in found) == rows
    for recording in found:
        x, active = recording.read(torch.arange(len(recording)))
        torch.testing.assert_close(x, torch.cat(seen[recording.site.readers[0]]).half().float())
        reached = torch.cat(seen[recording.site.writer])
        if recording.site.kind == "ffn":
            assert torch.equal(active, reached != 0)
            assert 0.1 < float(active.float().mean()) < 0.9
        else:
            projection = model.get_submodule(recording.site.writer)
            assert torch.equal(active, HeadActivity(projection, 4, 0.3)(reached))


def test_recording_ends_at_the_asked_number_of_positions(tmp_path: Path) -> None:
    model, given, calls = sparse("opt"), batch("opt"), []
    sites = find_sites(model, given)
    assert record(model, sites, [given] * 5, tmp_path, most_rows=20, seen=calls.append) == 20
    assert calls == [18, 20]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_padding_is_refused(tmp_path: Path) -> None:
    model, given = sparse("opt"), batch("opt")
    mask = torch.ones_like(given["input_ids"])
    sites = find_sites(model, given)
    assert record(model, sites, [{**given, "attention_mask": mask}], tmp_path)
    mask[0, 0] = 0
    with pytest.raises(DomainError, match="padded rows"):
        record(model, sites, [{**given, "attention_mask": mask}], tmp_path)
    with pytest.raises(ConfigError, match="no recordings"):
        recordings(tmp_path)  # the old ones are gone, and no new ones complete


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 7e4])
def test_inputs_that_float16_cannot_hold_are_refused(bad: float, tmp_path: Path) -> None:
    with pytest.raises(DomainError, match="NaN or above"), RecordingWriter(tmp_path, site(), {}) as writer:
        writer.add(torch.full((1, 24), bad), torch.zeros(1, 40, dtype=torch.bool))
    with pytest.raises(ConfigError, match="no complete recording"):
        Recording(tmp_path)


def test_damaged_recordings_are_refused(tmp_path: Path) -> None:
    recording = linear_activity(tmp_path, rows=50)
    with (
        pytest.raises(DomainError, match="want \\[N, 24\\] and \\[N, 40\\]"),
        RecordingWriter(tmp_path / "other", recording.site, {}) as writer,
    ):
        writer.add(torch.zeros(2, 24), torch.zeros(3, 40, dtype=torch.bool))
    with (tmp_path / "active.bits").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match=r"active.bits: 251 bytes; want 250"):
        Recording(tmp_path)
    facts = tmp_path / "site.json"
    facts.write_text(facts.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ConfigError, match="version 9"):
        Recording(tmp_path)
