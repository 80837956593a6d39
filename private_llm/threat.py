"""What is hidden from whom: one entry per protocol and per shortcut, as data that the documentation is made from.

An entry states which corruption it withstands, what each role learns beyond its own input and output, and who
proved it. Protocols bring theirs (protocol_facts.py). `docs/threat-model.md` is `markdown()` of these entries; a test
compares them.
"""

from __future__ import annotations

from private_llm.protocol_facts import Threat, protocol_facts, protocol_names

PRODUCT_MASKS = Threat(
    name="masks of products",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("nobody", "nothing more, either way"),
        (
            "matmul='masked'",
            "a value keeps its mask as long as it lives; a weight is masked once, at load, and only the output is "
            "sent. That is no less private: both parties see weight + mask once, and each product hides its cross "
            "terms of masks behind a fresh mask. It asks more of the dealer: the mask of a weight must stay secret for "
            "the session's life, so whoever learns the seed later can open the weight",
        ),
        (
            "matmul='remask'",
            "both operands get fresh masks before each product and are opened under them: the classical way (Beaver; "
            "CrypTen, Comet), with traffic of the operands' size; kept to compare with systems that work so. Tables of "
            "token embeddings are masked once in both ways",
        ),
    ),
    source="argument in private_llm/protocols/trio/arithmetic.py and private_llm/protocols/dealer/party.py; a test "
    "checks that what each party receives is uniform in both ways",
    setting="matmul='masked' (default), or matmul='remask' with protocol='dealer'",
)

PREPROCESSED = Threat(
    name="preprocessing to disk",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        (
            "who runs ahead (party 0, the dealer, in quad party 3)",
            "the planned shapes, before the data; afterwards not even when calls happen",
        ),
        (
            "who reads the disk of party 2 (in quad also of party 0)",
            "sizes only: the file has no name, and is encrypted and authenticated under a key in that party's memory",
        ),
        (
            "the client, in quad",
            "digests of the masks of what will be opened, before there is data; it gets the masks with the results",
        ),
    ),
    source=(
        "Masks of each planned call come from streams of their own, used once: a second use is refused by every party "
        "and by the file, which is gone when read. In quad what party 3 sent ahead is recorded when it is read, so a "
        "lie ends the session before anything is opened, as ever; party 3 needs no verdict, because it opens nothing "
        "but those digests. private_llm/protocols/offline_phase.py, private_llm/net/offline_store.py"
    ),
    setting="model.preprocess(...), with protocol='trio', 'quad' or 'dealer'",
)

CASCADE = Threat(
    name="cascade",
    kind="protocol",
    corrupt=(
        "any one node that follows the protocol and does not attack what it sees; statistical, not cryptographic. "
        "Against a CompNode that does the algebra named below nothing is promised without a split of layers"
    ),
    learns=(
        (
            "every CompNode",
            "the model, the tokens of its own positions outright, their hidden states, and its rows' attention over "
            "the whole text. At layer 0 that is a system of linear equations in the other tokens; solved for 32 "
            "unknown ones in two minutes (attacks/sparse_totals.py), whatever the plan",
        ),
        (
            "every AttnNode",
            "queries, keys and values of its two query shards; at layer 0 each names its token after V candidates",
        ),
        (
            "with partials='open'",
            "a CompNode gets each shard's part of the attention and reads the shard's tokens, V candidates each, at "
            "any layer of a causal model (attacks/row_space.py)",
        ),
        (
            "nodes together",
            "the union of their positions and what the gaps between them then allow (plan audit with colluding=...); a "
            "CompNode with the two neighbours of an AttnNode in the ring of masks also what that AttnNode sent; all "
            "CompNodes: everything",
        ),
        ("a learner", "tokens that context gives away: no plan hides what the neighbouring tokens imply"),
        (
            "every node that works",
            "shapes, lengths, padding, positions, which cache a step continues and is cut to, which beams survive",
        ),
        (
            "a node that deviates",
            "may change results unnoticed; an answer of another shape ends the session with its name",
        ),
        ("the client", "logits"),
        ("a wiretapper", "frame sizes and times if links are TLS; on unencrypted links what the link's nodes see"),
    ),
    source=(
        "Cascade (Thomas, Zahran, Choi, Potti, Goldblum, Pal): token sharding, vocab-matching, Theorem 6.2. The "
        "attacks by linear algebra, the masked sums against one of them, blocks of neighbouring positions and the "
        "audit are ours; the paper takes a node's sum of unknown tokens for an intractable subset-sum problem, but a "
        "node has many equations for few tokens. No outside review yet"
    ),
    setting="protocol='cascade' (weights are public; choose another where every token must stay hidden)",
)

