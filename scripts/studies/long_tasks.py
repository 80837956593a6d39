"""Prompts of an exact length that ask for one thing far back: a pass key, a number by its name, the rest of a line.

Everything is drawn from a seed and needs a tokenizer only. A prompt is, in this order: the beginning of the chat
template, an excerpt that fills up to the length, instructions, many lines with the asked one among them, the question,
the end of the template, and the first words of the answer. Key-value recall and copying are texts that go on, without
a chat template: their question is a few other lines, given again.
"""

import re
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from attacks.scores import exact
from private_llm_hf.tools.texts import token_ids

from private_llm.errors import ConfigError

sys.path.append(str(Path(__file__).resolve().parents[1]))
from long_context.text_windows import bundled_text, start_tokens

_KEY_EXAMPLES, _COPY_EXAMPLES = 3, 6
"""Lines given again before the asked one."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PLAY_LINES = 3
"""Between two lines of numbers: without them, a model of 135 M parameters confuses the numbers."""
_PAD_LINES = 40
"""Lines of the bundled text of which the filling excerpt is the end; it is shorter than one line of the prompt."""
_SPARE_TOKENS = 3


def normalised(text: str) -> list[str]:
    """Words in lower case, without punctuation and English articles (the rule of SQuAD)."""
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def begins_with(found: str, truth: str) -> float:
    """1 if the words of the text begin with those of the truth, else 0; what follows them does not count."""
    wanted = normalised(truth)
    return float(normalised(found)[: len(wanted)] == wanted)


def words_in_place(found: str, truth: str) -> float:
    """Share of the words of the truth that stand at the same place in the text."""
    return exact(normalised(found), normalised(truth))


@dataclass(frozen=True)
class LongPrompt:
    """One prompt.

    ids: its tokens, [S]. answer: the text that should follow. task: its name, a key of `TASKS`. depth: where the
    answer stands among the lines, from 0 (the first) to 1 (the last).
    """

    ids: tuple[int, ...]
    answer: str
    task: str
    depth: float


@dataclass(frozen=True)
class _Parts:
    """Texts of one prompt.

    lines: each with its newline, more than any prompt holds. least: so many of them must fit. asked: the line that
    holds the answer. opening: of the answer.
    """

    head: str
    lines: Iterator[str]
    asked: str
    question: str
    opening: str
    answer: str
    least: int = 1


@dataclass(frozen=True)
class Task:
    """How prompts are made and answers are scored.

    parts: texts, drawn from a generator. metric: of what was generated and the answer, from 0 to 1. chat: ask in a
    user's turn if the tokenizer has a chat template.
    """

    parts: Callable[[Random], _Parts]
    metric: Callable[[str, str], float]
    chat: bool


def make_prompts(task: str, tokenizer: Any, length: int = 1024, count: int = 10, seed: int = 0) -> list[LongPrompt]:  # noqa: ANN401
    """`count` prompts of exactly `length` tokens each; their depths are spread evenly over 0 to 1.

    task: "passkey", "key_value" or "copy". The same arguments give the same prompts. Raises ConfigError for an unknown
    task, a count below 1, and a length that does not hold the question and a few lines.
    """
    if task not in TASKS:
        raise ConfigError(f"task: got {task!r}; want one of {', '.join(TASKS)}")
    if count < 1:
        raise ConfigError(f"count: got {count}; want 1 or more prompts")
    frame = frame_of(tokenizer, TASKS[task].chat)
    made = []
    for index in range(count):
        depth = (index + 0.5) / count
        parts = TASKS[task].parts(Random(f"{task} {seed} {index}"))
        made.append(LongPrompt(_tokens(tokenizer, frame, parts, length, depth), parts.answer, task, depth))
    return made


def answer_tokens(prompt: LongPrompt, tokenizer: Any) -> int:  # noqa: ANN401 - transformers is not typed
    """How many tokens to generate for an answer: its own and a few more."""
    return len(token_ids(tokenizer, f" {prompt.answer}")) + _SPARE_TOKENS


def score(prompt: LongPrompt, text: str) -> float:
    """How right a generated text (without special tokens) is, from 0 to 1."""
    return TASKS[prompt.task].metric(text, prompt.answer)


def _tokens(tokenizer: Any, frame: "PromptFrame", parts: _Parts, length: int, depth: float) -> tuple[int, ...]:  # noqa: ANN401
    """The prompt, [length]. Raises ConfigError if it holds fewer lines besides the asked one than it must."""
    head, asked, question, opening = (
        token_ids(tokenizer, text) for text in (parts.head, parts.asked, parts.question, parts.opening)
    )
    turn = frame.after or token_ids(tokenizer, "\n")
    fixed = sum(map(len, (frame.before, head, asked, question, turn, opening)))
    lines, room = _fitting(tokenizer, parts.lines, length - fixed)
    if len(lines) < parts.least:
        raise ConfigError(
            f"length: {length} tokens do not hold {fixed} of question and answer and the {parts.least} lines that must "
            "stand before it; want more"
        )
    lines.insert(round(depth * len(lines)), asked)
    excerpt = token_ids(tokenizer, "\n".join(bundled_text().split("\n")[:_PAD_LINES]) + "\n\n")
    pad = excerpt[len(excerpt) - room :]
    return (*frame.before, *pad, *head, *chain.from_iterable(lines), *question, *turn, *opening)


def _fitting(tokenizer: Any, texts: Iterator[str], room: int) -> tuple[list[tuple[int, ...]], int]:  # noqa: ANN401
    """Tokens of the first lines that fit into `room` tokens together, and the tokens left over."""
    lines: list[tuple[int, ...]] = []
    for text in texts:
        line = token_ids(tokenizer, text)
        if len(line) > room:
            break
        lines.append(line)
        room -= len(line)
    return lines, room


def _passkey(rng: Random) -> _Parts:
    """A number of five digits between the lines of a play."""
    number = str(rng.randrange(10_000, 100_000))
    return _Parts(
        head="A pass key is hidden in the text below. Find it and remember it.\n\n",
        lines=_play(rng),
        asked=f"The pass key is {number}. Remember it. {number} is the pass key.\n",
        question="\nWhat is the pass key? Answer with its five digits.",
        opening="The pass key is the number",
        answer=number,
    )


def _play(rng: Random) -> Iterator[str]:
    """Lines of the bundled play from a drawn one on, again and again."""
    lines = [f"{line}\n" for line in bundled_text().split("\n") if line]
    at = rng.randrange(len(lines))
    while True:
        yield lines[at % len(lines)]
        at += 1


def _key_value(rng: Random) -> _Parts:
    """A number of four digits under one of many names of two words."""

    def pairs() -> Iterator[tuple[str, str]]:
        for name in _names(rng):
            yield name, str(rng.randrange(1_000, 10_000))

    drawn = pairs()
    name, value = next(drawn)
    lines = (f"{other}: {number}\n" for other, number in drawn)
    examples = [next(lines) for _ in range(_KEY_EXAMPLES)]
    return _Parts(
        head="A list of names, each with its number.\n\n",
        lines=chain(examples, lines),
        asked=f"{name}: {value}\n",
        question="\nSome of them again:\n" + "".join(examples).rstrip("\n"),
        opening=f"{name}:",
        answer=value,
        least=_KEY_EXAMPLES,
    )


def _names(rng: Random) -> Iterator[str]:
    """Names of two words, none twice; ends when all were drawn."""
    pairs = [f"{first} {second}" for first in WORDS for second in WORDS if first != second]
    rng.shuffle(pairs)
    yield from pairs


def _copy(rng: Random) -> _Parts:
    """The rest of a line of six numbers, of which three are given; such lines stand here and there in a play."""

    def pattern() -> tuple[str, ...]:
        return tuple(str(rng.randrange(100, 1_000)) for _ in range(6))

    wanted, play = pattern(), _play(rng)
    others = (f"{' '.join(other)}\n" for other in iter(pattern, None) if other[:3] != wanted[:3])
    examples = [next(others) for _ in range(_COPY_EXAMPLES)]
    lines = chain.from_iterable((line, *islice(play, _PLAY_LINES)) for line in chain(examples, others))
    return _Parts(
        head="Lines.\n\n",
        lines=lines,
        asked=f"{' '.join(wanted)}\n",
        question="\nSome of these lines again:\n" + "".join(examples).rstrip("\n"),
        opening=" ".join(wanted[:3]),
        answer=" ".join(wanted[3:]),
        least=(_COPY_EXAMPLES - 1) * (_PLAY_LINES + 1) + 1,
    )


TASKS: dict[str, Task] = {
    "passkey": Task(_passkey, begins_with, chat=True),
    "key_value": Task(_key_value, begins_with, chat=False),
    "copy": Task(_copy, words_in_place, chat=False),
}
"""By name."""


# -- Tokens around a user's text: what the tokenizer puts in front, or the turns of its chat template -----------------
_TEXT = "the text of the user"
"""Stands for the user's text while a chat template is laid out."""


