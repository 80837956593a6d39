"""`private-llm gateway`: a server at the user that speaks the OpenAI API and asks the parties."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PartiesBusy, PartyFailed, TransportError, UnsupportedOp
from private_llm.net.rendezvous import WAIT_UNTIL, Unreached
from private_llm.protocol_facts import ASSISTED
from private_llm_cli.commands.calibrate import ranges_from
from private_llm_cli.commands.models import AUTO, DEMO_PROMPT, demo_model, loaded_from, tokenizer_of
from private_llm_cli.commands.output import CONSOLE, NOTES, TURN, note_sparsity, progress_bar, waiting_told

if TYPE_CHECKING:
    from private_llm_gateway.served import Served
    from private_llm_gateway.settings import GatewaySettings
    from private_llm_hf.client.speculation import SpeculationConfig

    from private_llm_cli.using import GatewayChoices

_SESSIONS = 8
_LOADING_S = 900.0
"""Seconds that parties which were started here may take to load a model: a large one, on a busy machine."""


def gateway(
    choices: GatewayChoices, config: PrivateConfig, settings: GatewaySettings, listening: socket.socket
) -> None:
    """Start the model, say where the gateway is, serve until interrupted; until parties are ready it answers 503."""
    _sessions(choices, config)
    known = _instructions(choices.public_prefix)
    from private_llm_gateway.app import answering_meanwhile, create_app, serve
    from private_llm_gateway.engine import publish
    from private_llm_gateway.errors import ApiError
    from private_llm_gateway.prompts import of_instructions

    settings = dataclasses.replace(settings, port=listening.getsockname()[1])
    with contextlib.ExitStack() as stack:
        with answering_meanwhile(settings, listening) as say:
            served = start_model(choices, config, stack, say)
            if known:
                say("reading the public prefix")
                try:
                    publish(served, of_instructions(served, known), settings)
                except ApiError as error:
                    raise ConfigError(f"public prefix: {error}") from None
        _announce(served, settings, shown=not choices.token)
        ready = functools.partial(CONSOLE.print, "ready; Ctrl-C ends it", highlight=False)
        serve(create_app({served.name: served}, settings), settings, listening, ready)


def _instructions(file: Path | None) -> str:
    """The system message that all may know. Raises ConfigError for a file without a text."""
    try:
        text = "" if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"public prefix: cannot read {file} ({error}); want a text file") from None
    if file is not None and not text:
        raise ConfigError(f"public prefix: {file} is empty; want the text of a system message")
    return text


def name_of(source: str) -> str:
    """What clients call a model: its folder's name, but of a client folder of share files that of the one around it."""
    folder = Path(source.rstrip("/"))
    around = folder.resolve().parent.name if folder.name == "client" and folder.is_dir() else ""
    if source and not (around or folder.name):
        raise ConfigError(f"name: {source!r} does not end in a name; give one with --name")
    return around or folder.name or "demo"


def start_model(
    choices: GatewayChoices, config: PrivateConfig, stack: contextlib.ExitStack,
    say: Callable[[str], None] = lambda text: None,
) -> Served:  # fmt: skip
    """The model with its sessions, which end with `stack`: at the parties of `config.hosts`, or at services that run on
    this machine. say: hears what is done or waited for.
    """
    from private_llm_gateway.group_file import GroupFile
    from private_llm_gateway.kept_prompts import KeptPrompts
    from private_llm_gateway.pool import SessionPool, tried
    from private_llm_gateway.served import Served
    from private_llm_hf import AutoPrivateModel, AutoPrivateModelForCausalLM
    from private_llm_hf.api import share_checkpoint
    from private_llm_hf.checkpoint.sentence_vectors import SentenceVectors, sentence_vectors
    from private_llm_hf.checkpoint.share_files import share_path
    from private_llm_hf.models.architectures import architecture
    from private_llm_hf.service.local import LocalParties
    from transformers import AutoConfig

    source = choices.model or demo_model()
    name = choices.name or name_of(choices.model)
    shared = (Path(source) / "client").is_dir() and share_path(Path(source), 0).is_file()
    client = str(Path(source) / "client") if shared else source
    with progress_bar(None, False) as bar:

        def step(text: str) -> None:
            bar(text, 0)
            say(text)

        listed = GroupFile(choices.groups, config) if choices.groups is not None else None
        start = {} if listed is None else {"start": listed.groups}
        step("loading the tokenizer")
        tokenizer = tokenizer_of(client)
        writes = architecture(AutoConfig.from_pretrained(client)).kind == "decoder"
        vectors = SentenceVectors() if writes else sentence_vectors(client)
        auto = AutoPrivateModelForCausalLM if writes else AutoPrivateModel
        hides = config.facts is not None and config.facts.hides and config.plan is None
        if hides and config.weights == "secret" and not config.hosts:  # services work with shares of secret weights
            folder = Path(source) if shared else Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if not shared:
                step("sharing the weights")
                share_checkpoint(source, folder, config, auto=auto, ranges=ranges_from(choices.ranges))
            step("starting the parties")
            config = stack.enter_context(LocalParties(config, {name: folder}, ready_s=_LOADING_S, tell=step)).config
            client = str(folder / "client")
        step("calling the parties" if config.hosts else "sharing the weights")
        ranges = None if config.hosts else ranges_from(choices.ranges)

        load = functools.partial(loaded_from, auto, client, config, ranges=ranges, **start)
        chosen = load if listed is None else functools.partial(tried, load, listed.groups)
        model = when_ready(chosen, choices.wait if config.hosts else 0.0, step)
    stack.callback(model.close)
    if writes:
        note_sparsity(model, *TURN)
    pool = SessionPool(model, _sessions(choices, config), start.get("start"))
    if listed is not None:
        listed.follow(pool)
    drafts = _drafts(choices, model, tokenizer) if choices.draft and writes else None
    served = Served(name, pool, tokenizer, vectors, KeptPrompts(choices.keep_tokens), drafts)
    stack.callback(served.pool.close)
    return served


