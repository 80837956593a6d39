"""What is hidden from whom: one entry per protocol and per shortcut, as data that the documentation is made from.

An entry states which corruption it withstands, what each role learns beyond its own input and output, and who proved
it. Protocols bring theirs (protocol_facts.py). A test compares docs/threat-model.md with `markdown()`.
"""

from private_llm.protocol_facts import Threat, protocol_facts, protocol_names
from private_llm.threat import computing, running

_SHORTCUTS: tuple[Threat, ...] = (
    computing.TRUNCATION, computing.COARSE, computing.COMPARISON_KEYS, computing.RANGES, computing.PRODUCT_MASKS,
    computing.PREPROCESSED, computing.LOOKUP, computing.FRESH_ORDERS, computing.NOISY_LEVELS, computing.REUSED_ORDERS,
    running.SHAPES, running.CACHE_POLICY, running.EXPERT_CAPACITY, running.STOP_TIME, running.DRAFTS,
    running.REVEAL_LOGITS, running.REVEAL_TOKEN, running.PUBLIC_WEIGHTS, running.SHARE_FILES, running.SPLIT,
    running.CORRECTIONS, computing.PARALLEL_SESSIONS, running.ONE_MACHINE, running.ADMISSION, running.SERVICE,
)  # fmt: skip


def entries() -> tuple[Threat, ...]:
    """All entries, protocols first: those of the registered protocols, then the others."""
    return (*(protocol_facts(name).threat for name in protocol_names()), running.CASCADE, running.ASSISTED, *_SHORTCUTS)


def markdown() -> str:
    """The entries as the text of docs/threat-model.md."""
    lines = [
        "# Threat model",
        "",
        "Who learns what under each protocol and each shortcut. `private-llm doctor --threats` makes this page from "
        "`private_llm/protocol_facts.py` and `private_llm/threat/`; files that it names lie in the repository, and "
        "`private-llm docs NAME` prints docs/NAME.md.",
        "",
    ]
    for entry in entries():
        lines += [f"## {entry.name} ({entry.kind})", "", f"- **Chosen by:** {entry.setting}"]
        lines += [f"- **May be corrupt:** {entry.corrupt}", "- **Who learns what:**"]
        lines += [f"  - {role}: {what}" for role, what in entry.learns]
        lines += [f"- **Source:** {entry.source}", ""]
    return "\n".join(lines)
