"""Calibration: run the owner's plaintext model and note, for every module, the power of two that its values need.

A mode of PyTorch sees the operations that private rules exist for, hooks say in which module they run. Of each module
only the largest values stay, as exponents with head room (`private_llm.ranges`); no value and no token goes anywhere.
Products that are added to a residual stream may leave fewer fractional bits if the norm that reads it can then do with
one sum of squares: streams are followed from the product over sums to that norm.
"""

import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from private_llm.approx.lines import bits_above
from private_llm.approx.norms import fitting_bits
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, LowPrecision, TightRange
from private_llm.nn.activations import ACTIVATIONS
from private_llm.ranges import LARGEST_EXPONENT, LEAST_BITS, REACH, SQUARE_HEAD_ROOM, Ranges, exponent
from private_llm.ring.ring import Ring
from private_llm.tensor.dispatch import TorchArg
from private_llm.tensor.range_check import PIECE
from private_llm_hf.checkpoint.norm_readers import ResultReaders
from private_llm_hf.models.handlers import match
from private_llm_hf.models.norms import norm_of

_LAYERS = {F.linear, torch.addmm}
_GROUPED = {"_grouped_mm", "grouped_mm_fallback"}  # products of experts in one call: torch's, and transformers' own
_LAYER_NORMS, _RMS_NORMS = {F.layer_norm, torch.layer_norm}, {F.rms_norm, torch.rms_norm}
_CONVOLUTIONS = {F.conv2d, F.conv1d}
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm}
_TIMES = {torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, Tensor.mul_}
_COMPARED = {op: made.name for made in ACTIVATIONS if made.compared for op in made.ops}
_SUMS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
_SAME = {F.dropout, torch.dropout, Tensor.to, Tensor.float, Tensor.contiguous, Tensor.view, Tensor.reshape}

ROUNDING = 4e-4  # one unit of a row with fewer bits, in parts of its smallest root mean square: error about 1e-4
VISIBLE = 2e-3  # one unit, in parts of a row's root mean square, from which a warning says so: logits off by 0.01

_LARGE_SCORE = 500.0  # attention scores above it are warned of

_MOST_SCORE = 15  # scores below 2^15 pass the check of ranges, which sums up 256 of them


