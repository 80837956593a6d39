"""Attention on shares: scores, softmax and the mix of values, at the allowed positions only.

A public mask says which key positions a query sees. Scores above the diagonal, at padding or outside a sliding
window are neither sent nor fed to softmax: the product makes just the selected outputs. Grouped heads share
their keys and values without a copy: [B, G*r, q, D] is seen as [B, G, r*q, D], which keeps every flat position.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from private_llm.approx.activations import precise_tanh
from private_llm.approx.softmax import (
    EXP_BITS,
    inverse_bits,
    softmax,
    softmax_ragged,
    sum_bits,
    unscaled,
    unscaled_ragged,
)
from private_llm.config import chunk_sizes
from private_llm.errors import DomainError
from private_llm.exact.comparisons import SHORTEST, comparing
from private_llm.exact.ragged_rows import Rows
from private_llm.nn.padded_keys import alike, padded, presence, repeats
from private_llm.protocols.session import Session
from private_llm.protocols.share import Share
from private_llm.ranges import REACH
from private_llm.replay.program_cache import repeat
from private_llm.replay.regions import uses_cuda_graphs
from private_llm.tensor.fixed import Fixed, by_keys, module_bits
from private_llm.tensor.range_check import watch_flat
from private_llm.tensor.scale import dyadic, times_scalar
from private_llm.tensor.secret import SLACK, SecretTensor

_CPU = torch.device("cpu")
_ALL = Rows(())

_FEW = 16  # queries of a step that is worth a program of its own for each length of the cache (see `kv_cache`)

_PATIENCE = 2
"""Calls at one length before one is recorded: to record and to check costs as much as ten calls that are repeated save,
and all layers of up to 16 tokens have one length."""

SCALE_BITS = 14  # bits of a score scale that is no power of two: relative error 2^-14; one truncation of q removes them


ROOM = 4  # bits above 2^REACH that scores need: their differences and a sign, and one to see what leaves its range
LEAST_EXP_BITS = 18  # least fractional bits of exponentials that are mixed before they are divided

LEAST_MIXED_BITS = 14  # least fractional bits of what is divided last, which rounds less than each probability of a row


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which scores of shape [batch, heads, queries, keys] exist: flat positions (int64), and the rows they form.

    `select` is None where all exist; else `entries` says how many each row of the batch has, and `seeing` which of the
    batch * heads * queries rows are not empty. Public.
    """

    shape: tuple[int, int, int, int]
    select: Tensor | None
    rows: Rows
    entries: tuple[int, ...] = ()
    seeing: Tensor | None = None
    digest: bytes = b""  # equal for equal masks

    @property
    def longest(self) -> int:
        """Entries of the longest row."""
        return self.shape[-1] if self.select is None else self.rows.longest

    @property
    def count(self) -> int:
        """Number of scores."""
        return math.prod(self.shape) if self.select is None else len(self.select)

    def row_numbers(self, device: torch.device) -> Tensor:
        """int64: `seeing`, or all of them, where the scores lie."""
        return torch.arange(math.prod(self.shape[:-1]), device=device) if self.seeing is None else self.seeing


def pattern_of(
    mask: Tensor | None, batch: int, heads: int, queries: int, keys: int, device: torch.device = _CPU
) -> Pattern:
    """The pattern of a public boolean mask (True: allowed) broadcastable to [batch, heads, queries, keys].

    `device` is where the scores lie (meta counts as cpu: positions are public and real). The pattern is remembered on
    the mask, because every layer meets the same one.
    """
    shape = (batch, heads, queries, keys)
    if mask is None:
        return Pattern(shape, None, _ALL)
    device = _CPU if device.type == "meta" else device
    held: dict[object, Pattern] = mask.__dict__.setdefault("_private_patterns", {})
    found = held.get((shape, device))
    if found is None:
        found = _searched(mask[..., :keys].cpu().expand(batch, -1, queries, keys), shape, device)
        held[(shape, device)] = found
    return found


