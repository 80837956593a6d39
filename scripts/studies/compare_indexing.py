"""Picking the m active of n neurons: one-hot indexing beside indexing in a secret order, and ReLU of all n.

    python scripts/studies/compare_indexing.py  # the table of docs/studies/secret-orders.md: trio and dealer, 3 sizes
    python scripts/studies/compare_indexing.py --json     # rows
    python scripts/studies/compare_indexing.py --tiny     # a few seconds

Both get the activity as secret zeros and ones, and give the m values, still secret. Parties are threads of this
machine; bytes are those over all links, a dealer's among them. The largest size runs a few of its m picks by the
one-hot way: seconds are those of all m at that rate, bytes and rounds are counted on meta tensors.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.catalogue import make
from bench.measure import measure
from bench.rows import machine
from bench.work import Run, Work
from private_llm_cli.commands.output import emit_json, progress_bar
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.exact.maximum import argmax
from private_llm.net.ledger import Cost, merge
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.share import BitShare, Share
from private_llm.tensor.fixed import Fixed, arithmetic

ONE = 2.0**-18
"""A value whose ring element is 1: activity is shared as 0 and 1 without fractional bits."""


# -- the two ways ------------------------------------------------------------------------------------------------------
def one_hot_rows(active: Fixed, picks: int) -> Fixed:
    """Rows of which each has a 1 at another place of `active`, zeros and ones [n], first places first: [picks, n].

    Comet, section 4.2, steps 1 and 2: arg max, n comparisons that make its index a one-hot row, which is taken out of
    `active` before the next arg max. (The paper counts two comparisons for an equality; [i <= j] - [i <= j-1] needs
    one.) Needs `picks` ones; no fractional bits anywhere.
    """
    width = active.shape[0]
    counting = torch.arange(width, dtype=active.session.ring.dtype, device=active.share.parts[0].device)
    rows = []
    for _ in range(picks):
        index = argmax(active)
        gaps = index.view(lambda part: part.expand(width)) - counting
        reached = arithmetic(active.session, gaps.less_than([1.0], bits=width.bit_length() + 1), [1.0], 0)
        reached = reached.view(lambda part: part[:width])
        row = reached - reached.view(lambda part: torch.nn.functional.pad(part[:-1], (1, 0)))
        active = active - row
        rows.append(row.share.parts)
    return active.with_share(Share(tuple(torch.stack(parts) for parts in zip(*rows, strict=True))))


def picked_by_one_hot(active: Fixed, x: Fixed, picks: int) -> Fixed:
    """Step 3: those rows times x [n]: the values at the ones of `active`, [picks], in their order."""
    column = x.view(lambda part: part[:, None])
    return one_hot_rows(active, picks).matmul(column, frac=x.frac).view(lambda part: part[:, 0])


def picked_in_secret_order(active: BitShare, x: Fixed) -> Fixed:
    """Values of x [n] where `active` is set, in a fresh secret order that is opened: all parties learn how many."""
    p = x.proto
    order = p.permutation(active.count)
    opened = p.open_shuffled(p.shuffle_bits(active, order))
    moved = p.shuffle(x.share, order)
    chosen = opened[0].nonzero()[:, 0]
    return x.with_share(moved.map(lambda part: part[chosen]))


# -- measuring ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Indexing(Work):
    """Work on the activity of n neurons, `ones` of them active, and their values; the result is a sum."""

    ones: int = 0

    def values(self, seed: int = 1) -> list[Tensor]:
        """Zeros and ones (as `ONE`), and normal values."""
        active, x = super().values(seed)
        return [torch.zeros_like(active).scatter_(0, active.topk(self.ones).indices, ONE), x]


def total(x: Fixed) -> Fixed:
    """The sum of what was picked, [1]: the order does not matter to it. Local."""
    return x.sum(0, keepdim=True)


def by_one_hot(n: int, ones: int, picks: int) -> Work:
    """The first `picks` of the active ones, by one-hot rows."""

    def prepare(_: Session, __: Mapping[str, Fixed]) -> Run:
        return lambda _, given: total(picked_by_one_hot(given[0].with_share(given[0].share, 0), given[1], picks))

    def truth(values: Sequence[Tensor], _: Mapping[str, Tensor]) -> Tensor:
        return values[1][values[0] > 0][:picks].sum(0, keepdim=True)

    return Indexing("one-hot", (n, ones), ((n,), (n,)), prepare, truth, ones=ones)


def in_secret_order(n: int, ones: int) -> Work:
    """All active ones, in a secret order. A predictor ends in bits: the warm-up run makes them of the activity."""

    def prepare(_: Session, __: Mapping[str, Fixed]) -> Run:
        held: list[BitShare] = []

        def run(_: Session, given: Sequence[Fixed]) -> Fixed:
            if not held:
                held.append((-given[0]).less_than([0.0]))
            return total(picked_in_secret_order(held[0], given[1]))

        return run

    def truth(values: Sequence[Tensor], _: Mapping[str, Tensor]) -> Tensor:
        return values[1][values[0] > 0].sum(0, keepdim=True)

    return Indexing("secret order", (n, ones), ((n,), (n,)), prepare, truth, ones=ones)


def counted_one_hot(config: PrivateConfig, n: int, picks: int) -> Cost:
    """Bytes and rounds of all picks: those of one, `picks` times, and the product. Meta tensors."""

    def cost(rows: int, product: bool) -> Cost:
        ledgers = []
        for party in range(config.parties):
            session = meta_session(config, party)

            def held(*shape: int, frac: int, of: Session = session) -> Fixed:
                part = torch.empty(shape, dtype=of.ring.dtype, device="meta")
                return Fixed(of, Share((part, part)), frac)

            if product:
                held(rows, n, frac=0).matmul(held(n, 1, frac=session.frac), frac=session.frac)
            else:
                one_hot_rows(held(n, frac=0), rows)
            ledgers.append(session.protocol.ledger)
        return merge(ledgers)

    return cost(1, False).times(picks) + cost(picks, True)


@dataclass(frozen=True)
class Row:
    """One way at one size under one protocol. extrapolated: seconds are of some picks, times the rest."""

    way: str
    protocol: str
    n: int
    m: int
    bytes: int
    rounds: int
    seconds: float
    extrapolated: bool = False


def rows_of(config: PrivateConfig, n: int, picks: int, repeat: int) -> list[Row]:
    """One-hot with `picks` of m = n / 10 picks run, secret order, ReLU."""
    m = math.ceil(n / 10)
    found = []
    for work, times in ((by_one_hot(n, m, picks), 1), (in_secret_order(n, m), repeat), (make("relu", (n,)), repeat)):
        row = measure(work, config, times)
        if row.error_max > 1e-2:
            raise SystemExit(f"{work.name}, n = {n}: the result is off by {row.error_max:g}")
        seconds, sent, rounds = row.seconds["median"], row.bytes_total, row.rounds
        partly = work.name == "one-hot" and picks < m
        if partly:
            cost = counted_one_hot(config, n, m)
            seconds, sent, rounds = seconds * m / picks, cost.total, cost.rounds
        found.append(Row(work.name, config.protocol, n, m, sent, rounds, seconds, partly))
    return found


def size(count: float) -> str:
    """Bytes in decimal units."""
    unit = max(0, min(3, int(math.log10(max(count, 1)) // 3)))
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}"


def rounded(ratio: float) -> str:
    """Two digits."""
    return f"{float(f'{ratio:.2g}'):,.0f}"


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each protocol and size."""
    heads = (
        "protocol", "n", "m", "one-hot: bytes, rounds, s", "secret order: bytes, rounds, ms", "ReLU: bytes, rounds, ms",
        "one-hot / ReLU: bytes, time",
    )  # fmt: skip
    lines = [f"{machine()}, parties are threads:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one, other, relu in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        about = "about " if one.extrapolated else ""
        lines.append(
            f"| {one.protocol} | {one.n} | {one.m} | {size(one.bytes)}, {one.rounds}, {about}{one.seconds:.2g} "
            f"| {size(other.bytes)}, {other.rounds}, {1e3 * other.seconds:.1f} "
            f"| {size(relu.bytes)}, {relu.rounds}, {1e3 * relu.seconds:.1f} "
            f"| {rounded(one.bytes / relu.bytes)}, {about}{rounded(one.seconds / relu.seconds)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--tiny", action="store_true", help="n = 64 and 128 alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = ((64, 7), (128, 2)) if options.tiny else ((256, 26), (1024, 103), (16384, 64))
    rows = []
    with progress_bar(2 * len(sizes), quiet=options.json) as step:
        for name in ("trio", "dealer"):
            for n, picks in sizes:
                rows += rows_of(PrivateConfig(protocol=name), n, picks, 2 if options.tiny else 9)
                step(f"{name}, n = {n}")
    if options.json:
        for row in rows:
            emit_json({**asdict(row), "machine": machine()})
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
