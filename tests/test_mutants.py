"""The mutants of tests/system fit the code: each is one change of code, somewhere, that tests could notice."""

from __future__ import annotations

import ast

import pytest

from tests.system.run_mutants import KINDS, ROOT, Mutant, Unfit, chosen, load


def test_every_mutant_changes_one_place_of_code() -> None:
    texts = {file: (ROOT / file).read_text("utf-8") for file in {mutant.file for mutant in load()}}
    trees = {file: ast.dump(ast.parse(text)) for file, text in texts.items()}
    for mutant in load():
        made = ast.dump(ast.parse(mutant.applied(texts[mutant.file])))
        assert made != trees[mutant.file], f"mutant {mutant.number} changes no code"


def test_every_mutant_says_what_it_is_and_which_tests_could_notice() -> None:
    for mutant in load():
        assert mutant.kind in KINDS, mutant.number
        assert mutant.what.endswith("."), mutant.number
        assert 1 <= len(mutant.tests) <= 5, mutant.number
        missing = [test for test in mutant.tests if not (ROOT / test).is_file()]
        assert not missing, f"mutant {mutant.number}: no such tests: {missing}"


def test_a_mutant_that_does_not_fit_is_told() -> None:
    mutant = Mutant(1, "mask", "a.py", "x", "y", "Nothing.", ())
    assert mutant.applied("a x b") == "a y b"
    for text in ("a b", "x x"):
        with pytest.raises(Unfit, match=r"mutant 1, a\.py: `old` is there [02] times"):
            mutant.applied(text)
    assert chosen([mutant], []) == chosen([mutant], ["1"]) == chosen([mutant], ["mask"]) == [mutant]
    assert chosen([mutant], ["wrap"]) == []
    with pytest.raises(Unfit, match="got 2"):
        chosen([mutant], ["2"])
