"""HuggingFace's own generate() at the client gives the plaintext model's tokens (protocol `plain`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers as tr
from private_llm_hf import patch
from private_llm_hf.client.session_client import PrivateCache
from transformers import PreTrainedModel

from private_llm.errors import UnsupportedOp
from tests.hf import tiny
from tests.hf.compare import BATCH, LOGIT_ERROR, MASK, PADDED, worst
from tests.hf.conftest import PLAIN

Pair = tuple[PreTrainedModel, PreTrainedModel]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", list(tiny.DECODERS))
def test_every_decoder_generates_the_plaintext_tokens(name: str) -> None:
    model = tiny.build(name)
    with patch(model, PLAIN) as private, torch.no_grad():
        assert isinstance(private, PreTrainedModel)
        assert isinstance(private, type(model))
        out, want = private(**BATCH), model(**BATCH)
        assert type(out) is type(want)
        assert worst(out.logits, want.logits, MASK) < LOGIT_ERROR
        greedy = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(private.generate(**BATCH, **greedy), model.generate(**BATCH, **greedy))


@pytest.fixture(scope="module", params=["opt", "gpt2", "llama"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    model = tiny.build(request.param)
    with patch(model, PLAIN) as private:
        yield model, private


def same(pair: Pair, **kwargs: object) -> None:
    """The same call on both, with the same random numbers."""
    results = []
    for model in pair:
        torch.manual_seed(3)
        results.append(model.generate(**{**BATCH, **kwargs}))
    assert torch.equal(*results)


def test_sampling_with_the_same_seed(pair: Pair) -> None:
    same(pair, max_new_tokens=6, do_sample=True, temperature=0.7, top_k=20, top_p=0.9)
    same(pair, max_new_tokens=4, do_sample=True, num_return_sequences=3)


def test_beams(pair: Pair) -> None:
    same(pair, max_new_tokens=6, num_beams=3, do_sample=False)
    same(pair, max_new_tokens=5, num_beams=4, num_return_sequences=2, length_penalty=0.5, early_stopping=True)


def test_processors_and_stopping(pair: Pair) -> None:
    same(pair, max_new_tokens=6, repetition_penalty=1.5, do_sample=False)
    same(pair, max_new_tokens=6, min_new_tokens=4, no_repeat_ngram_size=2, do_sample=False)

    class AfterTwo(tr.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= PADDED.shape[1] + 2)

    criteria = tr.StoppingCriteriaList([AfterTwo()])
    out = pair[1].generate(**BATCH, max_new_tokens=6, stopping_criteria=criteria, do_sample=False)
    assert out.shape[1] == PADDED.shape[1] + 2


def test_streamer(pair: Pair) -> None:
    class Collect(tr.generation.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.ended = True

    streamer, ids = Collect(), PADDED[1:]
    out = pair[1].generate(input_ids=ids, max_new_tokens=5, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == out[0].tolist()


def test_without_cache_in_chunks_and_by_lookup(pair: Pair) -> None:
    same(pair, max_new_tokens=3, use_cache=False, do_sample=False)
    same(pair, max_new_tokens=3, prefill_chunk_size=2, do_sample=False)
    ids = torch.tensor([[9, 8, 7, 9, 8, 7, 9, 8]])
    same(pair, input_ids=ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=3, max_new_tokens=6)


def test_embeddings_as_prompt_and_an_assistant(pair: Pair) -> None:
    """A plaintext draft model at the client guesses tokens, the private model checks several at once."""
    embeds = pair[0].get_input_embeddings()(PADDED).detach()
    results = [m.generate(inputs_embeds=embeds, attention_mask=MASK, max_new_tokens=3, do_sample=False) for m in pair]
    assert torch.equal(*results)
    draft = tiny.build("opt", seed=5)
    ids = PADDED[1:]
    results = [m.generate(ids, assistant_model=draft, max_new_tokens=6, do_sample=False) for m in pair]
    assert torch.equal(*results)


def test_scores_and_logits_are_the_users(pair: Pair) -> None:
    kwargs = {**BATCH, "max_new_tokens": 3, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    want, out = (model.generate(**kwargs) for model in pair)
    assert isinstance(out.past_key_values, PrivateCache)
    assert all(worst(a, b) < LOGIT_ERROR for a, b in zip(out.scores, want.scores, strict=True))


def test_a_conversation_continues_from_the_parties_cache(pair: Pair) -> None:
    """Two calls with the handle equal one call on the whole text; the second sends its own tokens only."""
    model, private = pair
    ids = PADDED[1:]
    with torch.no_grad():
        first = private(ids[:, :3], use_cache=True)
        private.cost(reset=True)
        second = private(ids[:, 3:], past_key_values=first.past_key_values)
        want = model(ids)
    assert worst(second.logits, want.logits[:, 3:]) < LOGIT_ERROR
    assert second.past_key_values.get_seq_length() == 5


def test_caches_can_be_cropped_copied_and_reordered(pair: Pair) -> None:
    model, private = pair
    import copy

    with torch.no_grad():
        cache = private(PADDED, use_cache=True).past_key_values
        twin = copy.deepcopy(cache)
        twin.crop(-2)
        twin.reorder_cache(torch.tensor([1, 1]))
        rows = PADDED[[1, 1]]
        again = private(torch.tensor([[3], [4]]), past_key_values=twin).logits
        want = model(torch.cat([rows[:, :3], torch.tensor([[3], [4]])], dim=1)).logits[:, -1:]
        assert worst(again, want) < LOGIT_ERROR
        untouched = private(torch.tensor([[3], [4]]), past_key_values=cache).logits
        want = model(torch.cat([PADDED, torch.tensor([[3], [4]])], dim=1)).logits[:, -1:]
        assert worst(untouched, want) < LOGIT_ERROR
    with pytest.raises(UnsupportedOp, match="only as shares"):
        cache.update(PADDED, PADDED, 0)


def test_dropped_caches_are_freed_at_the_parties() -> None:
    from private_llm_hf.party import party

    seen: list[party.Party] = []
    original = party.Party.__init__

    def spy(self: party.Party, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        seen.append(self)

    party.Party.__init__ = spy
    try:
        private = patch(tiny.build("opt"), PLAIN)
    finally:
        party.Party.__init__ = original
    for _ in range(3):
        private.generate(**BATCH, max_new_tokens=2, do_sample=False)
    out = private(PADDED, use_cache=True)
    state = seen[0].state
    assert state is not None
    assert state.handles("") == [out.past_key_values.handle]
    private.close()


def test_the_original_model_stays_as_it_was() -> None:
    model = tiny.build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = model.config.to_dict()
    with patch(model, PLAIN) as private:
        private.generate(**BATCH, max_new_tokens=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.config.to_dict() == settings


def test_a_model_may_start_its_text_anew() -> None:
    """Phi-3 with long rope drops its cache once, at a length, and computes all of the text with other factors."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    config = tr.Phi3Config(
        hidden_size=64, num_hidden_layers=2, vocab_size=128, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tr.Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    ids = torch.arange(3, 17).view(1, 14)
    plain = model.generate(ids, output_logits=True, **how)
    with patch(model, PLAIN) as private:
        found = private.generate(ids, output_logits=True, **how)
    assert torch.equal(found.sequences, plain.sequences)
    for step, (mine, theirs) in enumerate(zip(found.logits, plain.logits, strict=True)):
        assert worst(mine, theirs) < LOGIT_ERROR, step