@dataclass(frozen=True)
class PromptFrame:
    """Tokens before and after a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


def frame_of(tokenizer: Any, chat: bool) -> PromptFrame:  # noqa: ANN401 - transformers is not typed
    """A user's turn and the opening of the answer if `chat` and there is a chat template, else the start token alone.

    A tokenizer that starts no text with a token gives an empty frame; what it would end a text with is left out.
    Raises ConfigError if the chat template leaves out what the user says.
    """
    if chat and tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": _TEXT}]
        laid_out = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, found, after = laid_out.partition(_TEXT)
        if not found:
            raise ConfigError("the tokenizer's chat template leaves out what the user says; ask with chat=False")
        return PromptFrame(token_ids(tokenizer, before), token_ids(tokenizer, after))
    return PromptFrame(start_tokens(tokenizer), ())


_WORDS = """
apple arrow autumn badge baker basket beach bell bird boat book bottle branch bread bridge brush bucket button
cabin cable candle canoe carpet castle cattle chain chair chalk cheese cherry church circle clock cloud coat coffee
copper corn cotton cradle cream crown curtain dance desert diamond dinner doctor dragon drum eagle engine fabric
farmer feather fence field finger fire flag flower forest fountain fruit garden garlic gate ghost glass glove
gold grain grape grass guitar hammer harbor hat hill honey horse hotel house insect iron island jacket jewel
kettle key king kitchen kite knife ladder lake lamp leaf leather lemon letter lion lock machine map marble
market meadow milk mirror money monkey moon mother motor mountain mouse music nail needle nest night ocean
office olive onion orange oven owl paint palace paper park path peach pearl pencil pepper piano picture pillow
pilot planet plate pocket poem potato powder prince queen rabbit radio rain ribbon rice ring river road rock
roof room rope rose salt sand school screen seed shadow sheep shell ship shoe silver sister skirt snow soap
soldier song spider spoon spring square stable star station steam stone storm street sugar summer table tail
teacher temple thread tiger tower town train tree tunnel valley village violin wagon wall watch water weather
wheel window winter wire wolf wood wool
"""
WORDS: tuple[str, ...] = tuple(_WORDS.split())