def _drafts(choices: GatewayChoices, model: Any, tokenizer: Any) -> SpeculationConfig | None:  # noqa: ANN401
    """How drafts are made; "auto" chooses and says why. Raises ConfigError for unfit drafts and evicting policies."""
    from private_llm_hf.client.speculation import LOOKUP, SpeculationConfig, check_drafts, stateful
    from private_llm_hf.client.speculative_loop import look_ups_pay
    from private_llm_hf.models.inputs import max_positions
    from transformers import LogitsProcessorList

    auto = choices.draft == AUTO
    made = SpeculationConfig(LOOKUP if auto else choices.draft)
    try:
        if stateful(model):
            told = f"draft: {type(model).__name__} has states that drafts cannot put back; leave --draft out"
            raise ConfigError(told)
        check_drafts(model.parties.config.kv_cache, max_positions(model.config) or 1 << 20, made.counts)
        made.drafter(model.config, LogitsProcessorList(), sample=False)
        if not auto:
            return made
        pays, why = look_ups_pay(model, tokenizer(DEMO_PROMPT)["input_ids"])
    except (ConfigError, UnsupportedOp) as error:
        if not auto:
            raise
        pays, why = False, str(error)
    NOTES.print(f"drafts: {'looked up' if pays else 'none'}: {why}", markup=False, highlight=False, soft_wrap=True)
    return made if pays else None


def _sessions(choices: GatewayChoices, config: PrivateConfig) -> int:
    """Requests that run at a time. Raises ConfigError for several under 'assisted' on this machine."""
    assisted = config.protocol == ASSISTED
    if assisted and not config.hosts and choices.sessions not in (None, 1):
        raise ConfigError(
            f"sessions: got {choices.sessions} without hosts, where servers of protocol='assisted' serve one session; "
            "want servers of their own (`private-llm party --clients N`), and their --hosts"
        )
    if not config.hosts:
        return 1
    return choices.sessions or (1 if assisted else _SESSIONS)


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


# -- Waiting for parties that are still starting, and saying for whom -------------------------------------------------
_T = TypeVar("_T")
_PAUSE_S = 0.5
_FAILURES = 2
"""Sessions that parties may end as they begin."""


def when_ready(call: Callable[[], _T], wait_s: float, show: Callable[[str], None]) -> _T:
    """What `call` makes, as soon as all parties are there and let a session in. wait_s: seconds until the parties must
    be there; 0: one try, of `timeout_s` and `busy_wait_s`. show: hears for whom it waits. Raises TransportError in the
    end, PartyFailed the third time, because parties whose links form anew end what has just begun, and at once what
    waiting does not mend.
    """
    began, failures = time.monotonic(), 0
    within = contextvars.copy_context()
    within.run(WAIT_UNTIL.set, began + wait_s if wait_s else math.inf)
    with waiting_told(show):
        while True:
            try:
                return within.run(call)
            except (Unreached, PartiesBusy, PartyFailed) as error:
                failures += isinstance(error, PartyFailed)
                if failures > _FAILURES:
                    raise
                reason = str(error)
            show(f"waiting for the parties (for {time.monotonic() - began:.0f} s): {reason}")
            time.sleep(max(0.0, min(_PAUSE_S, began + wait_s - time.monotonic())))
            passed = time.monotonic() - began
            if passed >= wait_s:
                raise TransportError(f"the parties were not ready after {passed:.0f} s (--wait {wait_s:g}): {reason}")
