"""Did every value stay in its range? One bit per call, for the client alone.

    p = sum of +-x over a row, for SKETCHES public patterns of signs         local
    v = [|p| < 2^e for all rows of all watched tensors of the call]          one comparison at the end of the call
    the client opens 1 - v together with the outputs

A product that leaves the ring comes out as garbage of the ring's size, so watching results is enough to see it. Sums of
signed entries see a large entry among many without a comparison for each: of the two signs of an entry of 2^(e+1) or
more one makes |p| at least 2^e, whatever the others are, so each pattern misses it with probability 1/2 at most, all
four with 1/16, and one that outweighs its row never. A row of norm n has |p| above 8 n with probability below 10^-13,
so values that calibration has seen, with its head room of 32, raise no alarm. What the client learns is declared in
`threat`. It finds honest mistakes, models whose values outgrow their plan; a cheating party is not its subject.

Short products (their lowest w bits are right) are summed modulo 2^w. A pattern misses an entry x with 2^(e+1) <= |x| <
2^(w-1) - 2^e with probability 1/2 at most, too: sums of both signs within 2^e of multiples of 2^w would put x within
2^e of a multiple of 2^(w-1). Every entry whose product stayed below 2^(ring bits - 2) has |x| <= 2^(w-2). Of others,
which are garbage of the size of 2^w, one near 2^(w-1) outweighs its row unless another one does.

Where rows of a batch belong to several clients (`RangeChecks.batch`), each row has a verdict of its own, and no sum
is over entries of two of them: of tensors whose first dimension counts the batch's rows, each as often, and of flat
ones of which it is known where each row's entries end. What cannot be told apart counts for all rows.

Values out of their range may make parties open an arrangement that no choice by rank has (`ranked_wrong`). They all
see it and go on with any rows of that number; the verdict of the call is then 1, and nobody else's call suffers.

Cost of n watched rows: 8 n comparisons over the whole ring and injections of a bit, 65 bytes each, 8 to 10 rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.ops import ring_matmul
from private_llm.protocols.session import PendingRangeCheck, Session
from private_llm.protocols.share import Share
from private_llm.ranges import REACH
from private_llm.tensor.fixed import READ_BITS, Fixed, module_bits, negative
from private_llm.tensor.secret import SecretTensor

SKETCHES = 4  # patterns of signs per row
PIECE = 256  # entries of one sum where there are no rows

_LESS_ROOM = 2  # bits of head room given up in a 32-bit ring, where what wrapped is at most 2^(31 - frac)

UNKNOWN = REACH + 3  # bits of magnitude that the signed sums of a module without calibration may have


def watch(x: Fixed, bits: int | None = None, batch: Tensor | None = None) -> None:
    """Owe a check of x [.., width]: signed sums of rows below 2^bits. Local, or 1 round if x is right in no more bits.

    bits: default, the calibrated `output` of the module that is computed. batch: of `RangeChecks.batch` rows of a
    batch the one that each row of x belongs to; default, as the first dimension of x tells. Nothing is done with
    guard=False, or in a 32-bit ring without calibration: its products have no bit to spare for a bound that knows
    nothing. Debug sessions compare the norms of the rows, and name the module.
    """
    session, part = x.session, x.share.parts[0]
    if batch is None and session.checks.batch is not None:
        batch = _rows_of(x, session.checks.batch)
    small, modules = session.ring.bits < 64, session.numerics.ranges.modules
    if not session.config.guard or not part.numel() or (small and not modules):
        return
    if bits is None:
        known = module_bits(session).output
        bits = x.frac + (UNKNOWN if known is None else known)
        if part.shape[-1] < PIECE:  # several short rows share their sums: head room is much more than their number
            x, batch = _in_pieces(x)
    if session.config.debug_ranges:
        if modules:  # without calibration, the ring's own limits are all there is to keep
            x.proto.expect_rows("a value that calls watch", x.share, 4.0**bits)
        return
    if small:
        bits -= _LESS_ROOM
    if x.width is not None and bits > x.width - 2:
        x = x.restore_high_bits()
    width = x.share.parts[0].shape[-1]
    # Every entry may be off by a unit or two of its last place, however small the values are.
    bits = max(width.bit_length() + 4, min(bits, session.ring.value_bits - 1))
    # what is right in its lowest bits alone is moved up, for the check to see them alone
    up = 0 if x.width is None else session.ring.bits - x.width
    signs = _signs(width, up, session.ring.dtype, str(part.device))
    sums = Share(tuple([ring_matmul(part.reshape(-1, width), signs).reshape(-1) for part in x.share.parts]))
    session.checks.pending.append((sums, bits + up, None if batch is None else batch.repeat_interleave(SKETCHES)))


def watch_later(x: SecretTensor) -> None:
    """Owe a check of x below `output`'s bound (UNKNOWN: 2^23), unless the next operation watches x. Local."""
    watch_pending(x.session)
    known = module_bits(x.session).output
    bits = x.value().frac + (UNKNOWN if known is None else known)
    if x.session.config.debug_ranges:  # which names the module that runs now
        watch_flat(x.value(), bits)
    else:
        x.session.checks.deferred = (x, bits)


