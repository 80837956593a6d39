"""`private-llm docs`: the pages of docs/, which the wheel contains beside this package."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from private_llm.errors import ConfigError


def docs(
    page: Annotated[str, typer.Argument(help="Its name, such as errors or studies/top-k.")] = "README",
) -> None:
    """Print a page of the documentation (Markdown); without a name the list of all pages."""
    folder = Path(str(files("private_llm_cli") / "docs")).resolve()  # a link in a checkout
    pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.md")}
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        raise ConfigError(f"docs: got {page!r}; want the name of a page, which `private-llm docs` lists")
    typer.echo(pages[name].read_text(encoding="utf-8"), nl=False)
