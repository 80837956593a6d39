"""Real tensors between nodes: their bytes, because links carry integers only.

Masked partial results: a CompNode learns the attention of its rows, not what each shard has to do with it.

The AttnNodes (j, 0) .. (j, beta - 1) each hold the queries and keys of shard j. For a row r of shard j, node (j, k)
has the attention out_k over the keys of shard k and its log-sum-exp lse_k. The CompNode is to learn no more than

    sum_k exp(lse_k - ref) [out_k, 1],    ref: the score of row r on itself, which all these nodes know.

1. Each node makes x_k = exp(lse_k - ref) [out_k, 1] a fixed-point number of 2^64, and adds its share of zero z_k.
2. The CompNode adds what all beta nodes sent, sum_k x_k, and divides the first numbers by the last one.

Shares of zero: the nodes of shard j form a ring. At load each sends its successor a fresh seed (32 bytes); z_k is the
stream of the outgoing seed less that of the incoming one, so that they cancel in the sum (secure aggregation without
dropouts). Both neighbours of a node together know its z_k; any other set without it sees uniform numbers. A CompNode
that colludes with some AttnNodes still sees the others' sums only: of each section of the ring between colluders.

Domain: a row that sees itself has a sum of at least 1, of which rounding is at most beta 2^-25. |x_k| must stay below
2^(62 - FRAC) / beta, else DomainError: no shard's keys may weigh e^23 times as much as a row's own key (beta = 16).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.errors import DomainError, TransportError
from private_llm.net.transport import Transport
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from private_llm.token_sharding.nodes.facts import AttentionCall, Piece
from private_llm.token_sharding.plans import ShardingPlan

_LARGE = 1 << 16  # bytes from which a copy costs more than a message of its own

Expected = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor in a message


def number_type(plan: ShardingPlan) -> torch.dtype:
    """How rows and partial results travel; log-sum-exps always have 32 bits, their exponentials are weights."""
    return torch.float16 if plan.wire == "float16" else torch.float32


def partial_bytes(plan: ShardingPlan, call: AttentionCall) -> int:
    """Bytes of one row's partial result from one AttnNode: masked, or its result and a log-sum-exp for each head."""
    if plan.masked:
        return call.heads * (call.value_dim + 1) * torch.int64.itemsize
    return call.heads * (call.value_dim * number_type(plan).itemsize + torch.float32.itemsize)


def send_floats(
    transport: Transport, to: int | Sequence[int], tag: str, tensors: Sequence[Tensor], dtype: torch.dtype | None = None
) -> None:
    """Send real tensors, small ones as one message, large ones apart, each made once, to one endpoint or several.

    dtype: what the numbers travel as; None: each tensor as it is, wider types first. Large tensors that lie as they
    travel are not copied: their memory must not change afterwards.
    """
    with transport.ledger.timing("serialising"):
        sizes = [tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in tensors]
        messages = [_packed([tensors[index] for index in group], dtype) for group in _messages(sizes)]
    for endpoint in [to] if isinstance(to, int) else to:
        for message in messages:
            transport.send(endpoint, tag, message)


def recv_floats(transport: Transport, frm: int, tag: str, expected: Sequence[Expected]) -> list[Tensor]:
    """What `send_floats` sent, as float32, in the order sent."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in expected]
    found: dict[int, Tensor] = {}
    for group in _messages(sizes):
        found.update(zip(group, _received(transport, frm, tag, [expected[index] for index in group]), strict=True))
    return [found[index] for index in range(len(expected))]


def _messages(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors share a message: each large one goes alone, the small ones together."""
    together = [index for index, size in enumerate(sizes) if size < _LARGE]
    return [*([index] for index, size in enumerate(sizes) if size >= _LARGE), *([together] if together else [])]


def _received(transport: Transport, frm: int, tag: str, expected: Sequence[Expected]) -> list[Tensor]:
    kinds = [dtype for _, dtype in expected]
    counts = [math.prod(shape) for shape, _ in expected]
    sizes = [count * dtype.itemsize for count, dtype in zip(counts, kinds, strict=True)]
    joined = transport.recv(frm, tag, (sum(sizes),), torch.uint8)
    with transport.ledger.timing("serialising"):
        parts: Sequence[Tensor]
        if len(set(kinds)) == 1:
            parts = joined.view(kinds[0]).split_with_sizes(counts)
        else:
            parts = [part.view(dtype) for part, dtype in zip(joined.split_with_sizes(sizes), kinds, strict=True)]
        return [_unfolded(part, shape) for part, (shape, _) in zip(parts, expected, strict=True)]


