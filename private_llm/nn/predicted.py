"""Feed-forward blocks and attention heads of which only the units are computed that a predictor predicts (Comet).

A predictor of low rank reads the block's input (section 4.1); what it predicts is opened in a secret order
(section 4.2), and the products of FC1 (gate, up) and FC2 (down) are made at the opened units alone (section 5; our
products send outputs only, so FC2 saves work and no bytes). What lies between the two gets the chosen neurons of all
positions in one dimension, so it must work entry by entry and map zero to zero.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from private_llm.errors import UnsupportedOp
from private_llm.nn.linear import SharedProducts, joined, lie_together
from private_llm.oblivious.budget import choose, opened_units
from private_llm.oblivious.level_noise import LevelNoise, noisy_choose
from private_llm.oblivious.sparse_products import sparse_input_product, sparse_output_product
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.ops_matmul import linear_by
from private_llm.tensor.range_check import watch_flat
from private_llm.tensor.secret import SecretTensor

SCORE_BITS = 10  # scores lie below 2^10: larger ones count with the wrong sign, so the check of ranges watches for it

RESOLUTION_BITS = 8  # scores up to 2^-8 above the threshold may count as below it

FEW_ROWS = 4  # up to that many positions FC2 reads the weights of listed neurons only; more want most of them anyway

_NOTHING = torch.zeros((0, 0), dtype=torch.bool)


class ActivityPredictor(nn.Module):
    """score = fc2 a(fc1 x), a unit is predicted active where its score is not negative (Comet, section 4.1).

    fc1 [rank, width] and fc2 [units, rank] with biases. hidden: a, "linear" or "relu". The owner takes the threshold
    off the bias of fc2. name: of the module in its model. expected: units a position opens where costs are counted.
    """

    def __init__(self, width: int, rank: int, units: int, hidden: Literal["linear", "relu"] = "linear") -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, rank)
        self.fc2 = nn.Linear(rank, units)
        self.hidden, self.name, self.expected = hidden, "", units

    def forward(self, x: Tensor) -> BitShare:
        """x [.., width], secret, to one row of bits [positions * units].

        Bytes in trio (64-bit ring, 18 bits): 31 for each of the rank, and for each unit 24 and a comparison of 19 bits
        (11), and of the check of ranges (2). 2 rounds, 1 and 3. Raises UnsupportedOp for public weights or input.
        """
        hidden: Tensor = self.fc1(x)
        if self.hidden == "relu":
            hidden = hidden.relu()
        weight, bias = self.fc2.weight, self.fc2.bias
        if not (
            isinstance(hidden, SecretTensor) and isinstance(weight, SecretTensor) and isinstance(bias, SecretTensor)
        ):
            raise UnsupportedOp("a predictor of activity needs a secret input and secret weights")
        value, held = hidden.to_operand(), weight.value(full=True)
        value = value.view(lambda part: part.reshape(-1, part.shape[-1]))
        scores = value.matmul(held.view(Tensor.t), frac=value.frac + held.frac)  # no bit is dropped: one round
        scores = scores + bias.value(full=True)
        watch_flat(scores, scores.frac + SCORE_BITS - 1)
        bits = min(scores.session.ring.bits, scores.frac + SCORE_BITS + 1)
        return scores.proto.invert(scores.less_than([0.0], bits=bits, low=max(0, scores.frac - RESOLUTION_BITS)))

    def opened(self, x: Tensor, positions: int, budget: int | None) -> Tensor:
        """The units to compute, bool [positions, units], in the owner's order: `opened_units`, booked as this module's.

        x: [.., width] with that many positions. Raises UnsupportedOp for a public input.
        """
        if not isinstance(x, SecretTensor):
            raise UnsupportedOp("a predictor of activity needs a secret input")
        bits = self(x)
        with x.session.module(self.name):
            return opened_units(x.session, bits, positions, budget, self.expected)


class _PredictedBlock(ABC):
    """Layers of one input whose outputs a predictor chooses; their forward becomes `read`, of the next `write`."""

    def __init__(
        self, predictor: ActivityPredictor, readers: Sequence[nn.Module], writer: nn.Module, count: int,
        budget: int | None, name: str,
    ) -> None:  # fmt: skip
        """Layers are linear, or Conv1D of transformers. count: neurons of a unit, or heads. budget: units that a
        position opens, None for as many as are active. name: the module as which the readers' product is computed.
        """
        self._predictor, self._readers, self._writer, self._count = predictor, list(readers), writer, count
        self._budget, self._name = budget, name
        self._write: Callable[[Tensor], Tensor] = writer.forward
        self._pieces = SharedProducts()
        self._lay_out()

    def _lay_out(self) -> None:  # noqa: B027 - not every block wants it
        """Move the writer's weights to where they are read fastest."""

    def read(self, index: int, x: Tensor) -> Tensor:
        """The outputs of reader `index` for x [.., K].

        The first call for an input asks the predictor, opens the pattern and computes all readers as one product:
        31 bytes an output in trio. Raises UnsupportedOp for a public input or public weights.
        """
        return self._pieces.take(index, x, self._computed)

    def _computed(self, x: Tensor) -> Sequence[Tensor]:
        if not isinstance(x, SecretTensor):
            raise UnsupportedOp("a block at predicted units needs a secret input")
        lead = tuple(x.shape[:-1])
        units = self._predictor.opened(x, torch.Size(lead).numel(), self._budget)
        with x.session.module(self._name):
            return self._chosen(x, units, lead)

    @abstractmethod
    def _chosen(self, x: SecretTensor, units: Tensor, lead: tuple[int, ...]) -> Sequence[Tensor]:
        """All readers' outputs at the opened units, bool [positions, units]."""


