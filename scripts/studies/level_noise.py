"""What noise on the number of active neurons costs and hides, beside a fixed budget: Comet's Table 7 on our protocols.

    python scripts/studies/level_noise.py            # the table of docs/studies/secret-orders.md
    python scripts/studies/level_noise.py --json     # rows
    python scripts/studies/level_noise.py --tiny     # two noises, two layers, a few seconds

Bytes are of one layer at one position, counted on meta tensors, over all links. `indexing`: from the bits of the
predictor to public places. `moving`: values of all neurons into the secret order, ReLU of those at these places, and
back. `products`: the chosen columns of the layers before and rows of the layer after, under dealer with both operands
masked each time (the paper's setting; elsewhere products cost their outputs). `sparsity` counts active dummies, and is
negative where there are more places than neurons. `told`: an adversary has the bundled model and two texts of 64
tokens, one of which was run, and sees the counts that were opened at one layer: the share of pairs where the likelier
text is the right one, least and most over layers.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from link_orders import LENGTH, before_activation, bundled
from private_llm_cli.commands.output import emit_json, emit_table
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.exact.comparisons import relu
from private_llm.net.ledger import Cost, merge
from private_llm.oblivious.budget import ChosenUnits, choose
from private_llm.oblivious.level_noise import LevelNoise, distribution, noisy_choose
from private_llm.oblivious.sparse_products import sparse_input_product, sparse_output_product
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.share import BitShare, Share
from private_llm.tensor.fixed import Fixed

EPSILONS = (0.5, 0.1, 0.05, 0.01)
DELTAS = (1e-6, 1e-9)
Chooser = Callable[[Session, BitShare], ChosenUnits]
Told = Callable[[LevelNoise | None], "tuple[float, float] | None"]


@dataclass(frozen=True)
class Shape:
    """A feed-forward block: neurons, width of the model, layers before the neurons, and active neurons in the mean."""

    name: str
    neurons: int
    width: int
    before: int
    active: float
    busiest: int


LLAMA = Shape("LLaMA-2-7B", 11008, 4096, 2, round(11008 * (1 - 0.894)), 2 * round(11008 * (1 - 0.894)))
"""At the paper's sparsity of 89.4 %. Nothing is published of its busiest position: twice the mean is taken."""


@dataclass(frozen=True)
class Row:
    """One way to hide the count (or none) at one shape; see the module's text. told: None where nothing is measured."""

    shape: str
    way: str
    sparsity: float
    dummies: int
    trio_indexing: int
    trio_moving: int
    dealer_indexing: int
    dealer_moving: int
    products: int
    told: tuple[float, float] | None


def counted(config: PrivateConfig, program: Callable[[Session], object]) -> Cost:
    """Bytes and rounds of a program without data."""
    ledgers = []
    for party in range(config.parties):
        session = meta_session(config, party)
        program(session)
        ledgers.append(session.protocol.ledger)
    return merge(ledgers)


def held(session: Session, *shape: int) -> Fixed:
    """A secret without values."""
    part = torch.empty(shape, dtype=session.ring.dtype, device="meta")
    return Fixed(session, Share((part, part)), session.frac)


def bytes_of(config: PrivateConfig, neurons: int, chooser: Chooser) -> tuple[int, int]:
    """Of indexing, and of moving values with ReLU."""

    def index(session: Session) -> ChosenUnits:
        return chooser(session, session.protocol.random_bits(1, neurons))

    def whole(session: Session) -> None:
        choice = index(session)
        choice.put_back(relu(choice.take(held(session, neurons))))

    indexing = counted(config, index).total
    return indexing, counted(config, whole).total - indexing


def product_bytes(shape: Shape, places: int) -> int:
    """Of the products before and after `places` neurons, under dealer with both operands masked each time."""
    wanted = torch.ones((1, places), dtype=torch.bool)

    def program(session: Session) -> None:
        for _ in range(shape.before):
            sparse_output_product(held(session, 1, shape.width), held(session, shape.width, places), wanted)
        sparse_input_product(held(session, places), held(session, places, shape.width), wanted)

    return counted(PrivateConfig(protocol="dealer", matmul="remask"), program).total


def row(shape: Shape, way: str, places: float, dummies: int, chooser: Chooser, told: tuple[float, float] | None) -> Row:
    """One row; `chooser` gives as many places on meta tensors as in the mean."""
    moved = [bytes_of(PrivateConfig(protocol=name), shape.neurons, chooser) for name in ("trio", "dealer")]
    products = product_bytes(shape, round(places))
    return Row(shape.name, way, 1 - places / shape.neurons, dummies, *moved[0], *moved[1], products, told)