def _packed(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Few operations, because a decode step's messages are small: tensors of one type are joined before anything else.

    Four-dimensional tensors [B, heads, n, D] travel as [B, n, heads, D], the order in which models make them.
    """
    flat = [(tensor.transpose(1, 2) if tensor.dim() == 4 else tensor).reshape(-1) for tensor in tensors]
    if len({part.dtype for part in flat}) == 1:
        joined = flat[0] if len(flat) == 1 and flat[0].nbytes >= _LARGE else torch.cat(flat)
        return (joined if dtype is None else joined.to(dtype)).view(torch.uint8)
    return torch.cat([(part if dtype is None else part.to(dtype)).contiguous().view(torch.uint8) for part in flat])


def _unfolded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a message as float32 in its own shape."""
    if len(shape) == 4:
        batch, heads, rows, size = shape
        part = part.view(batch, rows, heads, size).transpose(1, 2)
    else:
        part = part.view(shape)
    return part if part.dtype == torch.float32 else part.float()


FRAC = 24  # fractional bits of a masked number

_RING = Ring(64)


class ZeroShares:
    """One AttnNode's shares of zero among the AttnNodes of one query shard. Sends its successor's seed when made."""

    def __init__(self, plan: ShardingPlan, transport: Transport, shard: int) -> None:
        nodes = [plan.attn_endpoint(shard, other) for other in range(plan.beta)]
        place = nodes.index(transport.me)
        self._transport, self._before = transport, nodes[place - 1]
        seed = Seed.fresh()
        after = nodes[(place + 1) % len(nodes)]
        transport.send(after, "mask key", torch.frombuffer(bytearray(seed.raw()), dtype=torch.uint8))
        self._out = seed.stream("partial results")

    def join(self) -> None:
        """Receive the predecessor's seed."""
        raw = self._transport.recv(self._before, "mask key", (32,), torch.uint8)
        self._into = Seed(raw.cpu().numpy().tobytes()).stream("partial results")

    def add_to(self, numbers: Tensor) -> Tensor:
        """int64 numbers plus the next shares; all nodes of the shard take the same shapes in the same order."""
        count = numbers.numel()
        share = self._out.elements(count, _RING, numbers.device) - self._into.elements(count, _RING, numbers.device)
        return numbers + share.view(numbers.shape)


def own_scores(call: AttentionCall, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """The score of each row on itself: q [B, H, n, D], k [B, G, n, D], bias [B or 1, H, n] to [B, H, n]."""
    scores = (q * k.repeat_interleave(call.heads // call.groups, 1)).sum(-1) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if bias is None else scores + bias


def encode(piece: Piece, reference: Tensor, nodes: int, where: str = "attention") -> Tensor:
    """x_k int64 [B, H, n, E + 1] of out, lse, reference [B, H, n]. Raises DomainError for too large results."""
    out, lse = piece
    weight = torch.exp(lse.double() - reference.double()).unsqueeze(-1)
    numbers = torch.cat([weight * out.double(), weight], -1) * 2.0**FRAC
    if numbers.numel() and not float(numbers.abs().max()) < 2.0**62 / nodes:
        raise DomainError(
            f"{where}: some keys weigh more than 2^{62 - FRAC} / {nodes} times as much as a token's own key, which "
            "masked sums cannot hold; use a plan of fewer shards, or partials='open', "
            "which lets a node see each shard's part of its row's attention"
        )
    return numbers.round().to(torch.int64)


def decode(total: Tensor) -> Tensor:
    """The attention [B, H, n, E], float32, from the sum of all nodes' numbers; 0 for rows that see no key.

    Raises TransportError if masks did not cancel (seen with probability 3/4 for each row of each head).
    """
    numbers = total.double()
    weight = numbers[..., -1:]
    if weight.numel() and not 0 <= float(weight.min()) <= float(weight.max()) < 2.0**62:
        raise TransportError("masked partial results do not add up: the AttnNodes of a shard are not at the same call")
    return torch.where(weight == 0, 0.0, numbers[..., :-1] / weight).float()
