"""What protocol "assisted" will cost, without weights and servers: the client's own model, whose products are zeros.

The model is the ordinary one with zeros as weights, which take no memory. What it would ask of servers is counted, and
what it computes itself takes the time that it takes here.
"""

import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.assisted.fixed_point import BYTES, LINES, IntegerWeight
from private_llm.assisted.masks import fresh_label
from private_llm.assisted.projection import NAMING
from private_llm.config import PrivateConfig
from private_llm.kernels import ops
from private_llm.net.ledger import Ledger
from private_llm.net.transport import CLIENT, MetaTransport
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from private_llm_hf.client.assisted_layers import Products, TakesWeights, WeightElsewhere
from private_llm_hf.client.assisted_model import built
from private_llm_hf.client.assisted_rows import RowCounts
from private_llm_hf.client.costs import Costs, layer_of
from private_llm_hf.client.launch import start_parties
from private_llm_hf.client.product_servers import KEY, ProductServers, rows_at_once
from private_llm_hf.wire.answers import CostRows
from private_llm_hf.wire.assisted import HEADER, REQUEST

_RUNS = 5
_WIDE, _MANY = 2048, 64


# -- time ------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class ProductSpeed:
    """GMAC/s of servers with one row and many, 10^9 elements/s at the client, and seconds of each exchange besides."""

    one_row: float
    many_rows: float
    elements: float
    beside: float

    def __str__(self) -> str:
        return (
            f"a server {self.one_row:.3g} GMAC/s with one row, {self.many_rows:.3g} with many; the client "
            f"{self.elements * 1e3:.3g} million elements/s; {self.beside * 1e3:.2g} ms more for each exchange"
        )

    @classmethod
    def measured(cls, gmacs: float | None = None, weight_bits: Literal[16, 8] = 16) -> "ProductSpeed":
        """Of this machine, with a weight that is read from memory; some seconds. gmacs: of servers elsewhere."""
        lines = ops.narrow_lines(torch.ones(4 * _WIDE, _WIDE, dtype=LINES[weight_bits]))
        stream, rates = Seed.fresh().stream("speed"), []
        for rows in (1, _MANY):
            x = stream.elements(rows * _WIDE, Ring(64)).view(rows, _WIDE)
            rates.append(rows * lines.numel() / _fastest(ops.narrow_matmul, x, lines, rows) / 1e9)
        config = PrivateConfig(protocol="assisted", party_mode="threads", weight_bits=weight_bits)
        alone = ProductServers(config, _Zeros(CLIENT), lambda: None)
        alone._held = dict  # type: ignore[method-assign]  # no server holds anything
        ends = alone, start_parties(config)
        sizes = (_MANY, _WIDE), (1, 64)
        times = [_product(servers, *each) for servers, each in zip(ends, sizes, strict=True)]  # type: ignore[arg-type]
        ends[1].close()
        one_row, many_rows = rates if gmacs is None else (gmacs, gmacs)
        return cls(one_row, many_rows, 3 * _MANY * _WIDE / times[0] / 1e9, times[1])


def _product(servers: ProductServers, rows: int, wide: int) -> float:
    """Seconds of a product of zeros."""
    number = servers.load(IntegerWeight.of(torch.ones(wide, wide), bits=servers.weight_bits), "speed")
    return _fastest(servers.product, number, torch.zeros(rows, wide), "speed")


def _fastest(work: Callable[..., object], *given: object) -> float:
    """Seconds of the fastest of some runs, after one that compiles."""
    work(*given)
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        work(*given)
        times.append(time.perf_counter() - started)
    return min(times)


