"""Every kernel as a torch operator: schema, shapes under tracing, and the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from private_llm.kernels.library import SCHEMAS
from tests.kernels.cases import ALL, Case, expected

NAMES = [schema.split("(")[0] for schema in SCHEMAS]
SMALLEST = {name: min((c for c in ALL if c.op == name), key=lambda c: c.arguments[0].numel() or 99) for name in NAMES}


def _arguments(case: Case) -> tuple[Any, ...]:
    return tuple(
        a.clone() if isinstance(a, Tensor) else a.tolist() if hasattr(a, "tolist") else a for a in case.arguments
    )


def test_every_case_has_an_operator() -> None:
    assert {case.op for case in ALL} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_operator_passes_the_checks_of_torch(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.private_llm, name).default, _arguments(SMALLEST[name]))


@pytest.mark.parametrize("name", NAMES)
def test_operator_equals_the_reference(name: str) -> None:
    case = SMALLEST[name]
    arguments = _arguments(case)
    made = getattr(torch.ops.private_llm, name)(*arguments)
    made = [arguments[-1]] if case.changes else [made] if isinstance(made, Tensor) else made
    assert all(torch.equal(a, b) for a, b in zip(made, expected(case), strict=True))
