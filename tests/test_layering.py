"""Layers: a package imports only from itself and from layers below it, and modules never import in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from private_llm import token_sharding

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "private_llm": (
        "importing", "errors", "typed_settings", "forks", "ranges", "kv_cache.policies", "sparsity_config",
        "tls_config", "token_sharding.plans", "protocol_facts", "approximations", "config", "threat",
        "kernels", "ring", "net", "assisted", "protocols", "tensor", "replay", "exact", "approx", "oblivious", "nn",
        "kv_cache", "token_sharding.nodes",
    ),
    "private_llm_hf": (
        "transformers_versions", "wire", "models", "vision", "kv_cache", "checkpoint", "token_sharding", "patch_plan",
        "party", "client", "service", "tools", "sparsity", "api",
    ),
}  # fmt: skip
"""Of each package that has some, from the lowest to the highest."""
PACKAGES = {
    "private_llm": ROOT,
    **dict.fromkeys(
        ("private_llm_hf", "private_llm_hosting", "private_llm_gateway", "private_llm_cli"), ROOT / "integrations"
    ),
}
"""The library, its HuggingFace integration, what those run who host a party and a gateway, and the command line, from
the lowest to the highest, and where they lie."""
DOOR = "private_llm.__main__"
"""`python -m private_llm` is the command line: this one file, which nothing imports, starts it."""

ENTRY = "private_llm.token_sharding"
"""The package that is used by the names of its `__init__` only."""

Import = tuple[str, bool]


def modules(folder: Path, package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((folder / package).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(source: str) -> list[Import]:
    """(dotted name, run when the module is imported?) of every import; names of `from a import b` count as `a.b`."""
    tree = ast.parse(source)
    top = set()
    for node in tree.body:
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not typing_only and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            top.update(id(inner) for inner in ast.walk(node))
    found = []
    for node in ast.walk(tree):
        at_top = id(node) in top
        if isinstance(node, ast.Import):
            found += [(alias.name, at_top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(f"{'.' * node.level}{node.module}.{alias.name}", at_top) for alias in node.names]
    return found


@cache
def offered() -> dict[str, str]:
    """The module behind each name of ENTRY, as it is written there for types."""
    tree = ast.parse((ROOT / ENTRY.replace(".", "/") / "__init__.py").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith(ENTRY)]
    return {alias.name: node.module or "" for node in found for alias in node.names}


def layer(name: str) -> str:
    """The layer that a module, or what is imported from it, lies in: a package, or one inside it."""
    package, _, last = name.rpartition(".")
    parts = (offered().get(last, name) if package == ENTRY else name).split(".")
    inner = ".".join(parts[1:3])
    return inner if inner in LAYERS[parts[0]] else parts[1] if len(parts) > 1 else ""


def violations(name: str, source: str) -> list[str]:
    """What module `name` imports against the order; where in the file, or for types alone, makes no difference."""
    package = name.split(".")[0]
    if name in (DOOR, ENTRY):  # the names of ENTRY count where they are imported
        return []
    higher = list(PACKAGES)[list(PACKAGES).index(package) + 1 :]
    targets = [target for target, _ in imports_of(source)]
    bad = [f"{name}: write the whole name of {target}" for target in targets if target[0] == "."]
    bad += [f"{name} imports {target}, a package above" for target in targets if target.split(".")[0] in higher]
    layers = LAYERS.get(package)
    if layers is None:
        return bad
    if any(name == f"{package}.{known.rpartition('.')[0]}" for known in layers):
        allowed: tuple[str, ...] = ()  # whoever imports a part of it imports this package first
    else:
        last = {"private_llm": "threat", "private_llm_hf": "api"}.get(name, layer(name))
        assert last in layers, f"{name}: {last!r} is no layer; add it to LAYERS"
        allowed = layers[: layers.index(last) + 1]
    own = [target for target in targets if target.split(".")[0] == package]
    return bad + [f"{name} imports {target}, which lies above it" for target in own if layer(target) not in allowed]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_imports_from_layers_below_only(package: str) -> None:
    found = modules(PACKAGES[package], package)
    assert found
    bad = [line for name, path in found.items() for line in violations(name, path.read_text())]
    assert not bad, "\n".join(bad)


UNUSED = {
    DOOR: "starts the command line",
    "private_llm_hf.sparsity.powerinfer": "users read published predictors with it (docs/sparsity.md)",
}
"""Modules that nothing in the product and no example imports, and why they are not a study's or a test's."""


def used_by(source: str, known: Collection[str]) -> set[str]:
    """Modules of `known` that a file imports, or names in a text: "module:function", or "package." for all in it."""
    found = set()
    for target, _ in imports_of(source):
        package, _, last = target.rpartition(".")
        module = target if target in known else package
        found.add(offered().get(last, ENTRY) if package == ENTRY else module)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.partition(":")[0])
            if node.value.endswith(".") and node.value.count(".") > 1:
                found.update(name for name in known if name.startswith(node.value))
    return found & set(known)


def test_every_module_of_the_product_is_used_by_it() -> None:
    """What only scripts or tests import lies with them, not in the wheel."""
    files = {name: path for package, folder in PACKAGES.items() for name, path in modules(folder, package).items()}
    used = {name for path in (ROOT / "examples").rglob("*.py") for name in used_by(path.read_text(), files)}
    for name, path in files.items():
        used |= set() if name == ENTRY else used_by(path.read_text(), files) - {name}
    unused = {name for name, path in files.items() if path.name != "__init__.py"} - used
    assert unused == set(UNUSED), "move it to scripts/studies or tests, or say in UNUSED why users need it"


def test_every_class_has_a_name_of_its_own() -> None:
    """Whoever searches for a name finds one thing, also where it begins with an underscore."""
    homes: dict[str, list[str]] = {}
    for package, folder in PACKAGES.items():
        for name, path in modules(folder, package).items():
            for kind in re.findall(
                r"^ *class _*(\w+)[(:]|^_*([A-Z]\w*[a-z]\w*) = (?!TypeVar)", path.read_text(), re.MULTILINE
            ):
                homes.setdefault("".join(kind), []).append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_nothing_in_the_product_imports_scripts_or_tests() -> None:
    folders = (ROOT / "scripts", ROOT / "tests" / "system")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    outside = {"scripts", "tests", *(name for path in files for name in (path.stem, path.parent.name))} - {"__init__"}
    for package, folder in PACKAGES.items():
        for name, path in modules(folder, package).items():
            bad = {target for target, _ in imports_of(path.read_text()) if target.partition(".")[0] in outside}
            assert not bad, f"{name} imports {bad}, which the wheel lacks"


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ("from a.b import c", {"a.b.c"}),
        ("from a.e import x", {"a.e"}),
        ("def f():\n    import a.b.d", {"a.b.d"}),
        ("start('a.b:serve')", {"a.b"}),
        ("load(f'a.b.{name}')", {"a.b.c", "a.b.d"}),
        ("print('see a.b: it')", set()),
    ],
)
def test_the_checker_sees_what_is_used(line: str, used: set[str]) -> None:
    assert used_by(line, ("a.b", "a.b.c", "a.b.d", "a.e")) == used


def test_nothing_imports_the_door() -> None:
    for package, folder in PACKAGES.items():
        for name, path in modules(folder, package).items():
            assert not [target for target, _ in imports_of(path.read_text()) if target.startswith(DOOR)], name


def past_the_entry(path: str, source: str) -> list[str]:
    """What a file takes from inside ENTRY. Tests may, where it is not offered; those of the package itself anyway."""
    if path.startswith((ENTRY.replace(".", "/"), "tests/token_sharding")) or ENTRY.rpartition(".")[2] not in source:
        return []
    taken = [target.removeprefix(f"{ENTRY}.") for target, _ in imports_of(source) if target.startswith(f"{ENTRY}.")]
    bad = [name for name in taken if name not in offered()]
    return [name for name in bad if not path.startswith("tests/") or name.rpartition(".")[2] in offered()]


def test_others_use_token_sharding_by_its_entry() -> None:
    folders = ("private_llm", "integrations", "scripts", "examples", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        assert not past_the_entry(name, path.read_text()), f"{name}: want `from {ENTRY} import ...`"


def test_the_entry_gives_what_it_says_for_types() -> None:
    assert set(token_sharding.__all__) == set(offered())
    for name, module in offered().items():
        assert getattr(token_sharding, name) is getattr(import_module(module), name), name
    with pytest.raises(AttributeError, match="has no attribute 'Node'"):
        _ = token_sharding.Node  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "line", "wrong"),
    [
        ("scripts/a.py", "from private_llm.token_sharding import ForwardStep", False),
        ("scripts/a.py", "from private_llm.token_sharding.nodes.facts import ForwardStep", True),
        ("scripts/a.py", "from private_llm.token_sharding.nodes import facts", True),
        ("private_llm_cli/app.py", "def f():\n    import private_llm.token_sharding.plans", True),
        ("tests/hf/a.py", "from private_llm.token_sharding.nodes.facts import ForwardStep", True),
        ("tests/hf/a.py", "from private_llm.token_sharding.nodes import facts", False),
        ("tests/token_sharding/a.py", "from private_llm.token_sharding.nodes.facts import ForwardStep", False),
    ],
)
def test_the_checker_sees_what_goes_past_the_entry(path: str, line: str, wrong: bool) -> None:
    assert bool(past_the_entry(path, line)) is wrong


BACKEND = re.compile(
    r"private_llm\.kernels\.(\w+\.((seeded_)?(cpu|triton)|planes|tiles|aes|amx(_tiles)?)|attention|comparison_keys)(\.|$)"
)
"""Modules with kernels of one kind of device."""
REACHES = tuple(f"private_llm.{name}" for name in ("kernels.", "replay.ahead", "ring.comparison_keys", "ring.dpf"))
"""Who calls them: operations, who compiles them ahead, and the operations on keys, which are made on CPUs only."""


def test_kernels_are_reached_by_their_operations() -> None:
    seen = 0
    for package, folder in PACKAGES.items():
        for name, path in modules(folder, package).items():
            bad = [target for target, _ in imports_of(path.read_text()) if BACKEND.match(target)]
            seen += len(bad)
            assert not bad or name.startswith(REACHES), f"{name}: {bad}"
    assert seen > 20


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_do_not_import_each_other_in_a_circle(package: str) -> None:
    found = modules(PACKAGES[package], package)
    edges: dict[str, set[str]] = {}
    for name, path in found.items():
        targets = {target for target, at_top in imports_of(path.read_text()) if at_top}
        edges[name] = {t if t in found else t.rpartition(".")[0] for t in targets} & set(found) - {name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(found):
        visit(name, ())


@pytest.mark.parametrize(
    ("name", "line", "wrong"),
    [
        ("private_llm.net.wire", "from private_llm.protocols.session import Session", True),
        ("private_llm.net.wire", "from private_llm.ring.ring import Ring", False),
        ("private_llm.nn.linear", "import private_llm_hf", True),
        ("private_llm.nn.linear", "def f():\n    import private_llm_hf", True),
        ("private_llm.nn.linear", "if TYPE_CHECKING:\n    from private_llm_hf import Network", True),
        ("private_llm.nn.linear", "def f():\n    from private_llm_cli.app import main", True),
        ("private_llm_hf.api", "def f():\n    from private_llm_cli import options", True),
        ("private_llm_hf.models.norms", "if TYPE_CHECKING:\n    from private_llm_hf.party.model import release", True),
        ("private_llm_hf.party.party", "def f():\n    from private_llm_hf.client.launch import x", True),
        ("private_llm_hf.client.launch", "from private_llm_hf.party.party import run_party", False),
        ("private_llm_hf.client.launch", "from private_llm_hf import patch", True),
        ("private_llm_hf", "from private_llm_hf.api import patch", False),
        ("private_llm_cli.commands.demo", "import private_llm_hf", False),
        ("private_llm.__main__", "from private_llm_cli.app import main", False),
        ("private_llm.nn.linear", "from .norm import x", True),
        ("private_llm", "from private_llm.nn.linear import x", True),
        ("private_llm.config", "from private_llm.kv_cache.policies.policy import KEEP_ALL", False),
        ("private_llm.nn.attention", "from private_llm.kv_cache.buffer import KVBuffer", True),
        ("private_llm.kv_cache", "from private_llm.kv_cache.buffer import KVBuffer", True),
        ("private_llm.config", "from private_llm.token_sharding import ShardingPlan", False),
        ("private_llm.config", "from private_llm.token_sharding import ForwardStep", True),
        ("private_llm.net.wire", "def f():\n    from private_llm.token_sharding import Exchange", True),
    ],
)
def test_the_checker_sees_a_wrong_import(name: str, line: str, wrong: bool) -> None:
    assert bool(violations(name, line)) is wrong
