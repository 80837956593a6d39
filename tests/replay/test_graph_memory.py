"""What programs of a GPU hold, and whose weights they read; run in main memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.transport import Transport
from private_llm.protocols.session import Session
from private_llm.protocols.share import Share
from private_llm.replay import graphs
from private_llm.replay.program_cache import ProgramCache
from private_llm.replay.regions import WeightBinding
from private_llm.tensor.fixed import Fixed
from tests.replay.test_graphs import _as_on_a_gpu  # noqa: F401 - a fixture
from tests.replay.test_programs import FRAC
from tests.session import run_session


def test_programs_within_others_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of a new length takes the place of old lengths, not of layers that come next."""
    monkeypatch.setattr(graphs, "MOST_HELD", 600)
    left: list[list[str]] = []

    def party(session: Session, transport: Transport) -> None:
        x, programs = Fixed(session, session.protocol.receive_input((2, 8)), FRAC), ProgramCache()

        def run_all(names: str, held: int = 8) -> None:
            def compute(values: Sequence[Fixed]) -> tuple[Sequence[Fixed], tuple[()]]:
                return [values[0].view(lambda part: part + torch.arange(held)[:8])], ()

            for name in names:
                for _ in range(3):
                    programs.run(session, name, [x], compute)

        run_all("a")
        with programs._inside_break():
            run_all("bcdef")
        left.append([key[0] for key in programs._regions])  # type: ignore[index]
        run_all("g", held=64)
        assert dict(programs.refused) == {"programs of more than 0 MiB": 1}, "a large one gives way"
        assert [key[0] for key in programs._regions] == ["a", "c", "d", "e", "f", "g"]  # type: ignore[index]

    run_session(PrivateConfig(), party, lambda end: end.share(torch.ones(2, 8, dtype=torch.int64)))
    assert left == [["a", "c", "d", "e", "f"]] * 3


def test_other_weights_under_a_name_are_checked_anew() -> None:
    """And nothing prints them."""
    counts: list[Counter[str]] = []

    def party(session: Session, transport: Transport) -> None:
        x, programs = Fixed(session, session.protocol.receive_input((2, 8)), FRAC), ProgramCache()
        for factor in (3, 5):
            weight = torch.full((8,), factor)
            binding = WeightBinding("unit", (weight.untyped_storage(),))
            assert "Storage" not in repr(binding)

            def compute(values: Sequence[Fixed], weight: Tensor = weight) -> tuple[Sequence[Fixed], tuple[()]]:
                return [values[0].with_share(Share(tuple([part * weight for part in values[0].share.parts])))], ()

            for _ in range(4):
                (made,), _facts = programs.run(session, "unit", [x], compute, binding)
                pairs = zip(made.share.parts, x.share.parts, strict=True)
                assert all(torch.equal(part, given * factor) for part, given in pairs)
        counts.append(programs.counts)

    run_session(PrivateConfig(), party, lambda end: end.share(torch.ones(2, 8, dtype=torch.int64)))
    assert counts == [{"plain": 1, "recorded": 1, "checked": 2, "repeated": 4}] * 3
