"""`private-llm estimate`: bytes, rounds, multiply-adds, memory and time of a run that does not happen."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy
from private_llm.ranges import UNKNOWN, Ranges
from private_llm_cli import options
from private_llm_cli.commands.calibrate import ranges_from
from private_llm_cli.commands.estimate_plans import Hardware, Workload, sharding_facts, sharding_rows
from private_llm_cli.commands.models import shape_of
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import Estimate, LayerCost
    from transformers import PretrainedConfig, PreTrainedModel


def estimate(
    work: Workload, config: PrivateConfig, as_json: bool, hardware: Hardware, image: str | None, ranges: str,
    operations: bool,
) -> None:  # fmt: skip
    """Count costs and print them per layer. work.sparsity: see `PlannedSparsity.parse`. ranges: see `_known`.

    operations: print where the bytes are, too (see `cost_places`).
    """
    from private_llm_hf.models.architectures import architecture
    from private_llm_hf.sparsity.price import PlannedSparsity
    from private_llm_hf.tools.estimate import estimate as run

    model_class, model_config = shape_of(work.model)
    known = _known(ranges, model_class, model_config)
    vision = architecture(model_config).kind == "vision"
    if image is not None and not vision:
        raise ConfigError(f"image: {work.model!r} reads text; give --seq")
    if work.sparsity:
        planned = PlannedSparsity.parse(work.sparsity)
        config = replace(config, sparsity=planned.settings)
        model_config, replaced = planned.applied(model_class, model_config)
        work = replace(work, replaced=replaced)
    asked = [config] if config.kv_cache == KEEP_ALL else [config, replace(config, kv_cache=KEEP_ALL)]
    pixels = None if image is None else options.parse_shape(image)
    with progress_bar(max(1, work.new) * len(asked), quiet=as_json) as step:
        step("building the model", 0)
        found, *beside = (
            run(
                model_class, model_config, each, work.sequence, work.new, work.batch,
                lambda: step("counting forwards"), pixels, ranges=known,
            )
            for each in asked
        )  # fmt: skip
    saved = saving(beside[0], found, config.kv_cache, work.new, hardware) if beside else None
    if vision:
        work = replace(work, sequence=0)
    if as_json:
        kept = {} if saved is None else {"kv_cache": saved}
        places = {"operations": _operations(found, work.new)} if operations else {}
        emit_json({**_summary(work, found, config, hardware), **kept, **places})
        return
    _tables(work, found, config, hardware)
    if operations:
        _operation_tables(found, work.new)
    if saved is not None:
        _saving_table(saved, found.cache_bytes)


def _known(ranges: str, model_class: type[PreTrainedModel], model_config: PretrainedConfig) -> Ranges:
    """Of the name of a file of `calibrate`, "" or the word for the bundled ones."""
    from private_llm_hf.tools.ranges_by_depth import MEASURED, ranges_by_depth

    if ranges == MEASURED:
        return ranges_by_depth(model_class, model_config)
    return ranges_from(Path(ranges) if ranges else None) or UNKNOWN


def _operations(found: Estimate, new: int) -> dict[str, list[dict[str, Any]]]:
    """What sent most first; "token" is empty where nothing is generated after the first new token."""
    from private_llm_hf.tools.cost_places import places_of_prompt, places_of_token

    parts = {"prompt": places_of_prompt(found), "token": places_of_token(found, new)}
    return {name: [dataclasses.asdict(place) for place in places] for name, places in parts.items()}


_LEAST = 0.005  # share of the bytes of a line of its own


def _operation_tables(found: Estimate, new: int) -> None:
    """The same for people: the prompt's, or a further token's where there is one."""
    parts = _operations(found, new)
    title, places = ("a further token", parts["token"]) if parts["token"] else ("the prompt", parts["prompt"])
    total = max(1, sum(place["bytes"] for place in places))
    large = [place for place in places if place["bytes"] >= _LEAST * total]
    rest = [place for place in places if place["bytes"] < _LEAST * total]
    if rest:
        bytes_, rounds = (sum(place[what] for place in rest) for what in ("bytes", "rounds"))
        large.append({"module": f"{len(rest)} others", "operation": "", "bytes": bytes_, "rounds": rounds})
    rows = [
        (row["module"] or "-", row["operation"], size(row["bytes"]), f"{row['bytes'] / total:.1%}", row["rounds"])
        for row in large
    ]
    emit_table(f"where {title}'s bytes are", ("module, all layers", "operation", "bytes", "share", "rounds"), rows)


def _summary(work: Workload, found: Estimate, config: PrivateConfig, hardware: Hardware) -> dict[str, Any]:
    layers = found.layers()
    times = [hardware.seconds(layer) for layer in layers]
    macs = {str(p): sum(layer.macs.get(p, 0) for layer in layers) for p in range(config.endpoints)}
    speed = hardware.floats if config.protocol == "cascade" else hardware.ring
    return {
        "name": "estimate", "model": work.model, "protocol": config.protocol, "ring": config.ring,
        "adder": _adder(config),
        "seq": work.sequence, "new": work.new, "batch": work.batch, "sparsity": work.sparsity or None,
        "relu_instead_of": work.replaced, **found.costs.to_dict(), "macs_per_party": macs,
        "memory_per_party": {
            "weights": found.weight_bytes, "cache": found.cache_bytes, "weights_from_seeds": found.seeds_bytes
        } if hardware.products is None else {"weights": found.weight_bytes},
        **({} if hardware.products is None else {
            "memory_client": {"weights": found.client_bytes, "cache": found.cache_bytes},
            **dataclasses.asdict(hardware.products),
            **({} if found.corrections is None else {"corrections": {
                "rows": found.corrections.rows, "bytes": found.corrections.bytes,
                "seconds": found.corrections.seconds(hardware.products),
            }}),
        }),
        "bandwidth_mbit": hardware.link.bandwidth_mbit, "latency_ms": hardware.link.latency_ms,
        "gmacs": round(speed, 2), "seconds": sum(times), **speeds(work, found, hardware),
        **({} if config.plan is None else sharding_facts(work, found, config, hardware)),
        "layers": [
            {
                "name": layer.name, "bytes": layer.bytes_total, "rounds": layer.rounds,
                "macs": max(layer.macs.values(), default=0), "seconds": seconds,
            }
            for layer, seconds in zip(layers, times, strict=True)
        ],
    }  # fmt: skip


def _adder(config: PrivateConfig) -> str:
    """What comparisons are made by: "auto" without a bandwidth is the prefix adder."""
    return "prefix" if config.adder == "auto" and config.bandwidth_mbit is None else config.adder


def speeds(work: Workload, found: Estimate, hardware: Hardware) -> dict[str, float | None]:
    """Seconds until the first new token, and new tokens a second after it (of all rows); None where there are none."""
    if found.prompt is None:
        return {"seconds_first_token": None, "tokens_per_second": None}
    first, total = (sum(hardware.seconds(layer) for layer in part.layers()) for part in (found.prompt, found))
    later = (work.new - 1) * work.batch
    return {"seconds_first_token": first, "tokens_per_second": later / (total - first) if later else None}


def _speed_rows(work: Workload, found: Estimate, hardware: Hardware) -> list[tuple[str, object]]:
    """The same for people."""
    first, rate = speeds(work, found, hardware).values()
    rows: list[tuple[str, object]] = [] if first is None else [("time to first token", duration(first))]
    return rows if rate is None else [*rows, ("tokens per second after it", f"{rate:.3g}")]


def _tables(work: Workload, found: Estimate, config: PrivateConfig, hardware: Hardware) -> None:
    rows = []
    layers = found.layers()
    for name, group in merge_equal(layers):
        one = group[0]
        macs = max(one.macs.values(), default=0)
        each = duration(hardware.seconds(one))
        rows.append((name, len(group), size(one.bytes_total), one.rounds, f"{macs / 1e9:.2f} G", each))
    headings = ("layer", "times", "bytes each", "rounds each", "multiply-adds each", "time each")
    caption = f"{hardware.link}, {', '.join(hardware.speeds(config))}"
    by = "" if _adder(config) == "prefix" else f", adder {_adder(config)}"
    emit_table(f"{work}, {config.protocol}{by}", headings, rows, caption)
    total = duration(sum(hardware.seconds(layer) for layer in layers))
    pace = _speed_rows(work, found, hardware)
    if config.plan is not None:
        emit_table(
            "in sum", ("what", "how much"), [*sharding_rows(work, found, config, hardware), *pace, ("time", total)]
        )
        return
    if hardware.products is not None:
        stored = found.corrections
        prepared = [] if stored is None else [
            (f"corrections on disk, {stored.rows} rows of each weight", size(stored.bytes)),
            ("time of preparing them on this machine", duration(stored.seconds(hardware.products))),
        ]  # fmt: skip
        emit_table(
            "in sum", ("what", "how much"),
            [
                ("bytes over all links", size(found.costs.bytes_total)),
                ("rounds, each an exchange (two latencies) with the servers", found.costs.rounds),
                ("memory of a server, weights", size(found.weight_bytes)),
                ("memory of the client, weights and cache", f"{size(found.client_bytes)}, {size(found.cache_bytes)}"),
                *prepared, *pace, ("time (latency, the client's link, servers, client)", total),
            ],
        )  # fmt: skip
        return
    costs, sizes = found.costs, ", ".join(map(size, found.seeds_bytes))
    seeds = [("the same with weights_at_rest='seeds', party by party", sizes)] if sizes else []
    emit_table(
        "in sum", ("what", "how much"),
        [
            ("bytes over all links", size(costs.bytes_total)),
            ("of these preprocessing, which may be sent before", size(costs.preprocessing.total)),
            ("rounds", costs.rounds),
            ("memory per party, weights", size(found.weight_bytes)), *seeds,
            ("memory per party, cache", size(found.cache_bytes)), *pace,
            ("time (latency, busiest link, matrix products)", total),
        ],
    )  # fmt: skip


def merge_equal(layers: list[LayerCost]) -> list[tuple[str, list[LayerCost]]]:
    """Neighbours of equal cost whose names differ in a number only, under one name."""
    groups = itertools.groupby(
        layers, lambda layer: (re.sub(r"\d+$", "#", layer.name), layer.sent, layer.rounds, layer.macs)
    )
    merged = [list(members) for _, members in groups]
    return [
        (f"{first.name}-{rest[-1].name.rsplit('.', 1)[-1]}" if rest else first.name, [first, *rest])
        for first, *rest in merged
    ]


# -- what a policy of the KV cache saves: beside a full cache, for the prompt and for each token ----------------------
def saving(full: Estimate, kept: Estimate, policy: CachePolicy, new: int, hardware: Hardware) -> dict[str, Any]:
    """Of a run under `policy` (kept) beside one that keeps all (full), both of `new` tokens (0: one forward). policy;
    full: bytes_total, rounds, seconds and cache bytes of the whole run; prompt and token: full and kept bytes, rounds
    and seconds until the first new token, and of each later one on average (None without any).
    """
    runs = {"full": full, "kept": kept}
    whole = {name: _sum(found, hardware) for name, found in runs.items()}
    prompt = {name: _sum(found.prompt or found, hardware) for name, found in runs.items()}
    token = {
        name: {key: (costs[key] - prompt[name][key]) / (new - 1) for key in costs} for name, costs in whole.items()
    } if new > 1 else None  # fmt: skip
    costs = whole["full"]
    full_run = {"bytes_total": costs.pop("bytes"), **costs, "cache": full.cache_bytes}
    return {"policy": policy.to_dict(), "full": full_run, "prompt": prompt, "token": token}


def _saving_table(facts: dict[str, Any], kept: int) -> None:
    """The same for people. kept: bytes of the cache under the policy."""
    cells = []
    for label, part in (("prompt and first token", facts["prompt"]), ("each further token", facts["token"])):
        if part is not None:
            shown: tuple[tuple[str, Callable[[float], object]], ...]
            shown = (("bytes", size), ("rounds", "{:.0f}".format), ("seconds", duration))
            for place, (what, say) in enumerate(shown):
                pair = part["full"][what], part["kept"][what]
                cells.append(("" if place else label, what, say(pair[0]), say(pair[1]), _times(*pair)))
    full = facts["full"]["cache"]
    cells.append(("at the end", "cache of a party", size(full), size(kept), _times(full, kept)))
    headings = ("part", "what", "full", "kept", "full by kept")
    emit_table(f"{facts['policy']['name']} beside a full cache", headings, cells)


def _sum(found: Estimate, hardware: Hardware) -> dict[str, float]:
    return {
        "bytes": found.costs.bytes_total, "rounds": found.costs.rounds,
        "seconds": sum(hardware.seconds(layer) for layer in found.layers()),
    }  # fmt: skip


def _times(full: float, kept: float) -> str:
    return f"{full / kept:.2f}x" if kept else "-"
