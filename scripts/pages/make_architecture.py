"""Draw docs/architecture.svg: the packages in layers, as the imports in the tree make them.

python scripts/pages/make_architecture.py          write the picture
python scripts/pages/make_architecture.py --check  write nothing; exit 1 if the picture is not that of the tree
python scripts/pages/make_architecture.py --tiny   print the layers, write nothing

A package lies one layer above the highest one that it imports from, so no arrow is needed: imports only go down.
private_llm_hf lies above private_llm as a whole, since any part of it may import any of that.
"""

import ast
import sys
import textwrap
from functools import cache
from html import escape
from pathlib import Path

from generated import run

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
ABOVE = ROOT / "integrations"
"""Where private_llm_hf, whose packages are drawn as those of private_llm are, and private_llm_cli, one box, lie."""

WIDTH, GAP, LINE, MARGIN = 960, 10, 16, 16
"""Of the picture: its width, between boxes, of a line of text, at the edges; in pixels."""
_LETTER = 6.4
"""Mean width of a letter of the descriptions."""
PARTED = ("kv_cache", "token_sharding")
"""Packages whose parts lie in different layers: packages within, and the files beside these, if there are any."""
_COLOURS = ("#e8eef7", "#dbe5f3")


@cache
def packages() -> dict[str, list[Path]]:
    """Files of each package or module directly below private_llm and private_llm_hf, and of the command line."""
    found: dict[str, list[Path]] = {"private_llm_cli": sorted((ABOVE / "private_llm_cli").rglob("*.py"))}
    for path in [*sorted((ROOT / "private_llm").iterdir()), *sorted((ABOVE / "private_llm_hf").iterdir())]:
        name = path.stem if path.parent.parent == ROOT else f"private_llm_hf.{path.stem}"
        if name in PARTED:
            inner = (p for p in sorted(path.iterdir()) if (p / "__init__.py").exists())
            found.update({f"{name}.{p.name}": sorted(p.rglob("*.py")) for p in inner})
            beside = sorted(path.glob("*.py"))
            found.update({name: beside} if len(beside) > 1 else {})
        elif path.is_dir() and (path / "__init__.py").exists():
            found[name] = sorted(path.rglob("*.py"))
        elif path.suffix == ".py" and path.stem != "__init__":
            found[name] = [path]
    return found


@cache
def homes() -> dict[str, str]:
    """The part behind each name that a package of PARTED gives to others."""
    found = {}
    for name in PARTED:
        for node in ast.walk(ast.parse((ROOT / "private_llm" / name / "__init__.py").read_text(encoding="utf-8"))):
            parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            if parts[:2] == ["private_llm", name]:
                found |= {f"{name}.{alias.name}": ".".join(parts[1:3]) for alias in node.names}
    return found


@cache
def imported(path: Path) -> frozenset[str]:
    """Packages that a file imports from, wherever in it, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names if id(node) not in typing_only else ():
            parts = name.split(".")
            if parts[0] in ("private_llm_hf", "private_llm_cli"):
                places = (".".join(parts[:2]), parts[0], "private_llm_hf.api")  # the last: of names that users have
                found.add(next(place for place in places if place in packages()))
            elif parts[0] == "private_llm" and len(parts) > 1:
                inner = homes().get(".".join(parts[1:3]), ".".join(parts[1:3]))
                found.add(inner if inner in packages() else parts[1])
    return frozenset(found)


def layers() -> list[list[str]]:
    """Names by layer, the lowest first. Raises RecursionError if packages import each other in a circle."""
    files = packages()
    needs = {name: {n for path in paths for n in imported(path)} & set(files) - {name} for name, paths in files.items()}
    for name in files:
        if name.startswith("private_llm_hf."):
            needs[name].update(other for other in files if not other.startswith(("private_llm_", "__main__")))
    level: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in level:
            level[name] = 1 + max((height(other) for other in needs[name]), default=-1)
        return level[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(height, files)))]
    for name in sorted(files):
        rows[level[name]].append(name)
    return rows


def described(name: str) -> str:
    """The first sentence of a package's docstring, without its end."""
    first = packages()[name]
    source = next((path for path in first if path.name == "__init__.py"), first[0])
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0]
    return sentence.rstrip(".").replace("`", "")


def drawing() -> str:
    """The picture as SVG text: the highest layer on top."""
    rows = layers()[::-1]
    body, y = [], MARGIN + 2 * LINE
    for number, row in enumerate(rows):
        width = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        texts = [textwrap.wrap(described(name), int((width - 16) / _LETTER)) for name in row]
        height = LINE * (1 + max(map(len, texts))) + 14
        for index, (name, lines) in enumerate(zip(row, texts, strict=True)):
            x = MARGIN + index * (width + GAP)
            body.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="4" '
                f'fill="{_COLOURS[number % 2]}" stroke="#4c72b0"/>'
            )
            body.append(f'<text x="{x + 8:.0f}" y="{y + 18}" font-weight="bold">{escape(name)}</text>')
            for line, text in enumerate(lines):
                body.append(f'<text x="{x + 8:.0f}" y="{y + 18 + LINE * (line + 1)}">{escape(text)}</text>')
        y += height + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + MARGIN}" '
        f'viewBox="0 0 {WIDTH} {y + MARGIN}" font-family="sans-serif" font-size="12">'
    )
    title = f'<text x="{MARGIN}" y="{MARGIN + 8}">A package imports only from layers below its own.</text>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', title, *body, "</svg>"]) + "\n"


def outline() -> str:
    """The layers as text, the highest first."""
    return "\n".join(", ".join(row) for row in layers()[::-1])


def main() -> int:
    """Parse, draw, write or compare."""
    return run(__doc__, "make_architecture.py", PICTURE, drawing, outline)


if __name__ == "__main__":
    sys.exit(main())
