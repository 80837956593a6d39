"""Query, key and value of the active heads alone, and a KV cache that fills in what such steps left out.

One product makes all of a step: queries of the active heads, keys and values of their new positions and of those that
they lack, and what is worth making ahead (`refill.py`). Its outputs are exactly those: a block for
all heads that need the same positions, which reads each weight row once and makes nothing that is not wanted. (The
connected components of SOMM would be one block here, because all active heads share the new position. What is masked
under dealer with matmul="remask" is the same, the tokens and weight rows that take part, once each.)

The hidden inputs of all positions are held beside keys and values, N more elements a position. Patterns are public and
in one order for the whole run, which links them: threat-model.md, entry of reused orders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comet_cache.refill import RefillCost, RefillManager, RefillStep, Strategy
from private_llm.errors import DomainError
from private_llm.kv_cache.buffer import GrowingRows, checked_index, columns_at
from private_llm.oblivious.sparse_products import Block, SparseOutput
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed

Turn = Callable[[Fixed, Tensor], Fixed]
"""A local function of vectors [heads, tokens, D] and their positions, int64 [tokens]: a rotary embedding."""


@dataclass(frozen=True, eq=False)
class Projection:
    """Query, key and value layers as one below the other, heads in their secret order in each of the three.

    weight: [H D + G D + G Dv, N]. bias: [H D + G D + G Dv] or None. heads: H. groups: G, dividing H; head h reads key
    head h // (H / G), so an order of the heads keeps them together by groups. sizes: D and Dv.
    Raises DomainError for sizes that do not fit.
    """

    weight: Fixed
    bias: Fixed | None
    heads: int
    groups: int
    sizes: tuple[int, int]

    def __post_init__(self) -> None:
        height = self.value_row(self.groups)
        got = tuple(self.weight.shape), None if self.bias is None else tuple(self.bias.shape)
        if got[0][:1] != (height,) or len(got[0]) != 2 or got[1] not in (None, (height,)) or self.heads % self.groups:
            raise DomainError(
                f"projection: got weight {got[0]} and bias {got[1]} for {self.heads} heads in {self.groups} groups, "
                f"sizes {self.sizes}; want {height} rows and whole groups"
            )

    def key_row(self, group: int) -> int:
        """The first row of a group's key."""
        return (self.heads + group) * self.sizes[0]

    def value_row(self, group: int) -> int:
        """The first row of a group's value."""
        return self.key_row(self.groups) + group * self.sizes[1]


@dataclass(frozen=True, eq=False)
class ActiveHeads:
    """What attention of the active heads reads; P pairs of a batch row and a head, row by row.

    pairs: int64 [P, 2]. query: [P, 1, q, D], zeros where a head is not active. key, value: [P, 1, T, D], all there.
    active: bool [P, 1, q, 1], which queries are. `attend(query, key, value, made.mask(allowed), scale)` gives
    [P, 1, q, Dv], zeros for queries that are not active.
    """

    pairs: Tensor
    query: Fixed
    key: Fixed
    value: Fixed
    active: Tensor

    def mask(self, allowed: Tensor) -> Tensor:
        """A public mask for `attend`, [P, 1, q, T], from one for all heads, bool [B or 1, 1, q, T]."""
        rows = self.pairs[:, 0] if len(allowed) > 1 else torch.zeros_like(self.pairs[:, 0])
        return allowed[rows] & self.active


@dataclass(frozen=True)
class _Piece:
    """A block of the product: tokens of a row, and the first weight rows of what is made of them."""

    kind: int
    """0: query; 1: key; 2: value."""
    row: int
    heads: tuple[int, ...]
    tokens: tuple[int, ...]


