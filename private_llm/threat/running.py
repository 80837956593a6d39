"""How models are loaded and called: what is public of them, who gets which result, who may call; token sharding."""

from private_llm.protocol_facts import threat

SHAPES = threat("""public shapes (shortcut)
Chosen by: always on
- every party, and whoever sees the traffic: the architecture and its configuration (of a plain network: its layers,
  their sizes and names), batch size, size of images, prompt length, attention mask and positions
- every party (the dealer too): what is done with a cache between two calls: which rows go on, that is which beams
  survive (indices only), and how far it is cut back. With beams and with drafts these depend on the prompt and the text
Source: order, size and rounds of all messages are functions of these public facts alone; a test runs two different
  inputs of equal shape and compares the transcripts
""")

CACHE_POLICY = threat("""entries that a cache policy evicts or leaves out (shortcut)
Chosen by: kv_cache=MPCacheConfig(...), or another policy of private_llm/kv_cache/policies/; KeepAll() is the default
- every party, and whoever sees the traffic: the policy and its numbers, which are settings that all endpoints agree
  upon: how many entries stay of a text of a given length (gamma, least, most, every), sizes of clusters and how many of
  them a new token attends to at each level, and which layers use the choices of which. With the lengths, padding and
  positions that are public anyway they say when something is evicted. SlidingWindow chooses by these alone, so which
  entries stay is public, too
- every party, and whoever sees the traffic: nothing about which entries stay or are attended to under the other
  policies (MPCacheConfig, H2O, TOVA, SnapKV, InfLLM, LongCache): not their positions, not the attention that they got,
  not whether two heads, layers that choose for themselves, or tokens agree
- parties of one run: what is opened while entries are brought together is an arrangement of 1 .. kept (eviction) or of
  as many ones as clusters are kept (gather='shuffled-scores') in an order that is secret and fresh for each row, key
  head and choice: uniform, whatever is chosen, as long as what is ranked stays in its range; if it leaves it, another
  number of ones may be opened, which they see, and the answer is withheld. Layers that share a choice use the same
  order again and open nothing; so that they share is known, and it is a setting
- the user, and whoever reads the answer: the answer is that of a model that forgets: later tokens do not see what was
  evicted, and see of the rest only what was chosen. A budget may therefore change what is said, most for what a prompt
  mentions once and is asked for late
- every party: when drafts or beams go on, how far the cache is cut back and which rows go on, as without a policy;
  where entries were evicted only the newest ones can be cut back, and a call that asks for more fails by lengths alone
Source: private_llm/kv_cache/evicting.py, selecting.py; oblivious/chosen_rows.py; MPCache (arXiv 2501.06807). Rows and
  orders are of shapes that budgets and lengths give. Tests compare tokens and logits with a plaintext model under the
  same policy, the transcripts of a monotonous and a random prompt message by message, what is opened with a uniform
  arrangement, and the cost of a layer that shares with that of one shuffle
""")

EXPERT_CAPACITY = threat("""tokens that full experts leave out (shortcut)
Chosen by: expert_capacity=1.5 (None, the default: every expert computes every token)
- every party, and whoever sees the traffic: the capacity, a setting that all endpoints agree upon, and with the public
  length of a text how many tokens each expert takes. Nothing about which they are, to which experts tokens would have
  gone, or how many were left out
- the user, and whoever reads the answer: the answer is that of a model that left tokens out of experts. Texts of other
  users change nothing in it; of other rows of the user's own batch only the length of the longest does: places belong
  to one row, and padding up to that length adds some
Source: private_llm/oblivious/dispatch.py; integrations/private_llm_hf/models/experts.py; CryptoMoE (arXiv 2511.01197);
  why places belong to a row: Yona et al., arXiv 2410.22884. Tests compare logits with a plaintext model that is limited
  so, and the cost of two inputs of one shape
""")

STOP_TIME = threat("""token count and stop time (shortcut)
Chosen by: always on; avoidable as described
- every party, and whoever sees the traffic: how many tokens were generated and when generation stopped, hence whether
  an end-of-text token came before max_new_tokens
Source: generate() runs at the client, one call per token; to hide the length, ask for a fixed number of tokens
  (min_new_tokens = max_new_tokens) and cut the text at the client
""")

