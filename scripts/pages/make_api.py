"""Write docs/api.md: the public names, their signatures and what their docstrings say.

python scripts/pages/make_api.py          write the page
python scripts/pages/make_api.py --check  write nothing; exit 1 if the page is not that of the tree
python scripts/pages/make_api.py --tiny   print its headings, write nothing
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import private_llm_hf
from generated import run
from private_llm_hf.client.costs import Costs
from private_llm_hf.client.model import PrivateModel
from private_llm_hf.sparsity.apply import predicted_only
from private_llm_hf.sparsity.powerinfer import read_powerinfer
from private_llm_hf.sparsity.predictor_run import PredictorRun
from private_llm_hf.sparsity.predictor_run import run as run_predictors
from private_llm_hf.sparsity.predictor_set import PredictorSet
from private_llm_hf.sparsity.price import SparsityPrice, sparsity_price
from private_llm_hf.sparsity.relufy import load_relufied
from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig

import private_llm
from private_llm import config, errors
from private_llm.config import FIELD_GROUPS, PrivateConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"

_MODEL = ("explain", "cost", "preprocess", "close")
"""What a private model has besides its transformers methods."""
_HIDDEN = ("run", "from_rows", "forward", "finish", "layers_before", "digest", "agreement", "frac_of_weight")
"""Members that the library itself uses."""
_OF_OWNERS = (
    PredictorRun, run_predictors, PredictorConfig, TrainingConfig, PredictorSet, predicted_only, read_powerinfer,
    load_relufied, sparsity_price, SparsityPrice,
)  # fmt: skip
"""Classes and functions that are imported from their modules: some need what the extra `train` installs."""
_INTRODUCTION = """# Public names

Made from the docstrings by `scripts/pages/make_api.py`; edit them there. `private_llm` holds settings and errors,
`private_llm_hf` all that runs models (and the settings again). What is not on this page may change without notice.
"""


def described(fields: tuple[str, ...], docstring: str) -> dict[str, str]:
    """What a class docstring says of each field: the text behind "name:", up to the next one."""
    text = " ".join(docstring.split())
    spots = []
    for name in fields:
        found = re.search(rf"(?:^|[.)] ){name}: ", text)
        if found:
            spots.append((found.start(), found.end(), name))
    spots.sort()
    ends = [start + 1 for start, _, _ in spots[1:]] + [len(text)]
    return {name: text[begin:end].strip() for (_, begin, name), end in zip(spots, ends, strict=True)}


def settings() -> Iterator[str]:
    """The tables of PrivateConfig's fields, one for each group."""
    fields = {field.name: field for field in dataclasses.fields(PrivateConfig)}
    said = described(tuple(fields), inspect.getdoc(PrivateConfig) or "")
    agreed = set(config._AGREED)
    yield 'A "same" in the column "all": all parties and the client must agree. The rest is the matter of each.'
    for group, names in FIELD_GROUPS.items():
        yield f"**{group}**"
        rows = ["| setting | type | default | all | meaning |", "|---|---|---|---|---|"]
        for name in names:
            same = "same" if name in agreed else ""
            kind, default = _cell(f"`{fields[name].type}`"), _cell(f"`{fields[name].default!r}`")
            rows.append(f"| `{name}` | {kind} | {default} | {same} | {_cell(said[name])} |")
        yield "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def signature(name: str, made: Callable[..., Any]) -> str:
    """A call as code, on one line or with a line for each argument."""
    parts, star = [], False
    for parameter in inspect.signature(made).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        default, kind = parameter.default, parameter.annotation
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else "*" * (parameter.kind is parameter.VAR_POSITIONAL)
        text = f"{stars}{parameter.name}"
        if kind is not parameter.empty:
            text += f": {kind}"
        if default is not parameter.empty:
            # A dataclass with a default_factory shows an object of its own, whose text is "<factory>".
            shown = default.__name__ if callable(default) else "..." if repr(default)[0] == "<" else repr(default)
            text += f" = {shown}" if ":" in text else f"={shown}"
        parts.append(text)
        star = star or parameter.kind is parameter.VAR_POSITIONAL
    result = inspect.signature(made).return_annotation
    arrow = "" if result is inspect.Signature.empty or inspect.isclass(made) else f" -> {result}"
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) <= 100:
        return line
    inner = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{inner}){arrow}"