class _Zeros(MetaTransport):
    """Servers that agree, and answer with zeros, which are right for zeros."""

    _said = torch.empty(0)

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        self._said = payload

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._said if tag == "hello" else torch.zeros(shape, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class ProductExchange:
    """One product: [rows, inputs] by a weight [outputs, inputs]. own: the client's seconds before. size: in bytes."""

    layer: str
    rows: int
    inputs: int
    outputs: int
    own: float
    servers: int = 2
    size: int = BYTES[16]

    def seconds(self, bandwidth_mbit: float, latency_ms: float, speed: ProductSpeed) -> float:
        """One after the other: the rows' way there, a server, both answers through the client's link, the client."""
        elements, size = self.rows * (self.inputs + self.servers * self.outputs), self.inputs * self.outputs
        server = max(size / speed.one_row, self.rows * size / speed.many_rows)
        computing = (server + elements / speed.elements) / 1e9 + speed.beside + self.own
        return 2 * latency_ms / 1e3 + self.size * elements * 8 / (bandwidth_mbit * 1e6) + computing


@dataclasses.dataclass(frozen=True)
class StoredProducts:
    """Corrections of a run. rows: of each weight. shapes: outputs and inputs of all weights. size: of an element."""

    rows: int
    shapes: tuple[tuple[int, int], ...]
    size: int

    @property
    def bytes(self) -> int:
        """On disk, but for names and digests."""
        return self.size * self.rows * sum(outputs for outputs, _ in self.shapes)

    def seconds(self, speed: ProductSpeed) -> float:
        """Of making and checking them on this machine, without the time of its disk."""
        macs, elements = (sum(map(each, self.shapes)) for each in (math.prod, sum))
        return self.rows * (macs / speed.many_rows + elements / speed.elements) / 1e9


# -- bytes -----------------------------------------------------------------------------------------------------------
class CountedServers(ProductServers):
    """Stands where the client's link to the servers stands; answers with zeros, and counts what a run would send."""

    def __init__(self, config: PrivateConfig, progress: Callable[[], None]) -> None:
        plain = dataclasses.replace(config, corrections=None, hosts=(), party_mode="threads")
        super().__init__(plain, _Zeros(CLIENT), lambda: None)
        self._servers = config.endpoints
        self.asked: list[ProductExchange] = []
        self.shapes: list[tuple[int, int]] = []
        self._rows = Counter[int]()
        self.progress = progress
        self._since = time.perf_counter()
        self._ledgers = [*map(Ledger, range(self._servers)), Ledger(CLIENT)]

    @property
    def weight_bytes(self) -> int:
        """Of all weights at a server."""
        return self.weight_bits // 8 * sum(outputs * inputs for outputs, inputs in self.shapes)

    @property
    def check_bytes(self) -> int:
        """What the client keeps of all weights: secret sums, and scales."""
        return sum(8 * ((NAMING + 1) * outputs + (NAMING + 2) * inputs) for outputs, inputs in self.shapes)

    @property
    def prepared(self) -> StoredProducts | None:
        """With one server: what is prepared for what was asked so far."""
        rows = max(self._rows.values(), default=0)
        return None if self._servers > 1 else StoredProducts(rows, tuple(self.shapes), self._size)

    def product(self, number: int, x: Tensor, where: str) -> Tensor:
        """Zeros [M, outputs]."""
        outputs, inputs = self.shapes[number]
        self._rows[number] += len(x)
        for some in x.split(rows_at_once(inputs, outputs)):
            self._count(len(some), inputs, outputs, where)
        made = x.new_zeros(len(x), outputs)
        self.goes_on()
        return made

    def expect(self, names: dict[tuple[int, int], str]) -> None:
        """Nothing: whatever a model wants is counted."""

    def stand_for(self, products: Products) -> None:
        """For servers that hold their weight."""
        if products.number < 0:
            products.number = len(self.shapes)
            self.shapes.append((products.outputs, products.inputs))

    def goes_on(self) -> None:
        """What the client computes itself begins."""
        self._since = time.perf_counter()

    def _count(self, rows: int, inputs: int, outputs: int, where: str) -> None:
        own = time.perf_counter() - self._since
        exchange = ProductExchange(layer_of(where), rows, inputs, outputs, own, self._servers, self._size)
        self.asked.append(exchange)
        self.goes_on()
        *servers, client = self._ledgers
        if self._servers > 1:  # otherwise products of masks are stored
            client.sent[where, REQUEST, KEY] += HEADER.size + len(fresh_label())
        client.sent[where, REQUEST, self._servers - 1] += HEADER.size + self._size * rows * inputs
        client.rounds[where, "product"] += 1
        for ledger in servers:
            ledger.sent[where, "product", CLIENT] += self._size * rows * outputs
            ledger.rounds[where, "product"] += 1
            ledger.macs[where] += rows * inputs * outputs

    def costs(self, reset: bool = False) -> Costs:
        """What was counted."""
        return Costs.from_rows([CostRows.of(ledger) for ledger in self._ledgers])


def counted_model(
    model_class: type[PreTrainedModel], config: PretrainedConfig, private_config: PrivateConfig,
    progress: Callable[[], None],
) -> tuple[PreTrainedModel, CountedServers]:  # fmt: skip
    """The client's model, and what it asks. progress: called after each forward. Raises as `open_assisted`."""
    servers, plain = CountedServers(private_config, progress), copy.deepcopy(config)
    plain._experts_implementation = "eager"  # others refuse weights that take no memory
    model = built(model_class, plain, lambda *_: None, servers, RowCounts(), private_config.experts)
    for module in model.modules():
        elsewhere = module.elsewhere if isinstance(module, TakesWeights) else frozenset()
        for products in module._products if isinstance(module, TakesWeights) else ():
            servers.stand_for(products)
        for own, value in module._parameters.items():
            if value is not None and value.is_meta and own not in elsewhere:
                module._parameters[own] = nn.Parameter(_zeros(value), requires_grad=False)
        module._buffers.update({
            own: _zeros(value) for own, value in module._buffers.items() if value is not None and value.is_meta
        })  # fmt: skip
    model.register_forward_hook(lambda *_: servers.progress())
    return model, servers


def _zeros(like: Tensor) -> Tensor:
    """Without memory."""
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def own_bytes(model: PreTrainedModel) -> int:
    """The client's own weights."""
    return sum(value.nbytes for value in model.parameters() if not isinstance(value, WeightElsewhere))


def kept_bytes(output: Any) -> int:  # noqa: ANN401 - of any model
    """The cache that a call leaves."""
    cache = getattr(output, "past_key_values", None)
    caches = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for each in (cache, *caches) for layer in getattr(each, "layers", ())]
    kept = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return sum(value.nbytes for value in kept if value is not None)