class RefillingCache:
    """Inputs, keys and values of one attention block for B sequences.

    Positions as in `KVBuffer`: `position` is the number of the next, `positions` are those of the entries held, int64
    [B, 1, length], None while nothing was evicted. A cache policy that treats all heads alike works on it: it is asked
    with `positions_held` and answers `keep`.
    """

    def __init__(
        self, projection: Projection, strategy: Strategy = Strategy.MERGED, cost: RefillCost | None = None,
        turn: Turn | None = None,
    ) -> None:  # fmt: skip
        """cost: of the protocol, for PREFETCH (default: `RefillCost.of` the settings). turn: of queries and keys."""
        self.position = 0
        self.positions: Tensor | None = None
        self._made, self._strategy, self._turn = projection, strategy, turn
        session = projection.weight.session
        if strategy is Strategy.PREFETCH and cost is None:
            cost = RefillCost.of(session.config, projection.weight.shape[1], projection.sizes[0])
        self._cost = cost if strategy is Strategy.PREFETCH else None
        self._manager: RefillManager | None = None
        self._rows: tuple[GrowingRows, GrowingRows, GrowingRows] | None = None

    @property
    def length(self) -> int:
        """Positions that are held."""
        return 0 if self._manager is None else self._manager.length

    def filled(self) -> Tensor:
        """int64 [B, G]: how many of the positions held have keys and values; the others are inputs alone.

        Raises DomainError before the first `step`.
        """
        if self._manager is None:
            raise DomainError("filled: this cache holds nothing yet")
        return self._manager.filled

    def step(self, x: Fixed, active: Tensor) -> ActiveHeads:
        """Inputs of the next positions, [B, q, N], and which heads are active there, bool [B, q, H], public.

        A head that is active at one of them gets keys and values of all q. Rounds and bytes of one product with the
        outputs that are made (PER_HEAD: of one for each head that lacks older entries, one after the other, and
        one); nothing is sent if no head is active. Raises DomainError for other shapes, or other rows than before.
        """
        made = self._made
        batch, new, width = x.shape
        if tuple(active.shape) != (batch, new, made.heads) or active.dtype != torch.bool:
            raise DomainError(
                f"refill: got a pattern {active.dtype} {tuple(active.shape)} for inputs {tuple(x.shape)}; want bool "
                f"{(batch, new, made.heads)}"
            )
        if width != made.weight.shape[1]:
            raise DomainError(f"refill: got inputs of {width} elements; want {made.weight.shape[1]}")
        if self._rows is not None and self._rows[0].frac != x.frac:
            held = self._rows[0].frac
            raise DomainError(f"refill: got inputs with {x.frac} fractional bits; want {held} as before")
        active, old = active.cpu(), self.length
        if self._manager is None:
            self._manager = RefillManager(batch, made.groups, self._cost)
        of_groups = active.any(1).view(batch, made.groups, -1).any(-1)
        plan = self._manager.step(of_groups, new)
        self._grow(x)
        query = x.with_share(_zeros(x, (batch, made.heads, new, made.sizes[0])), x.session.frac)
        rows = GrowingRows(query)
        parts = plan.apart(old) if self._strategy is Strategy.PER_HEAD else (plan,)
        for number, part in enumerate(parts):
            self._make(part, active if not number else torch.zeros_like(active), old, rows)
        return self._read(active, rows.held(), made.heads // made.groups)

    # -- the product -----------------------------------------------------------------------------------
    def _make(self, plan: RefillStep, active: Tensor, old: int, queries: GrowingRows) -> None:
        """One product: the keys and values of `plan`, and queries where `active`, bool [B, q, H]."""
        pieces = [*_queries(active, old), *_entries(plan)]
        if not pieces or self._rows is None:
            return
        made, inputs = self._made, self._rows[0].held()
        tokens = sorted({(piece.row, token) for piece in pieces for token in piece.tokens})
        place = {token: number for number, token in enumerate(tokens)}
        blocks, columns, count = [], [], 0
        groups = _alike(pieces)
        for group in groups:
            lines = torch.cat([self._lines(piece) for piece in group])
            rows = torch.tensor([place[group[0].row, token] for token in group[0].tokens])
            every = torch.arange(len(rows) * len(lines))
            blocks.append(Block(rows, lines, every, count + every))
            columns.append(lines.repeat(len(rows)))
            count += len(every)
        at = torch.tensor(tokens)
        taken = inputs.view(lambda part: part[at[:, 0].to(part.device), 0, at[:, 1].to(part.device)])
        out, weight = inputs.session.frac, made.weight
        form = SparseOutput(blocks, count)
        flipped = weight.share.map(lambda part: part.mT)
        share = taken.proto.bilinear(form, taken.share, flipped, taken.frac + weight.frac - out)
        result = taken.with_share(share, out)
        if made.bias is not None:
            wanted = torch.cat(columns)
            result = result + made.bias.view(lambda part: part[wanted.to(part.device)])
        for group, block in zip(groups, blocks, strict=True):
            begin, end = int(block.places[0]), int(block.places[-1]) + 1
            self._place(group, _between(result, begin, end), old, queries)

    def _lines(self, piece: _Piece) -> Tensor:
        """The weight rows of a piece, head by head, int64."""
        made = self._made
        size = self._size(piece)
        first = (lambda head: head * size, made.key_row, made.value_row)[piece.kind]
        starts = torch.tensor([first(head) for head in piece.heads])
        return (starts[:, None] + torch.arange(size)).reshape(-1)

    def _place(self, group: Sequence[_Piece], flat: Fixed, old: int, queries: GrowingRows) -> None:
        """Put a block's outputs, tokens by weight rows, where they belong."""
        tokens = torch.tensor(group[0].tokens)
        wide, begin = flat.view(lambda part: part.view(len(tokens), -1)), 0
        for piece in group:
            count = len(piece.heads)
            end = begin + count * self._size(piece)
            mine = _between(wide, begin, end)
            vectors = _by_heads(mine, count)
            begin = end
            if self._turn is not None and piece.kind < 2:
                vectors = self._turn(
                    vectors, self.positions_held()[piece.row if self.positions is not None else 0, 0, tokens]
                )
            self._store(piece, vectors, old, queries)

    def _size(self, piece: _Piece) -> int:
        return self._made.sizes[piece.kind == 2]

    def _store(self, piece: _Piece, vectors: Fixed, old: int, queries: GrowingRows) -> None:
        heads = torch.tensor(piece.heads)
        if piece.kind == 0:
            _adopt(queries, vectors)
            for part, new in zip(queries.parts, vectors.share.parts, strict=True):
                at = torch.tensor(piece.tokens, device=part.device) - old
                part[piece.row, heads.to(part.device)[:, None], at] = new
        elif self._rows is not None:
            target = self._rows[piece.kind]
            _adopt(target, vectors)
            first, end = piece.tokens[0], piece.tokens[-1] + 1
            for part, new in zip(target.parts, vectors.share.parts, strict=True):
                part[piece.row, heads.to(part.device), first:end] = new

    # -- what is held ----------------------------------------------------------------------------------
    def _grow(self, x: Fixed) -> None:
        """Inputs of new positions, and room for their keys and values."""
        made, (batch, new, _) = self._made, x.shape
        inputs = x.view(lambda part: part[:, None])
        empty = [Fixed(x.session, _zeros(x, (batch, made.groups, new, size)), x.session.frac) for size in made.sizes]
        if self._rows is None:
            self._rows = (GrowingRows(inputs), GrowingRows(empty[0]), GrowingRows(empty[1]))
        else:
            for rows, more in zip(self._rows, (inputs, *empty), strict=True):
                for room, part in zip(rows.rooms(new), more.share.parts, strict=True):
                    room.copy_(part)
                rows.length += new
        if self.positions is not None:
            made_at = torch.arange(self.position, self.position + new).expand(batch, 1, new)
            self.positions = torch.cat([self.positions, made_at], dim=-1)
        self.position += new

    def _read(self, active: Tensor, query: Fixed, shared: int) -> ActiveHeads:
        """Copies of what the active heads read."""
        pairs = active.any(1).nonzero()
        row, head = pairs.unbind(1)

        def pick(part: Tensor, of: Tensor) -> Tensor:
            return part[row.to(part.device), of.to(part.device)].unsqueeze(1)

        if self._rows is None:
            raise DomainError("refill: this cache holds nothing yet")
        keys, values = (rows.held().view(lambda part: pick(part, head // shared)) for rows in self._rows[1:])
        which = active.transpose(1, 2)[row, head][:, None, :, None]
        return ActiveHeads(pairs, query.view(lambda part: pick(part, head)), keys, values, which)

    def positions_held(self) -> Tensor:
        """As `positions`, also while nothing was evicted: [B or 1, 1, length]."""
        return torch.arange(self.length).view(1, 1, -1) if self.positions is None else self.positions

    def columns(self, table: Tensor) -> Tensor:
        """Of a public mask over all positions, [B or 1, 1, q, position], the held columns: for `ActiveHeads.mask`."""
        return table if self.positions is None else columns_at(table, self.positions, heads=1)

    def keep(self, index: Tensor) -> None:
        """Evict all positions but `index`: int64 [kept] or [B or 1, 1, kept], ascending, public. Local.

        Heads share their inputs, so they lose the same positions. Raises DomainError for others, and while empty.
        """
        if self._manager is None or self._rows is None:
            raise DomainError("keep: this cache holds nothing yet")
        batch = len(self._manager.filled)
        index = checked_index(index, batch, 1, self.length)
        self.positions = self.positions_held().expand(batch, 1, -1).gather(2, index.expand(batch, 1, -1))
        self._manager.keep(index[:, 0])
        for rows in self._rows:
            rows.keep(index)

    def crop(self, count: int) -> None:
        """Forget the last `count` positions. Local. Raises DomainError if some of them were evicted."""
        if self._manager is None or self._rows is None:
            return
        start = max(0, self.position - count)
        if start and not bool(((self.positions_held() >= start).sum(-1) == count).all()):
            raise DomainError(f"crop: got {count} positions; some of them were evicted, so position {start} is gone")
        length = self.length - count if start else 0
        self._manager.crop(length)
        for rows in self._rows:
            rows.crop(length)
        self.positions = None if self.positions is None or not start else self.positions[..., :length]
        self.position = start

    def select(self, index: Tensor) -> None:
        """Keep, repeat or reorder batch rows by public indices, int64 [rows]; B becomes their number. Local."""
        if self._manager is None:
            return
        if self.positions is not None:
            self.positions = self.positions[index]
        self._manager.select(index)
        for rows in self._rows or ():
            rows.select(index)


def _zeros(like: Fixed, shape: tuple[int, ...]) -> Share:
    """A share of zeros, which everybody knows."""
    return like.share.map(lambda part: torch.zeros(shape, dtype=part.dtype, device=part.device))


def _between(x: Fixed, begin: int, end: int) -> Fixed:
    """A range of the last dimension. Local."""
    return x.view(lambda part: part[..., begin:end])


def _by_heads(x: Fixed, heads: int) -> Fixed:
    """Vectors [heads, tokens, D] of outputs [tokens, heads D]. Local."""
    return x.view(lambda part: part.unflatten(1, (heads, -1)).transpose(0, 1))


def _adopt(rows: GrowingRows, vectors: Fixed) -> None:
    """Take over the fractional bits of what is stored: a turn adds some. Those of zeros mean nothing."""
    rows.frac = vectors.frac


def _queries(active: Tensor, old: int) -> list[_Piece]:
    """Heads of a row that are active at the same ones of the new positions; bool [B, q, H]."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, head in active.any(1).nonzero().tolist():
        tokens = tuple((active[row, :, head].nonzero()[:, 0] + old).tolist())
        found.setdefault((row, tokens), []).append(head)
    return [_Piece(0, row, tuple(heads), tokens) for (row, tokens), heads in found.items()]


def _entries(plan: RefillStep) -> list[_Piece]:
    """Keys and values of heads of a row with the same range."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for row, group in plan.listed.nonzero().tolist():
        span = row, int(plan.start[row, group]), int(plan.stop[row, group])
        found.setdefault(span, []).append(group)
    return [
        _Piece(kind, row, tuple(groups), tuple(range(start, stop)))
        for (row, start, stop), groups in found.items()
        for kind in (1, 2)
    ]


def _alike(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces of the same tokens together: one block, in the order query, key, value."""
    found: dict[tuple[int, tuple[int, ...]], list[_Piece]] = {}
    for piece in pieces:
        found.setdefault((piece.row, piece.tokens), []).append(piece)
    return list(found.values())
