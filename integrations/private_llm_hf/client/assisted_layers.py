"""Linear layers and convolutions whose weights servers hold: what stands in their place in a model."""

import copy
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from private_llm.assisted.fixed_point import IntegerWeight
from private_llm.errors import DomainError, UnsupportedOp
from private_llm.tensor.dispatch import TorchArg
from private_llm_hf.checkpoint.sample_inputs import tensors_in
from private_llm_hf.client.assisted_rows import RowCounts, Sides, sides_of
from private_llm_hf.client.product_servers import ProductServers


class HoldsWeights(Protocol):
    """What takes the weights of layers: a session's servers, or what a server itself reads."""

    @property
    def weight_bits(self) -> int:
        """As of `PrivateConfig`."""

    def load(self, weight: IntegerWeight, name: str) -> int:
        """Hold a weight; the number to ask for it by. name: of its layers."""


class Products:
    """One weight at the servers, of one linear layer or of several that read the same input: one exchange for all.

    The first of them asks, for all; the others take their part when they are given the same tensor.
    """

    def __init__(self, weights: HoldsWeights, rows: RowCounts, name: str, sides: Sequence[Sides]) -> None:
        """sides: of each member's weight."""
        self._weights, self._rows, self.name = weights, rows, name
        self.number = -1
        """What to ask for."""
        self._widths, self.inputs = [outputs for outputs, _ in sides], sides[0][1]
        self._starts = dict(enumerate(itertools.accumulate(self._widths, initial=0)))
        self.outputs = self._starts.popitem()[1]
        self._taken: dict[int, Tensor] = {}
        self._mine = threading.local()
        """What each thread asked for last."""

    def take(self, member: int, weight: Tensor) -> None:
        """A member's weight [outputs, inputs]; the servers get it when all are here.

        Raises DomainError naming the layer for unfit values.
        """
        alone = len(self._widths) == 1
        # what is streamed may be a mapped file
        self._taken[member] = weight.detach().cpu() if alone else weight.detach().to("cpu", copy=True)
        if len(self._taken) == len(self._widths):
            taken, self._taken = [self._taken[each] for each in range(len(self._widths))], {}
            try:
                self.number = self._weights.load(IntegerWeight.of(*taken, bits=self._weights.weight_bits), self.name)
            except DomainError as error:
                raise DomainError(f"weight of '{self.name}': {error}") from None

    def at(self, servers: HoldsWeights) -> "Products":
        """The same weight in another session."""
        made = Products(servers, self._rows, self.name, [(width, self.inputs) for width in self._widths])
        made.number = self.number
        return made

    def part(self, member: int, x: Tensor) -> Tensor:
        """One member's product with x [..., inputs]. Raises DomainError naming the layers for values not finite and
        another number of inputs, UnsupportedOp for a server's own model, and for other products than an earlier call of
        equal shapes had.

        Which exchanges there are depends on which tensors layers read, and on writing to them, never on values.
        """
        servers = self._weights
        if not isinstance(servers, ProductServers):
            raise UnsupportedOp(f"{self.name}: this model has no servers to ask")
        if x.shape[-1] != self.inputs:
            raise DomainError(f"{self.name}: got {x.shape[-1]} inputs; want {self.inputs}")
        version, held = None if x.is_inference() else x._version, getattr(self._mine, "asked", None)
        if held is None or held.x is not x or member not in held.left or version != held.version:
            rows = x.detach().reshape(-1, self.inputs).to("cpu", torch.float32).contiguous()
            self._rows.asks(self.name, rows.shape[0])
            try:
                product = servers.product(self.number, rows, self.name)
            except DomainError as error:
                raise DomainError(f"{self.name}: {error}") from None
            made = product.view(*x.shape[:-1], self.outputs)
            made = made if made.dtype is x.dtype else made.to(x.dtype)
            if len(self._widths) == 1:
                return made
            held = _Asked(x, version, made, {*self._starts})
        held.left.discard(member)
        self._mine.asked = held if held.left and version is not None else None
        return held.product.narrow(-1, self._starts[member], self._widths[member])


@dataclass
class _Asked:
    """The last input, its version when sent (inference mode: none), the products, and whose nobody took yet."""

    x: Tensor
    version: int | None
    product: Tensor
    left: set[int]


_KNOWN = frozenset({
    "shape.__get__", "dtype.__get__", "device.__get__", "layout.__get__", "is_meta.__get__", "requires_grad.__get__",
    "requires_grad.__set__", "is_leaf.__get__", "grad.__get__", "grad_fn.__get__", "ndim.__get__", "is_sparse.__get__",
    "is_quantized.__get__", "itemsize.__get__", "nbytes.__get__", "size", "dim", "numel", "nelement", "element_size",
    "is_floating_point", "is_complex", "stride", "storage_offset", "is_contiguous", "requires_grad_", "__hash__",
    "__len__", "is_inference", "ndimension", "untyped_storage", "data_ptr", "_is_view", "is_cuda.__get__",
    "is_cpu.__get__",
})  # fmt: skip
"""What may be asked of a weight that is elsewhere: facts, no values."""


