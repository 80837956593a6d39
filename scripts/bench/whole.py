"""Whole models as users run them: forward of GPT-2 small, generate() of the bundled model, a chat."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from private_llm_cli.commands.models import CHAT_PROMPT, demo_model, plaintext_model, smollm2_model, tokenizer_of
from torch import Tensor, nn

from bench.link import LinkSpeed, SlowMesh
from bench.rows import Row, settings, spread
from bench.work import Shape, random_weights, warm_up
from private_llm.approximations import emulated
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.local import LocalMesh
from private_llm.replay.program_cache import uncompiled_calls

if TYPE_CHECKING:
    from private_llm_hf import ForwardPlan, GeneratePlan
    from private_llm_hf.client.costs import PartCost
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class WholeWork:
    """A model and what is asked of it.

    call: what the private model is asked; it returns its logits and the token ids that gave them. truth: logits of the
    plaintext model, in float64, for these ids (a private text may differ where two logits are nearly equal).
    """

    name: str
    shape: Shape
    build: Callable[[], nn.Module]
    call: Callable[[Any], tuple[Tensor, Tensor]]
    truth: Callable[[Any, Tensor], Tensor]
    plan: Callable[[], ForwardPlan | GeneratePlan] | None = None
    """Makes the preprocessing plan by which `call` can be preprocessed."""
    step: Callable[[Any], object] | None = None
    """One more token after `call`, timed and booked apart."""


def gpt2_forward(shape: Shape) -> WholeWork:
    """GPT-2 with random weights; batch x tokens x hidden x heads x layers x vocabulary (124 M parameters usually)."""
    batch, tokens, hidden, heads, layers, vocabulary = shape

    def build() -> PreTrainedModel:
        from transformers import AutoConfig, GPT2LMHeadModel

        config = AutoConfig.for_model(
            "gpt2", n_embd=hidden, n_head=heads, n_layer=layers, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0
        )
        model = GPT2LMHeadModel(config).eval()
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        model.load_state_dict(random_weights(shapes, 3), strict=False)
        return model

    ids = torch.from_numpy(np.random.default_rng(4).integers(0, vocabulary, (batch, tokens)))

    def call(model: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a private model
        return model(input_ids=ids, use_cache=False).logits, ids

    def plan() -> ForwardPlan:
        from private_llm_hf import ForwardPlan

        return ForwardPlan({"input_ids": (batch, tokens), "use_cache": False})

    return WholeWork("gpt2-forward", shape, build, call, lambda model, ids: model(input_ids=ids).logits, plan)


def generate(shape: Shape) -> WholeWork:
    """Greedy generate() of the bundled model; batch x prompt tokens x new tokens."""
    batch, prompt, new = shape
    folder = demo_model()

    def call(model: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a private model
        ids = torch.from_numpy(np.random.default_rng(4).integers(4, model.config.vocab_size, (batch, prompt)))
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new,
            do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        return torch.stack(made.logits, dim=1), made.sequences

    def truth(model: Any, ids: Tensor) -> Tensor:  # noqa: ANN401 - the plaintext model
        logits: Tensor = model(input_ids=ids).logits
        return logits[:, prompt - 1 : -1]

    def plan() -> GeneratePlan:
        from private_llm_hf import GeneratePlan

        return GeneratePlan(prompt=prompt, new_tokens=new, batch=batch)

    return WholeWork("generate", shape, lambda: plaintext_model(folder), call, truth, plan)


def smollm2(shape: Shape) -> WholeWork:
    """SmolLM2-135M-Instruct reads a chat's prompt; batch x tokens. A further token after it is measured apart.

    The prompt is repeated or cut to the tokens asked for. Of three sizes, batch x prefix x tokens, a prefix is read
    once, before, and the rest goes on from a copy of its cache. Making the model raises ConfigError if it is not
    installed.
    """
    batch, prefix, tokens = shape if len(shape) == 3 else (shape[0], 0, shape[1])
    asked: dict[str, Any] = {}

    def build() -> nn.Module:
        from private_llm_hf.models import smollm2

        folder, length = smollm2_model(), prefix + tokens
        ids = smollm2.chat(tokenizer_of(folder), [CHAT_PROMPT])["input_ids"]
        asked["ids"] = ids.repeat(batch, -(-length // ids.shape[1]))[:, :length]
        model: nn.Module = plaintext_model(folder)
        return model

    def call(model: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a private model
        from private_llm_hf.transformers_versions import CACHE

        if prefix and "before" not in asked:
            asked["before"] = model.prefix(asked["ids"][:1, :prefix]).before
        kept = {CACHE: asked["before"](asked["ids"])} if prefix else {}
        asked["out"] = model(input_ids=asked["ids"][:, prefix:], **kept, use_cache=True)
        return asked["out"].logits, asked["ids"]

    def step(model: Any) -> None:  # noqa: ANN401 - a private model
        from private_llm_hf.transformers_versions import CACHE

        out = asked["out"]
        best = out.logits[:, -1:].argmax(-1)
        asked["out"] = model(input_ids=best, **{CACHE: out[CACHE]}, use_cache=True)

    def truth(model: Any, ids: Tensor) -> Tensor:  # noqa: ANN401 - the plaintext model
        logits: Tensor = model(input_ids=ids).logits
        return logits[:, prefix:]

    return WholeWork("smollm2", shape, build, call, truth, step=step)


def measure_whole(
    work: WholeWork, config: PrivateConfig, repeat: int, speed: LinkSpeed | None, progress: Callable[[], None],
    mesh: LocalMesh | None = None, apart: bool = False,
) -> Row:  # fmt: skip
    """Share the model, then calls until no step is recorded and `repeat` timed ones; the client's share and opening are
    inside. Further tokens likewise, after each call. apart: each call is preprocessed before, which is timed apart.
    """
    from private_llm_hf import patch

    plan = work.plan
    if apart and plan is None:
        raise ConfigError(f"--preprocess: benchmark {work.name!r} has no preprocessing plan")
    model = work.build()
    if speed is not None and mesh is None:
        mesh = SlowMesh(config.parties, config.timeout_s, speed, instant="control")
    private: Any = patch(model, config, mesh)
    ahead, times, later, kinds, further, step = [], [], [], [], 0.0, work.step
    logits = ids = torch.empty(0)

    def once() -> float:
        nonlocal logits, ids
        private.cost(reset=True)
        if apart and plan is not None:
            ahead.append(_seconds(lambda: private.preprocess(plan())))
        started = time.perf_counter()
        logits, ids = work.call(private)
        times.append(time.perf_counter() - started)
        return times[-1]

    try:
        with torch.no_grad():
            first = warm_up(once, uncompiled_calls)
            if step is not None:
                further = warm_up(lambda: _seconds(lambda: step(private)), uncompiled_calls)
            ahead.clear()
            times.clear()
            progress()
            for _ in range(repeat):
                once()
                made = private.cost(reset=True)
                kinds.append(made.layer_kinds())
                if step is not None:
                    later.append(_seconds(lambda: step(private)))
                progress()
        after = private.cost()
        costs = made.to_dict()
        sent = {key: costs[key] for key in ("bytes_total", "bytes_preprocessing", "bytes_per_party", "rounds")}
    finally:
        private.close()
    with torch.no_grad(), emulated(config.approximations, model):
        truth = work.truth(model.double(), ids)
    return Row(
        **settings(config, speed), name=work.name, shape=work.shape, repeat=repeat,
        seconds=spread(times), seconds_first=first, **sent, error_max=float((logits - truth).abs().max()),
        bytes_received={
            str(party): sum(count for (_, to), count in made.cost.sent.items() if to == party)
            for party in range(config.parties)
        },
        by_kind=None if apart else _by_kind(kinds),
        seconds_preprocessing=spread(ahead) if apart else None,
        after={
            "seconds": spread(later), "seconds_first": further,
            "bytes_total": after.bytes_total, "rounds": after.rounds,
        } if later else None,
    )  # fmt: skip


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _by_kind(runs: Sequence[Mapping[str, PartCost]]) -> dict[str, dict[str, float]] | None:
    """Columns of a row by kind of module, with the median seconds over the runs; None where nothing books by module."""
    made = {}
    for name in {name for run in runs for name, part in run.items() if part.seconds}:
        parts = [run[name] for run in runs if name in run]
        part = replace(parts[-1], seconds=statistics.median(each.seconds for each in parts))
        made[name] = {**asdict(part), "gbit_per_s": part.gbit_per_s}
    return dict(sorted(made.items(), key=lambda item: item[1]["seconds"], reverse=True)) or None
