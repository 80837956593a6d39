"""Layers of equal cost are priced once: in a meta session, a layer like one that ran is booked instead of run.

A layer costs what a layer before it cost if both are built alike (classes, shapes, settings; not their number), are
called with the same shapes, bits and public values, and find as much in their part of the cache. Then the
second is not run: what the first booked is booked under the second's name, and the cache and the arguments are brought
to where the first left them. Whatever cannot be compared is run.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache, EncoderDecoderCache

from private_llm.net.ledger import Ledger
from private_llm.protocols.session import PendingRangeCheck
from private_llm.tensor.dispatch import Guarded
from private_llm.tensor.range_check import watch_pending
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.kv_cache.cache import SecretCache, SecretCacheLayer
from private_llm_hf.models.sparse_blocks import PREDICTOR, SPARSE

_NUMBERS = ("layer_idx", "layer_id")  # which layer a module belongs to: they address the cache, compared by itself

_OWN = frozenset(vars(nn.Module())) | {"forward", *_NUMBERS, "name", SPARSE}
"""Attributes that are not compared: a predictor's name, and what it tells about a block, follow from the rest of it."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _Unknown(Exception):
    """Something cannot be compared: the layer is run."""


@dataclass(frozen=True)
class _ModulePlace:
    """A module's name, the number of its layer, and where it books."""

    name: str
    number: int
    ledger: Ledger


@dataclass(frozen=True)
class _Ran:
    """What a layer booked and left. rescaled: arguments brought to the session's bits. pending: its range checks."""

    at: _ModulePlace
    counts: Ledger
    output: Any
    rescaled: tuple[bool, ...]
    pending: tuple[PendingRangeCheck, ...]


def price_once(model: nn.Module, ledger: Ledger) -> None:
    """Let lists of layers of `model`, which book in `ledger`, run the first of equal layers only, and parts that see no
    cache once for all tokens of equal shapes. In meta sessions: values are those of the first.
    """
    known, forever = dict[Hashable, _Ran](), dict[Hashable, _Ran]()

    def forget(*_: object) -> None:
        known.clear()

    model.register_forward_pre_hook(forget)
    inner: list[str] = []
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or path.startswith(tuple(inner)):
            continue
        if any(isinstance(part, nn.Conv2d) for part in layers.modules()):
            continue  # what one part computes is checked by the next: parts alone are no equals
        inner.append(f"{path}.")
        for place, layer in enumerate(layers):
            numbers = {getattr(part, name) for part in layer.modules() for name in _NUMBERS if hasattr(part, name)}
            if len(numbers) > 1:
                continue
            at = _ModulePlace(f"{path}.{place}", next(iter(numbers), place), ledger)
            for name, part in layer.named_children():
                if not isinstance(part, (nn.ModuleList, nn.Dropout, nn.Identity)):
                    _attach(part, replace(at, name=f"{at.name}.{name}"), known, forever)
            _attach(layer, at, known, forever)


def _attach(part: nn.Module, at: _ModulePlace, known: dict[Hashable, _Ran], forever: dict[Hashable, _Ran]) -> None:
    priced = _Priced(part.forward, at, _built(part), known, forever)
    part.forward = functools.update_wrapper(functools.partial(_Priced.run, priced), part.forward)