class WeightElsewhere(nn.Parameter):
    """The shape and type of a weight that servers hold. Whoever computes with it gets an UnsupportedOp.

    Without that, PyTorch's products of CPU tensors and tensors without values return memory as it is, and no error.
    """

    layer = ""

    @classmethod
    def of(cls, like: Tensor, layer: str) -> "WeightElsewhere":
        """Like a weight, without memory. layer: whose it is, for messages."""
        made: WeightElsewhere = torch.Tensor._make_subclass(cls, torch.empty_like(like, device="meta"), False)
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(
        cls, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        """Raises UnsupportedOp for all that needs values."""
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        name = f"{owner}.{func.__name__}" if func.__name__ in ("__get__", "__set__") else func.__name__
        if name in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        layer = next((each.layer for each in tensors_in((args, kwargs or {})) if isinstance(each, cls)), "")
        raise UnsupportedOp(
            f"{layer}: {name} reads the weight itself, which the servers hold under protocol='assisted'; choose "
            "another protocol for this model"
        )


class TakesWeights(nn.Module, ABC):
    """A module with weights that servers hold; `elsewhere` names them, and moving it leaves them."""

    elsewhere = frozenset({"weight"})
    _products: list[Products]

    @abstractmethod
    def take(self, own: str, weight: Tensor) -> None:
        """The weight of that name."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TakesWeights":
        """What to(), half() and others do: to what is here."""
        held = self._parameters
        self._parameters = {name: value for name, value in held.items() if name not in self.elsewhere}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters = {name: self._parameters.get(name, value) for name, value in held.items()}
        return self


def check_grad(x: Tensor) -> None:
    """Raises UnsupportedOp for gradients."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise UnsupportedOp("protocol='assisted' computes no gradients; call the model under torch.no_grad()")


class AssistedLinear(TakesWeights):
    """In place of nn.Linear or Conv1D: x W^T at the servers, plus the bias here. weight: a `WeightElsewhere`."""

    def __init__(self, original: nn.Module, products: Products, member: int, name: str) -> None:
        super().__init__()
        weight, bias = original.get_parameter("weight"), getattr(original, "bias", None)
        self.weight = WeightElsewhere.of(weight, name)
        self.bias = None if bias is None else WeightElsewhere.of(bias, name)  # until it is read
        self.turned = isinstance(original, Conv1D)
        """Whether the weight lies as [inputs, outputs]."""
        self.out_features, self.in_features = sides_of(original)
        self._products, self._member = [products], member

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]. Raises UnsupportedOp for gradients, else as `ProductServers.product`."""
        check_grad(input)
        if not input.numel():
            return input.new_empty(*input.shape[:-1], self.out_features)
        made = self._products[0].part(self._member, input)
        return made if self.bias is None else made + self.bias.to(made.dtype)

    def take(self, own: str, weight: Tensor) -> None:
        """The weight, as the original holds it."""
        self._products[0].take(self._member, weight.mT if self.turned else weight.flatten(1))


class AssistedConvolution(AssistedLinear):
    """In place of nn.Conv1d, Conv2d and Conv3d: a linear layer on windows, which travel once each where they overlap.

    It has the settings of the original (`stride`, `kernel_size`), which models read.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: str

    def __init__(self, original: _ConvNd, products: Products, member: int, name: str) -> None:
        super().__init__(original, products, member, name)
        for each in _ConvNd.__constants__:
            setattr(self, each, getattr(original, each))
        self._padding = original._reversed_padding_repeated_twice

    def forward(self, input: Tensor) -> Tensor:
        """[..., channels, *sizes] to [..., channels, *sizes]. Raises as `AssistedLinear.forward`."""
        sizes = len(self.kernel_size)
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        x = functional.pad(input, self._padding, mode)
        channel = x.dim() - sizes - 1
        for axis, (size, stride, dilation) in enumerate(zip(self.kernel_size, self.stride, self.dilation, strict=True)):
            x = x.unfold(channel + 1 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
        windows = x.movedim(channel, channel + sizes).flatten(channel + sizes)
        return super().forward(windows).movedim(-1, channel)


def ask(model: nn.Module, servers: HoldsWeights) -> None:
    """Let all layers of a model ask these servers from now on."""
    made: dict[Products, Products] = {}
    for module in model.modules():
        if isinstance(module, TakesWeights):
            module._products = [made.setdefault(each, each.at(servers)) for each in module._products]


def copied(model: nn.Module) -> nn.Module:
    """A model of the same tensors, hooks and settings, whose modules are others."""
    made: dict[nn.Module, nn.Module] = {}

    def twin(module: nn.Module) -> nn.Module:
        if module not in made:
            made[module] = each = copy.copy(module)
            for tensors in ("_parameters", "_buffers"):
                vars(each)[tensors] = {**vars(module)[tensors]}
            vars(each)["_modules"] = {name: child and twin(child) for name, child in module._modules.items()}
            vars(each).pop("_cache", None)  # which some settings of generate() keep
        return made[module]

    return twin(model)
