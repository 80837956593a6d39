"""Rows of bench_gpu.py about models: a prompt, further tokens, and what each part of them takes.

All parties of trio compute on one GPU. Weights are random, sizes are the published ones.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from accelerate import init_empty_weights
from bench.layers import network as network_work
from gpu_timing import GPU, Samples, copy_rates, gpu_work, small_calls, synchronize
from private_llm_cli.commands.models import demo_model
from private_llm_hf import AutoPrivateModelForCausalLM, patch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig

Row = dict[str, Any]
DEVICE = "cuda" if GPU else "cpu"
PARTIES = 3
_LAYER, _WORDS = 202e6, 262e6
"""Weights of one layer of LLaMA-7B, and of its embedding and head."""
_TINY = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


@dataclass(frozen=True)
class Given:
    """How this run was asked for. ends: by `time.monotonic`. layers, at_rest: of the part "whole"."""

    tiny: bool
    ends: float
    layers: int | None = None
    at_rest: str = "resident"
    prg: str | None = None

    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def skipped(self, need_s: float, what: str) -> Row | None:
        """The row of a step that takes about `need_s` seconds, if these are not left."""
        if self.tiny or self.left() > need_s:
            return None
        return {"name": "skipped", "what": what, "needs_s": need_s, "left_s": round(self.left(), 1)}


def llama(given: Given, layers: int, words: int = 1024) -> PretrainedConfig:
    """LLaMA-7B's sizes but for the number of layers and words."""
    sizes = {"vocab_size": words, "num_hidden_layers": layers}
    return LlamaConfig(**_TINY, **sizes | {"vocab_size": 96}) if given.tiny else LlamaConfig(**sizes)


def gpt2(given: Given) -> PretrainedConfig:
    """GPT-2 small."""
    return GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=96) if given.tiny else GPT2Config()


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Weights of the usual size that lie in one memory, each some places later, so that 27 GB need not be there."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(0)
    names = [name for name, _ in model.named_parameters()]
    base = torch.empty(max(p.numel() for p in model.parameters()) + 64 * len(names)).normal_(std=0.02)
    for number, name in enumerate(names):
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        shape = module.get_parameter(own).shape
        places = base[64 * number : 64 * number + shape.numel()].view(shape)
        one = torch.ones(shape) if own == "weight" else torch.zeros(shape)
        setattr(module, own, nn.Parameter(places if len(shape) > 1 else one, requires_grad=False))
    model.tie_weights()
    return model


@contextmanager
def opened(given: Given, config: PretrainedConfig, **settings: object) -> Iterator[tuple[Any, PreTrainedModel, float]]:
    """The private model, the plaintext one, and the seconds that sharing took."""
    ways = {"device": DEVICE, "party_mode": "threads", "calibrate": False, "timeout_s": 120.0}
    if given.prg:
        ways["prg"] = given.prg
    model = random_model(config)
    began = time.perf_counter()
    with torch.no_grad(), patch(model, PrivateConfig.from_dict(ways | settings)) as private:
        synchronize()
        yield private, model, round(time.perf_counter() - began, 2)


def some_ids(config: PretrainedConfig, count: int) -> Tensor:
    """Token ids [1, count]."""
    return (torch.arange(count) * 37 % config.vocab_size)[None]


def error_of(logits: Tensor, model: PreTrainedModel, ids: Tensor) -> float:
    """Largest difference of the last logits from those in the clear."""
    return float((logits[:, -1] - model(ids).logits[:, -1]).abs().max())


def timed(seconds: float) -> float | None:
    """Rounded; None without a GPU, where no time means anything."""
    return round(seconds, 5) if GPU else None


def memory() -> Row:
    """GB of the device: the highest since the last call, and what PyTorch has taken from it."""
    if not GPU:
        return {}
    found = {
        "device_gb_highest": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "device_gb_reserved": round(torch.cuda.memory_reserved() / 1e9, 2),
    }
    torch.cuda.reset_peak_memory_stats()
    return found