class SparseFeedForward(_PredictedBlock):
    """FC1 (gate, up) and FC2 (down) at predicted neurons, in the owner's order; `read` gives them 1-D, row by row."""

    _wanted, _lead = _NOTHING, tuple[int, ...]()

    def _lay_out(self) -> None:
        """The weights of a neuron side by side, where they are read alone; no copy where they lie so already."""
        weight, turned = self._writer.weight, _is_turned(self._writer)
        if isinstance(weight, SecretTensor):
            made = weight.viewed(lambda part: part.contiguous() if turned else part.t().contiguous().t())
            self._writer.weight = nn.Parameter(made, requires_grad=False)

    def _chosen(self, x: SecretTensor, units: Tensor, lead: tuple[int, ...]) -> Sequence[Tensor]:
        self._lead, self._wanted = lead, units.repeat_interleave(self._count, dim=1)
        pieces: list[Tensor] = []
        for layers in _as_products(self._readers):
            many = len(layers)
            out, columns = _at_wanted(x, layers, self._wanted.repeat(1, many), self._budget is not None)
            owner = columns // self._wanted.shape[1]
            pieces += [out] if many == 1 else [_picked(out, (owner == index).nonzero()[:, 0]) for index in range(many)]
        return pieces

    def write(self, h: Tensor) -> Tensor:
        """FC2 of `read`'s neurons h: [.., N], bytes and rounds of the layer. Raises UnsupportedOp for anything else."""
        if not isinstance(h, SecretTensor) or tuple(h.shape) != (int(self._wanted.sum()),):
            raise UnsupportedOp(
                f"{self._name}: what comes out of the block's activation is {tuple(h.shape)}, not the chosen neurons; "
                "this model does more between its layers than sparsity can follow"
            )
        wanted, lead = self._wanted, self._lead
        self._wanted = _NOTHING  # a pattern of many positions is as large as their neurons
        weight, bias = self._writer.weight, self._writer.bias
        if len(wanted) > FEW_ROWS or not isinstance(weight, SecretTensor):
            return self._write(h.viewed(lambda part: _spread(part, wanted, lead)))
        held, turned = weight.value(full=True), _is_turned(self._writer)
        there = held.view(lambda part: part if turned else part.t())

        def product(value: Fixed, frac: int | None) -> Fixed:
            made = sparse_input_product(value.restore_high_bits(), there, wanted, frac)
            return made.view(lambda part: part.view(*lead, part.shape[-1]))

        return linear_by(h, held.frac, product, bias if isinstance(bias, Tensor) else None)


class FreshActivation:
    """The activation at predicted neurons only, taken out and put back in a fresh secret order (`oblivious/budget.py`).

    Nothing is linked, and nothing but a public or noisy number is told; the products before and after are whole.
    """

    def __init__(
        self, predictor: ActivityPredictor, activation: nn.Module, block: int, level: int | LevelNoise
    ) -> None:
        """level: units that each position opens, or noise on how many are active in a call."""
        self._predictor, self._block, self._level = predictor, block, level
        self._inner: Callable[[Tensor], Tensor] = activation.forward
        self._active: BitShare | None = None
        self._is_whole = level == predictor.fc2.out_features
        """Whether a position opens all its units, so that there is nothing to ask."""

    def predict(self, x: Tensor) -> None:
        """Ask the predictor about the block's input x [.., K]."""
        self._active = None if self._is_whole else self._predictor(x)

    def run(self, h: Tensor) -> Tensor:
        """The activation of h [.., n], which is zero at neurons that are not chosen.

        Bytes in trio: a choice (35 to 46 a unit; noisy, 1 and some kilobytes), 40 to take out each element of h (and
        dummy, if noisy), as many to put back. Those of the activation alone if every position opens all units. Raises
        UnsupportedOp for a public h, or before `predict`.
        """
        if self._is_whole:
            return self._inner(h)
        active, self._active = self._active, None
        if not isinstance(h, SecretTensor) or active is None:
            raise UnsupportedOp("an activation at chosen neurons needs a secret input, after its block's first layer")
        units = h.shape[-1] // self._block
        positions = active.count // units
        if isinstance(self._level, LevelNoise):
            choice = noisy_choose(h.session, active, self._level, positions * self._predictor.expected)
        else:
            choice = choose(h.session, active, self._level, positions)
        rows = h.to_fixed().view(lambda part: part.reshape(-1, self._block))
        made = self._inner(SecretTensor(choice.take(rows)))
        if not isinstance(made, SecretTensor):
            raise UnsupportedOp("an activation made a public value of a secret")
        back = choice.put_back(made.to_fixed())
        return SecretTensor(back.view(lambda part: part.reshape(h.shape)))


