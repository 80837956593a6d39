"""How the parties compute: masks, preprocessing, divisions, comparisons, ranges, lookups, what secret orders show."""

from private_llm.protocol_facts import threat

PRODUCT_MASKS = threat("""masks of products (shortcut)
Chosen by: matmul='masked' (default), or matmul='remask' with protocol='dealer'
- nobody: nothing more, either way
- matmul='masked': a value keeps its mask as long as it lives; a weight is masked once, at load, and only the output is
  sent. That is no less private: both parties see weight + mask once, and each product hides its cross terms of masks
  under a fresh mask. It asks more of the dealer: the mask of a weight must stay secret for the session's life, so
  whoever learns the seed later can open the weight
- matmul='remask': both operands get fresh masks before each product and are opened under them: the classical way
  (Beaver; CrypTen, Comet), with traffic of the operands' size; kept to compare with systems that work so. Tables of
  token embeddings are masked once in both ways
Source: argument in private_llm/protocols/trio/arithmetic.py and private_llm/protocols/dealer.py; a test checks that
  what each party receives is uniform in both ways
""")

PREPROCESSED = threat("""preprocessing to disk (shortcut)
Chosen by: model.preprocess(...), with protocol='trio', 'quad' or 'dealer'
- who runs ahead (party 0, the dealer, in quad party 3): the planned shapes, before the data; afterwards not even when
  calls happen (a party service tells it)
- who reads the disk of party 2 (in quad also of party 0, with comparison keys of party 1): sizes only: the file has no
  name, and is encrypted and authenticated under a key in that party's memory
- the client, in quad: digests of the masks of what will be opened, before there is data; it gets the masks with the
  results
Source: Masks of each planned call come from streams of their own, used once: a second use is refused by every party and
  by the file, which is gone when read. In quad what party 3 sent ahead is recorded when it is read, so a lie ends the
  session before anything is opened, as ever; party 3 needs no verdict, because it opens nothing but those digests.
  private_llm/protocols/offline_phase.py, private_llm/net/offline_store.py; in a service
  private_llm_hf/service/preprocessing_store.py
""")

TRUNCATION = threat("""truncation by one unit (shortcut)
Chosen by: truncation='unit' (default); truncation='exact' corrects the unit by one more comparison
- nobody: nothing more
- meaning of the result: a division by 2^f gives floor or one more; which of the two depends on the masks, so the
  functionality is 'truncation with an error of one unit', not rounding to nearest; there is no rare large error as long
  as |value| < 2^(ring bits - 2)
Source: Li et al. (USENIX Security 2023) showed that truncation whose rounding bit is correlated with a party's view
  does not realise exact probabilistic truncation. Here the rounding bit is a function of the value and of the helping
  party's mask R alone; it is stated as part of the functionality. Derivation: header of
  private_llm/protocols/trio/division.py.
""")

COARSE = threat("""coarse comparisons (shortcut)
Chosen by: always on
- nobody: nothing more: the messages are those of a shorter adder
- meaning of the result: clips and maxima inside softmax, GELU, SiLU, sigmoid, tanh and reciprocals leave the lowest
  bits out of the comparison: within 2^-6 above a threshold (2^-3 in SiLU and GELU, 1 in the clip of exp) either answer
  is possible and depends on the masks; it is used only where the function is continuous there, and the stated errors
  include it; under trio and dealer a row's maximum, which softmax subtracts from all entries alike, is one of entries
  cut to 2^-4, up to 3/16 too low by the masks; ReLU and arg max are exact
- range: comparisons assume |x| < 2^20, or what calibration states for their module (see ranges); a debug session
  (protocol='plain', debug_ranges=True) names a module that breaks this; relu_bits and relu_low narrow ReLU's range and
  precision further, to what their user states
Source: private_llm/exact/comparisons.py; msb in private_llm/protocols/trio/bits.py; private_llm/exact/maximum.py and
  private_llm/protocols/trio/division.py
""")

COMPARISON_KEYS = threat("""comparison keys (shortcut)
Chosen by: adder='keys', or adder='auto' with bandwidth_mbit, under protocol='trio' or 'dealer'
- party 1 or party 2: keys of comparisons with masks: pseudorandom words of public length, so what hides the masks here
  is AES and not chance alone; the keys of AES are the parties' own, fresh for each session of theirs and again after
  2^20 keys of comparisons, and seeds have 127 bits, so 2^102 blocks of work may open one key of 32 levels, however many
  prompts a session has; values stay masked by uniform elements as ever
- party 0, or the dealer: nothing more: it makes the keys from masks that it knows anyway
- parties 1 and 2 together: everything, as without keys: both keys of a comparison name the mask
- meaning of the result: exp, SiLU, GELU, softplus, sigmoid, tanh, 1/x and x^(-1/2) are other polynomials than without
  keys, with errors of the same size; a row whose mean square lies below 2^-13, and below 2^-24 of the largest that its
  norm has room for, comes out too small
Source: Boyle et al. (Eurocrypt 2021), figure 1 and section 3, with Trio's masks in place of the dealer's;
  private_llm/ring/comparison_keys.py, private_llm/protocols/trio/one_step.py. Tests look at what receivers see. A
  helper that sends false keys is beyond semi-honest protocols: quad has none therefore
""")