TRUNCATION = Threat(
    name="truncation by one unit",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("nobody", "nothing more"),
        (
            "meaning of the result",
            "a division by 2^f gives floor or one more; which of the two depends on the masks, so the functionality "
            "is 'truncation with an error of one unit', not rounding to nearest; there is no rare large error as long "
            "as |value| < 2^(ring bits - 2)",
        ),
    ),
    source=(
        "Li et al. (USENIX Security 2023) showed that truncation whose rounding bit is correlated with a party's view "
        "does not realise exact probabilistic truncation. Here the rounding bit is a function of the value and of "
        "the helping party's mask R alone; it is stated as part of the functionality. Derivation: header of "
        "private_llm/protocols/trio/arithmetic.py."
    ),
    setting="truncation='unit' (default); truncation='exact' corrects the unit by one more comparison",
)

COARSE = Threat(
    name="coarse comparisons",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("nobody", "nothing more: the messages are those of a shorter adder"),
        (
            "meaning of the result",
            "clips and maxima inside softmax, GELU, SiLU, sigmoid, tanh and reciprocals leave the lowest bits out of "
            "the comparison: within 2^-6 above a threshold either answer is possible and depends on the masks; it is "
            "used only where the function is continuous there, and the stated errors include it; ReLU and arg max "
            "are exact",
        ),
        (
            "range",
            "comparisons assume |x| < 2^20, or what calibration states for their module (see ranges); a debug session "
            "(protocol='plain', debug_ranges=True) names a module that breaks this; relu_bits and relu_low narrow "
            "ReLU's range and precision further, to what their user states",
        ),
    ),
    source="private_llm/exact/comparisons.py; msb in private_llm/protocols/trio/party.py",
    setting="always on",
)

RANGES = Threat(
    name="ranges of modules, and their check",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        (
            "every party",
            "of each module of the model a few powers of two: how large its products, activations and mean squares "
            "get (with head room), how many fractional bits it keeps, and, where a layer's weights are very small, "
            "how small. They are made from the owner's plaintext model and a text or images of the owner's choice, "
            "and of the values that these lead to only the largest and smallest count",
        ),
        (
            "the client",
            "the same exponents (explain() prints them), and one bit per call: whether a value left its range. "
            "If so, the answer is withheld",
        ),
        ("parties", "of that bit nothing: a refused call looks like any other"),
        (
            "meaning of the result",
            "values beyond their stated range give garbage; of what is watched (layers, convolutions, products, "
            "scores, norms and activations) the check sees, in the 64-bit ring, any entry beyond its bound with "
            "probability 15/16 or more per row (docs/ranges.md says when always); in the 32-bit ring, where garbage is "
            "hardly larger than values, only what wraps widely, and nothing without calibration. It makes no claim "
            "against parties that deviate",
        ),
    ),
    source=(
        "private_llm/ranges.py, private_llm_hf/checkpoint/calibration.py and private_llm/tensor/range_check.py; "
        "docs/ranges.md. The argument for the signed sums is in the last one's header; "
        "tests open the bit under every protocol"
    ),
    setting="calibrate=True, guard=True (both default); text in the 64-bit ring, images in both",
)

LOOKUP = Threat(
    name="token lookup by point functions",
    kind="shortcut",
    corrupt="as the protocol; security of a single key rests on AES being a good pseudorandom generator",
    learns=(
        (
            "each party",
            "two keys a token (quad: four), each of another pair and pseudorandom alone; only two parties together "
            "hold a matching pair",
        ),
    ),
    source=(
        "distributed point functions of Boyle, Gilboa, Ishai (CCS 2016), figure 1; their combination with the three "
        "replicated components of a table is argued in TrioArithmetic.lookup; a test expands all that one party "
        "gets, and finds no token"
    ),
    setting="always on for token ids under trio and quad; dealer and preprocessed calls share one-hot rows instead",
)

SHAPES = Threat(
    name="public shapes",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("every party, and whoever sees the traffic", "the architecture and its configuration (of a plain network: "
         "its layers, their sizes and names), batch size, size of images, prompt length, attention mask and "
         "positions"),
        ("every party (the dealer too)", "what is done with a cache between two calls: which rows go on, that is which "
         "beams survive (indices only), and how far it is cut back. With beams and with drafts these depend on the "
         "prompt and the text"),
    ),
    source=(
        "order, size and rounds of all messages are functions of these public facts alone; a test runs two different "
        "inputs of equal shape and compares the transcripts"
    ),
    setting="always on",
)  # fmt: skip

