"""`private-llm gateway`: a server at the user that speaks the OpenAI API and asks the parties."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm_cli.commands.calibrate import ranges_from
from private_llm_cli.commands.models import demo_model, loaded_from, tokenizer_of
from private_llm_cli.commands.output import CONSOLE, NOTES, progress_bar

if TYPE_CHECKING:
    from private_llm_gateway.served import Served
    from private_llm_gateway.settings import GatewaySettings

DEMO = "demo"
"""The name of the bundled model."""


@dataclass(frozen=True)
class GatewayChoices:
    """What the command line says of a gateway. source: model folder, hub id or client folder ("": bundled model).

    name: what clients call the model (default: the last part of `source`). token: see `token_of`.
    """

    source: str
    name: str
    sessions: int
    ranges: Path | None
    token: str = field(repr=False)
    no_token: bool


def gateway(choices: GatewayChoices, config: PrivateConfig, settings: GatewaySettings) -> None:
    """Start the model, say where the gateway is, and serve until interrupted. Raises ConfigError for a taken port."""
    from private_llm_gateway.app import bound_socket, create_app, installed_page, serve

    listening = bound_socket(settings)
    settings = dataclasses.replace(settings, port=listening.getsockname()[1])
    try:
        served = start_model(choices, config)
    except BaseException:
        listening.close()
        raise
    try:
        _announce(served, settings, shown=not choices.token)
        serve(create_app({served.name: served}, settings, installed_page()), settings, listening)
    finally:
        served.pool.close()


def token_of(choices: GatewayChoices) -> str | None:
    """The token that clients must send: the one given, a random one, or none if that was asked for."""
    if choices.no_token:
        if choices.token:
            raise ConfigError("token: got one together with --no-token; want one of the two")
        return None
    return choices.token or secrets.token_urlsafe(24)


def start_model(choices: GatewayChoices, config: PrivateConfig) -> Served:
    """The model with its sessions: at the parties of `config.hosts`, or with parties on this machine."""
    from private_llm_gateway.pool import SessionPool
    from private_llm_gateway.served import Served
    from private_llm_hf import AutoPrivateModel, AutoPrivateModelForCausalLM
    from private_llm_hf.models.architectures import architecture
    from transformers import AutoConfig

    source = choices.source or demo_model()
    name = choices.name or (DEMO if not choices.source else Path(source.rstrip("/")).name)
    if not name:
        raise ConfigError(f"name: {source!r} gives none; want --name")
    with progress_bar(None, False) as step:
        step("loading the tokenizer", 0)
        tokenizer = tokenizer_of(source)
        writes = architecture(AutoConfig.from_pretrained(source)).kind == "decoder"
        auto = AutoPrivateModelForCausalLM if writes else AutoPrivateModel
        step("calling the parties" if config.hosts else "sharing the weights", 0)
        model = loaded_from(auto, source, config, ranges=ranges_from(choices.ranges))
    try:
        return Served(name, SessionPool(model, choices.sessions), tokenizer)
    except BaseException:
        model.close()
        raise


def _announce(served: Served, settings: GatewaySettings, shown: bool) -> None:
    """Where the gateway is, and what it protects. The token is shown if nobody else knows it."""
    about = served.about()
    if settings.token is None:
        token = "none wanted: every program of this machine may ask"
    else:
        token = settings.token if shown else "as given"
    page = settings.url + (f"/#token={settings.token}" if settings.token is not None and shown else "/")
    for what, told in (
        ("chat page", page), ("OpenAI API", f"{settings.url}/v1"), ("token", token), ("model", served.name),
        ("protocol", served.config.protocol),
        *((party["name"], f"{party['host']}: {party['holds']}") for party in about["parties"]),
    ):  # fmt: skip
        CONSOLE.print(f"[bold]{what:<11}[/]", end="", highlight=False)
        CONSOLE.print(told, markup=False, highlight=False, soft_wrap=True)
    NOTES.print(served.sentence, style="yellow" if served.one_machine else "", markup=False, highlight=False)
    CONSOLE.print("ready; Ctrl-C ends it", highlight=False)
