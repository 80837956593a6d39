"""Rules for public facts (shape, dtype, flags) and for the refusals that deserve their own words."""

from typing import NoReturn

import torch
from torch import Tensor

from private_llm.errors import PlaintextLeak
from private_llm.tensor.dispatch import TorchArg, implements, op_name
from private_llm.tensor.secret import SecretTensor


def _getter(name: str) -> TorchArg:
    return getattr(Tensor, name).__get__


def _held_bytes(x: SecretTensor) -> int:
    """Bytes this party really holds per element (all parts)."""
    parts = x.value(masked=True).share.parts
    return len(parts) * parts[0].element_size()


implements(Tensor.size)(lambda x, dim=None: x.shape if dim is None else x.shape[dim])
implements(Tensor.dim, Tensor.ndimension)(lambda x: x.ndim)
implements(Tensor.numel, torch.numel, Tensor.nelement)(lambda x: x.shape.numel())
implements(Tensor.__len__)(lambda x: x.shape[0])
implements(Tensor.__hash__)(id)
implements(Tensor.element_size, _getter("itemsize"))(lambda x, *_: _held_bytes(x))
implements(_getter("nbytes"))(lambda x, *_: _held_bytes(x) * x.shape.numel())
# Those of a contiguous tensor of this shape: the parts may lie otherwise.
implements(Tensor.stride)(lambda x, dim=None: torch.empty(x.shape, device="meta").stride(dim))
# A number that is unique among live secrets (tools that look for tied weights compare it); no values lie there.
implements(Tensor.data_ptr)(lambda x: id(x.value(masked=True).share))
implements(_getter("is_cuda"))(lambda x, *_: x.device.type == "cuda")
implements(_getter("is_cpu"))(lambda x, *_: x.device.type == "cpu")
implements(Tensor.get_device)(lambda x: -1 if x.device.index is None else x.device.index)
# Parameters ask for a gradient at their creation, and there is no graph to leave.
implements(Tensor.requires_grad_)(lambda x, requires_grad=True: x)
implements(_getter("data"), Tensor.detach, torch.detach)(lambda x, *_: x.viewed(lambda part: part))


def _constant(value: object, *ops: object) -> None:
    """What all secrets answer alike."""
    implements(*ops)(lambda *_, **__: value)


# Outwardly a contiguous float tensor, and a leaf: there is no graph, no gradient, and shares are never written to.
_constant(True, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_contiguous, Tensor.is_same_size)
_constant(True, _getter("is_leaf"))
_constant(torch.strided, _getter("layout"))
_constant(None, _getter("grad"), _getter("grad_fn"))
_constant(0, Tensor.storage_offset, _getter("_version"))
# None of these kinds of tensor; a module that moves its parameters makes new ones.
_constant(
    False,
    Tensor.is_complex, torch.is_complex, Tensor.is_conj, torch.is_conj, Tensor.is_neg, Tensor.is_inference,
    torch.is_inference, Tensor.is_pinned, Tensor.is_shared, torch._has_compatible_shallow_copy_type,
    *(_getter(n) for n in ("is_sparse", "is_quantized", "is_nested", "is_meta", "is_mkldnn", "is_vulkan")),
    *(_getter(n) for n in ("is_sparse_csr", "is_mps", "is_xpu", "is_xla", "is_ipu", "is_maia", "is_mtia")),
    _getter("retains_grad"),
)  # fmt: skip


@implements(Tensor.__deepcopy__)
def deepcopy(x: SecretTensor, memo: dict[int, object]) -> SecretTensor:
    """A new object for the same (never written) shares; a Parameter stays one."""
    found = memo.get(id(x))
    if isinstance(found, SecretTensor):
        return found
    out = memo[id(x)] = x.__copy__()
    return out


@implements(
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__complex__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero, torch.equal, Tensor.equal,
    torch.allclose, Tensor.allclose, Tensor.storage, Tensor.untyped_storage, Tensor.share_memory_, Tensor.nonzero,
    torch.nonzero,
)  # fmt: skip
def refuse_values(*args: object, **kwargs: object) -> NoReturn:
    """Everything that hands values, or decisions on values, to ordinary code: raises PlaintextLeak."""
    raise PlaintextLeak(
        "a secret tensor was asked for its values (bool, item, tolist, numpy, storage, comparison, ...); "
        "control flow and exports need public data: reveal the value to the client, or decide without it"
    )


@implements(Tensor.data.__set__, Tensor.copy_, Tensor.set_)  # type: ignore[attr-defined]
def assign(x: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """Secret into secret: rebinding. Secret into plain, or plain into secret: raises PlaintextLeak."""
    if not isinstance(x, SecretTensor):
        raise PlaintextLeak(f"{op_name(Tensor.copy_)} would write a secret into a plain tensor")
    if not isinstance(value, SecretTensor):
        raise PlaintextLeak("a plain tensor would overwrite a secret one; share it first")
    return x.rebind(value)
