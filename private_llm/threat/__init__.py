"""What is hidden from whom: one entry per protocol and per shortcut, as data that the documentation is made from.

An entry states which corruption it withstands, what each role learns beyond its own input and output, and who
proved it. Protocols bring theirs (protocol_facts.py). `docs/threat-model.md` is `markdown()` of these entries; a test
compares them.
"""

from __future__ import annotations

from private_llm.protocol_facts import Threat, protocol_facts, protocol_names
from private_llm.threat.computing import (
    COARSE,
    COMPARISON_KEYS,
    LOOKUP,
    PARALLEL_SESSIONS,
    PREPROCESSED,
    PRODUCT_MASKS,
    RANGES,
    TRUNCATION,
)
from private_llm.threat.orders import FRESH_ORDERS, KNOWN_ORDERS, NOISY_LEVELS, REUSED_ORDERS
from private_llm.threat.running import (
    ADMISSION,
    CACHE_POLICY,
    DRAFTS,
    ONE_MACHINE,
    PUBLIC_WEIGHTS,
    REVEAL_LOGITS,
    REVEAL_TOKEN,
    SERVICE,
    SHAPES,
    SHARE_FILES,
    STOP_TIME,
)
from private_llm.threat.token_sharding import CASCADE, SPLIT

_SHORTCUTS: tuple[Threat, ...] = (
    TRUNCATION,
    COARSE,
    COMPARISON_KEYS,
    RANGES,
    PRODUCT_MASKS,
    PREPROCESSED,
    LOOKUP,
    FRESH_ORDERS,
    NOISY_LEVELS,
    REUSED_ORDERS,
    KNOWN_ORDERS,
    SHAPES,
    CACHE_POLICY,
    STOP_TIME,
    DRAFTS,
    REVEAL_LOGITS,
    REVEAL_TOKEN,
    PUBLIC_WEIGHTS,
    SHARE_FILES,
    SPLIT,
    PARALLEL_SESSIONS,
    ONE_MACHINE,
    ADMISSION,
    SERVICE,
)


def entries() -> tuple[Threat, ...]:
    """All entries, protocols first: those of the registered protocols, then token sharding."""
    return (*(protocol_facts(name).threat for name in protocol_names()), CASCADE, *_SHORTCUTS)


def markdown() -> str:
    """The entries as the text of docs/threat-model.md."""
    lines = [
        "# Threat model",
        "",
        "Made from `private_llm/protocol_facts.py` and `private_llm/threat/` by `private-llm doctor --threats`; edit "
        "it there. Files that it names lie in the repository of private-llm.",
        "",
    ]
    for entry in entries():
        lines += [f"## {entry.name} ({entry.kind})", "", f"- **Chosen by:** {entry.setting}"]
        lines += [f"- **May be corrupt:** {entry.corrupt}", "- **Who learns what:**"]
        lines += [f"  - {role}: {what}" for role, what in entry.learns]
        lines += [f"- **Source:** {entry.source}", ""]
    return "\n".join(lines)
