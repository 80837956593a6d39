"""`private-llm demo --model smollm2`: a question, and the private answer as it comes, below the plaintext model's."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm_cli.commands.generate import Made, cost_line, figures
from private_llm_cli.commands.models import plaintext_model, smollm2_model, tokenizer_of
from private_llm_cli.commands.output import CONSOLE, emit_json, progress_bar, show_text
from private_llm_cli.commands.sparsity_note import note_sparsity
from private_llm_cli.commands.text import TextStream, agreement


def chat(prompt: str, config: PrivateConfig, new_tokens: int, as_json: bool, cache: Path | None) -> None:
    """Ask SmolLM2 in plaintext and in private, greedily, and print both answers, agreement and cost.

    cache: where the converted model is kept. Raises ConfigError if the model's package is not installed.
    """
    from private_llm_hf import patch
    from private_llm_hf.models import smollm2

    if new_tokens < 1:
        raise ConfigError(f"max-new-tokens: got {new_tokens}; want at least 1")
    if config.party_mode == "auto":  # thousands of small steps a token: threads would wait for the interpreter's lock
        config = replace(config, party_mode="processes")
    with progress_bar(None, as_json) as step:
        step("loading the model; its first use converts it", 0)
        source = smollm2_model(cache)
        tokenizer, plain = tokenizer_of(source), plaintext_model(source)
        inputs = smollm2.chat(tokenizer, [prompt])
        start = inputs["input_ids"].shape[1]
        step("plaintext answer", 0)
        reference = plain.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0]
        step("sharing the weights", 0)
        private: Any = patch(plain, config)
    with closing(private):
        note_sparsity(private, start, new_tokens)
        if not as_json:
            CONSOLE.print(f"[bold]model    [/] {smollm2.NAME}", highlight=False)
            _say("prompt", prompt)
            _say("plaintext", tokenizer.decode(reference[start:], skip_special_tokens=True))
            _say("private", "", end="")
        clock = TextStream(tokenizer, show_text if not as_json else lambda _: None)
        ids = private.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=clock)[0]
        made = Made(inputs["input_ids"][0], ids, clock, private.cost())
    equal, total = agreement(ids[start:], reference[start:])
    if as_json:
        texts = [tokenizer.decode(answer[start:], skip_special_tokens=True) for answer in (ids, reference)]
        facts = {"name": "demo", "model": "smollm2", "prompt": prompt, "private_text": texts[0], "plain_text": texts[1]}
        sizes = {"tokens_equal": equal, "tokens": total, "frac_bits": config.frac_bits}
        emit_json({**facts, "protocol": config.protocol, **sizes, **figures(made, config)})
        return
    CONSOLE.print()
    CONSOLE.print(f"[bold]agreement[/] {equal} of {total} tokens\n", highlight=False)
    CONSOLE.print(f"{start} tokens of prompt; {cost_line(made)}", highlight=False)
    if config.party_mode != "remote":
        CONSOLE.print("All parties ran on this machine, which protects nobody from its owner.", style="yellow")


def _say(what: str, text: str, end: str = "\n") -> None:
    CONSOLE.print(f"[bold]{what:<9}[/] ", end="", highlight=False)
    show_text(text + end)