class _Priced:
    """A layer's forward, or the bookings of an equal one."""

    def __init__(
        self, forward: Callable[..., Any], at: _ModulePlace, built: Hashable, known: dict[Hashable, _Ran],
        forever: dict[Hashable, _Ran],
    ) -> None:  # fmt: skip
        """known: of this forward of the model. forever: of all, for what no cache was given to."""
        self._forward, self._at, self._built = forward, at, built
        self._known, self._forever = known, forever

    def run(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a layer's own signature
        leaves = list(_leaves((args, kwargs)))
        secrets = [leaf for leaf in leaves if isinstance(leaf, SecretTensor)]
        caches = [leaf for leaf in leaves if isinstance(leaf, Cache)]
        try:
            same = tuple(next(i for i, other in enumerate(secrets) if other is each) for each in secrets)
            held = tuple(_held(cache, self._at.number) for cache in caches)
            key = (self._built, _compared((args, kwargs)), same, held)
        except _Unknown:
            return self._forward(*args, **kwargs)
        known = self._known if caches else self._forever
        ran = known.get(key)
        if ran is not None:
            return self._replay(ran, secrets, caches)
        if secrets:
            watch_pending(secrets[0].session)  # what an earlier layer owes is not this one's
        pending = secrets[0].session.checks.pending if secrets else []
        before = len(pending)
        forms, untouched = [secret.value().form for secret in secrets], self._untouched(leaves, caches)
        with self._at.ledger.apart() as counts:
            output = self._forward(*args, **kwargs)
        self._at.ledger.book(counts)
        scopes = {*(key[0] for key in counts.sent), *(key[0] for key in counts.rounds), *counts.macs}
        own = (f"{self._at.name}.", f"{self._at.name}{PREDICTOR}.")
        inside = all(f"{scope}.".startswith(own) for scope in scopes)
        if inside and untouched == self._untouched(leaves, caches):
            rescaled = tuple(secret.value().form != form for secret, form in zip(secrets, forms, strict=True))
            with suppress(_Unknown):
                known[key] = _Ran(self._at, counts, _again(output), rescaled, tuple(pending[before:]))
        return output

    def _untouched(self, leaves: list[object], caches: list[Cache]) -> list[object]:
        """What a layer must leave as it is: public arguments, other layers' part of the cache."""
        versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Guarded)]
        return [versions, *([n for i, n in _lengths(cache) if i != self._at.number] for cache in caches)]

    def _replay(self, ran: _Ran, secrets: list[SecretTensor], caches: list[Cache]) -> object:
        with self._at.ledger.apart():
            for secret, rescaled in zip(secrets, ran.rescaled, strict=True):
                if rescaled:
                    secret.to_fixed()  # is remembered by the argument, and booked below
        if secrets:
            secrets[0].session.checks.pending.extend(ran.pending)
        self._at.ledger.book(ran.counts, lambda scope: self._at.name + scope[len(ran.at.name) :])
        for cache in caches:
            _copy_layer(cache, ran.at.number, self._at.number)
        return _again(ran.output)


# -- what is compared ------------------------------------------------------------------------------------------
def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _compared(value: object) -> Hashable:
    """Equal for arguments that cost the same. Raises _Unknown for what this does not know of."""
    if isinstance(value, dict):
        return tuple((str(name), _compared(item)) for name, item in value.items())
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return tuple(_compared(item) for item in value)
    if isinstance(value, SecretTensor):
        if value.hidden is not None:
            raise _Unknown
        return SecretTensor, value.shape, value.value().form
    if isinstance(value, Tensor) and not isinstance(value, Guarded):
        return Tensor, value.shape, value.dtype, value.is_meta or _digest(value)
    if isinstance(value, Cache):
        return (type(value),)
    raise _Unknown


def _digest(value: Tensor) -> bytes:
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.cpu().numpy().tobytes(), digest_size=16).digest()


def _built(layer: nn.Module) -> Hashable:
    """Equal for modules that compute the same of weights of the same shapes."""
    return tuple((path, type(part), _settings(part)) for path, part in layer.named_modules())


def _settings(part: nn.Module) -> Hashable:
    held = part.named_parameters(recurse=False)
    shapes = tuple(
        (name, type(value), value.shape, value.dtype, value.value().form if isinstance(value, SecretTensor) else None)
        for name, value in held
    )
    buffers = tuple((name, _setting(value)) for name, value in part.named_buffers(recurse=False))
    others = tuple((name, _setting(value)) for name, value in sorted(vars(part).items()) if name not in _OWN)
    return shapes, buffers, others


def _setting(value: object) -> Hashable:
    try:
        return _compared(value)
    except _Unknown:
        return id(value)  # the very same object, or not the same


# -- caches and results --------------------------------------------------------------------------------------------
def _parts(cache: EncoderDecoderCache) -> tuple[Cache, Cache]:
    return cache.self_attention_cache, cache.cross_attention_cache


def _lengths(cache: Cache) -> list[tuple[int, int]]:
    if isinstance(cache, EncoderDecoderCache):
        return [pair for part in _parts(cache) for pair in _lengths(part)]
    return [(number, layer.get_seq_length()) for number, layer in enumerate(cache.layers)]


