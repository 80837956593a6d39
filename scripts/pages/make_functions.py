"""Write the table of functions in docs/ranges.md from their records (private_llm/nn/activations.py).

python scripts/pages/make_functions.py            write it
python scripts/pages/make_functions.py --check    is it that of the records?
python scripts/pages/make_functions.py --tiny     print it
"""

import math
import sys
from pathlib import Path

import torch
from generated import run

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Cost, merge
from private_llm.nn.activations import ACTIVATIONS, Activation
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranges.md"
BEGIN, END = "<!-- functions -->\n", "<!-- /functions -->"
COUNT = 64_000
WAYS = {"quad": PrivateConfig(protocol="quad"), "trio, comparison keys": PrivateConfig(adder="keys")}


def counted(made: Activation, config: PrivateConfig) -> Cost:
    """What COUNT elements cost, without data."""
    ends = [meta_session(config, party) for party in range(config.parties)]
    for end in ends:
        part = torch.empty(COUNT, dtype=torch.int64, device="meta")
        made.compute(Fixed(end, Share((part,) * (3 if config.protocol == "quad" else 2)), end.frac), *made.example)
    return merge([end.protocol.ledger for end in ends])


def error(made: Activation) -> str:
    """The largest one."""
    parts = [f"{made.relative:.0e} of the result"] * (made.relative > 0) + [f"{made.error:.0e}"] * (made.error > 0)
    return " + ".join(parts).replace("e-0", "e-") or "none"


def arguments(made: Activation) -> str:
    """The domain, of which \"any\" is the usual one."""
    low, high = made.domain
    if made.domain == Activation.domain:
        return "any"
    return f"below 2^{math.log2(high):g} in size" if low == -high else f"up to {high:g}"


def page() -> str:
    """The page with the table of now."""
    rows = [f"| function | arguments | largest error | trio | {' | '.join(WAYS)} |", "|---" * (4 + len(WAYS)) + "|"]
    for made in ACTIVATIONS:
        costs = [made.price, *((cost.total / COUNT, cost.rounds) for cost in (counted(made, c) for c in WAYS.values()))]
        prices = (f"{size:,.0f} bytes, {rounds} round{'s' * (rounds > 1)}" for size, rounds in costs)
        rows.append(f"| `{made.name}` | {arguments(made)} | {error(made)} | {' | '.join(prices)} |")
    head, rest = PAGE.read_text("utf-8").split(BEGIN)
    return head + BEGIN + "\n".join(rows) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    sys.exit(run(__doc__, "make_functions.py", PAGE, page, page))
