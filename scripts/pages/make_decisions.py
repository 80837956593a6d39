"""Write docs/decisions/README.md: the index of the pages beside it, by topic.

python scripts/pages/make_decisions.py          write the index
python scripts/pages/make_decisions.py --check  write nothing; exit 1 if the index is not that of the pages
python scripts/pages/make_decisions.py --tiny   print how many pages there are by status, write nothing

A page begins with `# Title` or `# NNN: Title`, has a line `Status: accepted.`, `Status: replaced by NNN.` or `Status:
withdrawn.` (more may follow on it), and at most MOST_LINES lines.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from generated import run

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
PAGE = FOLDER / "README.md"
MOST_LINES = 40
TOPICS = {
    0: "In the order of writing",
    100: "Protocols",
    130: "Numbers and approximations",
    150: "Kernels and devices",
    160: "Recorded programs",
    170: "HuggingFace integration",
    190: "Party services and deployment",
    200: "Gateway",
    210: "Sparsity",
    230: "KV cache and top-k",
    250: "Token sharding",
    270: "Tests and benchmarks",
}
"""The first number of each topic."""
HEAD = """# Decisions

One page per decision that a maintainer might otherwise undo: the decision, the reason, and what was tried and rejected.
Numbers of a topic leave gaps for later pages. A page has at most 40 lines and no measurements: those are in
[benchmarks.md](../benchmarks.md) and the [studies](../README.md).

Words: under `trio` party 0 is the *helper*, which knows the masks, and parties 1 and 2 are the *evaluators*, which know
masked values. A *finish* is the exchange that follows local products; *by keys* means with comparison keys
([112](112-comparison-keys-come-from-the-helper.md)). A *program* is a recorded part of a step
([160](160-modules-and-attention-are-recorded.md)).

This index is generated: `python scripts/pages/make_decisions.py`.
"""


@dataclass(frozen=True)
class Decision:
    """What the index says of a page. file: its name. status: "accepted", "withdrawn" or "replaced by NNN"."""

    number: int
    file: str
    title: str
    status: str

    @classmethod
    def read(cls, path: Path) -> "Decision":
        """Raises ValueError for a page without number, title or status, or with too many lines."""
        text = path.read_text(encoding="utf-8")
        number = re.match(r"(\d{3})-[\w-]+\.md$", path.name)
        title = re.match(r"# (?:\d{3}: )?(.+)\n", text)
        status = re.search(r"^Status: (accepted|withdrawn|replaced by \d{3})\b", text, re.MULTILINE)
        if not number or not title or not status:
            raise ValueError(f"{path.name}: want a name NNN-words.md, a first line `# Title`, and a line `Status: ...`")
        if len(text.splitlines()) > MOST_LINES:
            raise ValueError(f"{path.name}: got {len(text.splitlines())} lines; want at most {MOST_LINES}")
        return cls(int(number[1]), path.name, title[1], status[1])


def decisions() -> list[Decision]:
    """All pages, by number. Raises ValueError where two have one number, or as `Decision.read` does."""
    found = [Decision.read(path) for path in sorted(FOLDER.glob("*.md")) if path.name != "README.md"]
    double = [number for number, times in Counter(each.number for each in found).items() if times > 1]
    if double:
        raise ValueError(f"docs/decisions: got two pages of number {double[0]:03}; want one")
    return found


def index() -> str:
    """The text of the page."""
    lines, topics = [HEAD], sorted(TOPICS)
    for first, end in zip(topics, [*topics[1:], 1000], strict=True):
        rows = [
            f"| {each.number:03} | [{each.title}]({each.file}) | {each.status} |"
            for each in decisions()
            if first <= each.number < end
        ]
        if rows:
            lines += ["\n".join((f"## {TOPICS[first]}\n", "| | decision | status |", "|---|---|---|", *rows, ""))]
    return "\n".join(lines)


def outline() -> str:
    """How many pages there are of each status."""
    return ", ".join(f"{times} {status}" for status, times in Counter(each.status for each in decisions()).items())


def main() -> int:
    """Parse, make, write or compare."""
    return run(__doc__, "make_decisions.py", PAGE, index, outline)


if __name__ == "__main__":
    sys.exit(main())
