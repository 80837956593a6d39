"""What mkdocs.yml adds to mkdocs: contents from docs/README.md, and files outside docs/ that pages link to."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_ELSEWHERE = "repository"
"""The site's folder for files of the repository that lie outside docs/."""
_LINK = re.compile(r"\]\(([^)#:]+)((?:#[^)]*)?)\)")


# -- links ------------------------------------------------------------------------------------------------------------
def place(path: Path) -> str:
    """Where a file of the repository lies in the site."""
    return str(path.relative_to(DOCS) if path.is_relative_to(DOCS) else Path(_ELSEWHERE, path.relative_to(ROOT)))


def source(uri: str) -> Path:
    """The file of the repository that lies at this place of the site."""
    inside, _, rest = uri.partition("/")
    return ROOT / rest if inside == _ELSEWHERE else DOCS / uri


def linked(page: Path) -> Iterator[Path]:
    """Files that a page links to."""
    for target, _ in _LINK.findall(page.read_text(encoding="utf-8")):
        if (page.parent / target).exists():
            yield (page.parent / target).resolve()


def outside() -> set[Path]:
    """Files outside docs/ that the site needs: what its pages link to, and what those link to."""
    found: set[Path] = set()
    new = set(DOCS.rglob("*.md"))
    while new:
        reached = {target for page in new for target in linked(page) if target.is_file()}
        new = {path for path in reached - found if not path.is_relative_to(DOCS)}
        found |= new
        new = {path for path in new if path.suffix == ".md"}
    return found


def on_files(files: Any, config: Any) -> Any:  # noqa: ANN401 - mkdocs is not always installed
    """Add the files outside docs/."""
    from mkdocs.structure.files import File

    for path in sorted(outside()):
        files.append(File.generated(config, place(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:  # noqa: ANN401
    """Links as they have to be in the site."""
    uri = page.file.src_uri
    here = source(uri).parent

    def moved(found: re.Match[str]) -> str:
        target = (here / found[1]).resolve()
        if not target.is_file():
            return found[0]
        return f"]({os.path.relpath(place(target), Path(uri).parent)}{found[2]})"

    return _LINK.sub(moved, markdown)


# -- contents ---------------------------------------------------------------------------------------------------------
def on_config(config: Any) -> Any:  # noqa: ANN401
    """The contents: the lists of docs/README.md, each under its bold title."""
    config.nav = [{"Contents": "README.md"}]
    for title, pages in re.findall(r"^\*\*([^*]+)\*\*\n\n((?:.+\n)+)", (DOCS / "README.md").read_text("utf-8"), re.M):
        targets = re.findall(r"^\d+\. \[[^]]+\]\(([^)]+)\)", pages, re.MULTILINE)
        config.nav.append({title: [place((DOCS / target).resolve()) for target in targets]})
    return config