def text_of(thing: object) -> str:
    """A docstring as Markdown."""
    lines = (inspect.getdoc(thing) or "").replace("<", "&lt;")
    return re.sub(r"\](?=\()", "]&#8203;", lines)


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class defines itself, or inherits from a private base."""
    for name in dict.fromkeys(name for base in owner.__mro__ for name in vars(base)):
        holder = next(base for base in owner.__mro__ if name in vars(base))
        own = holder is owner or (holder.__name__.startswith("_") and holder.__module__ == owner.__module__)
        thing = vars(holder)[name]
        kinds = (property, classmethod, staticmethod, FunctionType)
        if own and not name.startswith("_") and isinstance(thing, kinds):
            yield name, thing


def entry(name: str, thing: Any, only: tuple[str, ...] | None = None) -> Iterator[str]:  # noqa: ANN401 - any public name
    """One public name: heading, signature, docstring, members."""
    yield f"### {name}"
    if not callable(thing):
        yield f"`{thing!r}`"
        return
    shown_call = inspect.isfunction(thing) or dataclasses.is_dataclass(thing)
    if shown_call and thing not in (PrivateConfig, Costs):
        yield f"```text\n{signature(name, thing)}\n```"
    yield text_of(thing) if thing is not PrivateConfig else (inspect.getdoc(thing) or "").split("\n\n")[0]
    if thing is PrivateConfig:
        yield from settings()
    for member, found in members(thing) if inspect.isclass(thing) else ():
        if member in _HIDDEN or (only is not None and member not in only):
            continue
        what = getattr(thing, member) if isinstance(found, (classmethod, staticmethod)) else found
        call = member if isinstance(found, property) else signature(member, what)
        head = f"- `{' '.join(call.split())}`".replace("( ", "(").replace(", )", ")")
        body = text_of(found.fget if isinstance(found, property) else what)
        prose = [line for line in body.splitlines() if not line.startswith("    ")]  # no code
        yield f"{head}: {' '.join(' '.join(prose).split())}"


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION.strip(), "## Running models"]
    auto = [name for name in private_llm_hf.__all__ if name.startswith("AutoPrivate")]
    parts.append("### AutoPrivate...")
    parts.append("One class for each auto class of transformers: " + ", ".join(f"`{name}`" for name in auto) + ".")
    load = private_llm_hf.AutoPrivateModel.from_pretrained
    parts += [f"```text\n{signature('from_pretrained', load)}\n```", text_of(load)]
    for name in private_llm_hf.__all__:
        if name not in auto and name not in private_llm.__all__:
            parts += entry(name, getattr(private_llm_hf, name))
    parts += [
        "## A private model",
        "A `PreTrainedModel` of transformers and a context manager, with these methods besides.",
    ]
    parts += list(entry("PrivateModel", PrivateModel, _MODEL))[2:]
    parts += entry("Costs", Costs)
    parts.append("## Settings")
    kinds = [name for name in private_llm.__all__ if not _is_error(getattr(private_llm, name))]
    for name in kinds:
        parts += entry(name, getattr(private_llm, name))
    parts += [
        "## Predictors of activity",
        "What an owner of a sparse model uses ([sparsity.md](sparsity.md)); training takes the extra `train`.",
    ]
    for thing in _OF_OWNERS:
        name, *rest = entry(thing.__name__, thing)
        parts += [name, f"`from {thing.__module__} import {thing.__name__}`", *rest]
    parts += ["## Errors and warnings", "| name | is a | meaning |\n|---|---|---|\n" + "\n".join(error_rows())]
    return re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", "\n\n".join(parts)) + "\n"


def error_rows() -> Iterator[str]:
    """One row of the table for each error and warning."""
    for name, thing in vars(errors).items():
        if _is_error(thing) and thing.__module__ == errors.__name__:
            bases = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
            yield f"| `{name}` | {bases} | {_cell(' '.join(text_of(thing).split()))} |"


def _is_error(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def outline() -> str:
    """The headings of the page."""
    return "\n".join(line for line in page().splitlines() if line.startswith("#"))


def main() -> int:
    """Parse, make, write or compare."""
    return run(__doc__, "make_api.py", PAGE, page, outline)


if __name__ == "__main__":
    sys.exit(main())
