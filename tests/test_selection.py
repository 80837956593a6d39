"""The gate, slices and named files, over a small folder of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ("pytester",)
ROOT = Path(__file__).resolve().parent.parent

TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.full
def test_dear(): pass

@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", range(10))
def test_cases(case): pass
"""
CONFTEST = """
from tests.selection import configure as pytest_configure, select as pytest_collection_modifyitems
from tests.selection import add_options as pytest_addoption
"""


def chosen(pytester: pytest.Pytester, *arguments: str) -> set[str]:
    result = pytester.inline_run(*arguments)
    return {call.nodeid for call in result.getcalls("pytest_runtest_logstart")}


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none is needed, and loading takes most of the time
    pytester.makeini("[pytest]\ntestpaths = checks\nmarkers =\n    full\n    sampled(n)\n")
    pytester.makeconftest(CONFTEST)
    for name in ("checks/test_some.py", "checks/system/test_more.py"):
        path = Path(pytester.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TESTS)
    return pytester


def test_slices_are_what_the_gate_leaves_out(folder: pytest.Pytester) -> None:
    gate, everything = chosen(folder), chosen(folder, "--all")
    assert len(gate) == 1 + 3, "one plain test, and three of ten cases"
    assert len(everything) == 24
    parts = [chosen(folder, "--slice", f"{at}/3") for at in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(everything - gate)
    assert chosen(folder, "checks/test_some.py") == {name for name in everything if "system" not in name}
    assert chosen(folder, "--gate", "checks") == gate


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("arguments", "count"), [((), 4), (("--all",), 24), (("checks/test_some.py",), 12)])
def test_processes_choose_alike(
    folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], count: int
) -> None:
    """With xdist, as scripts/test.sh runs them."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder.runpytest_subprocess("-p", "xdist", "-n", "1", *arguments).assert_outcomes(passed=count)


def test_a_slice_that_is_none(folder: pytest.Pytester) -> None:
    assert folder.inline_run("--slice", "3").ret == pytest.ExitCode.USAGE_ERROR
