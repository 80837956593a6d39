"""What nodes of token sharding see, alone and after a split."""

from __future__ import annotations

from private_llm.protocol_facts import threat

CASCADE = threat("""cascade (protocol)
Chosen by: protocol='cascade' (weights are public; choose another where every token must stay hidden)
May be corrupt: any one node that follows the protocol and does not attack what it sees; statistical, not cryptographic.
  Against a CompNode that does the algebra named below nothing is promised without a split of layers
- every CompNode: the model, the tokens of its own positions outright, their hidden states, and its rows' attention over
  the whole text. At layer 0 that is a system of linear equations in the other tokens; solved for 32 unknown ones in two
  minutes (attacks/sparse_totals.py), whatever the plan
- every AttnNode: queries, keys and values of its two query shards; at layer 0 each names its token after V candidates
- with partials='open': a CompNode gets each shard's part of the attention and reads the shard's tokens, V candidates
  each, at any layer of a causal model (attacks/row_space.py)
- nodes together: the union of their positions and what the gaps between them then allow (plan audit with
  colluding=...); a CompNode with the two neighbours of an AttnNode in the ring of masks also what that AttnNode sent;
  all CompNodes: everything
- a learner: tokens that context gives away: no plan hides what the neighbouring tokens imply
- every node that works: shapes, lengths, padding, positions, which cache a step continues and is cut to, which beams
  survive
- a node that deviates: may change results unnoticed; an answer of another shape ends the session with its name
- the client: logits
- a wiretapper: frame sizes and times if links are TLS; on unencrypted links what the link's nodes see
Source: Cascade (Thomas, Zahran, Choi, Potti, Goldblum, Pal): token sharding, vocab-matching, Theorem 6.2. The attacks
  by linear algebra, the masked sums against one of them, blocks of neighbouring positions and the audit are ours; the
  paper takes a node's sum of unknown tokens for an intractable subset-sum problem, but a node has many equations for
  few tokens. No outside review yet
""")

SPLIT = threat("""split of layers (shortcut)
Chosen by: split=L with protocol='trio', 'quad' or 'dealer', and plan=ShardingPlan(...)
May be corrupt: for the first layers as the protocol; after them any one node that follows the protocol and does not
  attack what it sees. Statistical, not cryptographic
- the parties: of the first layers what the protocol says, of the others nothing; weights are public
- every CompNode: hidden states of its own positions from the split on and its rows' attention over the text: no token
  and no embedding
- a CompNode that attacks: of a causal model the tokens of its own first cluster exactly, V candidates each (V: the
  vocabulary); of any model tokens of other positions by likelihood, from its rows' attention and other texts
  (attacks/likelihood.py; measured: the true token mostly among the first 5 of thousands, with 6 to 16 unknown ones). An
  audit bounds exact searches only
- every AttnNode: queries, keys and values of its two query shards from the split on
- with partials='open': each shard's part of the attention: of a causal model a CompNode reads all text before its last
  row
- nodes together: as under cascade: the union of their positions, and what the gaps between them then allow; all
  CompNodes of a causal model: everything
- a learner: what states and context give away; see docs/cascade.md
- a party or node that deviates: a party as the protocol says (quad: noticed before anything is opened, or by the
  CompNode that opens); a node may change results unnoticed
- a party and a node of one owner: what each of them sees, no more
Source: Cascade (appendix A). The first layers open their states to the CompNodes row by row after the protocol's own
  check. Searches after it are counted in private_llm/token_sharding/plans/audit.py and compared with
  scripts/studies/attacks. The statistical attack is ours and is why no more is claimed. No outside review yet
""")
