"""Indexing by public positions, joining, and table lookup. Only a lookup by secret one-hot rows communicates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.errors import PlaintextLeak, UnsupportedOp
from private_llm.kernels.forms import MATMUL
from private_llm.kernels.ops import gather_rows
from private_llm.protocols.share import Share
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.ops_matmul import ring_weight
from private_llm.tensor.secret import SecretIndex, SecretTensor, same_session


def _check_public(index: object) -> None:
    if isinstance(index, SecretTensor):
        raise UnsupportedOp("a secret index has no private rule; look up with one-hot rows (F.embedding)")
    if isinstance(index, slice):
        index = (index.start, index.stop, index.step)
    if isinstance(index, (tuple, list)):
        for entry in index:
            if not (entry is None or entry is Ellipsis or type(entry) is int):
                _check_public(entry)


@implements(Tensor.__getitem__)
def getitem(x: Tensor, index: TorchArg) -> SecretTensor:
    """Public slices, integers, masks and index tensors. Local. Raises UnsupportedOp for a secret index."""
    _check_public(index)
    if not isinstance(x, SecretTensor):
        raise UnsupportedOp("a secret index has no private rule; look up with one-hot rows (F.embedding)")
    return x.viewed(lambda part: part[index])


@implements(Tensor.__setitem__)
def setitem(x: Tensor, index: TorchArg, value: TorchArg) -> None:
    """Secret entries of a secret tensor; rebinds. Local, but for truncations of what has not the session's bits.

    Raises PlaintextLeak for a plain destination, UnsupportedOp for a plain value, a secret index or a tensor with
    views, DomainError for secrets of two sessions.
    """
    _check_public(index)
    if not isinstance(x, SecretTensor):
        raise PlaintextLeak("x[index] = secret would write a secret into a plain tensor; keep x secret")
    if not isinstance(value, SecretTensor):
        raise UnsupportedOp("x[index] = plain value on a secret tensor; build it with torch.where or torch.cat")
    same_session(x, value)
    mine, theirs = x.to_fixed(), value.to_fixed()
    parts = [part.clone() for part in mine.share.parts]
    for part, new in zip(parts, theirs.share.parts, strict=True):
        part[index] = new
    x.rebind(SecretTensor(mine.with_share(Share(tuple(parts)))))


@implements(torch.index_select, Tensor.index_select)
def index_select(x: SecretTensor, dim: int, index: Tensor) -> SecretTensor:
    """Rows by public indices (int64 [n]) along `dim`. Local. Raises UnsupportedOp for secret ones."""
    _check_public(index)
    return x.viewed(lambda part: part.index_select(dim, index.to(part.device)))


@implements(torch.gather, Tensor.gather)
def gather(x: SecretTensor, dim: int, index: Tensor, **_: object) -> SecretTensor:
    """Entries by public indices, in their shape. Local. Raises UnsupportedOp for secret ones."""
    _check_public(index)
    return x.viewed(lambda part: part.gather(dim, index.to(part.device)))


@implements(torch.repeat_interleave, Tensor.repeat_interleave)
def repeat_interleave(x: SecretTensor, repeats: int, dim: int | None = None, **_: object) -> SecretTensor:
    """Each entry several times in a row. Local. Raises UnsupportedOp for a secret number of times."""
    _check_public(repeats)
    return x.viewed(lambda part: part.repeat_interleave(repeats, dim=dim))


# -- joining ------------------------------------------------------------------------------------------------
def _joined(tensors: Sequence[Tensor], dim: int, join: TorchArg) -> SecretTensor:
    secrets = [t for t in tensors if isinstance(t, SecretTensor)]
    session = secrets[0].session
    for other in secrets[1:]:
        same_session(secrets[0], other)
    fracs = {t.value(full=True).frac for t in secrets}
    frac = fracs.pop() if len(fracs) == 1 and len(secrets) == len(tensors) else session.frac
    found = [_at(t, frac, session, secrets[0]) for t in tensors]
    count = len(found[0].share.parts)
    parts = tuple(join([f.share.parts[i] for f in found], dim) for i in range(count))
    return SecretTensor(Fixed(session, Share(parts), frac))


def _at(t: Tensor, frac: int, session: TorchArg, sample: SecretTensor) -> Fixed:
    if isinstance(t, SecretTensor):
        return t.value(full=True) if t.value(full=True).frac == frac else t.to_fixed()
    elements = session.ring.encode(t, frac).to(sample.value(full=True).share.parts[0].device)
    return Fixed(session, session.protocol.public(elements), frac)


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> SecretTensor:
    """Join; plain members count as public values, plain empty 1-D tensors (as torch allows) are dropped.

    Local where all have the same fractional bits; else each other secret is truncated to the session's (1 round each).
    Raises DomainError for secrets of two sessions.
    """
    kept = [t for t in tensors if isinstance(t, SecretTensor) or t.shape != (0,)]
    return _joined(kept, dim, torch.cat)


@implements(torch.stack)
def stack(tensors: Sequence[Tensor], dim: int = 0) -> SecretTensor:
    """Join along a new dimension; plain members, cost and errors as `cat`."""
    return _joined(tensors, dim, torch.stack)


# -- lookup -------------------------------------------------------------------------------------------------
@implements(torch.nn.functional.embedding, torch.embedding)
def embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, *_: object,
    **__: object,
) -> SecretTensor:  # fmt: skip
    """Rows of `weight` [V, H] at public ids, a `SecretIndex`, or secret one-hot rows [.., V] of 0 and 1.

    Public ids: local. A `SecretIndex`: one lookup. One-hot rows, without fractional bits: a product without truncation,
    local for a public table. In trio a secret index costs 24 bytes per output (16 for a public table) and one round,
    one-hot rows 24 with a secret table (64-bit ring). Returns [.., H]. Raises UnsupportedOp for max_norm, for secrets
    that are no one-hot rows and for indices below another number than V; PlaintextLeak if neither operand is secret.
    """
    if max_norm is not None:
        raise UnsupportedOp("embedding with max_norm has no private rule")
    if isinstance(input, SecretIndex):
        return _looked_up(input, weight)
    if not isinstance(input, SecretTensor):
        if not isinstance(weight, SecretTensor):
            raise PlaintextLeak("embedding of two plain tensors reached the private table")
        flat, shape = input.reshape(-1).long(), (*input.shape, weight.shape[1])
        return weight.viewed(lambda part: gather_rows(part, flat).view(shape))
    rows = input.value(full=True)
    if rows.frac != 0 or rows.shape[-1] != weight.shape[0]:
        raise UnsupportedOp(
            f"embedding of a secret of shape {tuple(rows.shape)}; want one-hot rows [.., {weight.shape[0]}] "
            "without fractional bits, or a SecretIndex"
        )
    if isinstance(weight, SecretTensor):
        same_session(input, weight)
        table = weight.to_operand()
        return SecretTensor(rows.matmul(table, table.frac))
    elements = ring_weight(input.session, weight, rows.share.parts[0].device)
    return SecretTensor(rows.with_share(rows.proto.bilinear_public(MATMUL, rows.share, elements), rows.session.frac))


def _looked_up(tokens: SecretIndex, weight: Tensor) -> SecretTensor:
    session = tokens.session
    if tokens.share.domain != weight.shape[0]:
        raise UnsupportedOp(f"lookup of indices below {tokens.share.domain} in a table of {weight.shape[0]} rows")
    if isinstance(weight, SecretTensor):
        table = weight.to_operand()
        share = table.proto.lookup(tokens.share, table.share)
        frac = table.frac
    else:
        where = torch.device(session.device) if session.device == "meta" else weight.device
        share = session.protocol.on(where).lookup(tokens.share, ring_weight(session, weight, where))
        frac = session.frac
    shape = (*tokens.shape, weight.shape[1])
    return SecretTensor(Fixed(session, share.map(lambda part: part.reshape(shape)), frac))