class Largest(TorchFunctionMode):
    """Notes each module's largest values while it is on. Raises DomainError naming a module for NaN and infinity."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.largest: dict[str, dict[str, float]] = {}
        self.widths: dict[str, int] = {}
        self.smallest: dict[str, float] = {}  # smallest mean square of a row, by norm; rows of zeros do not count
        self.feeds: dict[str, set[str]] = {}  # norms that read a residual sum, by the products that were added to it
        self._names = {module: name for name, module in model.named_modules()}
        found = {module: norm_of(module) for module in self._names}
        self._norms = {module: norm for module, norm in found.items() if norm is not None}
        self._running: list[str] = []
        self._thread = threading.get_ident()
        self._streams: dict[int, tuple[Tensor, set[str]]] = {}
        self.readers = ResultReaders(model)
        self._convolved: tuple[str, Tensor] | None = None
        self.folded: set[str] = set()  # convolutions before a batch norm, which their weights will contain

    def enter(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        """A module begins; in other threads the model may run meanwhile, which is nobody's business here."""
        if threading.get_ident() != self._thread:
            return
        self._running.append(self._names[module])
        self.readers.enter(module)
        if not inputs or not isinstance(inputs[0], Tensor):
            return
        norm = self._norms.get(module)
        if norm is not None:
            self.note_rows(inputs[0], centred=norm.kind == "layer")
            self._note_gain(getattr(module, "weight", None), norm.offset)
        elif match("gelus", module) is not None:
            self._note_compared(inputs[0])
        if norm is not None or isinstance(module, nn.LayerNorm):
            self._read(inputs[0])

    def leave(self, module: nn.Module, inputs: object, output: object) -> None:
        """The module that began last has ended."""
        if threading.get_ident() != self._thread:
            return
        if isinstance(output, Tensor) and (module in self._norms or isinstance(module, nn.LayerNorm)):
            self._note_largest("entry", output)
        self.readers.leave(module, inputs, output)
        self._running.pop()

    def __torch_function__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        out = func(*args, **(kwargs or {}))
        multiplies = func in _LAYERS
        if func in _TIMES and len(args) > 1 and all(isinstance(a, Tensor) and a.is_floating_point() for a in args[:2]):
            # two values (gate and up), not a value with a table or a weight
            multiplies = args[0].dim() > 1 and args[0].shape == args[1].shape and self._scope not in self.widths
        self.readers.see(func, args, kwargs, out, self._scope, multiplies)
        if multiplies:
            self._note_rows_of("output", out)
            self._note_largest("peak", out)
            if func is F.linear:
                self._streams[id(out)] = (out, {self._scope})
        elif getattr(func, "__name__", "") in _GROUPED:
            self._note_rows_of("output", out)
            self._note_largest("peak", out)
        elif func in _CONVOLUTIONS:
            self._note_convolution()
            self._convolved = (self._scope, out)
        elif func in (F.batch_norm, torch.batch_norm) and self._convolved is not None and args[0] is self._convolved[1]:
            self._convolved = (self._convolved[0], out)
            self.folded.add(self._convolved[0])
        elif func in _PRODUCTS and out.is_floating_point():
            self._note_largest("product", out)
        elif func is F.scaled_dot_product_attention:
            self._note_attention(*args[:3], **(kwargs or {}))
        elif func in _COMPARED:
            self._note_compared(args[0])
            if _COMPARED[func] == "relu":
                self._note_largest("relu", args[0])
        elif func in _LAYER_NORMS or func in _RMS_NORMS:
            self.note_rows(args[0], centred=func in _LAYER_NORMS)
            self._note_gain(*args[2:3], **(kwargs or {}))
        elif func in _SUMS or func in _SAME:
            self._follow(out, args)
        return out

    @property
    def _scope(self) -> str:
        return self._running[-1] if self._running else ""

    def _note(self, quantity: str, value: float, scope: str | None = None) -> None:
        scope = self._scope if scope is None else scope
        known = self.largest.setdefault(scope, {})
        if not math.isfinite(value):
            raise DomainError(f"calibration: module '{scope}' of the plaintext model makes NaN or infinity")
        known[quantity] = max(known.get(quantity, 0.0), value)

    def _note_convolution(self) -> None:
        """The last convolution, or the batch norm that its weights will contain."""
        if self._convolved is not None:
            scope, out = self._convolved
            self._note_rows_of("output", out, scope)
            self._note_largest("peak", out, scope)
            self._convolved = None

    def _note_rows_of(self, quantity: str, x: Tensor, scope: str | None = None) -> None:
        """Norms of rows, or where these are short, of the pieces that the check of ranges sums up."""
        x = x.detach().float()
        if x.dim() and x.shape[-1] < PIECE:
            x = F.pad(x.reshape(-1), (0, -x.numel() % PIECE)).view(-1, PIECE)
        rows = x.norm(dim=-1)
        self._note(quantity, float(rows.max()) if rows.numel() else 0.0, scope)

    def _note_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, scale: float | None = None,
        **_: object,
    ) -> None:  # fmt: skip
        """Values, and scores of fused attention before and after scaling; ranges where nothing is added to them."""
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query.float() @ key.float().mT
        largest = float(scores.abs().max())
        self._note("product", largest)
        self._note("largest score", largest / math.sqrt(query.shape[-1]))
        if attn_mask is None or attn_mask.dtype == torch.bool:
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            self._note_rows_of("score", factor * scores)
            self._note("value", float(value.detach().float().square().sum((1, 3)).sqrt().max()))

    def _note_compared(self, x: Tensor) -> None:
        """Arguments of an activation; 1.702 of them where GELU is x sigmoid(1.702 x)."""
        self._note_rows_of("compare", 1.702 * x)
        self._note_largest("peak", x)

    def _note_largest(self, quantity: str, x: Tensor, scope: str | None = None) -> None:
        if x.numel():
            self._note(quantity, float(x.detach().abs().max()), scope)

    def note_rows(self, x: Tensor, centred: bool) -> None:
        """The rows of a norm's input."""
        x = x.detach().double()
        squares = (x - x.mean(-1, keepdim=True) if centred else x).square().mean(-1)
        self._note("square", float(x.square().mean(-1).max()))  # with the mean, which the check of rows sees, too
        small = [self.smallest.get(self._scope, math.inf), *squares[squares > 0].flatten().tolist()]
        self.smallest[self._scope] = min(small)
        self._note("entry", float(x.abs().max()))
        self.widths[self._scope] = x.shape[-1]

    def _note_gain(self, weight: Tensor | None = None, offset: float = 0.0, **_: object) -> None:
        if weight is not None:
            self._note_largest("gain", weight + offset)

    def _follow(self, out: TorchArg, args: Sequence[TorchArg]) -> None:
        """A sum carries the products of both sides; so does what is the same tensor under another shape."""
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return
        found = [self._streams[id(a)][1] for a in args if isinstance(a, Tensor) and id(a) in self._streams]
        if found:
            self._streams[id(out)] = (out, set().union(*found))

    def _read(self, x: Tensor) -> None:
        """The running norm reads x: products that were added to it belong to this norm, and to no later one."""
        stream = self._streams.get(id(x))
        if stream is not None:
            for name in stream[1]:
                self.feeds.setdefault(name, set()).add(self._scope)
            self._streams[id(x)] = (x, set())

    def forget(self) -> None:
        """The run is over: drop the tensors that were followed."""
        self._note_convolution()
        self._streams.clear()
        self.readers.forget()


@contextmanager
def watching(model: nn.Module) -> Iterator[Largest]:
    """`Largest` over everything that `model` does inside."""
    largest = Largest(model)
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(largest.enter).remove)
            stack.callback(module.register_forward_hook(largest.leave, always_call=True).remove)
        stack.callback(largest.forget)
        with torch.no_grad(), largest:
            yield largest