class SparseHeads(_PredictedBlock):
    """Predicted attention heads of one block, whose heads lie in the owner's order.

    Queries of other heads are not computed, and `allowed` takes them out of the attention mask, so they have no scores,
    no softmax and no output. Keys and values are those of all heads, which later queries may need. The layer of the
    queries is the first reader. `read` gives [B, length, N]; queries of heads left out are zero.
    """

    _active: Tensor | None = None

    def _chosen(self, x: SecretTensor, units: Tensor, lead: tuple[int, ...]) -> Sequence[Tensor]:
        self._active = units.view(*lead, self._count)
        made: list[Tensor] = []
        for layers in _as_products(self._readers):
            sizes = [_outputs(layer) for layer in layers]
            wanted = [torch.ones(len(units), size, dtype=torch.bool) for size in sizes]
            if not made:
                wanted[0] = units.cpu().repeat_interleave(sizes[0] // self._count, dim=1)
            places = torch.cat(wanted, dim=1)
            flat, _ = _at_wanted(x, layers, places, self._budget is not None)
            whole = flat.viewed(functools.partial(_spread, wanted=places, lead=lead))
            made += torch.split(whole, sizes, dim=-1)
        return made

    def allowed(self, mask: Tensor | None, heads: int, keys: int) -> Tensor:
        """`mask` (boolean, [B, 1, length, keys or more], None: all) at active heads' queries: [B, H, length, keys].

        Local. Raises UnsupportedOp if nothing was predicted for this call, or another number of heads.
        """
        active, self._active = self._active, None
        if active is None:
            raise UnsupportedOp("sparse attention ran without its first layer, whose input predicts the heads")
        if heads != self._count:
            raise UnsupportedOp(f"{self._name}: {self._count} heads are predicted, but attention has {heads}")
        rows = active.transpose(1, 2)[..., None]
        return rows.expand(*rows.shape[:-1], keys) if mask is None else mask[..., :keys].to(rows.device) & rows

    def write(self, h: Tensor) -> Tensor:
        """The layer after the heads. Raises UnsupportedOp if they did not pass `allowed`, which leaves heads out."""
        if self._active is not None:
            raise UnsupportedOp(
                f"{self._name}: this model computes attention where heads cannot be left out; want "
                "CometConfig(heads=False)"
            )
        return self._write(h)


def _as_products(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """All layers as one product, if their weights lie one below the other; else each alone."""
    weights = [layer.weight for layer in layers]
    if not any(map(_is_turned, layers)) and lie_together([w for w in weights if isinstance(w, Tensor)]):
        return [list(layers)]
    return [[layer] for layer in layers]


def _at_wanted(
    x: SecretTensor, layers: Sequence[nn.Module], wanted: Tensor, equal: bool
) -> tuple[SecretTensor, Tensor]:
    """Layers of one input at wanted outputs [positions, N1 + N2 + ..] (`equal`: as many each): 1-D, and columns."""
    weight, bias = joined([(layer.weight, layer.bias) for layer in layers])  # type: ignore[misc]
    if not isinstance(weight, SecretTensor):
        raise UnsupportedOp("products at predicted outputs need secret weights")
    held, columns = weight.value(full=True), wanted.nonzero()[:, 1]
    there = held.view(lambda part: part if _is_turned(layers[0]) else part.t())
    shape = (len(wanted), -1) if equal else (-1,)

    def product(value: Fixed, frac: int | None) -> Fixed:
        rows = value.restore_high_bits().view(lambda part: part.reshape(-1, part.shape[-1]))
        return sparse_output_product(rows, there, wanted, frac).view(lambda part: part.view(shape))

    found = None if equal else functools.partial(_spread, wanted=wanted, lead=(len(wanted),))
    out = linear_by(x, held.frac, product, None if bias is None else _picked(bias, columns.view(shape)), found)
    return out.viewed(lambda part: part.reshape(-1)), columns


def _is_turned(layer: nn.Module) -> bool:
    """Whether a layer's weight is [inputs, outputs], as transformers' Conv1D has it."""
    return not isinstance(layer, nn.Linear)


def _outputs(layer: nn.Module) -> int:
    weight = layer.weight
    return int(weight.shape[1 if _is_turned(layer) else 0]) if isinstance(weight, Tensor) else 0


def _picked(x: Tensor, places: Tensor) -> SecretTensor:
    if not isinstance(x, SecretTensor):
        raise UnsupportedOp("a sparse feed-forward block needs secret weights")
    return x.viewed(lambda part: part[places.to(part.device)])


def _spread(part: Tensor, wanted: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Entries of the wanted places among zeros: [.., n]."""
    whole = torch.zeros(wanted.shape, dtype=part.dtype, device=part.device)
    whole[wanted.to(part.device)] = part
    return whole.view(*lead, wanted.shape[1])