def _searched(allowed: Tensor, shape: tuple[int, int, int, int], device: torch.device) -> Pattern:
    """Positions head by head; a mask that is the same for all heads is searched once, not per head."""
    batch, heads, queries, keys = shape
    if bool(allowed.all()):
        return Pattern(shape, None, _ALL)
    lengths = allowed.sum(-1).expand(batch, heads, queries).reshape(-1)
    if allowed.shape[1] == 1:
        starts = torch.arange(batch * heads, device=device).view(batch, heads, 1) * (queries * keys)
        found = [allowed[b].reshape(-1).nonzero().view(-1) for b in range(batch)]
        there = torch.cat(found).to(device).split([len(each) for each in found])
        select = torch.cat([(starts[b] + there[b]).view(-1) for b in range(batch)])
    else:
        select = allowed.expand(shape).reshape(-1).nonzero().view(-1).to(device)
    apart = lengths.view(batch, -1)
    rows = Rows.of(lengths, tuple((apart > 0).sum(-1).tolist()))
    digest = hashlib.sha256(repr(allowed.shape).encode() + np.packbits(allowed.numpy()).tobytes()).digest()
    return Pattern(shape, select, rows, tuple(apart.sum(-1).tolist()), lengths.nonzero().view(-1).to(device), digest)


@dataclass(frozen=True, eq=False)
class AttentionQuery:
    """What attention is asked: query [B, H, q, D] and which of the n entries held may be seen.

    mask: public, bool [B or 1, H or 1, q, n], True where allowed, None: all; it may leave heads out. tokens: the same
    before heads were left out, [B or 1, 1, q, n]: what the last query may not see is padding. sinks: a score for each
    head [H] that takes part in its softmax and brings no value: one entry more a row.
    """

    query: Fixed
    mask: Tensor | None
    tokens: Tensor | None
    scale: float
    softcap: float | None = None
    sinks: Fixed | None = None


def attend(
    query: Fixed, key: Fixed, value: Fixed, mask: Tensor | None, scale: float, softcap: float | None = None,
    bias: Fixed | Tensor | None = None,
) -> Fixed:  # fmt: skip
    """softmax(scale * q k^T, capped, + bias) v: q [B, H, q, D], k and v [B, G, k, D] with G dividing H.

    mask: public, boolean, True where allowed. bias: broadcastable to [B, H, q, k], secret or public. Returns [B, H, q,
    Dv]; queries that see nothing get zeros. Communicates one product per allowed score, softmax on those (with
    `softcap` a `precise_tanh`, too), one product per output. Scores, scaled, may reach 2^20. Where `scale` is no power
    of two and q comes straight from a rotary embedding, |q| must stay below 2^14: one truncation removes its surplus
    bits and the scale's. Raises DomainError if G does not divide H, for rows longer than 65,536 and in a 32-bit ring.
    """
    return attend_and_weigh(AttentionQuery(query, mask, None, scale, softcap), key, value, bias)[0]


def attend_and_weigh(
    call: AttentionQuery, key: Fixed, value: Fixed, bias: Fixed | Tensor | None = None, counted: int = 0,
    among: Tensor | None = None,
) -> tuple[Fixed, Fixed | None]:  # fmt: skip
    """As `attend`, with sinks and the attention mass that each key got from the last `counted` queries, or None for 0.

    The mass is [B, G, k]: the sum of the probabilities over these queries and over the H / G heads that share the key
    head; queries that see nothing add nothing, nor do those that `among`, bool [B or 1, counted],
    leaves out. It is a local sum, so asking for it sends nothing.
    """
    query = call.query
    batch, heads, queries, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    if heads % groups:
        raise DomainError(f"attention: got {heads} query heads for {groups} key heads; want a multiple")
    pattern = pattern_of(call.mask, batch, heads, queries, keys, query.share.parts[0].device)
    if pattern.select is not None and not pattern.rows.count:
        nobody = _nothing(query, (batch, groups, keys)) if counted else None
        return _nothing(query, (batch, heads, queries, value.shape[-1])), nobody
    if bias is None and call.sinks is None and not counted and among is None:
        if queries <= _FEW and pattern.select is None:
            return _repeated(call, key, value), None
        if queries in chunk_sizes(query.session.config) and uses_cuda_graphs(query.session):
            return _repeated_chunk(call, key, value, pattern), None
    return _attended(call, key, value, pattern, bias, counted, among=among)


