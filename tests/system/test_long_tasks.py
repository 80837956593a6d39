"""Made prompts: of exactly the length asked for, the answer in them once, at the depth they say."""

from __future__ import annotations

import pytest
from long_context.text_windows import bundled_text
from long_tasks import (
    TASKS,
    LongPrompt,
    PromptFrame,
    answer_tokens,
    begins_with,
    frame_of,
    make_prompts,
    normalised,
    score,
    words_in_place,
)
from private_llm_hf.tools.texts import token_ids

from private_llm.errors import ConfigError
from tests.long_context.tokenizers_of_kinds import KINDS, TEMPLATE, bare, closed, demo


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1500, 8191])
def test_a_prompt_has_the_length_asked_for(kind: str, task: str, length: int) -> None:
    prompts = make_prompts(task, KINDS[kind](), length=length, count=2)
    assert [len(prompt.ids) for prompt in prompts] == [length, length]


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_stands_in_the_prompt_at_its_depth(task: str) -> None:
    tokenizer = demo()
    prompts = make_prompts(task, tokenizer, length=4096, count=4, seed=5)
    assert [prompt.depth for prompt in prompts] == [0.125, 0.375, 0.625, 0.875]
    for prompt in prompts:
        text = tokenizer.decode(prompt.ids, skip_special_tokens=True)
        assert text.count(prompt.answer) == (2 if task == "passkey" else 1)
        assert text.index(prompt.answer) / len(text) == pytest.approx(prompt.depth, abs=0.08)
        assert not text.endswith(prompt.answer)


def test_the_question_leads_to_the_answer() -> None:
    tokenizer = demo()
    for task, count in (("key_value", 3), ("copy", 6)):
        (prompt,) = make_prompts(task, tokenizer, length=2048, count=1)
        text = tokenizer.decode(prompt.ids, skip_special_tokens=True)
        body, _, opening = text.rpartition("\n")
        assert f"\n{opening} {prompt.answer}\n" in body
        *_, examples = body.split("again:\n")
        assert len(examples.split("\n")) == count
        for example in examples.split("\n"):
            assert body.count(f"{example}\n") + body.endswith(example) == 2
    (prompt,) = make_prompts("passkey", tokenizer, length=2048, count=1)
    text = tokenizer.decode(prompt.ids, skip_special_tokens=True)
    assert text.endswith("What is the pass key? Answer with its five digits.\nThe pass key is the number")


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_prompts_and_another_seed_others(task: str) -> None:
    tokenizer = bare()
    first, again, other = (make_prompts(task, tokenizer, 2048, 3, seed) for seed in (0, 0, 1))
    assert first == again
    assert len({prompt.answer for prompt in first + other}) == 6


def test_only_the_pass_key_is_asked_in_a_users_turn() -> None:
    tokenizer = demo(TEMPLATE)
    for task in TASKS:
        (prompt,) = make_prompts(task, tokenizer, 2048, 1)
        text = tokenizer.decode(prompt.ids)
        assert text.startswith("[user] ") is (task == "passkey")
        assert ("digits. [end]\n[assistant]\nThe pass key is the number" in text) is (task == "passkey")


def test_frames() -> None:
    assert frame_of(bare(), chat=True) == PromptFrame((), ())
    assert frame_of(closed(), chat=True) == PromptFrame((256,), ())
    assert frame_of(demo(TEMPLATE), chat=False) == PromptFrame((demo().bos_token_id,), ())
    framed = frame_of(demo(TEMPLATE), chat=True)
    assert framed.before == token_ids(demo(), "[user] ")
    assert framed.after == token_ids(demo(), " [end]\n[assistant]\n")
    assert len(framed) == len(framed.before) + len(framed.after)
    with pytest.raises(ConfigError, match="leaves out what the user says"):
        frame_of(demo("[assistant]"), chat=True)


def test_an_answer_is_scored() -> None:
    def prompt(task: str, answer: str) -> LongPrompt:
        return LongPrompt((), answer, task, 0.5)

    assert score(prompt("passkey", "12345"), " 12345. And") == 1
    assert score(prompt("passkey", "12345"), " 123456") == 0
    assert score(prompt("key_value", "1234"), " 1234\nriver") == 1
    assert score(prompt("key_value", "1234"), "The 1243") == 0
    assert score(prompt("copy", "111 222 333"), " 111 222 334\n555") == pytest.approx(2 / 3)


def test_an_answer_has_room() -> None:
    assert answer_tokens(LongPrompt((), "12345", "passkey", 0.5), bare()) == 1 + 5 + 3


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'passkeys'; want one of passkey, key_value, copy"):
        make_prompts("passkeys", bare())
    with pytest.raises(ConfigError, match="count: got 0"):
        make_prompts("copy", bare(), count=0)
    for task, least in (("passkey", 1), ("key_value", 3), ("copy", 21)):
        with pytest.raises(ConfigError, match=f"length: 150 tokens do not hold .* the {least} lines"):
            make_prompts(task, bare(), length=150)
    with pytest.raises(ConfigError, match=r"'absent.txt' is not bundled"):
        bundled_text("absent.txt")


# -- metrics ----------------------------------------------------------------------------------------------------------
def test_words_are_normalised() -> None:
    assert normalised("The  Cat's, an APPLE!\n theatre") == ["cats", "apple", "theatre"]


def test_the_beginning_counts() -> None:
    assert begins_with(" 48213. And then", "48213") == 1
    assert begins_with("482134", "48213") == 0
    assert begins_with("It is 48213", "48213") == 0


def test_words_count_in_their_place() -> None:
    assert words_in_place("1 2 4 9", "1 2 3") == pytest.approx(2 / 3)
    assert words_in_place("2 3", "1 2 3") == 0
