"""Versions of transformers: either name of the cache works, and one that is newer than the tests is told."""

from __future__ import annotations

import functools
import importlib
import tomllib
import warnings
from pathlib import Path

import private_llm_hf
import pytest
import torch
from private_llm_hf import patch, transformers_versions
from private_llm_hf.transformers_versions import CACHE, TESTED, warn_if_untested

from private_llm.errors import ConfigError, UntestedVersion
from tests.hf import tiny
from tests.hf.conftest import PLAIN

ROOT = Path(__file__).resolve().parents[2]
IDS = torch.tensor([[5, 6, 7, 8]])


def test_either_name_of_the_cache_works_and_both_are_refused() -> None:
    model = tiny.build("llama")
    more = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    want = model(torch.cat([IDS, IDS], 1)).logits[:, 4:]
    with warnings.catch_warnings(), patch(model, PLAIN) as private:
        warnings.simplefilter("error")
        for name in ("cache", "past_key_values"):
            held = private(IDS, use_cache=True)[CACHE]
            assert held.is_linear == [False]
            torch.testing.assert_close(private(IDS, **{name: held}).logits, want, atol=0.02, rtol=0)
            first = private.generate(IDS, **more)
            again = private.generate(torch.cat([first.sequences, IDS], 1), **more, **{name: first[CACHE]})
            assert again[CACHE].get_seq_length() == again.sequences.shape[1] - 1
        with pytest.raises(ConfigError, match="which is the same argument"):
            private(IDS, cache=held, past_key_values=held)
        with pytest.raises(ConfigError, match="which is the same argument"):
            private.generate(IDS, cache=held, past_key_values=held)


def test_a_version_beyond_the_tested_one_is_told_once_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = ".".join(map(str, TESTED))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("5.20.0", f"{tested}.9", f"{tested}.0.dev0"):
            warn_if_untested(version)
    for version in (f"{TESTED[0]}.{TESTED[1] + 1}.0.dev0", f"{TESTED[0] + 1}.0.1"):
        with pytest.warns(UntestedVersion, match=f"transformers {version} is newer than {tested}, .*pip install"):
            warn_if_untested(version)
    monkeypatch.setattr(transformers_versions.multiprocessing, "parent_process", lambda: "the user's process")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("99.0")


def test_importing_the_integration_looks_at_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = functools.partial(warn_if_untested, "99.0.0")
    monkeypatch.setattr(transformers_versions, "warn_if_untested", looked)
    with pytest.warns(UntestedVersion, match=r"transformers 99\.0\.0 is newer than"):
        importlib.reload(private_llm_hf)


def test_the_project_allows_what_was_tested_and_no_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (need,) = [each for each in project["dependencies"] if each.startswith("transformers")]
    assert need == f"transformers>=5.20,<{TESTED[0]}.{TESTED[1] + 1}"
    (pinned,) = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("transformers=")
    ]
    assert tuple(map(int, pinned.split("==")[1].split(".")[:2])) <= TESTED