def watch_compared(x: SecretTensor, bits: int, rows: bool = False) -> None:
    """Owe a check of what is compared next: rows of x (if they are long and `rows` says so), or pieces.

    One dimension is no row: it holds chosen entries of many.

    Sums below 2^bits in ring elements of the session's fractional bits. Local, or a truncation (1 round) if x has more.
    """
    watch_pending(x.session, instead=x)
    value = x.to_operand(narrow=True, least=READ_BITS)
    bits -= x.session.frac - value.frac
    if rows and x.dim() > 1 and x.shape[-1] >= PIECE:
        watch(value, bits)
    else:  # lines of images are short: they share their sums
        watch_flat(value, bits)


def watch_pending(session: Session, instead: SecretTensor | None = None) -> None:
    """Owe the check that was put off, unless it is of `instead`. Local."""
    pending, session.checks.deferred = session.checks.deferred, None
    if pending is not None and pending[0] is not instead:
        watch_flat(pending[0].value(), pending[1])


def watch_flat(x: Fixed, bits: int, counts: Sequence[int] = ()) -> None:
    """As `watch`, for values without rows (scores of attention at the allowed positions): in pieces of `PIECE`.

    counts: entries of x of each row of a batch, one after the other, where x is flat and that is known. Local.
    """
    pieces, batch = _in_pieces(x, counts)
    watch(pieces, bits, batch)


