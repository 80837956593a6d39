"""`private-llm generate` and `private-llm demo`: private text, its cost, and the plaintext model's text beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.ranges import Ranges
from private_llm_cli.commands import models, output
from private_llm_cli.commands.doctor import machine
from private_llm_cli.commands.output import duration, size
from private_llm_cli.commands.text import TextStream, TokenClock, agreement, by_link, is_text, margin

if TYPE_CHECKING:
    from private_llm_hf.client.costs import Costs
    from torch import Tensor


@dataclass(frozen=True)
class Made:
    """One private generation."""

    prompt: Tensor
    ids: Tensor
    clock: TokenClock
    costs: Costs
    preprocessed: float | None = None
    """Seconds of preprocessing, if it was apart."""


def generate(
    source: str, prompt: str, config: PrivateConfig, new_tokens: int, as_json: bool, sampling: dict[str, Any],
    preprocess: bool = False, gguf_file: str | None = None, ranges: Ranges | None = None,
) -> None:  # fmt: skip
    """Generate privately and print the text as it comes, and its cost. If generation fails, the error is raised after
    what there is: the text so far is printed already, as JSON it is an object with the text and the error.
    """
    from private_llm_hf import AutoPrivateModelForCausalLM

    tokenizer = models.tokenizer_of(source, gguf_file)
    inputs = _inputs(tokenizer, prompt)
    models.check_length(source, inputs["input_ids"].shape[1] + new_tokens - 1)  # before parties are called
    form = {**models.gguf_options(gguf_file), "ranges": ranges}
    text = TextStream(tokenizer, output.show_text if not as_json else lambda _: None, prompt=True)
    facts = {"model": source, "prompt": prompt}
    try:
        made = run(
            lambda: models.loaded_from(AutoPrivateModelForCausalLM, source, config, **form), inputs, new_tokens,
            as_json, sampling, preprocess, text, bool(config.hosts),
        )  # fmt: skip
    except Exception as error:
        if as_json and text.arrived:
            output.emit_json({**facts, "private_text": text.text, "error": str(error)})
        raise
    finally:
        if text.arrived and not as_json:
            text.end()
            output.show_text("\n")
    if as_json:
        output.emit_json({**facts, "private_text": text.text, **figures(made, config)})
        return
    output.CONSOLE.print(cost_line(made), style="dim", highlight=False)


def demo(prompt: str, config: PrivateConfig, new_tokens: int, as_json: bool) -> None:
    """The bundled model: private against plaintext, and where the bytes go."""
    from private_llm_hf import patch
    from private_llm_hf.tools.estimate import by_layer

    source = models.demo_model()
    tokenizer, plain = models.tokenizer_of(source), models.plaintext_model(source)
    inputs = _inputs(tokenizer, prompt)
    made = run(lambda: patch(plain, config), inputs, new_tokens, as_json, {"do_sample": False})
    reference = plain.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0]
    layers = by_layer(made.costs)
    facts = _facts(made, reference, tokenizer, prompt, config)
    if as_json:
        parts = [{"name": layer.name, "bytes": layer.bytes_total, "rounds": layer.rounds} for layer in layers]
        output.emit_json({**facts, "layers": parts})
        return
    for label, text in (("prompt", prompt), ("private", facts["private_text"]), ("plaintext", facts["plain_text"])):
        _say(label, f"{text}\n")
    note = ""
    if facts["tokens_equal"] < facts["tokens"]:
        gap = margin(plain, reference[: len(made.prompt) + facts["tokens_equal"]])
        note = f"; at the first difference the plaintext model's two best logits are {gap:.4f} apart"
    _say("agreement", f"{facts['tokens_equal']} of {facts['tokens']} tokens{note}\n\n")
    output.emit_table(
        "bytes by link", ("link", "bytes"), [(name, size(n)) for name, n in by_link(made.costs, config).items()]
    )
    rows = [(layer.name, size(layer.bytes_total), layer.rounds) for layer in layers]
    if len(rows) > 1:  # nodes of a sharding plan do not book by layer
        output.emit_table("cost by layer, all tokens", ("layer", "bytes", "rounds"), rows)
    _say_cost(cost_line(made), config)


def demo_chat(prompt: str, config: PrivateConfig, new_tokens: int, as_json: bool, cache: Path | None) -> None:
    """Ask SmolLM2 in plaintext and in private, greedily: the private answer as it comes, below the plaintext model's.
    cache: where the converted model is kept. Raises ConfigError if the model's package is not installed.
    """
    from private_llm_hf import patch
    from private_llm_hf.models import smollm2

    if config.party_mode == "auto":  # thousands of small steps a token: threads would wait for the interpreter's lock
        config = replace(config, party_mode="processes")
    with output.progress_bar(None, as_json) as step:
        step("loading the model; its first use converts it", 0)
        source = models.smollm2_model(cache)
        tokenizer, plain = models.tokenizer_of(source), models.plaintext_model(source)
        inputs = smollm2.chat(tokenizer, [prompt])
        step("plaintext answer", 0)
        reference = plain.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0]
    start = inputs["input_ids"].shape[1]
    if not as_json:
        answer = tokenizer.decode(reference[start:], skip_special_tokens=True)
        for label, text in (("model", smollm2.NAME), ("prompt", prompt), ("plaintext", answer)):
            _say(label, f"{text}\n")
    labels = iter(["private"])
    stream = TextStream(tokenizer, lambda text: None if as_json else _say(next(labels, ""), text))
    made = run(lambda: patch(plain, config), inputs, new_tokens, as_json, {"do_sample": False}, text=stream)
    facts = _facts(made, reference, tokenizer, prompt, config)
    if as_json:
        output.emit_json({**facts, "model": "smollm2", "protocol": config.protocol, "frac_bits": config.frac_bits})
        return
    _say(next(labels, ""), "\n")
    _say("agreement", f"{facts['tokens_equal']} of {facts['tokens']} tokens\n\n")
    _say_cost(f"{start} tokens of prompt; {cost_line(made)}", config)


def _say(label: str, text: str) -> None:
    """Text as it is, after a label unless this is empty."""
    if label:
        output.CONSOLE.print(f"[bold]{label:<9}[/] ", end="", highlight=False)
    output.show_text(text)


def _say_cost(line: str, config: PrivateConfig) -> None:
    output.CONSOLE.print(line, highlight=False)
    if config.party_mode != "remote":
        output.CONSOLE.print("All parties ran on this machine, which protects nobody from its owner.", style="yellow")


def _facts(made: Made, reference: Tensor, tokenizer: Any, prompt: str, config: PrivateConfig) -> dict[str, Any]:  # noqa: ANN401
    """For JSON: both texts from their tokens, prompts included; how many of the first tokens are equal; costs."""
    answers = [ids[len(made.prompt) :] for ids in (made.ids, reference)]
    equal, total = agreement(*answers)
    private, plain = (tokenizer.decode(ids, skip_special_tokens=True) for ids in answers)
    texts = {"name": "demo", "prompt": prompt, "private_text": private, "plain_text": plain}
    return {**texts, "tokens_equal": equal, "tokens": total, **figures(made, config)}


def run(
    load: Callable[[], Any], inputs: Any, new_tokens: int, quiet: bool, sampling: dict[str, Any],  # noqa: ANN401
    preprocess: bool = False, text: TextStream | None = None, remote: bool = False,
) -> Made:  # fmt: skip
    """Share the model (`load`), generate, and collect times and costs. text: takes the text as it comes, in the place
    of a progress bar. remote: parties on other hosts have the weights.
    """
    from private_llm_hf import GeneratePlan

    with ExitStack() as shown:
        step = shown.enter_context(output.progress_bar(new_tokens, quiet))
        step("calling the parties" if remote else "sharing the weights", 0)
        model = load()
        with closing(model):
            output.note_sparsity(model, inputs["input_ids"].shape[1], new_tokens)
            output.note_corrections(model, inputs["input_ids"].shape[1] + new_tokens - 1)
            spent = None
            if preprocess:
                step("preprocessing", 0)
                started = time.perf_counter()
                model.preprocess(GeneratePlan(prompt=inputs["input_ids"].shape[1], new_tokens=new_tokens))
                spent = time.perf_counter() - started
            step("private prompt", 0)
            model.on_chunk = lambda read, length: step(f"private prompt, {read} of {length} tokens", 0)
            clock = text or TokenClock(step)
            if text is not None and not quiet:
                text.step = lambda _: shown.close()  # the text takes the place of the bar
            clock.started = time.perf_counter()
            ids = model.generate(**inputs, max_new_tokens=new_tokens, streamer=clock, **sampling)[0]
            costs: Costs = model.cost()
    return Made(inputs["input_ids"][0], ids, clock, costs, spent)


def figures(made: Made, config: PrivateConfig) -> dict[str, Any]:
    """Times and costs for JSON."""
    new = len(made.ids) - len(made.prompt)
    return {
        "new_tokens": new, "seconds_first_token": made.clock.first, "seconds_per_token": made.clock.each,
        "seconds_preprocessing": made.preprocessed,
        **made.costs.to_dict(), "bytes_by_link": by_link(made.costs, config), "machine": machine(),
    }  # fmt: skip


def _inputs(tokenizer: Any, prompt: str) -> Any:  # noqa: ANN401 - transformers' own types
    if not is_text(prompt):
        raise ConfigError("prompt: got bytes that are not UTF-8; want text")
    inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ConfigError("prompt: got no tokens; want at least one")
    inputs.pop("token_type_ids", None)
    return inputs


def cost_line(made: Made) -> str:
    """Times, bytes and rounds for people."""
    new = len(made.ids) - len(made.prompt)
    ahead = made.costs.preprocessing.total
    apart = "" if made.preprocessed is None else f"preprocessed in {duration(made.preprocessed)}; "
    return (
        f"{apart}{new} tokens, first after {duration(made.clock.first)}, then {duration(made.clock.each)} each; "
        f"{size(made.costs.bytes_total)} over all links ({size(ahead)} of it preprocessing), {made.costs.rounds} rounds"
    )
