"""Fields of a request's body; errors have OpenAI's form, and repeat no value: it may be a secret."""

import json
import math
import re
from collections.abc import Collection, Mapping
from itertools import islice
from types import UnionType
from typing import Any

from private_llm_gateway.errors import ApiError, bad

_TEXT = (
    "model", "max_tokens", "temperature", "top_p", "seed", "n", "stop", "logprobs", "logit_bias", "presence_penalty",
    "frequency_penalty", "stream", "stream_options", "response_format",
)  # fmt: skip
EFFORTS = {  # settings that some chat templates read
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "verbosity": ("low", "medium", "high"),
}
_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_VLLM = ("add_generation_prompt", "continue_final_message")
_DONE: dict[str, tuple[str, ...]] = {
    "chat": (*_TEXT, "messages", "max_completion_tokens", "top_logprobs", *EFFORTS, *_TOOLS, *_VLLM),
    "completions": (*_TEXT, "prompt", "echo"),
    "responses": (
        "model", "input", "instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "store",
        "top_logprobs", "include", "reasoning", "text", "stream", "stream_options", *_TOOLS,
    ),
    "embeddings": ("model", "input", "encoding_format", "dimensions"),
}  # fmt: skip
_CHANGES_NOTHING = frozenset({
    "user", "metadata", "safety_identifier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "service_tier", "request_id", "priority", "keep_alive", "cache_prompt",
})  # fmt: skip
_NEUTRAL: dict[str, tuple[object, ...]] = {
    # what would change an answer and is not done here, and the values with which it does not
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "suffix": ("",), "reasoning_effort": ("none",), "verbosity": ("medium",),
    "store": (False,), "stream": (False,), "echo": (False,), "top_logprobs": (0,), "top_k": (0, -1), "min_p": (0,),
    "typical_p": (1,), "repetition_penalty": (1,), "length_penalty": (1,),
    "min_tokens": (0,), "ignore_eos": (False,), "best_of": (1,), "use_beam_search": (False,),
    "chat_template_kwargs": ({},), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "bad_words": ([],), "stop_token_ids": ([],), "prompt_logprobs": (0,), "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,), "min_new_tokens": (0,), "num_beams": (1,), "beam_width": (1,),
    "top_a": (0,), "tfs_z": (1,), "tfs": (1,), "xtc_probability": (0,), "dry_multiplier": (0,), "mirostat": (0,),
    "dynatemp_range": (0,), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "documents": ([],), "background": (False,), "truncation": ("disabled",), "truncate": (False, "NONE"),
}  # fmt: skip
_INSTEAD = {
    "store": "the gateway keeps no chats, so want false",
    "functions": "want tools, which came in their place",
    "function_call": "want tool_choice, which came in its place",
}
_MOST_NAME = 64
_WANTED = "want an object as OpenAI's API describes it"
# 32,768: a chat of 2,000 messages has 20,000 texts, commas and brackets, and 2,048 texts to embed have 4,100
_MOST_VALUES = 1 << 15
_MOST_STOP = 1024
_PART = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{,]', re.DOTALL)  # linear also where a text does not end
_ESCAPE = re.compile(r"\\(?:u(?:[dD][89abAB]..\\u[dD][c-fC-F]|(?P<lone>[dD][89a-fA-F]))|.)", re.DOTALL)


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError (400) for anything else. To be called off the event loop."""
    try:
        text = raw.decode("utf-8-sig")
        if sum(1 for _ in islice(_PART.finditer(text), _MOST_VALUES + 1)) > _MOST_VALUES:  # would hold up everybody
            told = f"the body has more than {_MOST_VALUES} texts, lists, objects and commas"
            raise ApiError(400, told, code="invalid_value")
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if any(each["lone"] for each in _ESCAPE.finditer(text)):  # no text has lone surrogates: no tokenizer takes them
            raise ValueError("a lone surrogate")
    except (ValueError, RecursionError):
        raise ApiError(400, "the body cannot be read as JSON; " + _WANTED, code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body is JSON of another type; " + _WANTED, code="invalid_json")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"got {name}; want a JSON number")


def _finite(text: str) -> float:
    """Others, as 1e400, could not be sent back as JSON."""
    return float(text) if math.isfinite(float(text)) else _no_number(text)


def refuse_unsupported(body: Mapping[str, Any], place: str, alright: tuple[str, ...] = ()) -> None:
    """Raises ApiError (400) naming a field that may change something and is not done at `place`: a key of `_DONE`."""
    refuse_others(body, {*_DONE[place], *alright, *_CHANGES_NOTHING}, _NEUTRAL)


def refuse_others(
    given: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Raises ApiError (400) for a field of `given` (at `where`) that is not `known`, not null, and not `neutral`."""
    for name, value in given.items():
        if value is None or name in known:
            continue
        if not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral.get(name, ())
        ):
            told = f"{where}{name}" if len(name) <= _MOST_NAME else f"{where}{name[:_MOST_NAME]}..."
            advice = "leave it out" if where else _INSTEAD.get(name, "leave it out")
            raise bad(told, f"unsupported here; {advice}", "unsupported_parameter")


