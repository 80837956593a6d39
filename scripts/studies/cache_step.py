"""Processor time of a decode step over a full cache, beside its two products with the cache, and beside MPCache.

    python scripts/studies/cache_step.py                 # LLaMA-2's attention over 2,048 entries, trio, minutes
    python scripts/studies/cache_step.py --tokens 512    # another length
    python scripts/studies/cache_step.py --json          # rows
    python scripts/studies/cache_step.py --tiny          # a few seconds

Seconds are those of the processor, of all parties together as threads of this process, without links: the smallest of
the repetitions, in turns. product: what the parties multiply locally with the keys and values that they hold (two
products each at parties 0 and 1, one at party 2), in the same kernels. recorded: steps that repeat run
as programs, otherwise as Python.
"""

import argparse
import time
from dataclasses import replace
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.rows import provenance
from cache_steps import AttentionShape, timed
from private_llm_cli.commands.output import emit_json, emit_table

from private_llm.config import PrivateConfig
from private_llm.kernels import ops
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import KEEP_ALL
from private_llm.nn.padded_keys import padded_length
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring

HELD = (2, 2, 1)
"""Products with keys, and with values, at each party of trio."""
USUAL = AttentionShape(32, 32, 128, 2048), MPCacheConfig.paper(), 9
"""LLaMA-2's attention, MPCache as published, repetitions."""
TINY = AttentionShape(4, 4, 8, 96), MPCacheConfig.paper(least=32), 2


def product_seconds(shape: AttentionShape, repeat: int) -> float:
    """Of the products of one step at all parties."""
    stream, ring, length = Seed(bytes(32)).stream("cache step"), Ring(64), padded_length(shape.tokens + 1)

    def drawn(*size: int) -> torch.Tensor:
        return stream.elements(torch.Size(size).numel(), ring).view(size)

    query, weights = drawn(1, shape.heads, 1, shape.depth), drawn(1, shape.heads, 1, length)
    room = length + length // 8  # a cache lies in larger buffers
    held = [drawn(1, shape.groups, room, shape.depth)[:, :, :length] for _ in range(4)]
    found = []
    for _ in range(repeat):
        before = time.process_time()
        for parts in HELD:
            for part in range(parts):
                ops.ring_matmul(query, held[part].mT)
                ops.ring_matmul(weights, held[2 + part])
        found.append(time.process_time() - before)
    return min(found)


def row(shape: AttentionShape, policy: MPCacheConfig, recorded: bool, repeat: int) -> dict[str, Any]:
    """Steps with a full cache and under the policy, and the product."""
    torch.set_num_threads(1)
    config = PrivateConfig(protocol="trio", calibrate=False, replay=recorded)
    before = product_seconds(shape, repeat)
    full, kept = (made.processor["min"] for made in timed(config, [KEEP_ALL, policy], shape, repeat))
    product = min(before, product_seconds(shape, repeat))
    return {
        "name": "cache-step", "tokens": shape.tokens, "heads": shape.heads, "depth": shape.depth, "recorded": recorded,
        "product": product, "full": full, "kept": kept, "ratio_product": full / product, "ratio_kept": full / kept,
        "repeat": repeat, **provenance(),
    }  # fmt: skip


def main() -> None:
    """Rows as JSON, or a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shape, policy, repeat = TINY if options.tiny else USUAL
    if not options.tiny:
        shape, repeat = replace(shape, tokens=options.tokens), options.repeat
    rows = [row(shape, policy, recorded, repeat) for recorded in (True, False)]
    if options.json:
        for each in rows:
            emit_json(each)
        return
    cells = []
    for each in rows:
        times = (f"{1e3 * each[name]:.1f}" for name in ("product", "full", "kept"))
        ratios = (f"{each[name]:.2f}" for name in ("ratio_product", "ratio_kept"))
        cells.append(("recorded" if each["recorded"] else "Python", *times, *ratios))
    header = ("steps", "product, ms", "full cache, ms", "MPCache, ms", "full by product", "full by MPCache")
    emit_table("processor time of a decode step's attention, all parties", header, cells)


if __name__ == "__main__":
    main()
