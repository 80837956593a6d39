"""Answers that are JSON of a schema: which tokens may come next, as llguidance finds it, and how to end in time.

llguidance bounds what one token costs. It bounds neither how deep it recurses, nor what it takes to meet several
patterns at once or to begin, so a schema that asks for these is refused here, and a start has a stack of its own.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from private_llm_gateway.decoding import TokenTexts
from private_llm_gateway.errors import ApiError, bad

if TYPE_CHECKING:
    from llguidance import LLMatcher

_PARAM = "response_format.json_schema.schema"
_FORM = {
    "lenient": False, "coerce_one_of": False, "item_separator": ",", "key_separator": ":", "whitespace_pattern": " ?",
    "json_allowed_escapes": '"\\bfnrt',
}  # fmt: skip
"""One space at most where JSON allows any, and no `\\u` escapes, which could write half a surrogate pair."""
_GUIDED = {"x-guidance": _FORM}
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000, "max_grammar_size": 50_000, "max_items_in_row": 20_000, "verbose_errors": False,
}  # fmt: skip
"""A row holds an object of 4,000 optional members."""
_MOST_TEXT = 1 << 17  # characters of a schema
_MOST_PARTS = 1 << 12  # lists and objects of a schema, those of its values too: 4,096 take half a second at most
_MOST_LEVELS = 512  # levels of a schema, definitions' added: the library ends the process at some 1,300 (8 MiB stack)
_STACK = 16 << 20  # bytes of stack of a start. Threads have 2 MiB where the process's own may grow without end.
_STARTING = threading.Lock()
_REFUSED = (
    "allOf", "multipleOf", "patternProperties", "x-guidance",  # without bounds
    "$dynamicRef", "$recursiveRef", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "%lark", "grammars",
)  # fmt: skip
"""The others mean something in one draft alone, or in the library's own grammars, and it would pass them over."""
_ALONE = ("$ref", "anyOf", "oneOf")
_PARTS = ("properties", "$defs", "definitions", "items", "additionalProperties", "prefixItems", "anyOf", "oneOf")
_BESIDE = re.compile(r"properties|additionalProperties|items|prefixItems|pattern|format|enum|const|m(in|ax)[A-Z].*")
_TARGET = re.compile(r"#(/(\$defs|definitions)/[^/%]+)?")
_ERRORS = (
    # what the library says, and what the client is told: nothing of the schema's own values
    (r"Unimplemented keys: \[.*?\]", ""),
    (r"Unknown format", "format"),
    (r"oneOf constraints", "oneOf whose options may hold together; want anyOf"),
    (r"look-around|not supported", "pattern or reference"),
    (r"regex parse error", "pattern; want a valid regular expression"),
    (r"Unsatisfiable|NoExtension|Regex is empty", "contradiction: no text fits it"),
    (r"Pointer|Resource|circular", "$ref; want one to a definition of this schema"),
    (r"URI", "name of a definition; want ASCII letters, digits and marks that an address may hold"),
    (r"Expected|must be|Invalid type", "value of a keyword; want what JSON Schema says of it"),
    (r"", "size: it says too much at one place; want fewer alternatives, or shorter patterns"),
)

_NEAR = 64  # tokens before the end of an answer in which it is looked whether the text can be closed

_STEPS = 1024  # tokens that are tried in an answer to see how it can be closed, besides those that close it
_CLOSERS = (b'"', b":", b"}", b"]", b"0")


class TokenTable:
    """A model's tokens by their bytes. ends: those that end a text. Raises ApiError (501) without llguidance."""

    def __init__(self, texts: TokenTexts, size: int, ends: tuple[int, ...]) -> None:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            told = "response_format: the gateway lacks llguidance: pip install 'private-llm[gateway]'"
            raise ApiError(501, told, param="response_format", code="unsupported_parameter") from None
        words = [texts.bytes_of(token) or b"" for token in range(size)]
        self.ends = tuple(token for token in ends if token < size) or (size,)
        self.size, self.lengths = size, torch.tensor([len(word) for word in words])
        self.quote, self.colon, *self.closers = (words.index(each) if each in words else 0 for each in _CLOSERS)
        named = _Named([*words, *[b""] * (self.ends == (size,))], self.ends[0], sorted({*texts.special, *self.ends}))
        self.tokens = named.tokenizer = LLTokenizer(TokenizerWrapper(named), eos_token=list(self.ends))


