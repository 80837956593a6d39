"""Token sharding behind two lines: the plaintext model's numbers and tokens, for each family it serves."""

from __future__ import annotations

from importlib import resources

import pytest
import torch
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.api import AutoPrivateModelForCausalLM
from private_llm_hf.token_sharding.attention_calls import attention_calls
from transformers import GPT2ForSequenceClassification, LlamaForSequenceClassification, PreTrainedModel

from private_llm.errors import ConfigError, DomainError, PartyFailed, PatchMismatch
from private_llm.kernels import parallel
from private_llm.net.local import LocalMesh
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.token_sharding.nodes.prices import layer_bytes

DECODERS = ["opt", "gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"]
ENCODERS = ["bert", "distilbert", "modernbert"]
PLAN = ShardingPlan(3, 3, 1, accept_weak_plan=True)  # for models with grouped queries

# float32 everywhere; two layers, sums in another order: a few units of 2^-23 at magnitudes up to about 10.
ERROR = 2e-5


def settings(plan: ShardingPlan = PLAN, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": "cascade", "plan": plan, "timeout_s": 30, **more})


def text(rows: int = 2, length: int = 17, padded: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, :padded] = 0
    return ids, mask


def same(model: PreTrainedModel, private: PreTrainedModel, **more: object) -> bool:
    ids, mask = text()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **more}
    return torch.equal(model.generate(ids, **options), private.generate(ids, **options))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_generate_the_same_tokens(name: str) -> None:
    model = tiny.build(name)
    ids, mask = text()
    with torch.no_grad(), patch(model, settings()) as private:
        difference = (model(ids, attention_mask=mask).logits - private(ids, attention_mask=mask).logits).abs()
        assert float(difference[mask.bool()].max()) < ERROR
        assert same(model, private)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("plan", [PLAN, ShardingPlan(2, 4, 2, accept_weak_plan=True)], ids=str)
def test_encoders_give_the_same_states(name: str, plan: ShardingPlan) -> None:
    model = tiny.build(name)
    ids, mask = text()
    with torch.no_grad(), patch(model, settings(plan)) as private:
        expected, found = model(ids, attention_mask=mask), private(ids, attention_mask=mask)
        difference = (expected.last_hidden_state - found.last_hidden_state).abs()
        assert float(difference[mask.bool()].max()) < ERROR
        if expected.get("pooler_output") is not None:
            assert float((expected.pooler_output - found.pooler_output).abs().max()) < ERROR


