"""From a module to its description: torch.fx follows its forward once, at the owner of the model.

Functions of PyTorch that do a module's work (`F.relu`) become modules of their own, so that plans and costs name them.
Refused by name: unknown modules and functions, weights used outside modules, hooks, control flow on values.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from private_llm.errors import PatchMismatch, listed
from private_llm.nn.activations import ACTIVATIONS
from private_llm_hf.vision.description import HEADS, KINDS, check_description, kind_name, kind_of, users_of


def _called(op: object) -> object:
    """How a trace names a callable of PyTorch: methods of tensors by name."""
    name = getattr(op, "__name__", "")
    return name if op is getattr(Tensor, name, None) else op


_AS_MODULE: dict[object, str] = {
    **{_called(op): made.module.__name__ for made in ACTIVATIONS if made.module is not None for op in made.ops},
    F.max_pool2d: "MaxPool2d", F.avg_pool2d: "AvgPool2d", F.adaptive_avg_pool2d: "AdaptiveAvgPool2d",
    F.dropout: "Dropout", F.softmax: "Softmax", torch.softmax: "Softmax", "softmax": "Softmax",
    F.log_softmax: "LogSoftmax", torch.log_softmax: "LogSoftmax",
}  # fmt: skip
"""Functions that become modules; after the input they take the module's arguments, and then these."""
_MORE = {"MaxPool2d": ("return_indices",), "AvgPool2d": ("divisor_override",), "Dropout": ("p", "training", "inplace")}

_OF_TORCH = ("add", "mul", "flatten", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "mean")
_AS_FUNCTION: dict[object, str] = {
    **{way: name for name in _OF_TORCH for way in (getattr(torch, name), name)},  # the methods have the same names
    operator.add: "add", operator.mul: "mul", operator.getitem: "item", torch.cat: "cat", "view": "reshape",
    "size": "size", "contiguous": "same",
}  # fmt: skip
_PLAIN = ("add", "mul")  # functions that take their operands alone
_LISTS = ("reshape", "permute")  # functions that take sizes either one by one or as a list

_ALIASES = ("Identity", "Dropout", "Dropout2d", "same")  # return their input itself; `flatten` may return a view
_VIEWS = ("Flatten", "flatten", "reshape", "permute", "transpose", "unsqueeze", "squeeze")


def describe_module(module: nn.Module) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """The description of `module` and its modules by name. Raises PatchMismatch listing what has no rule."""
    root = nn.Sequential(module) if kind_name(type(module)) else module
    if root is module and _own_code(module) is not None:
        raise PatchMismatch(f"{type(module).__name__} {_own_code(module)}, which parties do not run; undo that")
    training = {id(part): part.training for part in root.modules()}
    root.eval()
    try:
        graph = _Tracer().trace(root)
    except (fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise PatchMismatch(
            f"{type(module).__name__}: its forward cannot be followed ({type(error).__name__}: {error}); a network "
            "may call modules and functions, but not decide by values"
        ) from None
    finally:
        for part in root.modules():
            part.training = training[id(part)]
    return _Describer(root, graph).run()


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return kind_name(type(m)) is not None or super().is_leaf_module(m, module_qualified_name)


class _Describer:
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self._root, self._nodes = root, list(graph.nodes)
        self._taken = {name for name, _ in root.named_modules()}
        self._modules: dict[str, nn.Module] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._steps: list[dict[str, Any]] = []
        self._value: dict[fx.Node, int] = {}
        self._unmatched: list[str] = []
        self._object: list[int] = [0]  # which tensor object a value is, and whose memory it uses
        self._memory: list[int] = [0]
        self._written: dict[int, int] = {}

    def run(self) -> tuple[dict[str, Any], dict[str, nn.Module]]:
        result: object = None
        for node in self._nodes:
            if node.op == "placeholder":
                if self._value and not node.args:
                    self._unmatched.append(f"input {node.target}")
                self._value[node] = 0
            elif node.op == "output":
                result = node.args[0]
            elif node.op == "get_attr":
                self._unmatched.append(f"{node.target} (weight used outside a module)")
                self._value[node] = 0
            elif node.op == "call_module":
                self._call_module(node)
            else:
                self._call(node)
        if self._unmatched:
            raise PatchMismatch(
                f"{type(self._root).__name__}: no private rule for {len(self._unmatched)} part(s): "
                f"{listed(self._unmatched)}; networks are made of {', '.join(KINDS)}, and of classes with a handler "
                "(register_handler)"
            )
        if not self._steps or not isinstance(result, fx.Node) or self._value.get(result) != len(self._steps):
            raise PatchMismatch(f"{type(self._root).__name__}: want one tensor, made by the last step, as output")
        last = self._steps[-1].get("module")
        head = last if last is not None and self._facts[last]["type"] in HEADS else None
        _pool_first(self._steps, self._facts)
        description = {"modules": self._facts, "steps": self._steps, "head": head}
        return check_description(description), self._modules

    # -- nodes -----------------------------------------------------------------------------------------------------
    def _call_module(self, node: fx.Node) -> None:
        name = str(node.target)
        module = self._root.get_submodule(name)
        reason = _refusal(module)
        if reason is not None:
            self._unmatched.append(f"{name} ({reason})")
            self._skip(node)
            return
        self._add_module(node, name, module, node.args, bool(getattr(module, "inplace", False)))

    def _call(self, node: fx.Node) -> None:
        target: object = node.target
        if target is getattr and node.args[1:] == ("shape",):
            self._add(node, {"function": "size", "args": [self._json(node.args[0])]}, "size")
        elif target in _AS_MODULE:
            self._as_module(node, _AS_MODULE[target])
        elif target in _AS_FUNCTION:
            name = _AS_FUNCTION[target]
            args = [self._json(arg) for arg in node.args]
            if name in _LISTS and not isinstance(args[1], list):
                args = [args[0], args[1:]]
            options = {key: self._json(value) for key, value in node.kwargs.items()}
            if options and name in _PLAIN:
                self._unmatched.append(f"{node.name} ({name} with {', '.join(options)})")
            step = {"function": name, "args": args}
            self._add(node, {**step, "options": options} if options else step, name)
        else:
            shown = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            self._unmatched.append(node.name if node.name == shown else f"{node.name} ({shown})")
            self._skip(node)

    def _as_module(self, node: fx.Node, kind: str) -> None:
        own = KINDS[kind].options
        names = (*own, *_MORE.get(kind, ("inplace",)))
        given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        in_place = bool(given.pop("inplace", False))
        options = {name: value for name, value in given.items() if name in own}
        more = [value for name, value in given.items() if name not in (*own, "input", "p", "_stacklevel")]
        if (
            len(node.args) - 1 > len(names)
            or any(more)
            or any(isinstance(value, fx.Node) for value in options.values())
        ):
            self._unmatched.append(f"{node.name} ({kind} with arguments that have no rule)")
            self._skip(node)
            return
        name = node.name
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        source = node.args[:1] or (node.kwargs["input"],)
        self._add_module(node, name, KINDS[kind].build(**options), source, in_place)

    # -- steps -------------------------------------------------------------------------------------------------------
    def _add_module(self, node: fx.Node, name: str, module: nn.Module, args: Sequence[object], in_place: bool) -> None:
        self._facts[name], self._modules[name] = _facts(module), module
        step = {"module": name, "args": [self._json(arg) for arg in args]}
        self._add(node, step, self._facts[name]["type"], in_place)

    def _add(self, node: fx.Node, step: dict[str, Any], what: str, in_place: bool = False) -> None:
        """Append a step, and note what an in-place one writes to."""
        self._steps.append(step)
        place = len(self._steps)
        self._value[node] = place
        first = step["args"][0] if step["args"] else None
        source: int = first["value"] if isinstance(first, dict) else place
        aliases = in_place or what in _ALIASES
        self._object.append(place)
        self._memory.append(place)
        if aliases:
            self._object[place] = self._object[source]
        if aliases or what in _VIEWS:
            self._memory[place] = self._memory[source]
        if in_place:
            self._written[self._memory[place]] = place

    def _skip(self, node: fx.Node) -> None:
        self._add(node, {"function": "same", "args": []}, "skipped")

    def _json(self, value: object) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, fx.Node):
            return {"value": self._now(self._value[value], value.name)}
        if isinstance(value, tuple | list):
            return [self._json(item) for item in value]
        return value

    def _now(self, place: int, name: str) -> int:
        """The value that a tensor holds by now, if an in-place operation has changed it."""
        writer = self._written.get(self._memory[place])
        if writer is None or writer <= place:
            return place
        if self._object[writer] != self._object[place]:
            raise PatchMismatch(f"{name} is read after an in-place operation on a view of it; use inplace=False")
        return writer