def let_go() -> None:
    """Give back what closed models held on the device."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


# -- what is measured -----------------------------------------------------------------------------------------------
def token_rows(given: Given, private: Any, model: PreTrainedModel, about: Row, deep: bool = True) -> Iterator[Row]:  # noqa: ANN401
    """Further tokens after a prompt of 128: their times, then what one does, then where its threads stand.

    The first six record the step; 14 stay within a program of attention of 16 lengths, and so do the next 14.
    """
    prompt, recording, counted, profiled = (5, 5, 1, 1) if given.tiny else (128, 6, 8, 2)
    ids = some_ids(model.config, prompt + 2 * (recording + counted) + profiled)
    made, at = private(ids[:, :prompt], use_cache=True), prompt

    def steps(count: int) -> list[float]:
        nonlocal made, at
        found = []
        for _ in range(count):
            began = time.perf_counter()
            made = private(ids[:, at : at + 1], past_key_values=made.past_key_values, use_cache=True)
            found.append(time.perf_counter() - began)
            at += 1
        return found

    first, then = steps(recording), steps(counted)
    wall = statistics.median(then)
    yield {
        "name": "token", **about, "seconds_median": timed(wall), "seconds_least": timed(min(then)),
        "seconds_while_recording": [timed(x) for x in first], "error_max": error_of(made.logits, model, ids[:, :at]),
        **memory(),
    }  # fmt: skip
    if not deep:
        return
    yield {"name": "token-work", **about, **gpu_work(lambda: steps(profiled), PARTIES, profiled)}
    steps(recording)
    with Samples() as samples:
        again = steps(counted)
    yield {"name": "token-parts", **about, "seconds": timed(statistics.median(again)), **samples.shares(wall)}


def prompt_rows(
    given: Given, private: Any, model: PreTrainedModel, about: Row, sizes: Sequence[int], deep: bool = True,  # noqa: ANN401
) -> Iterator[Row]:  # fmt: skip
    """Prompts of these lengths: the sixth call of each is timed, those before compile kernels and record programs.

    Fewer calls where time is short. One more says what the GPU does, and where the threads stand.
    """
    taken = 0.0
    for number, size in enumerate(sizes):
        longer = 1.0 if number == 0 else size / sizes[number - 1]
        if skip := given.skipped(1.5 * longer * taken, f"prompt of {size}, {about['model']}"):
            yield skip
            return
        ids, found = some_ids(model.config, size), list[float]()
        memory()
        while len(found) < (2 if given.tiny else 6) and (not found or given.tiny or given.left() > 4 * found[-1]):
            began = time.perf_counter()
            made = private(ids, use_cache=True)
            found.append(time.perf_counter() - began)
        taken, where = found[-1], {**about, "prompt": size}
        yield {
            "name": "prompt", **where, "seconds": timed(taken), "seconds_each": [timed(each) for each in found],
            "error_max": error_of(made.logits, model, ids), **memory(),
        }  # fmt: skip
        if deep and (given.tiny or given.left() > 3 * taken):
            work = gpu_work(lambda ids=ids: private(ids, use_cache=True), PARTIES)
            with Samples() as samples:  # apart, because the profiler's own work afterwards takes longer than the call
                private(ids, use_cache=True)
            yield {"name": "prompt-work", **where, **work, **samples.shares(taken)}


# -- parts ----------------------------------------------------------------------------------------------------------
def check(given: Given) -> Iterator[Row]:
    """What this GPU is, and whether a private generation on it gives the plaintext tokens."""
    if GPU:
        about = torch.cuda.get_device_properties(0)
        yield {"name": "device", "memory_gb": round(about.total_memory / 1e9, 1), "cores": about.multi_processor_count}
    yield {"name": "copies", "gb_per_s": copy_rates(DEVICE, given.tiny)}
    yield {"name": "small-calls", "microseconds": small_calls()}
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(5, 21)[None]
    want = AutoModelForCausalLM.from_pretrained(demo_model()).generate(ids, **how)
    for prg in ("aes", "chacha20"):
        settings = PrivateConfig.from_dict({"device": DEVICE, "prg": prg, "party_mode": "threads", "timeout_s": 120.0})
        began = time.perf_counter()
        with AutoPrivateModelForCausalLM.from_pretrained(demo_model(), private_config=settings) as private:
            found = [private.generate(ids, **how) for _ in range(1 if given.tiny else 2)]
            again: list[Tensor] = []
            work = gpu_work(lambda private=private, again=again: again.append(private.generate(ids, **how)), PARTIES)
        yield {
            "name": "generate", "model": "bundled demo", "prg": prg, "parties_on": DEVICE,
            "tokens_equal_plaintext": all(torch.equal(each, want) for each in found + again),
            "seconds_all": timed(time.perf_counter() - began), "graphs_per_party": work["graphs_per_party"],
        }  # fmt: skip


def token(given: Given) -> Iterator[Row]:
    """One layer of LLaMA-7B with 1,024 words: tokens after a prompt of 128."""
    yield from _layer(given, token_rows)


def prompt(given: Given) -> Iterator[Row]:
    """The same layer: prompts."""
    yield from _layer(given, partial(prompt_rows, sizes=(5,) if given.tiny else (128, 512, 2048)))


def _layer(given: Given, rows: Callable[..., Iterator[Row]]) -> Iterator[Row]:
    about = {"model": "llama-7b-1-layer", "prg": given.prg or "default"}
    with opened(given, llama(given, 1)) as (private, model, seconds):
        yield {"name": "start", **about, "seconds": timed(seconds), **memory()}
        yield from rows(given, private, model, about)


def small(given: Given) -> Iterator[Row]:
    """GPT-2 small: a token, and a prompt of 128."""
    about = {"model": "gpt2", "prg": given.prg or "default"}
    with opened(given, gpt2(given)) as (private, model, seconds):
        yield {"name": "start", **about, "seconds": timed(seconds), **memory()}
        yield from prompt_rows(given, private, model, about, (5 if given.tiny else 128,))
        if skip := given.skipped(20, "tokens of gpt2"):
            yield skip
            return
        yield from token_rows(given, private, model, about)


def whole(given: Given) -> Iterator[Row]:
    """LLaMA-7B with its 32,000 words and `layers` of its layers, beside one layer: what a layer takes, and the rest."""
    found: dict[tuple[str, int], float] = {}
    counts = (1, 2 if given.tiny else given.layers or _layers_that_fit(given.at_rest))
    size, need = 5 if given.tiny else 512, 30.0
    for layers in counts:
        about = {"model": f"llama-7b-{layers}-layers-32000-words", "weights_at_rest": given.at_rest}
        if skip := given.skipped(need, str(about["model"])):
            yield skip
            return
        with opened(given, llama(given, layers, 32000), weights_at_rest=given.at_rest) as (private, model, seconds):
            yield {"name": "start", **about, "seconds": timed(seconds), **memory()}
            need = 30 + 1.5 * seconds * (counts[1] * _LAYER + _WORDS) / (_LAYER + _WORDS)
            for row in (
                *token_rows(given, private, model, about, deep=layers == counts[1]),
                *prompt_rows(given, private, model, about, (size,), deep=False),
            ):
                yield row
                for name, of in (("token", "seconds_median"), ("prompt", "seconds")):
                    if row["name"] == name and row.get(of) is not None:
                        found[name, layers] = row[of]
        let_go()
    for name in ("token", "prompt"):
        if (name, counts[0]) in found and (name, counts[1]) in found:
            layer = (found[name, counts[1]] - found[name, counts[0]]) / (counts[1] - counts[0])
            rest = found[name, counts[0]] - layer
            yield {
                "name": f"whole-{name}", "layers": counts[1], "seconds_layer": timed(layer),
                "seconds_head": timed(rest), "seconds_32_layers": timed(32 * layer + rest),
            }  # fmt: skip


def _layers_that_fit(at_rest: str) -> int:
    """Beside words and 12 GB for what is computed. A weight takes 48 bytes, or 16 where masks are seeds."""
    room = torch.cuda.get_device_properties(0).total_memory - 12e9
    return min(32, int((room / (16 if at_rest == "seeds" else 48) - _WORDS) / _LAYER))


def images(given: Given) -> Iterator[Row]:
    """VGG-16 of images of 32 x 32, 16 at once, in the 32-bit ring, on the GPU and on this machine's cores."""
    work = network_work("vgg16", (1 if given.tiny else 16, 3, 32, 32))
    network = work.build()
    for device in ("cpu",) if given.tiny else ("cuda", "cpu"):
        about = {"model": "vgg16", "shape": [*work.shape], "ring": 32, "parties_on": device}
        settings = {
            "device": device,
            "party_mode": "threads",
            "ring": 32,
            "frac_bits": 12,
            "calibrate": False,
            "timeout_s": 120.0,
        }
        with torch.no_grad(), patch(network, PrivateConfig.from_dict(settings)) as private:
            found = []
            for _ in range(1 if given.tiny else 4):
                began = time.perf_counter()
                logits, asked = work.call(private)
                found.append(time.perf_counter() - began)
            error = float((logits - network.double()(asked.double())).abs().max())
            yield {
                "name": "images", **about, "seconds_first": timed(found[0]),
                "seconds": timed(statistics.median(found[-3:])), "error_max": error, **memory(),
            }  # fmt: skip
            if device == "cuda":
                yield {"name": "images-work", **about, **gpu_work(lambda private=private: work.call(private), PARTIES)}
        network.float()


def processes(given: Given) -> Iterator[Row]:
    """GPT-2 small with parties as processes, on the GPU and on this machine's cores."""
    for device in ("cpu",) if given.tiny else ("cuda", "cpu"):
        if skip := given.skipped(60, f"gpt2, processes on {device}"):
            yield skip
            return
        about = {"model": "gpt2", "parties_on": device, "parties_as": "processes"}
        mode = "threads" if given.tiny else "processes"
        with opened(given, gpt2(given), device=device, party_mode=mode) as (private, model, _):
            yield from prompt_rows(given, private, model, about, (5 if given.tiny else 128,), deep=False)
            yield from token_rows(given, private, model, about, deep=False)
