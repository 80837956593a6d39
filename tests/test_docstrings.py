"""Docstrings say what a caller must know: costs and shapes of the protocol interfaces, and the errors raised."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from private_llm import errors
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.trio.division import Family

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"private_llm": ROOT, "private_llm_hf": ROOT / "integrations"}
"""Where they lie."""
INTERFACES = (Protocol, ClientEnd)
ERRORS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.PrivateLLMError)
}
UNREACHABLE = {("open_listeners", "ConfigError")}
"""Errors that a function's helpers cannot raise when it calls them: port 0 of an address is not resolved."""
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
"""Methods whose errors a class's docstring names."""

NAME = r"`(?:[\w./]+\.)?(\w+)`"
FREE = re.compile(r"\bLocal\b")
ROUNDS = re.compile(r"\b[Rr]ounds?\b")
BYTES = re.compile(r"\b(?:[Bb]ytes|bits a gate|elements? an opened one)\b")
SAME_COST = re.compile(rf"\b[Aa]s {NAME}|^{NAME} of\b")
SAME_ERRORS = re.compile(
    rf"(?:\b[Aa]s|\bErrors of) (?:those of )?{NAME}(?: and {NAME})?|{NAME}, (?:at its|with its) cost"
)
SHAPE = re.compile(r"\[[^\]]*\]|\bshapes?\b|broadcasting|1-D|\bsize\b|\brows and count\b|rows?, of equal\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def one_line(docstring: str | None) -> str:
    return " ".join((docstring or "").split())


def described(node: Function | ast.ClassDef | ast.Module) -> str:
    return one_line(ast.get_docstring(node))


# -- the protocol interfaces ---------------------------------------------------------------------------------------


def interface_methods() -> list[tuple[type, str]]:
    return [
        (interface, name)
        for interface in INTERFACES
        for name, value in vars(interface).items()
        if not name.startswith("_") and inspect.isfunction(value)
    ]


each_method = pytest.mark.parametrize(
    ("interface", "name"), interface_methods(), ids=lambda value: getattr(value, "__name__", value)
)


def states_cost(doc: str, seen: tuple[str, ...] = ()) -> bool:
    """Whether a docstring says that nothing is sent, or rounds and bytes, or whose method's they are."""
    if FREE.search(doc) or (ROUNDS.search(doc) and BYTES.search(doc)):
        return True
    referred = [name for found in SAME_COST.findall(doc) for name in found if name and name not in seen]
    docs = [one_line(getattr(kind, name).__doc__) for name in referred for kind in INTERFACES if hasattr(kind, name)]
    return any(states_cost(other, (*seen, *referred)) for other in docs)


def test_the_interfaces_were_found() -> None:
    assert {(Protocol, "mul"), (Protocol, "msb"), (Protocol, "lookup")} <= {*interface_methods()}
    assert len(interface_methods()) >= 30


@each_method
def test_interfaces_state_rounds_and_bytes(interface: type, name: str) -> None:
    doc = one_line(vars(interface)[name].__doc__)
    assert states_cost(doc), f"{interface.__name__}.{name}: say rounds and bytes, where they are stated, or `Local.`"


@each_method
def test_interfaces_state_shapes(interface: type, name: str) -> None:
    """Of what gives a share, bits or a tensor."""
    function = vars(interface)[name]
    if {"Share", "BitShare", "Tensor", "Tensor | None"} & {function.__annotations__["return"]}:
        doc = one_line(function.__doc__)
        assert SHAPE.search(doc), f"{interface.__name__}.{name}: say which shape comes out"


def test_a_docstring_that_states_no_cost_is_found() -> None:
    assert not states_cost("x times y.")
    assert not states_cost("x times y; 2 rounds.")
    assert not states_cost("x times y, as `nothing_of_this_name`.")
    assert states_cost("x times y; 2 rounds, 24 bytes an element.")
    assert states_cost("x times y, as `mul`.")


# -- errors --------------------------------------------------------------------------------------------------------


Private = dict[str, list[Function]]


def raised(node: ast.AST, private: Private, seen: frozenset[str] = frozenset()) -> set[str]:
    """Errors of this project that a function raises itself, or in private functions of its file that it calls."""
    found: set[str] = set()
    if isinstance(node, Function) and any(called(each) == "noted" for each in node.decorator_list):
        return found  # which catches them (`replay.transports`)
    if isinstance(node, ast.Raise) and node.exc is not None:
        made = called(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        found |= {made, *(called(function.returns) for function in private.get(made, []) if function.returns)} & ERRORS
    elif isinstance(node, ast.Call) and (name := called(node.func)) not in seen:
        found.update(*(raised(function, private, seen | {name}) for function in private.get(name, [])))
    if isinstance(node, ast.Try):
        tried = set[str]().union(*(raised(part, private, seen) for part in node.body))
        caught = {called(kind) for handler in node.handlers for kind in ast.walk(handler.type or handler)}
        parts: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
        left = set() if "Exception" in caught else tried - caught
        return found | left | set[str]().union(*(raised(part, private, seen) for part in parts))
    return found.union(*(raised(part, private, seen) for part in ast.iter_child_nodes(node)))


def called(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@cache
def files(package: str) -> list[Path]:
    return sorted((PACKAGES[package] / package).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> ModuleType:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return import_module(".".join(parts[parts[0] == "integrations" :]).removesuffix(".__init__"))


@cache
def all_descriptions() -> dict[str, list[str]]:
    """Docstrings of all functions, methods and classes by name."""
    found: dict[str, list[str]] = {}
    for path in (path for package in PACKAGES for path in files(package)):
        for node in ast.walk(tree(path)):
            if isinstance(node, Function | ast.ClassDef):
                found.setdefault(node.name, []).append(described(node))
    return found


def names_error(doc: str, error: str, seen: tuple[str, ...] = ()) -> bool:
    """Whether a docstring names an error, or refers to that of another function which does."""
    if re.search(rf"\b{error}\b", doc):
        return True
    referred = [name for found in SAME_ERRORS.findall(doc) for name in found if name and name not in seen]
    docs = [other for name in referred for other in all_descriptions().get(name, [])]
    return any(names_error(other, error, (*seen, *referred)) for other in docs)


def of_all_functions(module: ast.Module) -> str:
    """What a file's docstring says of all its functions: "All raise ..."."""
    return " ".join(re.findall(r"\b(?:All raise|Every \w+ raises) [^.]*\.", described(module)))


def silent(path: Path) -> Iterator[str]:
    """Public functions and methods of a file whose docstrings, those of class and bases included, miss an error."""
    module = tree(path)
    private: Private = {}
    for node in ast.walk(module):
        if isinstance(node, Function) and node.name.startswith("_") and not node.name.startswith("__"):
            private.setdefault(node.name, []).append(node)
    for node in module.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if isinstance(node, Function):
            docs = [described(node), of_all_functions(module)]
            yield from missing(path, node.name, docs, raised(node, private))
            continue
        bases = getattr(module_of(path), node.name).__mro__
        bases += (Protocol,) if Family in bases else ()  # which states what a family's primitives raise
        for method in node.body:
            if isinstance(method, Function) and (method.name in CONSTRUCTORS or not method.name.startswith("_")):
                inherited = [one_line(vars(base)[method.name].__doc__) for base in bases if method.name in vars(base)]
                classes = bases if method.name in CONSTRUCTORS else bases[:1]
                docs = [described(method), *inherited, *(one_line(kind.__doc__) for kind in classes)]
                yield from missing(path, f"{node.name}.{method.name}", docs, raised(method, private))


def missing(path: Path, name: str, docs: list[str], wanted: set[str]) -> Iterator[str]:
    for error in sorted(wanted):
        if (name, error) not in UNREACHABLE and not any(names_error(doc, error) for doc in docs):
            yield f"{path.relative_to(ROOT)}: {name} raises {error}"


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_the_errors(package: str) -> None:
    assert not [line for path in files(package) for line in silent(path)]


def test_an_error_that_is_not_named_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised by the function itself, or by a private one that it calls; not by a private one alone."""
    path = tmp_path / "made.py"
    path.write_text(
        '"""A file."""\n'
        'def own(x):\n    """Of x."""\n    raise DomainError(x)\n'
        'def by_another(x):\n    """Of x."""\n    return _checked(x)\n'
        'def told(x):\n    """Of x. Raises DomainError."""\n    return _checked(x)\n'
        'def referring(x):\n    """As `told`."""\n    return _checked(x)\n'
        "def _checked(x):\n    raise errors.DomainError(x)\n"
    )
    monkeypatch.setattr("tests.test_docstrings.ROOT", tmp_path)
    monkeypatch.setitem(all_descriptions(), "told", ["Of x. Raises DomainError."])
    assert [line.split(": ")[1] for line in silent(path)] == ["own raises DomainError", "by_another raises DomainError"]


@pytest.mark.parametrize("package", PACKAGES)
def test_errors_that_docstrings_promise_exist(package: str) -> None:
    """Behind "Raises" stands an error of this project or of Python, or a class of the same file."""
    for path in files(package):
        known = ERRORS | {*dir(builtins)} | {n.name for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)}
        for node in ast.walk(tree(path)):
            if isinstance(node, Function | ast.ClassDef | ast.Module):
                promised = set(re.findall(r"\b[Rr]aises? ([A-Z]\w+)", described(node)))
                assert promised <= known, f"{path.relative_to(ROOT)}: {sorted(promised - known)}"
