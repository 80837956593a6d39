"""The learned attack: it sees what the plan lets its nodes hold and nothing else, learns, and is scored as written."""

from __future__ import annotations

from importlib import resources

import pytest
import torch
from attacks.inversion import Inverter, Observers, any_attn, any_comp, colluding, draw, guess, loss_of, recovery
from attacks.inversion_model import BothWays, SeenRows, reader, reader_of
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from private_llm.errors import DomainError, PatchMismatch
from private_llm.token_sharding import ShardingPlan

PLANS = [
    ShardingPlan(3, 4, 2, partials="open"),
    ShardingPlan(4, 1, 1, partials="open"),
    ShardingPlan(2, 6, 3, partials="open"),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    folder = str(resources.files("private_llm_hf").joinpath("demo_model"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Mixer(nn.Module):
    """The smallest body in which every position hears every other."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(width, width), nn.Linear(2 * width, vocabulary)

    def forward(self, rows: Tensor) -> Tensor:
        heard = self.mix(rows).relu().mean(1, keepdim=True).expand_as(rows)
        return self.head(torch.cat([rows, heard], -1))


# -- what is seen --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_masks_are_the_positions_that_the_plan_deals_out(plan: ShardingPlan) -> None:
    """Written out once more: clusters of c go round alpha nodes, and each cluster is cut into m blocks."""
    n, front = 41, plan.front or 0
    places = [0] * front + list(range(n - front))
    for comp, row in enumerate(any_comp(plan).masks(n)):
        assert row.tolist() == [(p // plan.c) % plan.alpha == comp for p in places]
    block = plan.c // plan.m
    shard = [(p // plan.c) % plan.alpha * plan.m + p % plan.c // block for p in places]
    observers = any_attn(plan)
    assert len(observers.sets) == plan.beta * (plan.beta + 1) // 2
    pairs = [(j, k) for j in range(plan.beta) for k in range(j, plan.beta)]
    for (j, k), row in zip(pairs, observers.masks(n), strict=True):
        assert row.tolist() == [s in (j, k) for s in shard]


def test_those_who_collude_hold_the_union() -> None:
    plan = PLANS[0]
    node = plan.attn_endpoint(1, 4)
    observers = colluding(plan, [0, node])
    assert observers.name == "CompNode 0 + AttnNode (1, 4)"
    assert set(observers.masks(30)[0].nonzero().flatten().tolist()) == plan.held(0, 30) | plan.held(node, 30)
    assert colluding(plan, range(plan.alpha)).masks(30).all()


def test_draw_takes_every_plan_and_every_set() -> None:
    masks = [any_comp(plan).masks(24) for plan in PLANS[:2]]
    drawn = draw(masks, 400, torch.Generator().manual_seed(0))
    wanted = {tuple(row.tolist()) for rows in masks for row in rows}
    assert {tuple(row.tolist()) for row in drawn} == wanted


@pytest.mark.parametrize("layer", [0, 2])
def test_rows_that_are_not_held_change_nothing(model: PreTrainedModel, layer: int) -> None:
    """Not even as infinities; a held row changes what is read at other positions."""
    seen = SeenRows(model, [layer])
    ids = torch.arange(40, 64).unsqueeze(0)
    attacker, held = reader(model), any_comp(PLANS[0]).masks(24)[1:2]
    if layer:
        attacker = reader_of(attacker, SeenRows(model, [0]), seen, ids)
    rows = seen(ids)
    with torch.no_grad():
        plain = attacker(rows, held)
        poisoned = rows.masked_fill(~held.unsqueeze(-1), float("inf"))
        assert torch.equal(attacker(poisoned, held), plain)
        touched = rows.clone()
        touched[0, int(held[0].nonzero()[-1])] += 1.0
        moved = (attacker(touched, held) - plain).abs().amax(-1)[0]
    assert (moved[1:] > 1e-6).all()  # bidirectional: the last held row is heard at the first positions


def test_the_attacked_model_hears_later_rows_too() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, sliding_window=None)
    body = BothWays(LlamaForCausalLM(config))
    rows = torch.randn(2, 9, 32)
    other = rows.clone()
    other[:, -1] += 1.0
    with torch.no_grad():
        assert ((body(other) - body(rows)).abs().amax(-1)[:, 1:] > 1e-6).all()


def test_untrained_it_knows_held_tokens_and_guesses_their_neighbours(model: PreTrainedModel) -> None:
    """Every second token given, the model's own sense for what comes next is right far more often than chance."""
    text = resources.files("private_llm_hf").joinpath("data/heldout.txt").read_text()[:3000]
    tokenizer = AutoTokenizer.from_pretrained(str(resources.files("private_llm_hf").joinpath("demo_model")))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :512]
    held = any_comp(PLANS[1]).masks(ids.shape[1])[::2].any(0, keepdim=True)
    with torch.no_grad():
        found = reader(model)(SeenRows(model, [0])(ids), held).argmax(-1)
    assert float((found[held] == ids[held]).double().mean()) > 0.95
    assert recovery(found, ids, held).unheld_exact > 0.12


def test_states_are_the_models_own(model: PreTrainedModel) -> None:
    """Several layers lie side by side; layer 0 is the token without its position."""
    ids = torch.tensor([[5, 9, 200, 7], [8, 8, 30, 31]])
    with torch.no_grad():
        made = model(input_ids=ids, output_hidden_states=True).hidden_states
    rows = SeenRows(model, [0, 1, 4])(ids)
    assert torch.equal(rows[..., :256], model.get_input_embeddings()(ids))
    assert torch.allclose(rows[..., 256:512], made[1], atol=1e-5)
    assert torch.allclose(rows[..., 512:], made[4], atol=1e-5)


def test_an_attacker_that_changes_layers_reads_the_same_tokens(model: PreTrainedModel) -> None:
    """At layer 1 a linear map alone gives back nearly every token's embedding: permuted or not, rows are no secret."""
    ids = torch.randint(3, 4096, (24, 32), generator=torch.Generator().manual_seed(0))
    fresh = torch.randint(3, 4096, (2, 32), generator=torch.Generator().manual_seed(1))
    before, after = SeenRows(model, [0]), SeenRows(model, [1])
    attacker = reader_of(reader(model), before, after, ids)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        read = torch.cdist(attacker.adapter(after(fresh)), table.unsqueeze(0)).argmin(-1)
    assert float((read == fresh).double().mean()) > 0.9


def test_rows_that_say_the_same_are_read_the_same() -> None:
    """New rows that are an invertible function of the old ones: the attacker that takes over gives the same logits."""
    chance = torch.Generator().manual_seed(0)
    width, n = 6, 12
    start = Inverter(Mixer(width, 9), width, width, reach=3)
    for parameter in (start.adapter.weight, start.adapter.bias, start.near.weight, start.unseen):
        nn.init.normal_(parameter, generator=chance)
    before = torch.normal(0.0, 1.0, (4, n, width), generator=chance)
    after = before @ torch.normal(0.0, 1.0, (width, width), generator=chance) + 2.0
    made = Inverter(start.body, width, width, reach=3)
    made.take_over(start, after.flatten(0, 1), before.flatten(0, 1))
    held = any_comp(PLANS[0]).masks(n)[[0, 1, 2, 0]]
    with torch.no_grad():
        assert torch.allclose(made(after, held), start(before, held), atol=1e-3)


def test_an_unheld_position_hears_its_neighbours_even_without_attention() -> None:
    attacker = Inverter(nn.Identity(), 2, 2, reach=2)
    nn.init.ones_(attacker.near.weight)
    seen, held = torch.zeros(1, 9, 2), torch.zeros(1, 9, dtype=torch.bool)
    held[0, 4] = True
    with torch.no_grad():
        changed = (attacker(seen + 1.0, held) - attacker(seen, held)).abs().amax(-1)[0]
        alone = attacker(seen, torch.zeros_like(held))
    assert (changed[[2, 3, 5, 6]] > 0).all()
    assert (changed[[0, 1, 7, 8]] == 0).all()
    assert (alone == 0).all()  # no row is held: only the learned one, here zero


# -- learning ------------------------------------------------------------------------------------------------------
def test_a_small_attacker_learns_what_is_held_and_what_follows_from_it() -> None:
    """Texts in which every token is repeated: one of two nodes of clusters of one gives the whole text away."""
    torch.manual_seed(0)
    vocabulary, width, n = 12, 16, 4
    table = torch.randn(vocabulary, width)
    attacker = Inverter(Mixer(width, vocabulary), width, width)
    optimizer = torch.optim.AdamW(attacker.parameters(), lr=1e-2)
    masks, chance = [any_comp(ShardingPlan(2, 1, 1, partials="open")).masks(n)], torch.Generator().manual_seed(0)
    for _ in range(150):
        ids = torch.randint(vocabulary, (32, 1), generator=chance).expand(32, n)
        loss = loss_of(attacker(table[ids], draw(masks, 32, chance)), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = torch.arange(vocabulary).unsqueeze(1).expand(vocabulary, n)
    held = draw(masks, vocabulary, chance)
    scores = recovery(attacker(table[ids], held).argmax(-1), ids, held)
    assert scores.exact - scores.unheld_exact < 0.5
    assert scores.exact > 0.9
    assert scores.unheld_exact > 0.8  # chance is 1 in 12
    blind = recovery(attacker(table[ids], torch.zeros_like(held)).argmax(-1), ids, held)
    assert blind.exact < 0.3


def test_the_loss_counts_all_positions() -> None:
    logits = torch.zeros(1, 4, 8)
    logits[0, 0, 3] = 5.0
    ids = torch.tensor([[3, 1, 1, 1]])
    wanted = [(5.0 if p == 0 else 0.0) - float(logits[0, p].exp().sum().log()) for p in range(4)]
    assert float(loss_of(logits, ids)) == pytest.approx(-sum(wanted) / 4, abs=1e-5)


# -- scores --------------------------------------------------------------------------------------------------------
def test_recovery_counts_the_whole_and_the_gaps() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    held = torch.tensor([[True, False, False, True], [True, True, True, True]])
    scores = recovery(torch.tensor([[1, 2, 9, 4], [5, 6, 7, 8]]), ids, held)
    assert scores.exact == pytest.approx((3 / 4 + 1) / 2)
    assert scores.rouge_l == pytest.approx((3 / 4 + 1) / 2)
    assert scores.unheld_exact == pytest.approx(1 / 2)  # of the first text alone: the second has no gaps
    assert scores.unheld_rouge_l == pytest.approx(1 / 2)
    assert recovery(ids, ids, torch.ones_like(held)).unheld_exact == 1.0


def test_the_guess_knows_what_is_held() -> None:
    ids = torch.tensor([[1, 2, 3]])
    assert guess(ids, torch.tensor([[True, False, True]]), 7).tolist() == [[1, 7, 3]]


# -- refusals ------------------------------------------------------------------------------------------------------
def test_wrong_nodes_and_shapes_are_refused(model: PreTrainedModel) -> None:
    plan = PLANS[1]
    with pytest.raises(DomainError, match=r"nodes that observe: got \[-1, 14\]; want 0 to 13"):
        Observers(plan, ((0, -1), (14,)), "wrong")
    with pytest.raises(DomainError, match="at least one node"):
        Observers(plan, (), "nobody")
    with pytest.raises(DomainError, match=r"held: got shape \(2, 3\); want \(2, 4\)"):
        Inverter(Mixer(4, 5), 4, 4)(torch.zeros(2, 4, 4), torch.ones(2, 3, dtype=torch.bool))
    for layers in ([], [1, 1], [-1], [7]):
        with pytest.raises(DomainError, match="layers: got"):
            SeenRows(model, layers)
    with pytest.raises(PatchMismatch, match="BloomForCausalLM: cannot read rows, its forward takes no position_ids"):
        BothWays(BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=9)))
