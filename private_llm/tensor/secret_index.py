"""`SecretIndex`: token ids that only the client knows; good for one thing, looking up rows of a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.protocols.session import Session
from private_llm.protocols.share import Index
from private_llm.tensor.dispatch import Guarded, TorchArg, dispatch, op_name


class SecretIndex(Guarded):
    """One party's hold on secret integers of a public shape; pass it to an embedding.

    All functions but that and public facts raise UnsupportedOp.
    """

    __slots__ = ("_index", "_session", "_shape")
    _index: Index
    _session: Session
    _shape: torch.Size

    @staticmethod
    def __new__(cls: type[SecretIndex], session: Session, index: Index, shape: Sequence[int]) -> SecretIndex:
        """`index` as received by `Protocol.receive_index`, arranged as `shape`.

        Raises DomainError if the counts differ.
        """
        size = torch.Size(shape)
        if size.numel() != index.count:
            raise DomainError(f"SecretIndex: got {index.count} indices; want {size.numel()} for shape {tuple(size)}")
        self: SecretIndex = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.int64)
        self._index, self._session, self._shape = index, session, size
        return self

    def __init__(self, session: Session, index: Index, shape: Sequence[int]) -> None:
        """State is set by `__new__`."""

    @property
    def session(self) -> Session:
        """The session whose parties hold the other keys."""
        return self._session

    @property
    def share(self) -> Index:
        """What this party holds."""
        return self._index

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
        return f"SecretIndex(shape={tuple(self._shape)}, domain={self._index.domain}, {self._session!r})"

    @classmethod
    def __torch_function__(
        cls, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        """Lookup and public facts; everything else is refused. The keys stay in main memory until a lookup."""
        if func is torch.Tensor.to:
            return args[0]
        if func not in _ALLOWED:
            raise UnsupportedOp(f"{op_name(func)} of secret indices; they can only be looked up (F.embedding)")
        return dispatch(func, args, kwargs or {})


_ALLOWED = (
    torch.nn.functional.embedding,
    torch.embedding,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
)
