"""Bad calls are refused before a batch, whatever they ask; good ones pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from private_llm_hf.party.model import empty_model
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.service.batch import BatchedRequest, run_batch
from private_llm_hf.service.checks import check_call
from private_llm_hf.wire.commands import Call, Encoded, Tokens, Values

from private_llm.errors import DomainError, PrivateLLMError, TransportError, UnsupportedOp
from private_llm.protocols.share import Index
from tests.hf import images, tiny
from tests.hf.party.parties import description, ids, private_twin
from tests.tensor.secrets import plain_session


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def call(*shape: int, cache: int | None = None, name: str = "input_ids", **public: Any) -> Call:
    return Call(public, (Tokens(name, shape, 128),), cache, None, None, ("logits",))


def values(name: str, *shape: int) -> Call:
    return Call({}, (Values(name, shape),), None, None, None, ())


def opened(name: str) -> SessionState:
    session = plain_session()
    model = private_twin(tiny.build(name), session)
    return SessionState(model, session)


def fill(state: SessionState, asked: Call, owner: str = "a") -> None:
    text = ids(*asked.secret[0].shape)
    run_batch(state, [BatchedRequest(owner, asked, (Index((text.reshape(-1),), text.numel(), 128),))])
    state.session.checks.pending.clear()


ONES = torch.ones(2, 6, dtype=torch.int64)
FAR = torch.full((2, 6), 64)
LLAMA: list[tuple[Call, type[PrivateLLMError], str]] = [
    (call(2, 6, output_attentions=True), UnsupportedOp, "output_attentions"),
    (replace(call(2, 6), outputs=("hidden_states",)), UnsupportedOp, "hidden_states"),
    (replace(call(2, 6), secret=()), TransportError, "got 0; want one"),
    (replace(call(2, 6), secret=call(2, 6).secret * 2), TransportError, "got 2; want one"),
    (call(2, 6, name="decoder_input_ids"), TransportError, "want input_ids or inputs_embeds"),
    (values("pixel_values", 1, 3, 16, 16), TransportError, "got pixel_values"),
    (values("inputs_embeds", 1, 5, 63), TransportError, r"want \['any', 'any', 64\]"),
    (values("inputs_embeds", 1, 5), TransportError, r"want \['any', 'any', 64\]"),
    (call(2, 6, 1), TransportError, r"got shape \[2, 6, 1\]"),
    (call(2, 0), TransportError, "positive sizes"),
    (call(1 << 20, 1 << 20), TransportError, "at most"),
    (replace(call(2, 6), secret=(Tokens("input_ids", (2, 6), 127),)), TransportError, "vocabulary: got 127"),
    (replace(call(2, 6), encoded=Encoded(3, None)), TransportError, "one stack"),
    (replace(call(2, 6), encode_to=3), TransportError, "one stack"),
    (call(2, 65), DomainError, "got 65 positions; the model has 64"),
    (call(2, 6, attention_mask=ONES[:, :5]), DomainError, r"want shape \(2, 6\)"),
    (call(2, 6, attention_mask=ONES + 1), DomainError, "values other than 0 and 1"),
    (call(2, 6, attention_mask=3), DomainError, "got int; want a tensor"),
    (call(2, 6, position_ids=ONES[:, :5]), DomainError, r"shape \(2, 5\)"),
    (call(2, 6, position_ids=FAR), DomainError, "got 64 to 64; want 0 to 63"),
    (call(2, 6, position_ids=ONES.float()), DomainError, "want an integer tensor"),
    (call(2, 6, logits_to_keep=-1), DomainError, "logits_to_keep: got -1"),
    (call(2, 6, logits_to_keep=ONES), DomainError, "logits_to_keep"),
    (call(2, 6, use_cache=3), DomainError, "use_cache"),
]


def test_what_a_decoder_does_not_take() -> None:
    state = opened("llama")
    for asked, error, message in LLAMA:
        with pytest.raises(error, match=message):
            check_call(state, "a", asked)
    assert not state.handles("a")
    for good in (call(2, 6), call(1, 64), call(2, 6, attention_mask=ONES, position_ids=ONES[:1], logits_to_keep=1),
                 values("inputs_embeds", 2, 4, 64), call(2, 6, cache=5, use_cache=True)):  # fmt: skip
        check_call(state, "a", good)


def test_what_does_not_fit_a_cache() -> None:
    state = opened("llama")
    fill(state, call(2, 60, cache=5))
    check_call(state, "a", call(2, 4, cache=5))
    check_call(state, "b", call(1, 60, cache=5))  # another session's 5 is another cache
    for asked, message in (
        (call(1, 1, cache=5), "got 1 rows; it holds 2"),
        (call(2, 5, cache=5), "got 65 positions"),
        (call(2, 1, cache=5, attention_mask=ONES), r"want shape \(2, 61\)"),
    ):
        with pytest.raises(DomainError, match=message):
            check_call(state, "a", asked)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_model_without_a_cache(name: str) -> None:
    state = opened(name)
    asked = call(1, 4) if name == "bert" else values("pixel_values", 1, 3, 16, 16)
    check_call(state, "a", asked)
    with pytest.raises(TransportError, match="keeps none"):
        check_call(state, "a", replace(asked, cache=1))
    wrong = call(1, 4, token_type_ids=torch.full((1, 4), 2)) if name == "bert" else values("pixel_values", 1, 3, 16, 8)
    with pytest.raises((TransportError, DomainError), match=r"want 0 to 1|want \['any', 3, 16, 16\]"):
        check_call(state, "a", wrong)


def test_images_of_any_size() -> None:
    model, _ = images.build(next(iter(images.HF)))
    party = empty_model(*description(model))
    check_call(SessionState(party, plain_session()), "a", values("pixel_values", 1, 3, 24, 32))
    with pytest.raises(TransportError, match=r"got shape \[3\]"):
        check_call(SessionState(party, plain_session()), "a", values("pixel_values", 3))


def test_two_stacks() -> None:
    state = opened("t5")
    first = replace(call(2, 6), encode_to=1, outputs=())
    check_call(state, "a", first)
    fill(state, first)
    decode = replace(call(2, 1, name="decoder_input_ids", cache=2), encoded=Encoded(1, None))
    check_call(state, "a", decode)
    fill(state, decode)
    assert (state.past("a", 2), state.rows("a", 2), state.positions("a")) == (1, 2, 14)
    for asked, message in (
        (call(2, 1, name="decoder_input_ids"), "want one"),
        (replace(decode, cache=1), "the number of an encoder's output"),
        (replace(decode, encoded=Encoded(7, None)), "no encoder output 7"),
        (replace(decode, encoded=Encoded(1, torch.tensor([0, 2]))), "want rows 0 to 1"),
        (replace(decode, encoded=Encoded(1, torch.tensor([0]))), "got 1 rows; want 2"),
    ):
        with pytest.raises((TransportError, DomainError), match=message):
            check_call(state, "a", asked)
    with pytest.raises(TransportError, match="no encoder output 1"):
        check_call(state, "b", decode)


def test_an_encoder_is_asked_for_no_cache() -> None:
    state = opened("t5")
    check_call(state, "a", replace(call(2, 6, use_cache=False), encode_to=3))
    with pytest.raises(DomainError, match="use_cache: got True for an encoder"):
        check_call(state, "a", replace(call(2, 6, use_cache=True), encode_to=3))


def test_a_pass_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caches are gone, for some of their layers may have grown; nothing of it reaches the next verdict."""
    state = opened("llama")
    for owner in "abc":
        fill(state, call(1, 4, cache=1), owner)

    def fail(*_: object, **__: object) -> None:
        raise DomainError("in the second layer")

    monkeypatch.setattr(state.model.model.layers[1], "forward", fail)
    parts = [BatchedRequest(owner, call(1, 1, cache=1), (Index((ids(1, 1).reshape(-1),), 1, 128),)) for owner in "ab"]
    with pytest.raises(DomainError, match="second layer"):
        run_batch(state, parts)
    assert [state.past(owner, 1) for owner in "abc"] == [0, 0, 4]
    assert (
        state.session.checks.pending,
        state.session.checks.deferred,
        state.session.checks.batch,
    ) == (
        [],
        None,
        None,
    )
