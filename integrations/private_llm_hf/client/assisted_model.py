"""A model under protocol "assisted": transformers' own at the client, whose linear layers servers multiply.

Everything but linear layers is computed here, on values that only the client has: embeddings, norms, attention with
its cache, activations, sampling. So generate(), its cache and its streamers are transformers' own.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.assisted.fixed_point import IntegerWeight
from private_llm.errors import ConfigError, DomainError, PatchMismatch, PlaintextLeak, UnsupportedOp, undoing
from private_llm.tensor.dispatch import TorchArg
from private_llm_hf.checkpoint.sample_inputs import empty_inputs, tensors_in
from private_llm_hf.checkpoint.weights import WeightList, WeightSource, skeleton, without_weights
from private_llm_hf.client.costs import Costs
from private_llm_hf.client.parties import Parties
from private_llm_hf.client.product_servers import ProductServers
from private_llm_hf.models.norms import CANNOT


class Products:
    """One weight at the servers, of one linear layer or of several that read the same input: one exchange for all.

    The first of them asks, for all; the others take their part when they are given the same tensor.
    """

    def __init__(self, servers: ProductServers, name: str) -> None:
        self._servers, self._name = servers, name
        self._number = -1
        self._widths: list[int] = []
        self._asked: _Asked | None = None

    def load(self, weights: Sequence[Tensor]) -> None:
        """Give all members' weights, [outputs, inputs] each. Raises DomainError naming the layer for unfit values."""
        self._widths = [len(weight) for weight in weights]
        try:
            self._number = self._servers.load(IntegerWeight.of(torch.cat(list(weights))), self._name)
        except DomainError as error:
            raise DomainError(f"weight of '{self._name}': {error}") from None

    def part(self, member: int, x: Tensor) -> Tensor:
        """One member's product with x [..., inputs]. Raises DomainError naming the layers for values not finite.

        Which exchanges there are depends on which tensors layers read, and on writing to them, never on values.
        """
        with self._servers.alone():
            version, held = None if x.is_inference() else x._version, self._asked
            if held is None or held.x is not x or member not in held.parts or version != held.version:
                rows = x.detach().reshape(-1, x.shape[-1]).to("cpu", torch.float32)
                try:
                    product = self._servers.product(self._number, rows, self._name)
                except DomainError as error:
                    raise DomainError(f"{self._name}: {error}") from None
                held = _Asked(x, version, dict(enumerate(product.split(self._widths, dim=1))))
            mine = held.parts.pop(member)
            self._asked = held if held.parts and version is not None else None
            return mine.reshape(*x.shape[:-1], -1).to(x.dtype)


@dataclass
class _Asked:
    """The last input, its version when it was sent, and those products with it that nobody took yet.

    Tensors of inference mode have no version, so each layer asks for itself there.
    """

    x: Tensor
    version: int | None
    parts: dict[int, Tensor]


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
    def of(cls, like: Tensor, layer: str) -> WeightElsewhere:
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


class AssistedLinear(nn.Module):
    """In place of nn.Linear or Conv1D: x W^T at the servers, plus the bias here.

    weight has the right shape and dtype and no values (`WeightElsewhere`).
    """

    def __init__(self, original: nn.Module, products: Products, member: int, name: str) -> None:
        super().__init__()
        weight, bias = original.get_parameter("weight"), getattr(original, "bias", None)
        self.weight = WeightElsewhere.of(weight, name)
        self.bias = None if bias is None else WeightElsewhere.of(bias, name)  # until it is read
        self.turned = isinstance(original, Conv1D)
        """Whether the weight lies as [inputs, outputs]."""
        self.in_features, self.out_features = weight.shape if self.turned else weight.shape[::-1]
        self._products, self._member = products, member

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]. Raises UnsupportedOp for gradients, else as `ProductServers.product`."""
        if torch.is_grad_enabled() and input.requires_grad:
            raise UnsupportedOp("protocol='assisted' computes no gradients; call the model under torch.no_grad()")
        if not input.numel():
            return input.new_empty(*input.shape[:-1], self.out_features)
        made = self._products.part(self._member, input)
        return made if self.bias is None else made + self.bias.to(made.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AssistedLinear:
        """What to(), half() and others do: to the bias, which is here."""
        weight = self._parameters.pop("weight")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters = {"weight": weight, **self._parameters}
        return self


class AssistedModel:
    """What models under protocol "assisted" have beside transformers' own methods."""

    parties: ProductServers
    stored = False
    """Whether servers had its weights already."""

    def cost(self, reset: bool = False) -> Costs:
        """Bytes, rounds and multiply-adds since the last reset. Raises PartyFailed if the session is over."""
        return self.parties.costs(reset)

    def close(self) -> None:
        """End the session with the servers."""
        self.parties.close()

    def __enter__(self) -> AssistedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_pretrained(self, *_: object, **__: object) -> None:
        """Raises PlaintextLeak: the weights of linear layers are with the servers."""
        raise PlaintextLeak("the servers hold the weights of linear layers; save the checkpoint that they came from")

    push_to_hub = state_dict = save_pretrained

    device = torch.device("cpu")
    """Where inputs are expected and outputs appear."""

    def train(self, mode: bool = True) -> AssistedModel:
        """The model as it is for mode=False. Raises UnsupportedOp for True."""
        if mode:
            raise UnsupportedOp("models under protocol='assisted' run inference only; train the plaintext model")
        made: AssistedModel = super().train(False)  # type: ignore[misc]
        return made


_CHOSEN = frozenset({"experts", "adapter_modules"})
"""Names of modules of which a forward uses some, by what it reads."""