def ranges_of(largest: Largest, config: PrivateConfig) -> Ranges:
    """Exponents with head room for what was met. Raises DomainError naming the module whose values do not fit."""
    modules: dict[str, dict[str, int]] = {}
    for name, met in largest.largest.items():
        reached, bits = met.get("relu", 0.0), config.relu_bits
        if bits is not None and reached >= 2.0 ** (bits - 1 - config.frac_bits):
            raise DomainError(
                f"module '{name}' gets {reached:.3g}, and relu_bits={bits} with {config.frac_bits} fractional bits "
                f"states less than {2.0 ** (bits - 1 - config.frac_bits):g}. Nothing was sent. Want "
                f"relu_bits={math.floor(math.log2(reached)) + 2 + config.frac_bits} or more (None: 2^20)"
            )
        entry = max(met.get(key, 0.0) for key in ("peak", "entry"))
        limits = {"product": REACH + 5, "largest score": _MOST_SCORE}
        for reached, limit in ((entry, REACH), *((met.get(key, 0.0), most) for key, most in limits.items())):
            if reached < 2.0**limit:
                continue
            raise DomainError(
                f"module '{name}' has values of 2^{math.log2(reached):.1f}; want less than 2^{limit}. Nothing was "
                "sent. The library's fixed-point formats are too small for this model; scale that layer's weights down "
                "if its architecture allows"
            )
        known: dict[str, int] = {
            key: min(exponent(met[key]), LARGEST_EXPONENT)
            for key in ("output", "compare", "score", "value")
            if key in met
        }
        if "square" in met:
            known["square"] = exponent(met["square"], SQUARE_HEAD_ROOM)
        if met.get("gain", 0.0) > 0.0:  # the weights themselves: no head room
            known["gain"] = max(0, bits_above(met["gain"]))
        modules[name] = known
    _check_ring(largest, config)
    for norm, width in largest.widths.items():
        fit = fitting_bits(width, modules[norm]["square"])
        if LEAST_BITS <= fit < config.frac_bits and 2.0**-fit <= ROUNDING * math.sqrt(largest.smallest[norm]):
            modules[norm]["frac"] = fit
    for product, norms in largest.feeds.items():
        fits = [modules[norm].get("frac", config.frac_bits) for norm in norms]
        if product in modules and all(fit < config.frac_bits for fit in fits):
            modules[product]["frac"] = min(fits)
    return Ranges({name: known for name, known in modules.items() if known})


def _check_ring(largest: Largest, config: PrivateConfig) -> None:
    """Raise DomainError for the module that outgrows a product of a 32-bit ring; warn (TightRange) of one near it."""
    limit = 2.0 ** (Ring(config.ring).value_bits - 2 * config.frac_bits)
    peaks = {name: met["peak"] for name, met in largest.largest.items() if "peak" in met}
    worst = max(peaks, key=lambda name: peaks[name], default=None)
    if config.ring == 64 or worst is None or peaks[worst] < limit / 2:
        return
    fitting = math.floor((Ring(config.ring).value_bits - math.ceil(math.log2(peaks[worst])) - 1) / 2)
    found = (
        f"module '{worst}' reached {peaks[worst]:.3g} in calibration, and a {config.ring}-bit ring with "
        f"{config.frac_bits} fractional bits holds less than {limit:g}"
    )
    room = f"frac_bits={fitting} or ring=64 gives room" if fitting >= LEAST_BITS else "ring=64 gives room"
    if peaks[worst] >= limit:
        raise DomainError(
            f"{found}. Nothing was sent. {room}; so do images like yours (images=some_images), if those of noise are "
            "what is too large"
        )
    warnings.warn(
        f"{found}: values beyond that are garbage, of which the check of ranges sees only what outgrows everything. "
        f"{room}; `calibrate=False` silences this for images that you have tried (private-llm diff)",
        TightRange,
        stacklevel=5,
    )


def warn_of_small_rows(largest: Largest, config: PrivateConfig) -> None:
    """Warn (LowPrecision) of what keeps few digits: rows of norms that are very small, scores that are very large."""
    small = {name: math.sqrt(square) for name, square in largest.smallest.items() if math.isfinite(square)}
    least = 2.0**-config.frac_bits / VISIBLE
    hit = [name for name, size in small.items() if size < least]
    if hit:
        worst = min(hit, key=lambda name: small[name])
        _warn(
            f"{len(hit)} norm(s) get rows with a root mean square of {small[worst]:.1g} ('{worst}'), and with "
            f"{config.frac_bits} fractional bits that is {small[worst] * 2.0**config.frac_bits:.1f} units: answers may "
            "differ from the plaintext model's. Scale what is added there up (a norm undoes it), or raise frac_bits"
        )
    scores = {
        name: met["largest score"]
        for name, met in largest.largest.items()
        if met.get("largest score", 0.0) > _LARGE_SCORE
    }
    if scores:
        worst = max(scores, key=lambda name: scores[name])
        _warn(
            f"attention scores of '{worst}' reach {scores[worst]:.0f}; a norm's relative error of 1e-4 is "
            f"{scores[worst] * 1e-4:.2f} there, so answers may differ from the plaintext model's"
        )


def _warn(text: str) -> None:
    warnings.warn(text, LowPrecision, stacklevel=7)