RANGES = threat("""ranges of modules, and their check (shortcut)
Chosen by: calibrate=True, guard=True (both default); text in the 64-bit ring, images in both
- every party: of each module of the model a few powers of two: how large its products, activations and mean squares get
  (with head room), how large the weights of a norm are, how many fractional bits it keeps, and, where a layer's weights
  are very small, how small. They are made from the owner's plaintext model and a text or images of the owner's choice,
  and of the values that these lead to only the largest and smallest count
- the client: the same exponents (explain() prints them), and one bit per call: whether a value left its range; of a
  pass that several sessions share one bit for each of its own rows. If so, the answer is withheld
- parties: of that bit nothing: a refused call looks like any other
- meaning of the result: values beyond their stated range give garbage; of what is watched (layers, convolutions,
  products, scores, norms and activations) the check sees, in the 64-bit ring, any entry beyond its bound with
  probability 15/16 or more per row (docs/ranges.md says when always); in the 32-bit ring, where garbage is hardly
  larger than values, only what wraps widely, and without calibration what comes within half of the ring's limit. It
  makes no claim against parties that deviate
Source: private_llm/ranges.py, private_llm_hf/checkpoint/calibration.py and private_llm/tensor/range_check.py;
  docs/ranges.md. The argument for the signed sums is in the last one's header; tests open the bit under every protocol
""")

LOOKUP = threat("""token lookup by point functions (shortcut)
Chosen by: always on for token ids under trio and quad; dealer and preprocessed calls share one-hot rows instead
May be corrupt: as the protocol; security of a single key rests on AES being a good pseudorandom generator
- each party: two keys a token (quad: four), each of another pair and pseudorandom alone; only two parties together hold
  a matching pair
Source: distributed point functions of Boyle, Gilboa, Ishai (CCS 2016), figure 1; their combination with the three
  replicated components of a table is argued in TrioArithmetic.lookup; a test expands all that one party gets, and finds
  no token
""")

PARALLEL_SESSIONS = threat("""parallel sessions with rotating roles (shortcut)
Chosen by: parallel_sessions=L with rotate_roles=True (trio and quad only: a dealer must not become a computing party)
May be corrupt: as the protocol; which party is corrupt does not depend on the parallel session
- every party: nothing more: each of them is a session with keys and masks of its own, and weights are shared anew, with
  fresh masks, for every assignment, so that a party that plays several roles sees independent uniform values in each;
  it never holds two roles of one sharing, which together would open the weights
- a wiretapper: which role a party plays in which parallel session (public)
- quad: a deviation in one parallel session ends all parallel sessions; another one may have opened its own, verified
  rows before
Source: parallel sessions are independent runs of the protocol on disjoint rows of a batch
  (private_llm/net/parallel_sessions.py); tests compare what a party holds in several parallel sessions. PIGEON, section
  5, proposes it for its load, without a proof
""")

FRESH_ORDERS = threat("""bits opened in a fresh secret order (shortcut)
Chosen by: sparsity=CometConfig(orders='fresh'), the default of CometConfig: with levels='budget' a public count at each
  position, with levels='noisy' how many are active in a call, and noise (the next entry); Protocol.open_shuffled in an
  order of Protocol.permutation(size)
- every party (the dealer too): how many of the bits are set, for instance how many neurons of a layer are active at one
  position of the text, and which positions of the order these are, which is as good as drawn at random: the order is
  uniform and serves one opening
- every party, from counts: more than it seems: counts depend on the input. Over one layer of the bundled model they
  told any two of 16 texts of 64 tokens apart, for whoever has the model and the two candidates. Only a count that is
  the same for all inputs (a public budget per position) takes this away
- two parties together: which bits are set. Trio: any two parties (party 0 with an evaluator, or both evaluators) hold
  all sub-permutations. Quad: any two, as each lacks one of four. Dealer: the dealer with a computing party, or both
  computing parties. These pairs open all values anyway
- the client, a wiretapper: nothing of the bits from the opening itself; what is sent afterwards has sizes that depend
  on the count, so who sees frame sizes learns the count
Source: oblivious shuffle of Comet (section 4.2), whose permutation is split so that no party holds all of it; trio's
  and quad's are argued in private_llm/protocols/trio/shuffle.py and private_llm/protocols/quad/shuffle.py, dealer's in
  private_llm/protocols/dealer.py. A second opening in one order is refused by every party. Counts are measured by
  scripts/studies/link_orders.py; the paper (appendix E) knows of no attack on them
""")

