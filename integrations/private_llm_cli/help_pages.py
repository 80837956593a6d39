"""Help pages: options in groups, each name whole, also in a terminal of 80 columns; and a hint for misspelt ones.

Typer's tables cut off names where there are many columns. Here a name too long for its column has a line of its own.
"""

import difflib
import re
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from private_llm.errors import ConfigError
from private_llm.protocol_facts import ASSISTED, CASCADE, protocol_names

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_BUILT_IN = protocol_names()
"""Titles of panels say which of these take their options; of a plugin's protocol nobody knows, so all are shown."""
_COLUMN = 30  # characters of names that stand beside their help


class _Page:
    """What is added to typer's classes; all objects are of the click that typer brings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write arguments and options, by the panel that each belongs to; only panels of a protocol that was given."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for title, records in panels.items():
            of = re.findall(r"\w+", title.partition("(")[2])
            if not of or ctx.meta.get("protocol") in (None, *of):
                _write(title, records, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """As click; the error of an unknown option names the one that is most like it. Raises ConfigError for an empty
        text, as an unset variable of a shell leaves it: it would mean the default.
        """
        given, text = list(args), " ".join(args)
        if found := re.search(rf"--protocol[ =]({'|'.join((*_BUILT_IN, CASCADE, ASSISTED))})( |$)", text):
            ctx.meta["protocol"] = found[1]
        for before, word in zip(["", *given], given, strict=False):
            name, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
            if name != "--prompt" and not value.strip() and ("=" in word or not word.startswith("--")):
                name = name.lstrip("-") if name.startswith("--") else "argument"
                raise ConfigError(f"{name}: got an empty text; want a value, or leave it out for its default")
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]
        except _UsageError as error:
            unknown = getattr(error, "option_name", None)
            if unknown is None or getattr(error, "possibilities", unknown) is unknown:
                raise
            typed = next((word.partition("=")[0] for word in given if word.startswith(unknown)), unknown)
            known = [name for each in self.get_params(ctx) if not getattr(each, "hidden", False) for name in each.opts]  # type: ignore[attr-defined]
            word = typed.lower().lstrip("-").replace("_", "-")
            part = [name for name in known if word in name.lstrip("-").split("-")]
            nearest = part or difflib.get_close_matches(f"--{word}", known, 1, 0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else "--help lists all."
            if word in known:  # an argument, whose name has no dashes
                hint = f"the {word} stands alone: {ctx.command_path} {word.upper()}"
            error.message, error.possibilities = f"No such option: {typed}; {hint}", None  # type: ignore[attr-defined]
            raise


class Command(_Page, TyperCommand):
    """A command with such a page."""


class Group(_Page, TyperGroup):
    """A group of commands with such a page."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write options, and then the commands, each with the first paragraph of its help."""
        super().format_options(ctx, formatter)
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        helps = [(name, (each.help or "").partition("\n\n")[0]) for name, each in found if each and not each.hidden]
        _write("Commands", helps, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        """As typer, which suggests what is like a misspelt command: those that moved are no commands."""
        if args[0] not in self.commands:
            self.commands = {name: each for name, each in self.commands.items() if not each.hidden}
        return super().resolve_command(ctx, args)


def _write(title: str, records: list[tuple[str, str]], formatter: Any) -> None:  # noqa: ANN401
    """A titled list; nothing without records."""
    if not records:
        return
    column = min(_COLUMN, max(len(name) for name, _ in records)) + 2
    with formatter.section(title):
        indent = " " * formatter.current_indent
        for name, text in records:
            lines = textwrap.wrap(
                text, formatter.width - len(indent) - column, break_on_hyphens=False, break_long_words=False
            )
            beside = lines.pop(0) if lines and len(name) <= column - 2 else ""
            formatter.write(f"{indent}{name:{column}}{beside}".rstrip() + "\n")
            for line in lines:
                formatter.write(f"{indent}{'':{column}}{line}\n")
