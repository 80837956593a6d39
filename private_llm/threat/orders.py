"""What is opened in secret orders: bits that were shuffled, and what links, counts or hides them."""

from __future__ import annotations

from private_llm.protocol_facts import threat

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