def _repeated(call: AttentionQuery, key: Fixed, value: Fixed) -> Fixed:
    """Attention of few queries to all keys: beside those of a cache, padded to a length that repeats."""
    query, scale, softcap = call.query, call.scale, call.softcap
    inputs, in_place = [query, key, value], list[Fixed]()
    decoding = key.shape[2] > query.shape[2] and repeats(query.session)
    # The same bits as at later steps: a layer that is repeated goes on with what attention gives.
    first = query.shape[2] == 1 and repeats(query.session)
    if decoding:
        inputs, in_place = [query, presence(key)], [padded(key), padded(value)]

    def compute(x: Sequence[Fixed]) -> Sequence[Fixed]:
        pattern = Pattern((*x[0].shape[:3], x[-1].shape[2]), None, _ALL)
        present = x[1].share.parts[0] if len(x) > 3 else None
        return (_attended(AttentionQuery(x[0], None, None, scale, softcap), x[-2], x[-1], pattern, present=present)[0],)

    with alike(query.session) if decoding or first else nullcontext():
        return repeat(query.session, ("attention", scale, softcap), inputs, compute, _PATIENCE, in_place)[0]


def _repeated_chunk(call: AttentionQuery, key: Fixed, value: Fixed, pattern: Pattern) -> Fixed:
    """Attention of a whole chunk of a prompt on a GPU by one program for all layers and prompts that see the same."""
    scale, softcap = call.scale, call.softcap

    def compute(x: Sequence[Fixed]) -> Sequence[Fixed]:
        return (_attended(AttentionQuery(x[0], None, None, scale, softcap), x[1], x[2], pattern)[0],)

    what = ("attention of a chunk", scale, softcap, pattern.digest)
    return repeat(call.query.session, what, [call.query, key, value], compute, _PATIENCE)[0]