NOISY_LEVELS = threat("""numbers of active elements under noise (shortcut)
Chosen by: sparsity=CometConfig(levels='noisy', epsilon=..., delta=...), which opens one noisy count for all positions
  of a call and block, with sensitivity 1: it hides a change of one neuron at one position, no text;
  oblivious.level_noise.noisy_choose(session, active, LevelNoise(epsilon, delta, sensitivity))
May be corrupt: as the protocol; the noise is made of bits that no party knows, and under quad no party can bias it
- every party (the dealer too): how many elements are active plus a secret number of dummies, and a uniform choice of as
  many places. Two inputs whose counts at this opening differ by at most `sensitivity` are told apart within (epsilon,
  delta): no event is exp(epsilon) times likelier under one than under the other, but for a chance of delta. Delta
  cannot be 0, as noise that only adds gives the smallest counts away
- every party, from several openings: more with each: the epsilons and deltas of all layers and positions of a text add
  up. With sensitivity 1, 64 openings at one layer of the bundled model still told all pairs of 16 texts apart at
  epsilon 0.05, and 90 to 100 % at 0.01, where the noise is wider than the layer. Nothing is promised for inputs that
  differ by more than `sensitivity`, and whole inputs do: a public budget tells nothing and is cheaper than noise for
  these
- two parties together: which bits are set. Trio: any two parties (party 0 with an evaluator, or both evaluators) hold
  all sub-permutations. Quad: any two, as each lacks one of four. Dealer: the dealer with a computing party, or both
  computing parties. These pairs open all values anyway
- the client, a wiretapper: as with bits opened in a fresh secret order
Source: Comet, appendix E, asks for it without a construction; digits of geometric noise as independent coins: Dwork,
  Kenthapadi, McSherry, Mironov and Naor, Eurocrypt 2006. private_llm/oblivious/level_noise.py has the argument,
  tests/oblivious/test_level_noise.py checks delta against the coins, scripts/studies/level_noise.py measures
""")

REUSED_ORDERS = threat("""several openings in one secret order (shortcut)
Chosen by: sparsity=CometConfig(orders='kept'): the order in which the owner stored neurons and heads, one for each
  block, which lasts as long as the sharing (every from_pretrained and patch draws anew, share files keep theirs until
  `private-llm share` runs again; a model that was shared for fresh orders refuses it); positions=N lets a client use an
  order for N positions; permutation(size, reuse=True). Without either a second opening is refused
May be corrupt: as the protocol; and a user who is a party's accomplice, or whose inputs a party can guess
- every party (the dealer too): what a fresh order tells, and which set bits of two openings are the same ones: whether
  two inputs, or two positions of a text, are alike, and how often each element is set
- a party that knows some of the inputs, and the model: the order itself. On the bundled model (1024 neurons a layer) 16
  known positions of a text tell 40 to 76 % of the neurons, 64 tell 85 to 99 %, 256 tell 99.6 % or more: one text of a
  page ends the secrecy of the order. From then on it reads which neurons are active for every other user's inputs in
  this order, and tells which of two texts was run, without an error in 240 pairs. A budget of neurons, which makes
  counts equal, changes nothing of this. Orders of few units fall sooner: a layer has 4 to 64 heads, and those that
  share keys and values stay together
- a party that has the model, and knows no input at all: the order from text of the same kind, by how often neurons are
  active and which are active together: on the bundled model 512 openings tell 81 to 93 % of the neurons, 2048 tell 94
  to 100 %, 8192 tell 99 to 100 %; with a budget of 30 % that is drawn at random 49 to 98 %, of blocks of 16 80 to 91 %,
  with a budget as well 47 to 63 %
- the same party, from one prompt of which it knows the beginning: the rest of the prompt: after 32 known tokens it read
  the 48 tokens that followed, all of them, from one layer alone, the first or the second, and with a budget of neurons
  as well. Where what is opened is what trained predictors say, of which it has none, it read 13 and, by another attack
  of this kind, 22 of 48 after 400 known tokens. Of blocks of 16 it read 14 of 48, with a budget of half of them 7.
  Fewer layers with predictors change nothing of this
- every party, with levels='open': how many neurons and heads are active at each position as well; with levels='budget'
  each opening holds a public number, filled up at random, so counts show in the mean of many openings at most
- the client: nothing more, unless a party tells it what was opened
Source: scripts/studies/linked_orders.py, measured by link_orders.py and kept_orders.py beside it;
  tests/system/test_linked_orders.py runs it on what trio opens. Comet keeps one order for all requests (weights are
  shuffled ahead of time) and proves each opening by itself secure (appendix A), which does not cover this
""")