def _pool_first(steps: list[dict[str, Any]], facts: dict[str, dict[str, Any]]) -> None:
    """Let a max pool go before the ReLU whose output it alone takes: the same function, with fewer comparisons."""
    kinds = [facts[step["module"]]["type"] if "module" in step else None for step in steps]
    users = users_of(steps)
    for place, kind in enumerate(kinds):
        pools = users.get(place + 1, [])
        if kind in ("ReLU", "ReLU6") and len(pools) == 1 and kinds[pools[0] - 1] == "MaxPool2d":
            relu, pool = steps[place], steps[pools[0] - 1]
            relu["module"], pool["module"] = pool["module"], relu["module"]


def _refusal(module: nn.Module) -> str | None:
    name = type(module).__name__
    if kind_name(type(module)) is None:
        return name
    if _own_code(module) is not None:
        return f"{name} {_own_code(module)}"
    unusual = {
        "padding_mode": ("zeros",), "return_indices": (False,), "divisor_override": (None,),
        "track_running_stats": (True,),
    }  # fmt: skip
    for key, usual in unusual.items():
        if getattr(module, key, usual[0]) not in usual:
            return f"{name} with {key}={getattr(module, key)!r}"
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        return f"{name} over {len(module.normalized_shape)} dimensions"
    if getattr(module, "padding", 0) == "same" and _same(module) is None:
        return f"{name} with uneven padding"
    return None


def _own_code(module: nn.Module) -> str | None:
    """What of a module that is not followed inside runs beside the forward of its class, if anything."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "with hooks"
    return "with a forward of this one object" if "forward" in vars(module) else None


def _facts(module: nn.Module) -> dict[str, Any]:
    name = kind_name(type(module))
    kind = kind_of(name)
    facts: dict[str, Any] = {"type": name}
    for key in kind.options if kind is not None else ():
        if not hasattr(module, key):
            raise PatchMismatch(f"{name}: the module lacks the attribute {key!r}; want all settings as attributes")
        value: Any = getattr(module, key)
        if name not in KINDS:
            facts[key] = list(value) if isinstance(value, tuple) else value
            continue
        if key == "bias":
            value = value is not None
        elif key == "padding" and isinstance(value, str):
            value = 0 if value == "valid" else _same(module)
        elif key == "normalized_shape":
            value = value[0]
        facts[key] = list(value) if isinstance(value, tuple) else value
    return facts


def _same(module: nn.Module) -> list[int] | None:
    """Padding that keeps the size, where it is equal on both sides."""
    full = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]  # type: ignore[arg-type]
    return None if any(size % 2 for size in full) else [size // 2 for size in full]