CACHE_POLICY = Threat(
    name="entries that a cache policy evicts",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("every party, and whoever sees the traffic", "nothing more: the policy and its numbers are settings that all "
         "endpoints agree upon, and SlidingWindow chooses by lengths, padding and positions, which are public anyway"),
        ("meaning of the result", "later tokens do not see what was evicted: the answer is that of the model under the "
         "mask of the window, not that of the whole text"),
    ),
    source="private_llm/cache_policy.py. A policy gets the attention mass of the entries as shares and answers with "
    "public indices: one that would open a mass to choose by it has to say so here. Tests compare tokens and logits "
    "with a plaintext model whose mask forbids what is evicted, and the bytes of late steps with each other",
    setting="cache_policy=SlidingWindow(...); KeepAll() is the default",
)  # fmt: skip

STOP_TIME = Threat(
    name="token count and stop time",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("every party, and whoever sees the traffic", "how many tokens were generated and when generation stopped, "
         "hence whether an end-of-text token came before max_new_tokens"),
    ),
    source="generate() runs at the client, one call per token; to hide the length, ask for a fixed number of tokens "
    "(min_new_tokens = max_new_tokens) and cut the text at the client",
    setting="always on; avoidable as described",
)  # fmt: skip

DRAFTS = Threat(
    name="speculative decoding",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("every party (the dealer too), and whoever sees the traffic", "how many tokens were drafted in each step, and "
         "how many of them were accepted, because the cache is cut back to them: how well the draft model, or a "
         "look-up in the prompt, foresees the private text. The number of drafts tells more where it is not fixed: "
         "with prompt_lookup_num_tokens it says whether the last words occurred before"),
    ),
    source="the draft model runs at the client; the parties only run its proposals through the private model. To hide "
    "the counts, generate without drafts",
    setting="generate(assistant_model=...) or generate(prompt_lookup_num_tokens=...), under every protocol",
)  # fmt: skip

SHARE_FILES = Threat(
    name="share files",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("who reads one party's file", "what that party knows: the model's configuration, names and shapes of its "
         "weights, seeds of masks, uniformly random ring elements. The file is as secret as the party: it is not "
         "encrypted, only its owner's account may open it, and it stays valid as long as its sharing is used"),
        ("who reads the files of two parties", "all weights"),
    ),
    source="each file is made anew, follows no link and replaces none; `private-llm share --force` deals new masks for "
    "all parties, which makes older files useless together with the new ones. "
    "integrations/private_llm_hf/checkpoint/share_files.py",
    setting="private-llm share",
)  # fmt: skip

REVEAL_LOGITS = Threat(
    name="logits at the client",
    kind="shortcut",
    corrupt="as the protocol; the client is entitled to the output",
    learns=(
        ("the client", "all logits of every step; many queries allow model extraction, as with any API that "
         "returns logits"),
        ("the parties", "nothing: sampling happens at the client"),
    ),
    source="by design: HuggingFace's generate() needs logits",
    setting="reveal='logits' (default)",
)  # fmt: skip

REVEAL_TOKEN = Threat(
    name="only tokens or classes at the client",
    kind="shortcut",
    corrupt="as the protocol",
    learns=(
        ("the client", "the arg max of each step, or of each image, and nothing else of the logits; sampling is then "
         "not possible"),
        ("the parties", "nothing"),
    ),
    source="secure arg max under the same protocol",
    setting="reveal='token' for models that generate, reveal='class' for classifiers",
)  # fmt: skip

PUBLIC_WEIGHTS = Threat(
    name="public weights",
    kind="shortcut",
    corrupt="as the protocol, for the prompt and the output",
    learns=(("every party", "all weights"),),
    source="meant for open-weight models: products with public weights need no communication before truncation",
    setting="weights='public'; refused unless chosen",
)

ONE_MACHINE = Threat(
    name="all parties on one machine",
    kind="shortcut",
    corrupt="nobody: who owns the machine owns all shares",
    learns=(("the machine's owner", "everything"),),
    source="for trying out, tests and measurements; real use needs one host per party, run by those who do not collude",
    setting="party_mode='threads' or 'processes'; party_mode='remote' is the real thing",
)

ADMISSION = Threat(
    name="who may be the client of remote parties",
    kind="shortcut",
    corrupt="whoever reaches a party's port; a user whose certificate is no longer wanted",
    learns=(
        ("a caller without a certificate", "that a party listens there. It keeps a connection for 10 s at most, less "
         "when many others call; a flood can still delay honest callers"),
        ("a user", "that another client is being served, not who. It keeps the parties as long as it calls, and "
         "idle_s (30 minutes) after its last call"),
        ("the parties", "the user's name, if its certificate has one; each party admits by its own list, and one that "
         "refuses suffices. A name that is taken off a list is refused from the next connection on; a session that "
         "runs goes on"),
    ),
    source="private_llm/net/acceptor.py, private_llm/net/users.py; one client at a time is admitted by party 0",
    setting="party_mode='remote'; TLSConfig(allow=...) or `private-llm party --allow` for users by name",
)  # fmt: skip