def _in_pieces(x: Fixed, counts: Sequence[int] = ()) -> tuple[Fixed, Tensor | None]:
    """Pieces [n, PIECE] of all entries, and which row of the batch each belongs to."""
    batch = x.session.checks.batch
    if batch is not None:
        sizes = [x.numel() // batch] * batch if _is_even(x, batch) else list(counts)
        if len(sizes) == batch:
            pieces = torch.tensor([-(-size // PIECE) for size in sizes])
            return x.view(lambda part: _cut(part, sizes)), torch.arange(batch).repeat_interleave(pieces)
    spare = -x.share.parts[0].numel() % PIECE
    whole = x.view(lambda part: torch.constant_pad_nd(part.reshape(-1), (0, spare)).view(-1, PIECE))
    return whole, None if batch is None else torch.full((len(whole.share.parts[0]),), batch)


def _cut(part: Tensor, sizes: list[int]) -> Tensor:
    each = part.reshape(-1).split(sizes)
    return torch.cat([torch.constant_pad_nd(one, (0, -one.numel() % PIECE)) for one in each]).view(-1, PIECE)


def _is_even(x: Fixed, batch: int) -> bool:
    """Whether the first dimension of x counts the rows of the batch, each the same number of times."""
    return len(x.shape) > 1 and x.shape[0] % batch == 0


def _rows_of(x: Fixed, batch: int) -> Tensor:
    """Of the rows of x [.., width] the row of the batch that each belongs to; `batch` for all."""
    count = x.numel() // max(x.shape[-1], 1)
    if not _is_even(x, batch):
        return torch.full((count,), batch)
    return torch.arange(batch).repeat_interleave(count // batch)


_FEW, _FEW_ON_GPUS = 1 << 12, 1 << 18
"""Comparisons of a token are fewer; a prompt's are many, so that Python is little of their time and a program large. On
GPUs Python is most of it for longer."""

Compute = Callable[[Sequence[Fixed]], Sequence[Fixed]]


def _computed(_: Session, __: Hashable, inputs: Sequence[Fixed], compute: Compute) -> Sequence[Fixed]:
    return compute(inputs)


def verdict(
    session: Session, run: Callable[[Session, Hashable, Sequence[Fixed], Compute], Sequence[Fixed]] = _computed
) -> Fixed | None:  # fmt: skip
    """A secret [1], 0 fractional bits: 1 if a watched value of this call left its range, else 0.

    With `RangeChecks.batch` [batch]: one for each row. None if nothing was watched; a public 1 where
    `RangeChecks.ranked_wrong`, even with guard=False. 8 sums for each watched row: 65 bytes each in trio (64-bit
    ring) from 64 rows on, 8 to 10 rounds; by comparison keys 4 kB and 2 rounds. No check is pending afterwards. run:
    computes a function of up to `_FEW` comparisons, such as `replay.program_cache.repeat`.
    """
    watch_pending(session)
    pending, wrong, batch = session.checks.pending, session.checks.ranked_wrong, session.checks.batch
    session.checks.clear()
    if wrong:
        ones = torch.ones(batch or 1, dtype=session.ring.dtype, device=session.device)
        return Fixed(session, session.protocol.on(ones.device).public(ones), 0)
    if not pending:
        return None
    device = pending[0][0].parts[0].device
    columns = zip(*[sums.parts for sums, _, _ in pending], strict=True)
    flat = Fixed(session, Share(tuple([torch.cat([part.to(device) for part in column]) for column in columns])), 0)
    spans = tuple([(sums.numel(), bits) for sums, bits, _ in pending])
    known = session.checks.bounds
    bounds = known[1] if known and known[0] == spans else _bounds(spans, session.ring.dtype, device)
    session.checks.bounds = spans, bounds

    def compute(sums: Sequence[Fixed]) -> Sequence[Fixed]:
        both = sums[0].view(lambda part: torch.cat([part, -part]))
        left = 1 - negative(both.with_share(both.proto.add_public(both.share, bounds)))
        count = left.sum(0, keepdim=True) if batch is None else _by_row(left, pending, batch)
        return (negative(-count, bounds.numel().bit_length() + 2),)

    few = bounds.numel() <= (_FEW if device.type == "cpu" else _FEW_ON_GPUS)
    return (run if few else _computed)(session, ("verdict", spans), (flat,), compute)[0]


def _bounds(spans: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """-2^bits for each sum and for its negative; spans: how many sums, one after the other, have how many bits."""
    counts, bits = zip(*spans, strict=True)
    bounds = torch.tensor([-(1 << each) for each in bits], dtype=dtype)
    return bounds.repeat_interleave(torch.tensor(counts)).repeat(2).to(device)


def _by_row(left: Fixed, pending: list[PendingRangeCheck], batch: int) -> Fixed:
    """How many sums of each row of the batch left their range; `left`: each sum, then each negative. Local."""
    index = torch.cat([rows for _, _, rows in pending if rows is not None]).repeat(2)

    def added(part: Tensor) -> Tensor:
        sums = part.new_zeros(batch + 1).index_add(0, index.to(part.device), part)
        return sums[:batch] + sums[batch:]

    return left.view(added)


def require(flag: Tensor, images: bool = False) -> None:
    """The client's side of the opened verdict [1], local. Raises DomainError, with what to do (images: of images)."""
    if bool((flag != 0).any()):
        do = (
            "calibrate on a batch of images like yours (patch(model, config, images=batch), or `private-llm calibrate "
            "MODEL --image FILE`); a run with protocol='plain', insecure=True and debug_ranges=True names the module"
            if images
            else "calibrate on texts like yours (`private-llm calibrate MODEL --text FILE`); `private-llm diff MODEL "
            "--prompt TEXT` names the module"
        )
        raise DomainError(
            f"a value left its range, so this answer would be wrong and is withheld. To give it room, {do}; fewer "
            "fractional bits (frac_bits) give room as well, and guard=False switches this check off"
        )


@lru_cache(maxsize=256)
def _signs(width: int, up: int, dtype: torch.dtype, device: str) -> Tensor:
    """Public signs [width, SKETCHES], times 2^up: the same for everybody, and not chosen by anybody."""
    raw = hashlib.shake_256(b"private-llm range check %d" % width).digest(width)
    octets = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(torch.int64)
    signs = ((octets[:, None] >> torch.arange(SKETCHES)) & 1) * 2 - 1
    return (signs << up).to(dtype).to(device)
