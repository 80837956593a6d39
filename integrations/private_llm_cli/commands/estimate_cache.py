"""What a policy of the KV cache saves: an estimate beside that of a full cache, for the prompt and for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from private_llm.kv_policies.policy import CachePolicy
from private_llm_cli.commands.hardware import Hardware
from private_llm_cli.commands.output import duration, emit_table, size

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import Estimate


@dataclass(frozen=True)
class Saving:
    """A run under `policy` (kept) and one that keeps all (full), both of `new` tokens (0: one forward)."""

    policy: CachePolicy
    full: Estimate
    kept: Estimate
    new: int

    def to_dict(self, hardware: Hardware) -> dict[str, Any]:
        """policy; full: bytes_total, rounds, seconds and cache bytes of the whole run; prompt and token: full and kept
        bytes, rounds and seconds until the first new token, and of each later one on average (None without any).
        """
        prompt, token = (
            {name: part(found, hardware, self.new) for name, found in (("full", self.full), ("kept", self.kept))}
            for part in (_prompt, _token)
        )
        whole = _sum(self.full, hardware)
        return {
            "policy": self.policy.to_dict(),
            "full": {
                "bytes_total": whole["bytes"], "rounds": whole["rounds"], "seconds": whole["seconds"],
                "cache": self.full.cache_bytes,
            },
            "prompt": prompt, "token": token if self.new > 1 else None,
        }  # fmt: skip

    def emit(self, hardware: Hardware) -> None:
        """The same for people."""
        facts = self.to_dict(hardware)
        cells = []
        for label, part in (("prompt and first token", facts["prompt"]), ("each further token", facts["token"])):
            if part is not None:
                full, kept = part["full"], part["kept"]
                shown: tuple[tuple[str, Callable[[float], object]], ...]
                shown = (("bytes", size), ("rounds", "{:.0f}".format), ("seconds", duration))
                for place, (what, say) in enumerate(shown):
                    pair = full[what], kept[what]
                    cells.append(("" if place else label, what, say(pair[0]), say(pair[1]), _times(*pair)))
        cache = (self.full.cache_bytes, self.kept.cache_bytes)
        cells.append(("at the end", "cache of a party", size(cache[0]), size(cache[1]), _times(*cache)))
        emit_table(f"{self.policy.name} beside a full cache", ("part", "what", "full", "kept", "full by kept"), cells)


def _sum(found: Estimate, hardware: Hardware) -> dict[str, float]:
    return {
        "bytes": found.costs.bytes_total, "rounds": found.costs.rounds,
        "seconds": sum(hardware.seconds(layer) for layer in found.layers()),
    }  # fmt: skip


def _prompt(found: Estimate, hardware: Hardware, _: int) -> dict[str, float]:
    return _sum(found if found.prompt is None else found.prompt, hardware)


def _token(found: Estimate, hardware: Hardware, new: int) -> dict[str, float]:
    whole, first = _sum(found, hardware), _prompt(found, hardware, new)
    return {key: (whole[key] - first[key]) / max(1, new - 1) for key in whole}


def _times(full: float, kept: float) -> str:
    return f"{full / kept:.2f}x" if kept else "-"