def in_the_open(shape: Shape) -> Chooser:
    """The count as it is: the pattern alone in a secret order."""

    def chooser(session: Session, active: BitShare) -> ChosenUnits:
        order = session.protocol.permutation(active.count)
        session.protocol.open_shuffled(session.protocol.shuffle_bits(active, order))
        return ChosenUnits(order, torch.arange(round(shape.active)), active.count)

    return chooser


def rows_of(shape: Shape, noises: Sequence[LevelNoise], told: Told) -> list[Row]:
    """No protection, each noise, the budget of the busiest position."""
    found = [row(shape, "the count as it is", shape.active, 0, in_the_open(shape), told(None))]
    for noise in noises:

        def noisy(session: Session, active: BitShare, noise: LevelNoise = noise) -> ChosenUnits:
            return noisy_choose(session, active, noise, expected=round(shape.active))

        way = f"epsilon {noise.epsilon:g}, delta {noise.delta:.0e}, {noise.sensitivity} apart"
        found.append(row(shape, way, shape.active + noise.mean, noise.dummies, noisy, told(noise)))
    budget = shape.busiest
    share = (0.5, 0.5) if told(None) else None
    found.append(
        row(shape, f"a budget of {budget}", budget, 0, lambda session, bits: choose(session, bits, budget), share)
    )
    return found


def share_told(texts: Tensor, noise: LevelNoise | None, seed: int = 0) -> float:
    """How often the likelier of two texts is the one that was run, from counts [texts, positions]; a tie is a half."""
    counts = texts.numpy()
    chances = np.ones(1) if noise is None else distribution(noise, noise.mean + 1)
    drawn = np.random.default_rng(seed).choice(len(chances), size=counts.shape, p=chances)
    opened, right, pairs = counts + drawn, 0.0, 0
    for one in range(len(counts)):
        for other in range(len(counts)):
            if one != other:
                mine, theirs = (likelihood(opened[one] - counts[text], chances) for text in (one, other))
                right += 0.5 if mine == theirs else float(mine > theirs)
                pairs += 1
    return right / pairs


def likelihood(noise: np.ndarray, chances: np.ndarray) -> float:
    """The logarithm of the chance of these values of the noise."""
    if (noise < 0).any() or (noise >= len(chances)).any():
        return -np.inf
    with np.errstate(divide="ignore"):
        return float(np.log(chances[noise]).sum())


def measured(layers: int | None, texts: int) -> tuple[Shape, list[Tensor], int]:
    """The bundled model over unknown texts: its mean layer, counts of each layer [texts, 64], and the widest range."""
    model, sites, _, unknown = bundled()
    values = before_activation(model, sites[:layers], unknown[:texts])
    counts = [(values[site.layer] > 0).sum(1).view(-1, LENGTH) for site in sites[:layers]]
    neurons, width = sites[0].units, sites[0].width
    active = float(torch.stack(counts).double().mean())
    busiest = round(sum(int(each.max()) for each in counts) / len(counts))
    widest = max(int(each.max() - each.min()) for each in counts)
    return Shape("the bundled model", neurons, width, 1, active, busiest), counts, widest


def table(rows: Sequence[Row]) -> None:
    """For people; thousands of bytes."""
    heads = ("shape, way", "sparsity", "dummies", "trio: indexing", "moving", "dealer: indexing", "moving", "products",
             "told")  # fmt: skip
    cells = []
    for r in rows:
        sizes = (r.trio_indexing, r.trio_moving, r.dealer_indexing, r.dealer_moving, r.products)
        told = "" if r.told is None else f"{100 * r.told[0]:.0f} to {100 * r.told[1]:.0f} %"
        cells.append([f"{r.shape}: {r.way}", f"{100 * r.sparsity:.1f} %", r.dummies,
                      *(f"{size / 1e3:,.1f}" for size in sizes), told])  # fmt: skip
    emit_table("Noise on the number of active neurons: kB a layer and position", heads, cells)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--tiny", action="store_true", help="two noises, two layers, three texts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    noises = [LevelNoise(epsilon, delta) for delta in DELTAS for epsilon in EPSILONS]
    model, counts, widest = measured(2 if options.tiny else None, 3 if options.tiny else 16)
    noises = noises[:2] if options.tiny else noises
    whole = [] if options.tiny else [LevelNoise(0.5, 1e-6, widest)]

    def told(noise: LevelNoise | None) -> tuple[float, float]:
        shares = [share_told(each, noise, layer) for layer, each in enumerate(counts)]
        return min(shares), max(shares)

    rows = [*rows_of(LLAMA, noises, lambda _: None), *rows_of(model, [*noises, *whole], told)]
    if options.json:
        for each in rows:
            emit_json(asdict(each))
    else:
        table(rows)


if __name__ == "__main__":
    main()