LANES = Threat(
    name="lanes with permuted roles",
    kind="shortcut",
    corrupt="as the protocol; which party is corrupt does not depend on the lane",
    learns=(
        ("every party", "nothing more: each lane is a session with keys and masks of its own, and weights are shared "
         "anew, with fresh masks, for every assignment, so that a party that plays several roles sees independent "
         "uniform values in each; it never holds two roles of one sharing, which together would open the weights"),
        ("a wiretapper", "which role a party plays in which lane (public)"),
        ("quad", "a deviation in one lane ends all lanes; another lane may have opened its own, verified rows before"),
    ),
    source="lanes are independent runs of the protocol on disjoint rows of a batch "
    "(private_llm/net/parallel_sessions.py); tests compare what a party holds in several lanes. PIGEON, section 5, "
    "proposes it for its load, without a proof",
    setting="lanes=L with permute=True (trio and quad only: a dealer must not become a computing party)",
)  # fmt: skip

SPLIT = Threat(
    name="split of layers",
    kind="shortcut",
    corrupt=(
        "for the first layers as the protocol; behind them any one node that follows the protocol and does not attack"
        " what it sees. Statistical, not cryptographic"
    ),
    learns=(
        ("the parties", "of the first layers what the protocol says, of the others nothing; weights are public"),
        (
            "every CompNode",
            "hidden states of its own positions from the split on and its rows' attention over the text: no token and"
            " no embedding",
        ),
        (
            "a CompNode that attacks",
            "of a causal model the tokens of its own first cluster exactly, V candidates each (V: the vocabulary); of"
            " any model tokens of other positions by likelihood, from its rows' attention and other texts "
            "(attacks/likelihood.py; measured: the true token mostly among the first 5 of thousands, with 6 to 16 "
            "unknown ones). An audit bounds exact searches only",
        ),
        ("every AttnNode", "queries, keys and values of its two query shards from the split on"),
        (
            "with partials='open'",
            "each shard's part of the attention: of a causal model a CompNode reads all text before its last row",
        ),
        (
            "nodes together",
            "as under cascade: the union of their positions, and what the gaps between them then allow; all CompNodes"
            " of a causal model: everything",
        ),
        ("a learner", "what states and context give away; see docs/cascade.md"),
        (
            "a party or node that deviates",
            "a party as the protocol says (quad: noticed before anything is opened, or by the CompNode that opens); a"
            " node may change results unnoticed",
        ),
        ("a party and a node of one owner", "what each of them sees, no more"),
    ),
    source=(
        "Cascade (appendix A). The first layers open their states to the CompNodes row by row after the protocol's "
        "own check. Searches behind it are counted in private_llm/token_sharding/plans/audit.py and compared with "
        "private_llm/attacks. The statistical attack is ours and is why no more is claimed. No "
        "outside review yet"
    ),
    setting="split=L with protocol='trio', 'quad' or 'dealer', and plan=ShardingPlan(...)",
)

_SHORTCUTS: tuple[Threat, ...] = (
    TRUNCATION,
    COARSE,
    RANGES,
    PRODUCT_MASKS,
    PREPROCESSED,
    LOOKUP,
    SHAPES,
    CACHE_POLICY,
    STOP_TIME,
    DRAFTS,
    REVEAL_LOGITS,
    REVEAL_TOKEN,
    PUBLIC_WEIGHTS,
    SHARE_FILES,
    SPLIT,
    LANES,
    ONE_MACHINE,
    ADMISSION,
)


def entries() -> tuple[Threat, ...]:
    """All entries, protocols first: those of the registered protocols, then token sharding."""
    return (*(protocol_facts(name).threat for name in protocol_names()), CASCADE, *_SHORTCUTS)


def markdown() -> str:
    """The entries as the text of docs/threat-model.md."""
    lines = [
        "# Threat model",
        "",
        "Made from `private_llm/protocol_facts.py` and `threat.py` by `private-llm doctor --threats`; edit it there.",
        "",
    ]
    for entry in entries():
        lines += [f"## {entry.name} ({entry.kind})", "", f"- **Chosen by:** {entry.setting}"]
        lines += [f"- **May be corrupt:** {entry.corrupt}", "- **Who learns what:**"]
        lines += [f"  - {role}: {what}" for role, what in entry.learns]
        lines += [f"- **Source:** {entry.source}", ""]
    return "\n".join(lines)