class Fields:
    """A body's fields; null counts as absent. Every method raises ApiError (400) naming the field."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def text(self, name: str, where: str = "") -> str:
        """A text that must be there. where: what errors name before it."""
        value = self.body.get(name)
        if not isinstance(value, str) or not value:
            raise bad(f"{where}{name}", f"{_kind(value)}; want a text", _code(value))
        return value

    def flag(self, name: str) -> bool:
        """True or false (default)."""
        return bool(self._of(name, bool, "true or false"))

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in a range."""
        value = self._of(name, int | float, "a number")
        if value is not None and not low <= value <= high:  # also of NaN, and of whole numbers that no float holds
            raise bad(name, f"out of range; want {low:g} to {high:g}")
        return None if value is None else float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in a range; errors name the bound that it passes, as some ends are as good as none."""
        value: int | None = self._of(name, int, "a whole number")
        if value is not None and not low <= value <= high:
            raise bad(name, f"out of range; want {f'{low} or more' if value < low else f'{high} at most'}")
        return value

    def option(self, name: str, *wanted: str) -> str | None:
        """A text that may be there, one of those wanted, if any are named."""
        value: str | None = self._of(name, str, "a text")
        if value is not None and wanted and value not in wanted:
            raise bad(name, f"want one of {', '.join(wanted)}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object (default: empty)."""
        return self._of(name, dict, "an object") or {}

    def _of(self, name: str, kind: type | UnionType, wanted: str) -> Any:  # noqa: ANN401 - of that kind, or None
        value = self.body.get(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise bad(name, f"{_kind(value)}; want {wanted}", _code(value))
        return value

    def stops(self) -> tuple[str, ...]:
        """`stop`: a text, or up to four."""
        value = self.body.get("stop")
        listed = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(listed, list) or len(listed) > 4 or not all(isinstance(s, str) and s for s in listed):
            raise bad("stop", "want a text, or a list of up to four, none empty")
        if any(len(text) > _MOST_STOP for text in listed):
            raise bad("stop", f"want texts of {_MOST_STOP} characters at most")
        return tuple(listed)

    def bias(self, vocabulary: int) -> tuple[tuple[int, float], ...]:
        """`logit_bias`: numbers from -100 to 100 by token id. Ids that are written in several ways are one."""
        made: dict[int, float] = {}
        for token, value in self.mapping("logit_bias").items():
            good = token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < vocabulary
            if not good or isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
                raise bad("logit_bias", f"want numbers from -100 to 100 by token ids from 0 to {vocabulary - 1}")
            made[int(token)] = made.get(int(token), 0.0) + float(value)
        return tuple(made.items())


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    names = {"str": "a text", "int": "a number", "float": "a number", "bool": "true or false", "dict": "an object"}
    return f"got {'an empty text' if value == '' else names.get(type(value).__name__, 'a list')}"


def _code(value: object) -> str:
    return "missing_required_parameter" if value is None else "invalid_type"
