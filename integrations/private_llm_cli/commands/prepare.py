"""`private-llm prepare`: what a user of protocol "assisted" stores beforehand, so that one server is online."""

from typing import Annotated

import typer

from private_llm.errors import ConfigError
from private_llm_cli import options
from private_llm_cli.commands.models import gguf_options, loading, quiet, want_model
from private_llm_cli.commands.output import CONSOLE, NOTES, emit_json, progress_bar
from private_llm_cli.commands.parties import auto_class


@options.grouped
def prepare(
    links: options.LinkOptions,
    model: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    corrections: Annotated[str, typer.Option("--corrections", help="Folder for what is prepared.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Make corrections of so many tokens more.")] = 0,
    keep: Annotated[int, typer.Option("--keep", help="Run on, and make some whenever fewer tokens are left.")] = 0,
    experts: options.ExpertsOption = options.ExpertsPlace.AUTO,
    weight_bits: options.WeightBits = 16,
    task: options.Task = "causal-lm",
    gguf_file: options.GgufFile = None,
    as_json: options.Json = False,
) -> None:
    """As a user of 'assisted': compute products of masks beforehand, here or on a host of --hosts, and store them."""
    settings = links.client_settings()
    if len(settings.get("hosts", ())) > 1:
        raise ConfigError("hosts: got several; want one that computes, which is not the one that is online later")
    if not tokens and not keep:
        raise ConfigError("tokens, keep: got neither; give --tokens N or --keep N")
    settings |= {"corrections": corrections, "experts": experts.value, "weight_bits": weight_bits}
    config = options.config_of("assisted", 64, **settings)
    want_model(model, gguf_file)
    loading(config, model, as_json, ahead=False)
    auto = auto_class(task)
    from private_llm_hf import prepare_corrections

    quiet()
    with progress_bar(None if keep else tokens, as_json) as step:
        before = 0
        step("calling the server" if config.hosts else "reading the weights", 0)

        def show(layer: str, done: int, total: int) -> None:
            nonlocal before
            short = layer.partition("+")[0]
            step(f"{done} of {total} tokens, {short}".rstrip(", ") if keep else short, max(0, done - before))
            before = done

        left = prepare_corrections(
            model, config, tokens, keep, auto, show,
            lambda text: None if as_json else NOTES.print(text, markup=False, highlight=False, soft_wrap=True),
            **gguf_options(gguf_file),
        )  # fmt: skip
    if as_json:
        emit_json({"name": "prepare", "folder": corrections, "tokens_left": left})
    else:
        CONSOLE.print(f"{left} tokens are left in {corrections}", highlight=False, markup=False)