class _Named:
    """Tokens as the library wants them told. A text that must come is written by the longest that fit."""

    tokenizer: Any
    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int, special: list[int]) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self.special_token_ids = [token for token in special if token < len(tokens)]

    def __call__(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.greedy_tokenize(text)
        return found


class Grammar:
    """JSON of a schema in a model's tokens. place: the field that errors name. rules: a grammar (Lark's form) in which
    `payload` is that JSON, and `form` that of another schema. Raises ApiError (400) for a schema that will not do.
    """

    def __init__(
        self, schema: object, table: TokenTable, place: str = _PARAM, rules: str = "", form: tuple[object, ...] = ()
    ) -> None:
        from llguidance import LLMatcher, LLParserLimits

        text = bounded(schema, place)
        if not rules:
            made = LLMatcher.grammar_from_json_schema(text, overrides=_FORM)  # type: ignore[arg-type]
        else:
            parts = {"payload": text} | ({"form": bounded(form[0], _PARAM)} if form else {})
            rows = [f"{name}: %json {json.dumps({**json.loads(part), **_GUIDED})}" for name, part in parts.items()]
            made = LLMatcher.grammar_from_lark("\n".join(["%llguidance {}", rules, *rows]))
        self.table, self.place = table, place
        limits = LLParserLimits(**_LIMITS)
        self._start = _with_stack(lambda: LLMatcher(table.tokens, made, log_level=0, limits=limits))
        self._start.compute_bitmask()  # shows at once that no text fits
        _check_error(self._start, place)

    def written(self) -> WrittenText:
        """A text that has not begun."""
        return WrittenText(self._start.deep_copy(), self.table, self.place)


class WrittenText:
    """How far one answer has come in a grammar. Its methods raise ApiError (400) where the schema asks too much."""

    def __init__(self, matcher: LLMatcher, table: TokenTable, place: str) -> None:
        self._matcher, self._table, self._place = matcher, table, place
        self._close: list[int] | None = None  # from here on, if it was looked for
        self._after: tuple[int, list[int]] | None = None  # the token that was tried last, and how to close then
        self._steps = 0

    @property
    def patient(self) -> bool:
        """Whether other ways to close may still be tried: so many steps take a fifth of a second at most."""
        return self._steps < _STEPS

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def allowed(self, count: int) -> Tensor:
        """Which of a model's tokens may come (bool [count])."""
        mask = torch.zeros(count, dtype=torch.bool)
        found = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        _check_error(self._matcher, self._place)
        known = min(count, self._table.size)
        mask[:known] = found[:known] > 0
        return mask

    def take(self, token: int) -> None:
        """The token that came."""
        self._consume(token)
        if self._after is not None and self._after[0] == token:
            self._close = self._after[1]
        else:
            self._close = self._close[1:] if self._close and self._close[0] == token else None
        self._after = None

    def _consume(self, token: int) -> None:
        self._matcher.consume_token(token)
        _check_error(self._matcher, self._place)

    def closing(self, left: int) -> list[int] | None:
        """Tokens that complete the text, found by closing what is open first; None if more than `left`."""
        if left > _NEAR:
            return None
        if self._close is None:
            self._close = self._closed(left)
        return self._close

    def _closed(self, left: int) -> list[int] | None:
        made: list[int] = []
        while not self._matcher.is_accepting() and len(made) <= left:
            made.append(self._next())
            self._consume(made[-1])
        self._matcher.rollback(len(made))
        self._steps += len(made)
        return made if len(made) <= left else None

    def closes(self, token: int, left: int) -> bool:
        """Whether the text can be completed in `left` tokens after this one."""
        if token in self._table.ends:
            return True
        self._consume(token)
        found = self._closed(left)
        self._matcher.rollback(1)
        self._after = None if found is None else (token, found)
        return found is not None

    def _next(self) -> int:
        table = self._table
        in_string = self._matcher.validate_tokens([table.colon])  # or before a value, where nothing can be closed
        for token in () if in_string else table.closers:
            if self._matcher.validate_tokens([token]):
                return token
        if self._matcher.validate_tokens([table.quote]):
            return table.quote
        allowed = self.allowed(table.size)
        return int(self._table.lengths.masked_fill(~allowed, -1).argmax())


def _with_stack(start: Callable[[], LLMatcher]) -> LLMatcher:
    """What `start` makes, in a thread with `_STACK` bytes of stack; one at a time."""
    with _STARTING, ThreadPoolExecutor(1, "grammar") as pool:
        before = threading.stack_size(_STACK)
        try:
            made = pool.submit(start)
        finally:
            threading.stack_size(before)
        return made.result()


def bounded(schema: object, param: str) -> str:
    """A schema's JSON. Raises ApiError (400) naming `param` for one without bounds, or beyond them."""
    from llguidance import LLMatcher

    root = {} if schema is True else schema
    if not isinstance(root, dict):
        raise bad(param, f"got {type(root).__name__}; want an object", "invalid_type")
    try:
        text = json.dumps(root, allow_nan=False)
        if len(text) > _MOST_TEXT:
            raise bad(param, f"has more than {_MOST_TEXT} characters")
        if text.count("[") + text.count("{") > _MOST_PARTS:
            raise bad(param, f"has more than {_MOST_PARTS} lists and objects")
        LLMatcher.grammar_from_json_schema(text, overrides=_FORM)  # type: ignore[arg-type]
    except ValueError:
        raise bad(param, "deeper than 127 levels, or a number beyond the range of a float") from None
    _check(root, param)
    return text


def _check(root: dict[str, Any], param: str) -> None:
    """Raises ApiError (400) for what the library takes without bounds."""
    levels: Counter[str] = Counter()
    open_ = [(root, "", "", 1)]
    while open_:
        schema, where, home, level = open_.pop()
        levels[home] = max(levels[home], level)
        place = where or "the top"
        _refuse(param, (name for name in _REFUSED if name in schema), f"at {place}")
        alone = next((name for name in _ALONE if name in schema), None)
        if alone is not None:
            others = (name for name in schema if name != alone and (name in _ALONE or _BESIDE.fullmatch(name)))
            _refuse(param, others, f"beside {alone} at {place}; want it inside")
        if "$ref" in schema and not _TARGET.fullmatch(str(schema["$ref"])):
            raise _unsupported(param, f"$ref at {place}; want #/$defs/NAME or #/definitions/NAME of this schema")
        for name in ("$defs", "definitions"):
            held = schema.get(name, {})
            if not isinstance(held, dict) or not all(isinstance(part, dict | bool) for part in held.values()):
                raise _unsupported(param, f"{name} at {place}; want an object of schemas")
        for name, part in parts_of(schema):
            begins = name.startswith(("$defs/", "definitions/"))
            inside = f"{where}/{name}"
            open_.append((part, inside, inside, 1) if begins else (part, inside, home, level + 1))
    if sum(levels.values()) > _MOST_LEVELS:
        raise bad(param, f"deeper than {_MOST_LEVELS} levels, those of definitions added")


def parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that stand in one, with their places."""
    for name in _PARTS:
        value = schema.get(name)
        if name in ("items", "additionalProperties") and isinstance(value, dict):
            yield name, value
        elif isinstance(value, dict | list):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(part, dict):
                    yield f"{name}/{key}", part


def _refuse(param: str, names: Iterable[str], where: str) -> None:
    if told := ", ".join(sorted(names)):
        raise _unsupported(param, f"{told} {where}")


def _check_error(matcher: LLMatcher, param: str) -> None:
    """Raises ApiError (400) with the error of a matcher that has one."""
    if matcher.is_error():
        said = matcher.get_error()
        found, told = next((each, told) for words, told in _ERRORS if (each := re.search(words, said)))
        raise _unsupported(param, told or ", ".join(json.loads(found[0].partition(": ")[2])))


def _unsupported(param: str, what: str) -> ApiError:
    return bad(param, f"unsupported {what}", "unsupported_schema")
