"""`SecretTensor`: a tensor to PyTorch and HuggingFace, one party's share inside.

Outside it is float32 with a public shape, so that model code works unchanged (masks built from
`torch.finfo(x.dtype)`, `.to(dtype)`); inside it holds a `Fixed`. Shares are never written to: an in-place
operation rebinds the object, and raises where another tensor shares its memory.

`SecretIndex`: token ids that only the client knows; good for one thing, looking up rows of a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.protocols.plain import CheckedPlain
from private_llm.protocols.session import Session
from private_llm.protocols.share import Index, Share
from private_llm.tensor.dispatch import Guarded, TorchArg, dispatch, op_name
from private_llm.tensor.fixed import Fixed

SLACK = 6  # fractional bits above the session's that sums and scores of attention accept without truncating first

_CPU = torch.device("cpu")


class SecretTensor(Guarded):
    """One party's share of a tensor; everything but its values is public. `repr` shows the shape only."""

    __slots__ = ("_family", "_fixed", "coarse", "hidden", "session")
    session: Session  # the session whose parties hold the other parts
    _fixed: Fixed
    _family: list[weakref.ref[SecretTensor]] | None
    coarse: bool  # whether this value is meant to have fewer fractional bits than the session
    hidden: Tensor | None  # public mask (bool, this shape), True where an entry stands for minus infinity, or None

    @staticmethod
    def __new__(cls: type[SecretTensor], fixed: Fixed) -> SecretTensor:
        """Wrap `fixed`; the shape is its shape, the outer dtype float32."""
        part = fixed.share.parts[0]
        device = part.device
        self: SecretTensor = torch.Tensor._make_wrapper_subclass(
            cls, part.shape, dtype=torch.float32, device=_CPU if device.type == "meta" else device
        )
        self._fixed, self.session = fixed, fixed.session
        self._family = None
        self.hidden = None
        self.coarse = False
        return self

    @classmethod
    def __torch_function__(
        cls, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        """The closed table; a debug session checks every result, also of what is local, and knows its operation."""
        ranges = _ranges(args)
        if ranges is None:
            return dispatch(func, args, kwargs or {})
        with ranges.ledger.op(op_name(func)):
            made = dispatch(func, args, kwargs or {})
            for out in made if isinstance(made, tuple | list) else (made,):
                if isinstance(out, SecretTensor):
                    ranges.check("the result", out._fixed.share)
        return made

    # -- what a rule reads ---------------------------------------------------------------------------------
    def to_fixed(self) -> Fixed:
        """The share with the session's fractional bits, from now on.

        If it has more: one truncation, 1 round; fewer: local. Raises UnsupportedOp if entries stand for minus infinity.
        """
        x = self.value(full=True)
        if x.frac != x.session.frac:
            x = self._fixed = x.rescale(x.session.frac)
        return x

    def to_operand(self, narrow: bool = False, least: int | None = None) -> Fixed:
        """The share with at most the session's fractional bits, for products: `to_fixed` if it has more.

        narrow: maybe right in its lowest bits alone, for products that know how many they need. least: not with fewer
        fractional bits than these, or the session's if that has fewer.
        """
        x = self.value(full=not narrow)
        fits = x.frac <= x.session.frac and (least is None or x.frac >= min(x.session.frac, least))
        return x if fits else self.to_fixed()

    def value(self, full: bool = False, masked: bool = False) -> Fixed:
        """The share as it is, maybe right in its lowest bits alone (`Fixed.width`).

        full: with all bits right, from now on; local, 1 round for a narrow one. masked: also where entries stand for
        minus infinity, with whatever lies there. Else raises UnsupportedOp for such entries (softmax removes them).
        """
        if self.hidden is not None and not masked:
            raise UnsupportedOp("a tensor with masked (minus infinity) entries can only be reshaped or go into softmax")
        if full and self._fixed.width is not None:
            self._fixed = self._fixed.restore_high_bits()
        return self._fixed

    def coarsen(self, frac: int) -> Fixed:
        """The share with `frac` fractional bits from now on, marked `coarse`; 1 round (truncation) if it has more."""
        self._fixed, self.coarse = self.value(full=True).rescale(frac), True
        return self._fixed

    def set_value(self, fixed: Fixed, coarse: bool) -> None:
        """From now on hold `fixed`, the same value with other fractional bits, as after `to_fixed`. Local."""
        self._fixed, self.coarse = fixed, coarse

    def shown(self) -> SecretTensor:
        """The same shares, no entry of which stands for minus infinity."""
        return SecretTensor(self._fixed)

    def duplicate(self) -> SecretTensor:
        """A new object for the same (never written) shares, which shares no memory by PyTorch's rules. Local."""
        out = SecretTensor(self._fixed)
        out.hidden, out.coarse = self.hidden, self.coarse
        return out

    def masked(self, hidden: Tensor) -> SecretTensor:
        """The same shares with `hidden` entries (public, this shape) standing for minus infinity. Local."""
        out = SecretTensor(self._fixed)
        out.hidden = hidden if self.hidden is None else hidden | self.hidden
        return out

    def viewed(self, reorder: Callable[[Tensor], Tensor]) -> SecretTensor:
        """Apply a reordering to all parts and the mask; the result counts as sharing memory with this tensor. Local."""
        hidden = None if self.hidden is None else reorder(self.hidden)
        return self.view_of_parts(tuple(map(reorder, self._fixed.share.parts)), hidden)

    def view_of_parts(self, parts: tuple[Tensor, ...], hidden: Tensor | None = None) -> SecretTensor:
        """A secret of moved elements of this one (and of `hidden`), which counts as sharing its memory. Local."""
        x = self._fixed
        out = SecretTensor(x.with_share(Share(parts)))
        out.coarse = self.coarse
        if self._family is None:
            self._family = [weakref.ref(self)]
        self._family.append(weakref.ref(out))
        out._family = self._family
        out.hidden = hidden
        return out

    def shares_memory_with(self, other: SecretTensor) -> bool:
        """Whether they are the same tensor, or views of the same one. Local."""
        return self is other or (self._family is not None and self._family is other._family)

    def inherit_flags(self, other: SecretTensor) -> SecretTensor:
        """This tensor, which is coarse where `other` is and refuses in-place operations where `other` does. Local."""
        self._family, self.coarse = other._family, other.coarse
        if self._family is not None:
            self._family.append(weakref.ref(self))
        return self

    def rebind(self, value: SecretTensor) -> SecretTensor:
        """Become `value`, in place. Local. Raises UnsupportedOp where others share the memory, or for another shape."""
        others = (other() for other in self._family or ())
        if any(other is not None and other is not self for other in others) or value.shape != self.shape:
            raise UnsupportedOp(
                "in-place operation on a secret tensor that is a view, has views, or would change its shape; "
                "use the out-of-place form"
            )
        self._fixed, self.hidden, self.coarse = value._fixed, value.hidden, value.coarse
        self.session, self._family = value.session, None
        return self

    # -- public facts, answered without going through PyTorch --------------------------------------------------
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Public shape."""
        return self._fixed.share.parts[0].shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """float32: what model code should believe."""
        return torch.float32

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where public operands should live (the shares' device; cpu while only costs are counted)."""
        device = self._fixed.share.parts[0].device
        return _CPU if device.type == "meta" else device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dimensions."""
        return self._fixed.share.parts[0].dim()

    @property
    def requires_grad(self) -> bool:
        """False: there is no gradient through a sharing."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Raises UnsupportedOp for True."""
        if value:
            raise UnsupportedOp("no gradient flows through a secret tensor; train in the clear, then share")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SecretTensor(shape={tuple(self.shape)}, frac={self._fixed.frac}, {self._fixed.session!r})"

    def __copy__(self) -> SecretTensor:
        """A new object for the same (never written) shares, with this one's attributes."""
        out = self.duplicate()
        out.__dict__.update(self.__dict__)
        return out


def _ranges(args: Sequence[TorchArg]) -> CheckedPlain | None:
    """The protocol of the first secret among the arguments, if it is one that checks ranges."""
    for arg in args:
        if isinstance(arg, SecretTensor):
            session = arg.session
            protocol = session.protocol
            return protocol if session.config.debug_ranges and isinstance(protocol, CheckedPlain) else None
        if isinstance(arg, tuple | list) and (found := _ranges(arg)) is not None:
            return found
    return None


def same_session(x: SecretTensor, y: SecretTensor) -> None:
    """Raises DomainError if two secrets belong to different sessions."""
    if x.session is not y.session:
        raise DomainError("two secret tensors of different sessions meet; all inputs and weights need one session")


class SecretIndex(Guarded):
    """A party's hold on secret integers of a public shape, for embeddings; anything else raises UnsupportedOp."""

    __slots__ = ("_shape", "session", "share")
    session: Session  # the session whose parties hold the other parts
    share: Index  # what this party holds
    _shape: torch.Size

    @staticmethod
    def __new__(cls: type[SecretIndex], session: Session, index: Index, shape: Sequence[int]) -> SecretIndex:
        """`index` of `Protocol.receive_index`, arranged as `shape`. Raises DomainError if the counts differ."""
        size = torch.Size(shape)
        if size.numel() != index.count:
            raise DomainError(f"SecretIndex: got {index.count} indices; want {size.numel()} for shape {tuple(size)}")
        self: SecretIndex = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.int64)
        self.share, self.session, self._shape = index, session, size
        return self

    def __init__(self, session: Session, index: Index, shape: Sequence[int]) -> None:
        """State is set by `__new__`."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Public shape."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """int64: what ids are."""
        return torch.int64

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The CPU."""
        return torch.device("cpu")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SecretIndex(shape={tuple(self._shape)}, domain={self.share.domain}, {self.session!r})"

    @classmethod
    def __torch_function__(
        cls, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        """Lookup and public facts; everything else raises. The keys stay in main memory until a lookup."""
        if func is torch.Tensor.to:
            return args[0]
        if func not in _ALLOWED:
            raise UnsupportedOp(f"{op_name(func)} of secret indices; they can only be looked up (F.embedding)")
        return dispatch(func, args, kwargs or {})


_ALLOWED = (
    torch.nn.functional.embedding, torch.embedding, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.__len__, torch.Tensor.__hash__,
)  # fmt: skip
