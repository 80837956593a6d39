"""`private-llm estimate`: bytes, rounds, multiply-adds, memory and time of a run that does not happen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from private_llm.bench.link import LinkSpeed
from private_llm.bench.work import parse_shape
from private_llm.commands.models import shape_of
from private_llm.commands.output import duration, emit_json, emit_table, progress_bar, size
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError

if TYPE_CHECKING:
    from private_llm_hf.estimate import Estimate, LayerCost


def estimate(
    model: str, config: PrivateConfig, as_json: bool, sequence: int, new_tokens: int, batch: int,
    bandwidth: float, latency: float, gmacs: float | None, image: str | None = None,
) -> None:  # fmt: skip
    """Count the costs on meta tensors and print them per layer."""
    from private_llm_hf.architectures import architecture
    from private_llm_hf.estimate import estimate as run

    speed = LinkSpeed(bandwidth, latency)
    model_class, model_config = shape_of(model)
    if gmacs is None:
        from private_llm.commands.doctor import matmul_speed

        gmacs = matmul_speed()
    elif not gmacs > 0:
        raise ConfigError(f"gmacs: got {gmacs:g}; want a positive number")
    with progress_bar(max(1, new_tokens), quiet=as_json) as step:
        found = run(
            model_class, model_config, config, sequence, new_tokens, batch,
            lambda: step("counting forwards"), None if image is None else parse_shape(image),
        )  # fmt: skip
    if architecture(model_config).kind == "vision":
        sequence = 0
    if as_json:
        emit_json(_summary(model, found, config, sequence, new_tokens, batch, speed, gmacs))
        return
    _tables(model, found, config, (sequence, new_tokens, batch), speed, gmacs)


def _summary(
    model: str, found: Estimate, config: PrivateConfig, sequence: int, new_tokens: int, batch: int, speed: LinkSpeed,
    gmacs: float,
) -> dict[str, Any]:  # fmt: skip
    layers = found.layers()
    times = [layer.seconds(speed.bandwidth_mbit, speed.latency_ms, gmacs) for layer in layers]
    macs = {str(p): sum(layer.macs.get(p, 0) for layer in layers) for p in range(config.parties)}
    return {
        "name": "estimate", "model": model, "protocol": config.protocol, "ring": config.ring, "seq": sequence,
        "new": new_tokens, "batch": batch, **found.costs.to_dict(), "macs_per_party": macs,
        "memory_per_party": {"weights": found.weight_bytes, "cache": found.cache_bytes},
        "bandwidth_mbit": speed.bandwidth_mbit, "latency_ms": speed.latency_ms, "gmacs": round(gmacs, 2),
        "seconds": sum(times),
        "layers": [
            {
                "name": layer.name, "bytes": layer.bytes_total, "rounds": layer.rounds,
                "macs": max(layer.macs.values(), default=0), "seconds": seconds,
            }
            for layer, seconds in zip(layers, times, strict=True)
        ],
    }  # fmt: skip


def _tables(
    model: str, found: Estimate, config: PrivateConfig, sizes: tuple[int, int, int], speed: LinkSpeed, gmacs: float
) -> None:
    rows = []
    total = 0.0
    for name, layers in merge_equal(found.layers()):
        seconds = [layer.seconds(speed.bandwidth_mbit, speed.latency_ms, gmacs) for layer in layers]
        total += sum(seconds)
        macs = max(layers[0].macs.values(), default=0)
        one = layers[0]
        rows.append((name, len(layers), size(one.bytes_total), one.rounds, f"{macs / 1e9:.2f} G", duration(seconds[0])))
    sequence, new_tokens, batch = sizes
    forward = f"one forward of {sequence} tokens" if sequence else "images"
    work = f"{new_tokens} tokens after {sequence}" if new_tokens else forward
    headings = ("layer", "times", "bytes each", "rounds each", "multiply-adds each", "time each")
    caption = f"{speed.bandwidth_mbit:g} Mbit/s, {speed.latency_ms:g} ms one way, {gmacs:.1f} GMAC/s per party"
    emit_table(f"{model}: {work}, batch {batch}, {config.protocol}", headings, rows, caption)
    costs = found.costs
    emit_table(
        "in sum", ("what", "how much"),
        [
            ("bytes over all links", size(costs.bytes_total)),
            ("of these preprocessing, which may be sent before", size(costs.preprocessing.total)),
            ("rounds", costs.rounds),
            ("memory per party, weights", size(found.weight_bytes)),
            ("memory per party, cache", size(found.cache_bytes)),
            ("time (latency, busiest link, matrix products)", duration(total)),
        ],
    )  # fmt: skip


def merge_equal(layers: list[LayerCost]) -> list[tuple[str, list[LayerCost]]]:
    """Neighbours of equal cost whose names differ in a number only, under one name."""
    groups: list[tuple[str, list[LayerCost]]] = []
    for layer in layers:
        pattern = re.sub(r"\d+$", "#", layer.name)
        if groups:
            last = groups[-1][1][-1]
            same = (last.sent, last.rounds, last.macs) == (layer.sent, layer.rounds, layer.macs)
            if same and pattern == re.sub(r"\d+$", "#", last.name):
                groups[-1][1].append(layer)
                continue
        groups.append((layer.name, [layer]))
    return [
        (f"{name}-{members[-1].name.rsplit('.', 1)[-1]}" if len(members) > 1 else name, members)
        for name, members in groups
    ]