def _held(cache: Cache, number: int) -> Hashable:
    """Shapes of what is kept of one layer."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.is_updated.get(number), *(_held(part, number) for part in _parts(cache))
    if number >= len(cache.layers):
        if not isinstance(cache, SecretCache):
            return None
        policy, leader = cache.role(number)  # a layer that follows others does not cost what they do
        return policy.name, leader != number
    layer = cache.layers[number]
    if not isinstance(layer, SecretCacheLayer):
        raise _Unknown
    buffer, evicting = layer.buffer, layer.evicting
    state = None if evicting is None else evicting.state()
    follows = layer.leader is not None
    return _compared((layer.keys, layer.values, buffer.position, buffer.positions, layer.policy.name, follows, state))


def _copy_layer(cache: Cache, frm: int, to: int) -> None:
    if isinstance(cache, EncoderDecoderCache):
        if frm in cache.is_updated:
            cache.is_updated[to] = cache.is_updated[frm]
        for part in _parts(cache):
            _copy_layer(part, frm, to)
    elif frm < len(cache.layers):
        if not isinstance(cache, SecretCache):
            raise _Unknown
        while len(cache.layers) <= to:
            cache.add_layer()
        cache.replace_layer(to, cache.layers[frm].copy(cache.layers[to].leader))


def _again(output: Any) -> Any:  # noqa: ANN401 - a layer's own result
    """The same, in secret tensors that later operations may bring to other fractional bits. Raises _Unknown."""
    if isinstance(output, SecretTensor):
        if output.hidden is not None:
            raise _Unknown
        return SecretTensor(output.value())
    if type(output) is Tensor or isinstance(output, _PLAIN):
        return output
    if type(output) in (tuple, list):
        return type(output)(_again(item) for item in output)
    raise _Unknown


# -- shapes of arithmetic on meta tensors without PyTorch's reference implementations ---------------------------------
# PyTorch finds the shape of `x + y` on the meta device by running its whole reference in Python, 0.2 ms each, which was
# a third of an estimate. Prices need shapes and types alone: strides here are those of contiguous tensors. Whatever is
# not plain arithmetic of one type goes the usual way.
_aten = torch.ops.aten


class QuickShapes(TorchDispatchMode):
    """Within, sums, products and concatenations of meta tensors are made from their shapes."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401 - PyTorch's own signature  # fmt: skip
        """The shape alone where a rule knows it, else what PyTorch makes."""
        rule = _RULES.get(func)
        made = None if rule is None else rule(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made


def _pair(x: object, y: object, alpha: int = 1) -> Tensor | None:
    if not isinstance(x, Tensor) or not x.is_meta:
        return None
    if isinstance(y, int):
        return None if x.is_floating_point() else _like(x, x.shape)
    if not isinstance(y, Tensor) or not y.is_meta or x.dtype is not y.dtype:
        return None
    return _like(x, x.shape if x.shape == y.shape else torch.broadcast_shapes(x.shape, y.shape))


def _onto(x: Tensor, y: object, *, alpha: int = 1, out: Tensor) -> Tensor | None:
    made = _pair(x, y)
    return out if made is not None and made.shape == out.shape and made.dtype is out.dtype else None


def _joined(pieces: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    def others(x: Tensor) -> tuple[int, ...]:
        return (*x.shape[:dim], *x.shape[dim + 1 :])

    first = pieces[0]
    dim %= max(first.dim(), 1)
    shape = list(first.shape)
    for piece in pieces[1:]:
        if not piece.is_meta or piece.dtype is not first.dtype or others(piece) != others(first):
            return None
        shape[dim] += piece.shape[dim]
    return _like(first, torch.Size(shape)) if first.is_meta else None


def _like(x: Tensor, shape: torch.Size) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device="meta")


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    **{getattr(_aten, name).Tensor: _pair for name in ("add", "sub", "mul", "bitwise_xor", "bitwise_and")},
    _aten.add.out: _onto,
    _aten.neg.default: lambda x: _like(x, x.shape) if x.is_meta else None,
    _aten.cat.default: _joined,
}
