"""Write the table of docs/benchmarks.md that says where the bytes of large models are, from the estimator.

python scripts/pages/make_bytes.py           write it (three minutes)
python scripts/pages/make_bytes.py --check   is it what the estimator counts now?
python scripts/pages/make_bytes.py --tiny    of small models, written nowhere: does it run?
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from make_benchmarks import put
from private_llm_hf.tools.cost_places import PlaceCost, places_of_prompt, places_of_token
from private_llm_hf.tools.estimate import estimate, named_shape
from private_llm_hf.tools.ranges_by_depth import ranges_by_depth

from private_llm.config import PrivateConfig
from private_llm.ranges import UNKNOWN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
CONFIG = PrivateConfig(adder="auto", bandwidth_mbit=1000, latency_ms=1)
PROMPT, CACHE = 128, 512


@dataclass(frozen=True)
class Model:
    """A shape of the estimator's. calibrated: with the ranges of SmolLM2 (`ranges_by_depth`)."""

    shape: str
    calibrated: bool

    def places(self) -> tuple[list[PlaceCost], list[PlaceCost]]:
        """Of a prompt of PROMPT tokens, and of a token after CACHE others."""
        found = named_shape(self.shape)
        if found is None:
            raise SystemExit(f"no shape is called {self.shape!r}")
        ranges = ranges_by_depth(*found) if self.calibrated else UNKNOWN
        prompt = estimate(*found, CONFIG, PROMPT, 1, ranges=ranges)
        token = estimate(*found, CONFIG, CACHE, 2, ranges=ranges)
        return places_of_prompt(prompt), places_of_token(token, 2)


MODELS = (Model("llama-7b", True), Model("qwen3-8b", True), Model("opt-6.7b", False))

_KINDS: tuple[tuple[str, Callable[[str, str], bool]], ...] = (
    ("norms", lambda module, operation: "norm" in module),
    ("softmax: exponentials", lambda module, operation: operation == "exponential"),
    ("attention: scores and mixes of values", lambda module, operation: _of_attention(module, operation, "matmul")),
    (
        "softmax: maxima and what is cut off",
        lambda module, operation: _of_attention(module, operation, "msb", "inject"),
    ),
    ("softmax and positions: the rest", lambda module, operation: module.endswith("self_attn")),
    ("linear layers: products, masked anew", lambda module, operation: "_proj" in module or ".fc" in module),
    ("SiLU, ReLU", lambda module, operation: module.endswith(("act_fn", "activation_fn"))),
    ("gates: products of elements", lambda module, operation: module.endswith("mlp")),
)
"""The first that takes a module and its operation is its kind; the rest are embedding, head, check of ranges, ends."""


def _of_attention(module: str, operation: str, *operations: str) -> bool:
    return module.endswith("self_attn") and operation in operations


def by_kind(places: Iterable[PlaceCost]) -> Counter[str]:
    """Bytes of each kind."""
    sums = Counter[str]()
    for place in places:
        takes = (name for name, belongs in _KINDS if belongs(place.module, place.operation))
        sums[next(takes, "embedding, head, check of ranges, input and output")] += place.bytes
    return sums


def table(models: Sequence[Model]) -> str:
    """Columns: of each model a token and a prompt; what the first model's token sends most of comes first."""
    columns, titles = list[Counter[str]](), list[str]()
    rounds = list[int]()
    for model in models:
        prompt, token = model.places()
        for places, of in ((token, "token"), (prompt, "prompt")):
            columns.append(by_kind(places))
            rounds.append(sum(place.rounds for place in places))
            titles.append(f"{model.shape}, {of}")
    names = sorted({name for column in columns for name in column}, key=lambda name: -columns[0][name])
    lines = [f"| MB | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name in names:
        cells = (f"{column[name] / 1e6:,.1f} ({column[name] / column.total():.0%})" for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| in sum | {' | '.join(f'{column.total() / 1e6:,.1f}' for column in columns)} |")
    lines.append(f"| rounds | {' | '.join(f'{count:,}' for count in rounds)} |")
    return "\n".join(lines)


def main() -> int:
    """Write, compare or try; 1 where the page has another table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        print(table([Model("opt-125m", False)]))
        return 0
    made = table(MODELS)
    if options.check:
        current = f"<!-- bytes -->\n{made}\n<!-- /bytes -->" in PAGE.read_text("utf-8")
        print(f"{PAGE.name} is {'current' if current else 'not what the estimator counts: run make_bytes.py'}")
        return int(not current)
    put(PAGE, "bytes", made)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