DRAFTS = threat("""speculative decoding (shortcut)
Chosen by: generate(speculation=SpeculationConfig(...)), and transformers' assistant_model and prompt_lookup_num_tokens,
  under every protocol; fixed_counts=FixedCounts(...) hides the counts altogether
- by default: every party (the dealer too), and whoever sees the traffic: how many passes a text took, and which of them
  went on by nothing because fewer than two tokens were known: something of how well the draft model, or a look-up in
  the text, foresees the private text. Every pass reads the same number of drafted tokens and goes on with the same row,
  by two tokens or none
- with open_counts, a length, or transformers' own assistant_model and prompt_lookup_num_tokens: the same: how many
  tokens and ways to go on were drafted in each pass, which way was gone on with, and how many of its tokens were
  accepted, because the cache is cut back to them. Such counts tell a prompt among known ones, and texts that a draft
  repeats (Wei et al., When Speculation Spills Secrets, arXiv 2411.01076, from sizes and times of packets alone).
  Lengths that are chosen from measured times and acceptance tell nothing more, nor does a gateway's --draft auto, which
  chooses by the times of passes over a public text before the first request. With prompt_lookup_num_tokens the number
  of drafts also says whether the last words occurred before
- with fixed_counts=FixedCounts(...): the same: the sizes in it, and of the text the limit max_new_tokens only: every
  pass reads as many tokens, keeps as many, and goes on with the same row, and the number of passes follows from the
  limit, also where the text ends before. A text that falls behind this schedule ends early for the user; that is not
  seen. A next turn of a chat does show the length of the answer together with that of the new message, which are read
  then. The client's pauses between passes are not padded: a draft model takes the same steps in each, but reads what
  was accepted, a few tokens more or less
- under assisted, where the client has the cache: every server, and whoever sees the traffic: how many rows each pass
  has, and when it begins. By default and with a length all have as many, which leaves how many passes a text took; with
  open_counts also how many tokens were drafted in each; with transformers' own drafts, which are filled up, passes get
  smaller when the longest text that was asked for is near
- whoever holds a draft model that was made from the private model: what went into it: scripts/train_draft.py copies
  layers and embeddings, and trains on the private model's words. Who may not see the weights may not see such a draft
Source: integrations/private_llm_hf/client/speculative_loop.py: drafts are made at the client, the parties only run
  proposals through the private model. A test compares what is asked of the parties for a perfect and a poor draft, for
  a text that ends early and for two prompts: different with open counts, equal with fixed ones; by default equal but
  for the number of passes and those that wait
""")

SHARE_FILES = threat("""share files (shortcut)
Chosen by: private-llm share
- who reads one party's file: what that party knows: the model's configuration, names and shapes of its weights, seeds
  of masks, uniformly random ring elements. The file is as secret as the party: it is not encrypted, only its owner's
  account may open it, and it stays valid as long as its sharing is used
- who reads the files of two parties: all weights
Source: each file is made anew, follows no link and replaces none; `private-llm share --force` deals new masks for all
  parties, which makes older files useless together with the new ones.
  integrations/private_llm_hf/checkpoint/share_files.py
""")

REVEAL_LOGITS = threat("""logits at the client (shortcut)
Chosen by: reveal='logits' (default)
May be corrupt: as the protocol; the client is entitled to the output
- the client: all logits of every step; many queries allow model extraction, as with any API that returns logits
- the parties: nothing: sampling happens at the client
Source: by design: HuggingFace's generate() needs logits
""")

REVEAL_TOKEN = threat("""only tokens or classes at the client (shortcut)
Chosen by: reveal='token' for models that generate, reveal='class' for classifiers
- the client: the arg max of each step, or of each image, and nothing else of the logits; sampling is then not possible
- the parties: nothing
Source: secure arg max under the same protocol
""")

PUBLIC_WEIGHTS = threat("""public weights (shortcut)
Chosen by: weights='public'; refused unless chosen
May be corrupt: as the protocol, for the prompt and the output
- every party: all weights
Source: meant for open-weight models: products with public weights need no communication before truncation
""")

ONE_MACHINE = threat("""all parties on one machine (shortcut)
Chosen by: party_mode='threads' or 'processes'; party_mode='remote' is the real thing
May be corrupt: nobody: who owns the machine owns all shares
- the machine's owner: everything
Source: for trying out, tests and measurements; real use needs one host per party, run by those who do not collude
""")

ADMISSION = threat("""who may be the client of remote parties (shortcut)
Chosen by: party_mode='remote'; TLSConfig(allow=...) or `private-llm party --allow` for users by name
May be corrupt: whoever reaches a party's port; a user whose certificate is no longer wanted
- a caller without a certificate: that a party listens there. It keeps a connection for 10 s at most, less when many
  others call; a flood can still delay honest callers
- a user: that another client is being served, not who. It keeps the parties as long as it calls, and idle_s (30
  minutes) after its last call; of a party service only its own sessions, and in line how many wait before it
- the parties: the user's name, if its certificate has one; each party admits by its own list, and one that refuses
  suffices. A name that is taken off a list is refused from the next connection on; a session that runs goes on
Source: private_llm/net/admission.py, private_llm/net/roles.py; one client at a time is admitted by party 0
""")