def open_assisted(
    model_class: type[PreTrainedModel], config: PretrainedConfig, weights: WeightSource, servers: Parties,
    generation: GenerationConfig | None,
) -> PreTrainedModel:  # fmt: skip
    """Build the model here without the weights of its linear layers, which go to the servers as they are read.

    Raises PatchMismatch for experts that are linear layers of their own (how many rows each gets would show which were
    chosen) and for modules that read the weight of a linear layer themselves; DomainError naming a layer with values
    that are not finite; ConfigError for the parties of another protocol.
    """
    if not isinstance(servers, ProductServers):
        raise ConfigError(f"start: got {type(servers).__name__}; want the servers of protocol='assisted'")
    with undoing(servers.close):
        return _opened(model_class, config, weights, servers, generation)


def _opened(
    model_class: type[PreTrainedModel], config: PretrainedConfig, weights: WeightSource, servers: ProductServers,
    generation: GenerationConfig | None,
) -> PreTrainedModel:  # fmt: skip
    model = without_weights(model_class, config).eval()
    wanted = WeightList.of(skeleton(model_class, config))
    layers = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    chosen = [name for name in layers if _CHOSEN & {*name.split(".")}]
    if chosen:
        raise PatchMismatch(
            f"{model_class.__name__}: {chosen[0]!r} computes for chosen rows alone, so servers would learn which "
            "experts or adapters were chosen; want another protocol, where all compute"
        )
    named: dict[str, tuple[Products, int, int]] = {}
    for group in layers_by_input(model_class, config, layers):
        products = Products(servers, "+".join(group))
        for member, name in enumerate(group):
            named[name] = (products, member, len(group))
            parent, _, own = name.rpartition(".")
            made = AssistedLinear(model.get_submodule(name), products, member, name)
            setattr(model.get_submodule(parent), own, made)
    weights(wanted, _Filling(model, wanted, named), False)
    servers.costs(reset=True)  # of loading
    kind = _assisted_class(model_class)
    model.eval().__class__ = kind
    model.parties = servers
    weakref.finalize(model, servers.close)
    if generation is not None:
        model.generation_config = generation
    return model


class _Filling:
    """A sink: weights of linear layers go to the servers, when all of a group are there; the others into the model."""

    def __init__(
        self, model: PreTrainedModel, wanted: WeightList, named: dict[str, tuple[Products, int, int]]
    ) -> None:  # fmt: skip
        self._model, self._named = model, named
        self._names: dict[str, list[str]] = {name: [name] for name in wanted.shapes}
        for name, source in wanted.tied.items():
            self._names[source].append(name)
        self._waiting: dict[Products, dict[int, Tensor]] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        """One weight, for all that share it."""
        held: nn.Parameter | None = None
        for each in self._names[name]:
            path, _, own = each.rpartition(".")
            module = self._model.get_submodule(path)
            if own == "weight" and path in self._named:
                self._to_servers(path, tensor)
            elif own in module._buffers:
                module._buffers[own] = tensor.detach().to("cpu", torch.float32, copy=True)
            else:
                if held is None:
                    held = nn.Parameter(tensor.detach().to("cpu", torch.float32, copy=True), requires_grad=False)
                module._parameters[own] = held

    def _to_servers(self, path: str, tensor: Tensor) -> None:
        products, member, members = self._named[path]
        layer = self._model.get_submodule(path)
        found = self._waiting.setdefault(products, {})
        found[member] = (tensor.mT if layer.turned else tensor).detach().to("cpu", copy=True)
        if len(found) == members:
            products.load([found[each] for each in range(members)])
            del self._waiting[products]


def layers_by_input(
    model_class: type[PreTrainedModel], config: PretrainedConfig, layers: Sequence[str]
) -> list[list[str]]:  # fmt: skip
    """Linear layers in groups that read the same tensor one after the other, such as queries, keys and values.

    Found in a forward on the meta device; where that needs values, each layer is a group. Raises PatchMismatch if that
    forward reads the weight of a linear layer itself.
    """
    settings = copy.deepcopy(config)
    settings._attn_implementation = "eager"  # others look into the mask
    model = skeleton(model_class, settings)
    groups: list[tuple[Tensor, int, list[str]]] = []
    for name in layers:

        def note(x: Tensor, name: str = name, width: int = _width(model.get_submodule(name))) -> Tensor:
            if groups and groups[-1][0] is x and groups[-1][1] == x._version:
                groups[-1][2].append(name)
            else:
                groups.append((x, x._version, [name]))
            return x.new_empty(*x.shape[:-1], width)

        layer = model.get_submodule(name)
        layer.weight = WeightElsewhere.of(layer.get_parameter("weight"), name)
        layer.forward = note
    try:
        with torch.no_grad():
            model(**empty_inputs(config))
    except UnsupportedOp as error:
        raise PatchMismatch(f"{model_class.__name__}: {error}") from None
    except CANNOT:
        groups = []
    found: list[list[str]] = []
    seen: set[str] = set()
    for _, _, group in groups:  # a layer that runs twice is in its first group
        new = [name for name in dict.fromkeys(group) if name not in seen]
        seen.update(new)
        found += [new] if new else []
    return found + [[name] for name in layers if name not in seen]


def _width(layer: nn.Module) -> int:
    return int(layer.get_parameter("weight").shape[1 if isinstance(layer, Conv1D) else 0])


_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _assisted_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The subclass of a model class: one per class, so that isinstance means something."""
    if original not in _CLASSES:
        body = {"__module__": __name__, "__doc__": f"{original.__name__} under protocol 'assisted'."}
        _CLASSES[original] = type(f"Assisted{original.__name__}", (AssistedModel, original), body)
    return _CLASSES[original]