@pytest.mark.full
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_nodes_take_turns_where_there_are_more_of_them_than_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Fewer computing at a time change no number; the nodes of a split take turns with its parties."""
    monkeypatch.setattr(parallel, "usable_cores", lambda: cores)
    meshes: list[LocalMesh] = []
    original = LocalMesh.__init__

    def spy(self: LocalMesh, parties: int, timeout: float = 60.0, at_once: int | None = None) -> None:
        original(self, parties, timeout, at_once)
        meshes.append(self)

    monkeypatch.setattr(LocalMesh, "__init__", spy)
    model = tiny.build("llama")
    before = torch.get_num_threads()
    with patch(model, settings()) as private:
        assert same(model, private)
    with patch(model, PrivateConfig(split=1, plan=PLAN, weights="public", timeout_s=60)) as private:
        assert same(model, private)
    assert [mesh.turns is None for mesh in meshes] == [cores == 64] * 2
    assert torch.get_num_threads() == before


def test_split_shards_beams_sampling_and_a_streamed_cache() -> None:
    """Grouped queries and a sliding window over (2, 4)-sharding in two blocks each; beams reorder the sharded cache."""
    model = tiny.build("mistral")
    with torch.no_grad(), patch(model, settings(ShardingPlan(2, 4, 2, accept_weak_plan=True))) as private:
        assert same(model, private, num_beams=3)
        torch.manual_seed(0)
        first = private.generate(text()[0], do_sample=True, top_k=5, max_new_tokens=8)
        torch.manual_seed(0)
        assert torch.equal(first, model.generate(text()[0], do_sample=True, top_k=5, max_new_tokens=8))


def test_a_decode_step_wakes_one_comp_node_and_beta_attn_nodes() -> None:
    model = tiny.build("llama")
    ids, _ = text(1)
    with torch.no_grad(), patch(model, settings()) as private:
        kept = private(ids).past_key_values
        private.cost(reset=True)
        private(ids[:, :1], past_key_values=kept)
        senders = {sender for sender, _ in private.cost().cost.sent if sender < PLAN.nodes}
    shard = PLAN.shard_of(17)
    assert senders == {PLAN.comp_of(17), *(PLAN.attn_endpoint(shard, other) for other in range(PLAN.beta))}


def test_traffic_between_nodes_is_the_formula_s() -> None:
    model = tiny.build("llama")
    ids, _ = text(2, 24)
    with torch.no_grad(), patch(model, settings()) as private:
        private(ids)
        sent = private.cost().cost.sent
    between = sum(n for (frm, to), n in sent.items() if max(frm, to) < PLAN.nodes)
    assert between == layer_bytes(PLAN, attention_calls(type(model), model.config), 2, 24)


@pytest.mark.full
def test_processes_give_the_same_tokens() -> None:
    model = tiny.build("gpt2")
    with torch.no_grad(), patch(model, settings(PLAN, party_mode="processes")) as private:
        assert same(model, private)


def test_from_pretrained_and_the_bundled_model() -> None:
    folder = str(resources.files("private_llm_hf").joinpath("demo_model"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(
        "The old bridge over the river was built of stone, and the people of the town", return_tensors="pt"
    )
    private = AutoPrivateModelForCausalLM.from_pretrained(folder, settings(PLAN))
    with torch.no_grad(), private:
        assert torch.equal(
            private.generate(**prompt, max_new_tokens=12, do_sample=False),
            model.generate(**prompt, max_new_tokens=12, do_sample=False),
        )


def test_embeddings_instead_of_tokens() -> None:
    """They travel as ring elements: 18 fractional bits."""
    model = tiny.build("llama")
    embeds = torch.randn(2, 14, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), patch(model, settings()) as private:
        assert float((private(inputs_embeds=embeds).logits - model(inputs_embeds=embeds).logits).abs().max()) < 1e-4


@pytest.mark.parametrize("cls", [LlamaForSequenceClassification, GPT2ForSequenceClassification])
def test_decoders_classify_by_their_last_token(cls: type[PreTrainedModel]) -> None:
    torch.manual_seed(0)
    config = tiny.build("llama" if cls is LlamaForSequenceClassification else "gpt2").config
    config.num_labels, config.pad_token_id = 3, 0
    model = cls(config).eval()
    ids, mask = text()
    ids = ids * mask
    with torch.no_grad(), patch(model, settings()) as private:
        want = model(ids, attention_mask=mask).logits
        assert float((private(ids, attention_mask=mask).logits - want).abs().max()) < ERROR


# -- refusals ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "this is encoder-decoder"),
        ("vit", "this is vision"),
    ],
)
def test_models_that_cannot_be_sharded(name: str, reason: str) -> None:
    with pytest.raises(PatchMismatch, match=reason):
        patch(tiny.build(name), settings())


def test_weak_plans_and_short_texts_are_refused() -> None:
    model = tiny.build("llama")
    with pytest.raises(ConfigError, match="gives tokens away"):
        patch(model, settings(ShardingPlan(3, 1, 1)))
    with pytest.raises(ConfigError, match="at most 250"):
        patch(model, settings(ShardingPlan(8, 9, 3)))
    with pytest.raises(ConfigError, match="from attention results V\\^1"):  # two queries a key head
        patch(model, settings(ShardingPlan(3, 3, 1)))
    sound = settings(ShardingPlan(3, 3, 1))
    with patch(tiny.build("gpt2"), sound) as private, pytest.raises(DomainError, match="3 tokens is too short"):
        private(torch.tensor([[3, 4, 5]]))
    with torch.no_grad(), patch(model, settings(ShardingPlan(3, 1, 1, accept_weak_plan=True))) as private:
        assert same(model, private)


def test_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match="returns logits"):
        settings(reveal="token")
    with pytest.raises(ConfigError, match="sharding plans are for 'cascade'"):
        PrivateConfig(plan=PLAN)


def test_a_dead_node_ends_the_session_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from private_llm.token_sharding import AttnNode

    def die(self: AttnNode, step: object) -> None:
        raise OSError("gone")

    model = tiny.build("llama")
    ids, _ = text(1)
    with patch(model, settings()) as private:
        monkeypatch.setattr(AttnNode, "run", die)
        with pytest.raises(PartyFailed, match=r"AttnNode \([0-9], [0-9]\) \(party [0-9]+\): OSError"):
            private(ids)
        with pytest.raises(PartyFailed, match="session is over"):
            private(ids)