def _attended(
    call: AttentionQuery, key: Fixed, value: Fixed, pattern: Pattern, bias: Fixed | Tensor | None = None,
    counted: int = 0, present: Tensor | None = None, among: Tensor | None = None,
) -> tuple[Fixed, Fixed | None]:  # fmt: skip
    """`attend_and_weigh` where some query sees something. present: see `kv_cache`; with all keys alone."""
    (batch, heads, queries, keys), groups, depth = pattern.shape, key.shape[1], call.query.shape[3]
    scale, softcap, sinks = call.scale, call.softcap, call.sinks
    grouped = (batch, groups, heads // groups * queries)
    query = call.query.view(lambda part: part.reshape(*grouped, depth))
    alone = bias is None and sinks is None  # the range of scores tells nothing of what is added to them
    if softcap is None:
        width = score_width(query.session, pattern.count, alone)
        scores = _scores(query, key, scale, pattern.select, query.session.frac, width)
    else:
        capped = precise_tanh(_scores(query, key, scale / softcap, pattern.select, query.session.frac + SLACK))
        scores = times_scalar(SecretTensor(capped), softcap).rescale(query.session.frac)
    counting = scores if present is None else scores.scale_int(present)
    reach = scores.session.exponent("score")  # bits of magnitude that the check of ranges allows signed sums of scores
    reach = REACH - 1 if reach is None else min(REACH - 1, max(reach, SHORTEST))
    watch_flat(counting, reach + scores.frac, pattern.entries)
    if pattern.select is None:
        scores = scores.view(lambda part: part.reshape(pattern.shape))
    if bias is not None:
        scores = scores + _at_scores(bias, pattern)
    late = None if counted or sinks is not None else _late_bits(scores, value, pattern)
    with comparing(scores.session, "score") if alone else nullcontext():
        if late is not None:
            mixed = _divided_last(scores, pattern, grouped, value, late, present)
            return mixed.view(lambda part: part.reshape(batch, heads, queries, -1)), None
        if sinks is not None:  # that of each row that is not empty, from those of the heads
            sinks = sinks.rescale(scores.frac)
            sinks = sinks.view(lambda part: part[pattern.row_numbers(part.device) // queries % heads])
        weights = soften(scores, pattern, sinks, present)
    weighing = weights.view(lambda part: part.reshape(*grouped, keys))
    known = module_bits(value.session, _outputs(pattern, value))
    mixed = mixed_values(weighing, value, pattern, known.read_frac, known.width(known.read_frac, values=True))
    mass = _mass(weights, groups, counted, among) if counted else None
    return mixed.view(lambda part: part.reshape(batch, heads, queries, -1)), mass


def mixed_values(
    weights: Fixed, value: Fixed, pattern: Pattern, frac: int | None = None, width: int | None = None
) -> Fixed:  # fmt: skip
    """weights [B, G, R, k] times value [B, G, k, D], `frac` fractional bits or the session's; unseen rows are zero."""
    shape = (*weights.shape[:-1], value.shape[-1])
    if pattern.seeing is None or len(pattern.seeing) == math.prod(shape[:-1]):
        return weights.matmul(value, frac=frac, width=width)
    wanted = pattern.seeing[:, None] * shape[-1]
    select = (wanted + torch.arange(shape[-1], device=wanted.device)).view(-1)
    return scatter(weights.matmul(value, frac=frac, select=select, width=width), select, shape)


def _late_bits(scores: Fixed, value: Fixed, pattern: Pattern) -> tuple[int, int] | None:
    """Fractional bits of exponentials and of their mix of values, if rows may be divided after that; else None.

    They may where the range of values is known, and the ring has room for sums of exponentials times values: with one
    more bit for what the check of ranges lets pass. They should where outputs are fewer than entries. Local and public.
    """
    session, width = scores.session, pattern.longest
    known = session.exponent("value")
    if known is None or session.config.approximations != "ours" or session.ring.bits != 64 or not width:
        return None
    room, sums = session.ring.value_bits - 1 - (max(known, 0) + 1), sum_bits(width)
    exponentials, mixed = min(EXP_BITS, room - value.frac - sums), min(session.frac, room - inverse_bits(width))
    if exponentials < LEAST_EXP_BITS or mixed < LEAST_MIXED_BITS:
        return None
    return (exponentials, mixed) if _outputs(pattern, value) < scores.numel() else None


def _outputs(pattern: Pattern, value: Fixed) -> int:
    return math.prod(pattern.shape[:-1]) * value.shape[-1]


def _divided_last(
    scores: Fixed, pattern: Pattern, grouped: tuple[int, int, int], value: Fixed, bits: tuple[int, int],
    present: Tensor | None,
) -> Fixed:  # fmt: skip
    """sum of e^(score - maximum) times values, divided by the sum of the e: [B, G, R, Dv]."""
    exponentials, frac = bits
    if pattern.select is None:
        e, inverse = unscaled(scores, exponentials, present)
    else:
        e, inverse = unscaled_ragged(scores, pattern.rows, exponentials)
        e = scatter(e, pattern.select, pattern.shape)
        inverse = scatter(inverse, pattern.row_numbers(pattern.select.device), (math.prod(pattern.shape[:-1]),))
    weights = e.view(lambda part: part.reshape(*grouped, pattern.shape[-1]))
    mixed = mixed_values(weights, value, pattern, frac)
    watch_flat(mixed, max(value.session.exponent("value") or 0, 0) + sum_bits(pattern.longest) + frac)
    known = module_bits(value.session, _outputs(pattern, value))
    width = known.width(known.read_frac, values=True)
    return mixed.mul(inverse.view(lambda part: part.reshape(*grouped, 1)), known.read_frac, width=width)


def _mass(weights: Fixed, groups: int, counted: int, among: Tensor | None) -> Fixed:
    """Probabilities [B, H, q, k] of the last `counted` queries, summed over them and the heads of a group. Local."""
    batch, _, _, keys = weights.shape
    newest = weights[:, :, -counted:]
    if among is not None:
        newest = newest.scale_int(among[:, None, :, None].to(newest.share.parts[0]))
    newest = newest.view(lambda part: part.reshape(batch, groups, -1, keys))
    return newest.sum(2)


def score_width(session: Session, count: int, alone: bool) -> int | None:
    """How many of the lowest bits of `count` scores softmax reads, one by circuits and `exponential`; None: all.

    Curves by comparison keys multiply scores, and so do the squares of other approximations. alone: nothing is added to
    scores, so that their calibrated range holds. Local and public.
    """
    known = session.exponent("score") if alone else None
    by_circuits = "exponential" in session.protocol.primitives and not by_keys(session, count)
    if session.config.approximations != "ours" or not by_circuits:
        return None
    return session.frac + ROOM + (REACH if known is None else min(REACH, max(known, SHORTEST) + 1))


def _scores(
    query: Fixed, key: Fixed, scale: float, select: Tensor | None, frac: int, width: int | None = None
) -> Fixed:  # fmt: skip
    """scale * q k^T with `frac` fractional bits. width: how many of the lowest bits softmax reads."""
    turned = key.view(lambda part: part.transpose(-1, -2))
    query = scaled(query, scale, None if width is None else width + turned.frac - frac)
    return query.matmul(turned, frac=frac, select=select, width=width)


def scaled(query: Fixed, scale: float, right: int | None = None) -> Fixed:
    """scale * q: its power of two moves the point, the rest multiplies; one truncation if bits get many.

    right: how many bits above its fractional ones have to be right; None: all.
    """
    session = query.session
    n, exponent = dyadic(scale, SCALE_BITS)
    bits = n.bit_length() - 1
    if n != 1:  # q times n / 2^bits, which lies in [1, 2)
        query = Fixed(session, query.scale_int(n).share, query.frac + bits)
    if query.frac > session.frac and query.frac - exponent - bits > session.frac + SLACK:
        wanted = None if right is None else right + session.frac - exponent - bits
        query = query.coarser(session.frac, wanted)  # one truncation, for the scale and what rope left
    return query.with_share(query.share, query.frac - exponent - bits)


def _at_scores(bias: Fixed | Tensor, pattern: Pattern) -> Fixed | Tensor:
    def pick(part: Tensor) -> Tensor:
        full = part.expand(pattern.shape)
        return full if pattern.select is None else full.reshape(-1)[pattern.select]

    return pick(bias) if isinstance(bias, Tensor) else bias.view(pick)


def soften(scores: Fixed, pattern: Pattern, sinks: Fixed | None = None, present: Tensor | None = None) -> Fixed:
    """Softmax over the last dimension, [B, H, q, k], the session's fractional bits; zeros where no score exists.

    `scores`: flat at the pattern's positions, or whole. sinks: one for each row that is not empty. present: for whole
    rows, see `kv_cache`. Cost and errors as `softmax`; local if no position exists.
    """
    if pattern.select is None:
        shaped = None if sinks is None else sinks.view(lambda part: part.view(*pattern.shape[:-1], 1))
        return softmax(scores, shaped, present=present)
    if not pattern.rows.count:
        return _nothing(scores, pattern.shape)
    return scatter(softmax_ragged(scores, pattern.rows, sinks), pattern.select, pattern.shape)


def _nothing(sample: Fixed, shape: tuple[int, ...]) -> Fixed:
    """Zeros, which everybody knows: no query sees anything."""
    part = sample.share.parts[0]
    zeros = torch.zeros(shape, dtype=part.dtype, device=part.device)
    return Fixed(sample.session, sample.proto.public(zeros), sample.session.frac)


def scatter(values: Fixed, positions: Tensor, shape: tuple[int, ...]) -> Fixed:
    """Zeros of `shape` with `values` [n] at flat `positions` (int64 [n], public). Local."""
    count = math.prod(shape)

    def spread(part: Tensor) -> Tensor:
        flat = torch.zeros(count, dtype=part.dtype, device=part.device)
        flat[positions] = part
        return flat.view(shape)

    return values.with_share(Share(tuple(spread(part) for part in values.share.parts)))
