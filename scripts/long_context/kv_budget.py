"""The smallest cache budget that keeps a model's next tokens, on the owner's text; prints a setting for `--kv-cache`.

python scripts/long_context/kv_budget.py FOLDER --text text.txt --loss 0.02
python scripts/long_context/kv_budget.py --tiny
"""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from private_llm_cli.app import main
from private_llm_cli.commands.models import demo_model, plaintext_model, quiet, tokenizer_of
from private_llm_cli.commands.output import CONSOLE, emit_json, emit_table, progress_bar
from private_llm_cli.help_pages import Command
from private_llm_cli.options import Json
from private_llm_hf.models.inputs import max_positions

from private_llm.config import import_plugins
from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy

sys.path.append(str(Path(__file__).resolve().parents[1]))
from long_context.budget import smallest_budget
from long_context.text_windows import text_windows

commands = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@commands.command(cls=Command)
def kv_budget(
    model: Annotated[str, typer.Argument(help="Model folder or hub id (default: the bundled model).")] = "",
    text: Annotated[Path | None, typer.Option(help="A text like those of your users (default: a bundled one).")] = None,
    loss: Annotated[float, typer.Option(help="Share of next tokens that may differ from the full cache's.")] = 0.02,
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of a prompt (default: 1024, or as many as the model has room for).")
    ] = None,
    continuation: Annotated[int, typer.Option(help="Tokens after it that are predicted.")] = 32,
    count: Annotated[int, typer.Option(help="Prompts.")] = 8,
    as_json: Json = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Two short prompts: does it run?")] = False,
    plugin: Annotated[list[str] | None, typer.Option(help="A Python module to import first.")] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """As the model owner: find the smallest budget of the KV cache that keeps the model's next tokens."""
    import_plugins(tuple(plugin or ()))
    if tiny:
        prompt, continuation, count, loss = 100, 4, 2, 0.5
    source = model or demo_model()
    quiet()
    try:
        words = None if text is None else text.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"text: {text} has bytes that UTF-8 cannot decode; save the text in UTF-8") from None
    with progress_bar(None, as_json) as step:
        step("loading the model", 0)
        plain, tokenizer = plaintext_model(source), tokenizer_of(source)
        prompt = prompt_length(prompt, continuation, max_positions(plain.config))
        windows = text_windows(tokenizer, prompt, continuation, count, words)
        step(f"reading {count} prompts of {prompt} tokens", 0)
        ids = torch.tensor([window.prompt + window.continuation for window in windows])
        found = smallest_budget(
            plain, ids, loss, continuation=continuation, trying=lambda policy: step(f"trying {setting_of(policy)}")
        )
    setting = setting_of(found.policy)
    rows = [
        {
            "kv_cache": setting_of(each.policy),
            "attended": each.attended,
            "held": each.held,
            "agreement": each.agreement,
            "perplexity": each.perplexity,
        }
        for each in sorted(found.tried, key=lambda each: each.attended)
    ]
    if as_json:
        emit_json({"name": "kv-budget", "model": source, "loss": loss, "tokens": found.tokens, "kv_cache": setting,
                   "policy": found.policy.to_dict(), "tried": rows})  # fmt: skip
        return
    cells = [
        (row["kv_cache"], f"{row['held']:.1%}", f"{row['attended']:.1%}", f"{row['agreement']:.2%}",
         f"{row['perplexity']:+.2%}")
        for row in rows
    ]  # fmt: skip
    emit_table("budgets tried", ["--kv-cache", "held", "attended", "same next token", "perplexity"], cells)
    if found.policy == KEEP_ALL:
        CONSOLE.print(
            f"no budget keeps within a loss of {loss:g} on {found.tokens} tokens: keep all, or allow a larger --loss",
            highlight=False,
            markup=False,
        )
    else:
        CONSOLE.print(f"use it with --kv-cache {setting}", highlight=False, markup=False)
    CONSOLE.print("Measured on this text; a task that looks for one thing far back may lose more.", style="yellow")


def prompt_length(wanted: int | None, continuation: int, positions: int | None) -> int:
    """`wanted`, or by default 1024 and at most what leaves room to go on. positions: of the model, None: no limit.

    Raises ConfigError if prompt and continuation need more positions than the model has.
    """
    room = None if positions is None else positions - continuation
    length = wanted if wanted is not None else 1024 if room is None else max(1, min(1024, room))
    if room is not None and length > room:
        raise ConfigError(
            f"prompt: got {length} tokens and {continuation} after them; want at most {positions} together, the "
            "positions of the model"
        )
    return length


def setting_of(policy: CachePolicy) -> str:
    """A policy as `--kv-cache` takes it: its name, and what differs from the default."""
    usual = type(policy)().to_dict()
    given = {key: value for key, value in policy.to_dict().items() if value != usual[key]}
    if isinstance(policy, MPCacheConfig) and "levels" in given:
        given["levels"] = "+".join(f"{level.size}:{level.kept:g}" for level in policy.levels) or "none"
    return ",".join([policy.name, *(f"{key}={value}" for key, value in given.items())])


if __name__ == "__main__":
    main(commands)
