"""What remains to be read from openings in a kept order, and what lowers it.

    python scripts/studies/kept_orders.py  # the bundled model: two tables of docs/studies/secret-orders.md, minutes
    python scripts/studies/kept_orders.py --json    # rows
    python scripts/studies/kept_orders.py --tiny    # a few seconds

The adversary is a party: it sees what is opened at each position (`levels="open"`, or a public budget) and has the
model. Two attacks:

order: it knows none of the inputs, and runs the model on text of the same kind (one half of a play; the other half is
what users sent). Columns that are active equally often, and together with the same others, are taken for one neuron:
an assignment by frequencies and sorted correlations, made better by correlations with those that are assigned already.

tokens: of one prompt it knows the beginning, which tells the order (`linked_orders.match_positions`). Then it reads the
rest token by token: of all tokens of the vocabulary it takes the one that makes the pattern most like the one opened.

Orders are drawn here; that the protocols open just these bits is shown in `tests/system/test_linked_orders.py`.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from linked_orders import UNKNOWN, match_positions
from private_llm_cli.commands.models import demo_model, plaintext_model, tokenizer_of
from private_llm_cli.commands.output import emit_json, emit_table
from private_llm_hf.sparsity.recordings import record, recordings
from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig
from private_llm_hf.sparsity.sites import find_sites
from private_llm_hf.sparsity.training import group, train_predictor
from private_llm_hf.tools.texts import windows
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import DynamicCache

DATA = Path(__file__).resolve().parents[2] / "integrations/private_llm_hf/data"
LENGTH = 128
"""Positions of a row of text."""


@dataclass(frozen=True)
class Opened:
    """What a run opens of the bundled model's neurons.

    block: neurons of a unit. budget: share of units that every position opens, at random as runs do; None: those that
    are active. predicted: what predictors of rank 32 say, which the adversary does not have; else what is active.
    """

    block: int = 1
    budget: float | None = None
    predicted: bool = False

    def __str__(self) -> str:
        units = ("predicted " if self.predicted else "") + ("neurons" if self.block == 1 else f"blocks of {self.block}")
        return f"{units}, " + ("open levels" if self.budget is None else f"a budget of {self.budget:.0%}")

    def of(self, active: Tensor, grouping: Tensor, chance: torch.Generator) -> Tensor:
        """bool [positions, units] of active neurons [positions, n]."""
        units = self.units(active, grouping)
        if self.budget is None:
            return units
        count = max(1, int(self.budget * units.shape[1]))
        # active ones first, at random among them
        order = units.float() + torch.empty(units.shape).uniform_(generator=chance)
        return torch.zeros_like(units).scatter_(1, order.topk(count, dim=1).indices, True)

    def units(self, active: Tensor, grouping: Tensor) -> Tensor:
        """Whether any neuron of a unit is active."""
        return active[:, grouping.long()].unflatten(1, (-1, self.block)).any(2) if self.block > 1 else active


@dataclass(frozen=True)
class OrderRow:
    """Share of units whose place in the order is found without any known input, after so many openings."""

    opened: str
    layer: int
    openings: int
    found: float


@dataclass(frozen=True)
class TokensRow:
    """Unknown tokens of one prompt that are read exactly, by the patterns of these layers after so many known ones."""

    opened: str
    layers: str
    known: int
    unknown: int
    read: int


# -- the order from statistics -----------------------------------------------------------------------------------------
def order_from_statistics(own: Tensor, opened: Tensor, rounds: int = 12) -> Tensor:
    """The unit at each place, int64 [n], from patterns of other text in the model's order and patterns as opened."""
    (often, joint), (seen_often, seen_joint) = _statistics(own), _statistics(opened)
    profile, seen_profile = (
        torch.cat([c.sort(dim=1).values[:, :: max(1, len(c) // 64)], 4 * f[:, None]], dim=1)
        for c, f in ((joint, often), (seen_joint, seen_often))
    )
    places = _assigned(torch.cdist(seen_profile, profile))
    for _ in range(rounds):
        # [place i, unit u]: how alike i's correlations with all places are to u's with the units assigned to them
        better = _assigned(-seen_joint @ joint[:, places].T - 4 * _alike(seen_often, often))
        if torch.equal(better, places):
            break
        places = better
    return places


def _statistics(active: Tensor) -> tuple[Tensor, Tensor]:
    """How often each column is set, on a scale where equal steps are equally likely, and correlations of columns."""
    x = active.float()
    mean = x.mean(0)
    spread = (mean * (1 - mean)).sqrt().clamp_min(1e-3)
    joint = (x.T @ x / len(x) - mean[:, None] * mean) / (spread[:, None] * spread)
    return mean.clamp(1e-4, 1 - 1e-4).logit(), joint.fill_diagonal_(0)


def _alike(one: Tensor, other: Tensor) -> Tensor:
    return -(one[:, None] - other).abs()


def _assigned(cost: Tensor) -> Tensor:
    return torch.from_numpy(linear_sum_assignment(cost.double().numpy())[1])


# -- the tokens from patterns ------------------------------------------------------------------------------------------
class Layers:
    """The first layers of the bundled model: patterns of rows, and of every token that may come next."""

    def __init__(self, model: Any, count: int) -> None:  # noqa: ANN401 - a transformers model
        self._model, self._count = model, count
        self._decoder = model.model.decoder

    @contextmanager
    def _shortened(self) -> Iterator[list[Tensor]]:
        """While it lasts, the model has these layers; what their FC1 makes, layer by layer."""
        whole, made = self._decoder.layers, list[Tensor]()
        self._decoder.layers = nn.ModuleList(list(whole)[: self._count])
        hooks = [
            layer.fc1.register_forward_hook(lambda _, __, out: made.append(out.detach() > 0))
            for layer in self._decoder.layers
        ]
        try:
            with torch.no_grad():
                yield made
        finally:
            self._decoder.layers = whole
            for hook in hooks:
                hook.remove()

    def predicted(self, text: Tensor, prompt: Tensor) -> Tensor:
        """bool [positions, n] of a prompt [T]: what a predictor of layer 0 says that was trained on rows of text."""
        (site,) = [each for each in find_sites(self._model, {"input_ids": text[:1]}, ("ffn",)) if each.layer == 0]
        with TemporaryDirectory() as folder:
            record(self._model, [site], ({"input_ids": some} for some in text.split(16)), Path(folder))
            (recording,) = recordings(Path(folder))
            trained = train_predictor(recording, PredictorConfig(rank=32), TrainingConfig(epochs=2)).predictor
        seen: list[Tensor] = []
        hook = self._decoder.layers[0].fc1.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        with torch.no_grad():
            self._decoder(input_ids=prompt[None], use_cache=False)
            hook.remove()
            return trained.predict(seen[0].view(len(prompt), -1))[1:]

    def patterns(self, rows: Tensor) -> list[Tensor]:
        """By layer, bool [all positions but the start tokens', n] of rows [N, T]."""
        found: list[list[Tensor]] = [[] for _ in range(self._count)]
        for some in rows.split(16):
            with self._shortened() as made:
                self._decoder(input_ids=some, use_cache=False)
            for layer, bits in enumerate(made):
                found[layer].append(bits.view(*some.shape, -1)[:, 1:].flatten(0, 1))
        return [torch.cat(parts) for parts in found]

    def candidates(self, prefix: Tensor, tokens: Tensor) -> list[Tensor]:
        """By layer, bool [tokens, n]: the pattern of each token if it comes after the prefix [T]."""
        count, length = len(tokens), len(prefix)
        cache = DynamicCache()
        with self._shortened():
            self._decoder(input_ids=prefix[None], past_key_values=cache, use_cache=True)
        sees = torch.cat([torch.ones(count, length, dtype=torch.bool), torch.eye(count, dtype=torch.bool)], dim=1)
        mask = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
        places = torch.full((1, count), length)
        with self._shortened() as made:
            self._decoder(
                input_ids=tokens[None], attention_mask=mask[None, None], position_ids=places, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
        return [bits.view(count, -1) for bits in made]


def tokens_read(
    layers: Layers, wanted: Sequence[int], prompt: Tensor, known: int, opened: Opened, grouping: Sequence[Tensor],
    vocabulary: Tensor, text: Tensor,
) -> TokensRow:  # fmt: skip
    """Read a prompt [T] after `known` of its tokens, by patterns of the `wanted` layers. text: for predictors."""
    chance = torch.Generator().manual_seed(0)
    true = layers.patterns(prompt[None])
    found, orders = {}, {}
    for layer in wanted:
        patterns = layers.predicted(text, prompt) if opened.predicted else true[layer]
        patterns = opened.of(patterns, grouping[layer], chance)
        order = torch.randperm(patterns.shape[1], generator=chance)
        found[layer] = patterns[:, order]
        own = opened.units(true[layer][:known], grouping[layer])
        slack = known if opened.predicted or opened.budget is not None else 0
        orders[layer] = match_positions(own, found[layer][:known], slack)
    read, right = prompt[: known + 1], 0
    for at in range(known, len(prompt) - 1):
        apart = torch.zeros(len(vocabulary))
        for first in range(0, len(vocabulary), 512):
            some = vocabulary[first : first + 512]
            made = layers.candidates(read, some)
            for layer in wanted:
                units, places = opened.units(made[layer], grouping[layer]), orders[layer]
                at_places = units[:, places[places != UNKNOWN]]
                apart[first : first + 512] += (at_places != found[layer][at, places != UNKNOWN]).sum(1)
        token = vocabulary[int(apart.argmin())]
        right += int(token == prompt[at + 1])
        read = torch.cat([read, token[None]])
    names = ", ".join(map(str, wanted))
    return TokensRow(str(opened), names, known, len(prompt) - 1 - known, right)


# -- the study ---------------------------------------------------------------------------------------------------------
def main() -> None:
    """Both attacks on the bundled model, against what lowers them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of tables")
    parser.add_argument("--tiny", action="store_true", help="few openings and tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = plaintext_model(demo_model()), tokenizer_of(demo_model())
    text = (DATA / "shakespeare.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    halves = ids[: 8192 if options.tiny else None].chunk(2)
    layers, layer = Layers(model, 2), 0
    rows = [windows(half, LENGTH + 1, tokenizer.bos_token_id) for half in halves]
    own, theirs = map(layers.patterns, rows)
    ways = (Opened(), Opened(budget=0.3), Opened(block=16), Opened(block=16, budget=0.5))
    counts = (512,) if options.tiny else (64, 256, 512, 2048, 8192)
    neighbours = torch.arange(own[0].shape[1])
    grouped = [group(bits[:2048], 16) for bits in own]
    orders, tokens = list[OrderRow](), list[TokensRow]()
    for way in ways[:: 3 if options.tiny else 1]:
        for layer in (0, 1):
            grouping = grouped[layer] if way.block > 1 else neighbours
            orders += _orders(way, layer, own[layer], theirs[layer], grouping, counts)
    prompts = windows(halves[1], 25 if options.tiny else 449, tokenizer.bos_token_id)
    vocabulary = torch.arange(512 if options.tiny else model.config.vocab_size)
    for way, wanted, known in _prompts(ways, options.tiny):
        grouping = grouped if way.block > 1 else [neighbours] * 2
        prompt = prompts[0][: known + (3 if options.tiny else 49)]
        tokens.append(tokens_read(layers, wanted, prompt, known, way, grouping, vocabulary, rows[0]))
    if options.json:
        for row in (*orders, *tokens):
            emit_json(asdict(row))
        return
    emit_table(
        "The order, found without any known input", ("opened", "layer", "openings", "found, %"),
        [(row.opened, row.layer, row.openings, f"{100 * row.found:.1f}") for row in orders],
    )  # fmt: skip
    emit_table(
        "Tokens of one prompt, read exactly", ("opened", "layers", "known", "unknown", "read"),
        [(row.opened, row.layers, row.known, row.unknown, row.read) for row in tokens],
    )  # fmt: skip


def _orders(
    way: Opened, layer: int, own: Tensor, theirs: Tensor, grouping: Tensor, counts: Sequence[int]
) -> Iterator[OrderRow]:
    chance = torch.Generator().manual_seed(layer)
    seen = way.of(theirs, grouping, chance)
    order = torch.randperm(seen.shape[1], generator=chance)
    for count in counts:
        if count <= len(seen):
            places = order_from_statistics(way.of(own, grouping, chance), seen[:count, order])
            yield OrderRow(str(way), layer, count, float((places == order).float().mean()))


def _prompts(ways: Sequence[Opened], tiny: bool) -> Iterator[tuple[Opened, tuple[int, ...], int]]:
    """What is opened, in which layers, after how many known tokens."""
    if tiny:
        yield ways[0], (0,), 16
        return
    for known in (400, 128, 32):
        yield ways[0], (0,), known
    yield ways[0], (1,), 400
    yield Opened(predicted=True), (0,), 400
    yield Opened(predicted=True), (0,), 32
    for way in ways[1:]:
        yield way, (0,), 400


if __name__ == "__main__":
    main()