SERVICE = threat("""passes that serve several clients (shortcut)
Chosen by: `private-llm party` with `clients` above 1, `private-llm gateway`
May be corrupt: as the protocol; and any number of clients, whatever they do
- every party: when each user's sessions ask for what (shapes as above), and which requests run together
- every party, behind a gateway: that a request goes on after so many tokens of the session's last one (--keep-tokens),
  so that they begin alike, and no token of it. With --public-prefix also that a prompt begins with this text, which all
  may know. Caches of other users' sessions are never used
- a client: of others nothing but time: its answer comes when the pass is over that it shares, and first steps of a
  length that another one had before are faster, because parties keep programs of steps (replay). Outputs are opened by
  rows, each to its own client; the check of ranges has a verdict for each row, but where rows cannot be told apart it
  counts for all
- a client that breaks rules: nothing. What it sends is received before a pass begins, by a thread of its own, and
  compared: a client that tells the parties different things is sent away, and what is wrong with a call ends the
  session of that call. Under quad, point functions cannot be compared before they are used: false ones look as a
  party's lie does, end the pass, and with it all sessions, which may reconnect. Named users of such a pass run alone
  for a while, and who is alone when it happens again stays out for a while. What a client keeps and asks is bounded;
  users take turns by what they had of the passes
- party 0: as every party. It chooses which requests run when, and can so keep a client waiting; it cannot make the
  others run what they did not get from the client itself. Under quad it cannot make them run different requests either,
  not even with a client's help: before each step all compare what they were told and got. Under semi-honest protocols
  it could
Source: private_llm_hf/service/; argued in docs/decisions/190-a-service-has-one-mesh.md and tested with clients that
  leave, lie and stall
""")

ASSISTED = threat("""assisted (protocol)
Chosen by: protocol='assisted' (weights are public; choose another where they are secret)
May be corrupt: any one of the two servers, malicious: a wrong product ends the call before anything of the answer is
  shown, except with probability 2^-50 a product; the client then names the server (of lies made to be overlooked, one
  in 256 leaves open which server it was)
- server 0 (party 0; nobody with prepared corrections): the key of the masks, labels, and public shapes; nothing that
  depends on a value of the client's
- server 1 (party 1): rows masked by a pseudorandom stream of AES that it lacks the key of, and public shapes
- every server, and whoever sees the traffic: the model (its weights are public), how many rows each product has, so the
  lengths of prompt and answer, when each token was asked for, whether there are beams or drafts, and that a call
  stopped because a value was not finite. Experts of a mixture all compute for every row; chosen ones at the client may
  take longer or shorter. Where values or arguments choose layers or rows (Longformer's global attention, labels of
  ModernBERT) and a trial at loading did not show it: what the first call with inputs of these shapes asks for, and
  where a later one differs, which the client then ends
- the two servers together: everything that the client computes from: prompt, states and answer
- a server that deviates: it can stop, delay, or be caught. Whether the client's check failed follows from its own error
  alone, and the session ends with it
- another client of the same servers (`clients` above 1): of others nothing but time, and how much memory is left.
  What it sends ends its own session at most; weights that it sends are its own session's
- the client: everything: it computes the model's other layers itself, on values in the clear
- a wiretapper: frame sizes and times if links are TLS; on unencrypted links (one machine only) everything
Source: additive sharing of x as (r, x - r) for a public linear map; Freivalds' check with two secret sums modulo
  2^64 (private_llm/assisted/projection.py states the argument). PLLM (2026) has the same split of work. Tests
  look at what each server gets, let each of them lie, draw masks in forks and after restored entropy, and let clients
  of one server flood, lie and leave. No outside review yet
""")

CORRECTIONS = threat("""prepared corrections (shortcut)
Chosen by: corrections=FOLDER with protocol='assisted', and `private-llm prepare`
May be corrupt: the online server, or who prepared, malicious, as servers of assisted; not both together. Of products
  of masks that are wrong so that the preparation overlooks them, it overlooks one in 256; the call that uses it ends
- the online server: what server 1 sees under assisted, and random names of blocks: when the next one begins
- who prepared (the client's own machine, or a host): the masks, and how many; not when or whether they are used
- both together: everything, as the two servers of assisted. The client refuses an online server at the address of one
  that prepared
- who reads the folder before a block is claimed, together with the online server: what is masked by that block later.
  Files are their owner's alone, and deleted when they are claimed; a disk may still hold what was deleted
- when the client restored the folder or its machine from a copy, an online server that lies about the names of blocks,
  or was started again without offline_folder, or two servers that were online in turn and pool what they got: rows
  under one mask, so the difference of two inputs of a layer. A server that goes on, or has that folder, refuses a block
  that it has heard of before it gets a row. Delete the folder before you go on from a copy
- when a copy of the memory of a session that runs goes on, too: whoever sees both connections, the same. End sessions
  before you copy a machine's memory
Source: additive sharing as under assisted, products of masks made before. Blocks are claimed by renaming and deleted,
  and the folder synced, before a row of them is used: private_llm/assisted/corrections.py. Tests fork, crash between
  claim and use, claim in two processes, restore copies, and let server and preparer lie. No outside review yet
""")

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
