"""The closed table of operations on secret tensors: what is not in it does not run.

Keys are the callables PyTorch hands to `__torch_function__`; they are compared by equality, because
`Tensor.dtype.__get__` and its like are new objects at every access.

Functions of tensors without readable values (`Guarded`) go through the table; for what gets past `__torch_function__`,
`__torch_dispatch__` raises; pickling, numpy, dlpack and printing of values raise, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from private_llm.errors import ConfigError, PlaintextLeak, UnsupportedOp
from private_llm.kernels.seeded_tensor import Unprinted

TorchArg = Any  # whatever PyTorch accepts or returns at this place

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)
_RULES: dict[object, Rule] = {}


def implements(*ops: object) -> Callable[[R], R]:
    """Register a rule for one or several PyTorch functions. Raises ConfigError if one of them has a rule."""

    def register(rule: R) -> R:
        for op in dict.fromkeys(ops):  # some of PyTorch's functions are equal under two names
            if op in _RULES:
                raise ConfigError(f"{op_name(op)} already has a private rule")
            _RULES[op] = rule
        return rule

    return register


def op_name(op: object) -> str:
    """How an operation is called in messages."""
    name = torch.overrides.resolve_name(op) if callable(op) else None
    return name or str(getattr(op, "__name__", op))


def dispatch(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Run the rule of `op` and return what it returns.

    Raises UnsupportedOp without a rule and for an argument that the rule does not take, PlaintextLeak where a plain
    tensor would receive a secret (in place, or as out=), and whatever the rule raises.
    """
    rule = _RULES.get(op)
    if rule is None or "out" in kwargs:
        _refuse(op, args, kwargs)
    try:
        return rule(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        # raised by the call itself: an argument that PyTorch knows and the rule does not
        raise UnsupportedOp(f"{op_name(op)}: no private rule for these arguments ({error})") from None


def _refuse(op: object, args: Sequence[object], kwargs: Mapping[str, object]) -> NoReturn:
    name = op_name(op)
    short = getattr(op, "__name__", "")
    in_place = (short.endswith("_") and not short.endswith("__")) or short in ("__setitem__", "__iadd__")
    if kwargs.get("out") is not None or (in_place and args and type(args[0]) in (Tensor, torch.nn.Parameter)):
        raise PlaintextLeak(
            f"{name} would write a secret into a plain tensor; keep the destination secret, or use the "
            "out-of-place form"
        )
    raise UnsupportedOp(
        f"{name} has no private rule; rules live in private_llm/tensor/ops_*.py (linear and local operations) "
        "and private_llm/nn/ops_*.py (non-linear functions): add one there with @implements"
    )


class Guarded(Unprinted):
    """A wrapper tensor whose values no code may read; subclasses answer for shape, dtype and functions."""

    __slots__ = ()

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise PlaintextLeak("numpy: a share is not an array; reveal it to the client on purpose")

    def __dlpack__(self, *_: object, **__: object) -> NoReturn:
        raise PlaintextLeak("dlpack: a share is not exported; reveal it to the client on purpose")

    def __dlpack_device__(self) -> NoReturn:
        raise PlaintextLeak("dlpack: a share is not exported; reveal it to the client on purpose")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        """What bypassed the table reads or moves values behind its back: refused."""
        raise PlaintextLeak(
            f"{op_name(func)} reached a secret tensor below the table of private rules; "
            "this operation would need its values"
        )
