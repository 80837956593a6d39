"""How models write calls of functions, and reading them while they come.

A tokenizer that has a `response_template` reads its model's calls itself (transformers); for other models a table says
what stands around calls. Text that looked like a call and is none is text.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from private_llm_gateway.completion import Finish

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_HEADER = re.compile(rf'\{{\s*"name"\s*:\s*"({NAME.pattern})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_SIGN = re.compile(r'\\.|["{}]', re.DOTALL)
_OPTIONAL_MARK = "<|python_tag|>"  # may stand before a call that needs no mark


@dataclass(frozen=True)
class CallFormat:
    """JSON of calls, and what a family of models writes around it. sign: in its chat templates alone. mark: before
    calls ("": a brace begins one). first, last: after the mark, and after calls. between: two. arguments: their name.
    """

    sign: str
    mark: str
    first: str
    between: str
    last: str
    arguments: str = "arguments"


_FORMATS = (
    CallFormat("<tool_call>", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),  # Hermes, Qwen
    CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", " [", ", ", "]"),  # Mistral
    CallFormat("ipython", "", "", "; ", "", "parameters"),  # Llama
)
_OTHERS = ("<function=", "<arg_key>", "[ARGS]")  # of templates whose calls are no such JSON
MARKS = frozenset({*(each.mark for each in _FORMATS), _OPTIONAL_MARK})  # text of an answer with calls, special or not


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template asks its model for, if it is one of the table's."""
    if any(sign in template for sign in _OTHERS):
        return None
    return next((each for each in _FORMATS if each.sign in template), None)


class CallReader(Protocol):
    """Reads one answer. calls: how many have begun."""

    calls: int

    def feed(self, text: str, finish: Finish | None) -> dict[str, Any]:
        """What more text adds, as the `delta` of a chunk. finish: how the answer ends with this text, if it does; then
        what was held back is told as well, but no call that the length cut off before its arguments began.
        """


class _Delta:
    """What a reader tells at a time. most: calls, beyond which nothing is told."""

    def __init__(self, most: int) -> None:
        self.calls, self._most = 0, most
        self._told: dict[str, Any] = {}

    def _say(self, text: str, field: str = "content") -> None:
        if text and self.calls < self._most:
            self._told[field] = self._told.get(field, "") + text

    def _call(self, name: str, arguments: str = "") -> None:
        self.calls += 1
        if self.calls <= self._most:
            made = {"index": self.calls - 1, "id": secrets.token_hex(5)[:9], "type": "function"}  # Mistral wants 9
            self._told.setdefault("tool_calls", []).append({**made, "function": {"name": name, "arguments": arguments}})

    def _argue(self, text: str) -> None:
        if text and self.calls <= self._most:
            listed, index = self._told.setdefault("tool_calls", []), self.calls - 1
            if not listed or listed[-1]["index"] != index:
                listed.append({"index": index, "function": {"arguments": ""}})
            listed[-1]["function"]["arguments"] += text

    def _taken(self) -> dict[str, Any]:
        told, self._told = self._told, {}
        return told


class FormatReader(_Delta):
    """Of a format of the table. Arguments are told as they come, as they are. forced: an answer is calls alone."""

    def __init__(self, form: CallFormat, most: int, forced: bool = False) -> None:
        super().__init__(most)
        self._forced = forced
        self._form, self._last = form, form.last.strip(" \n]")
        self._open = self._mark = ""  # what was not told yet, and the mark before it if no call has followed
        self._read = self._text if form.mark else self._begin
        self._depth, self._quoted = 0, False

    def feed(self, text: str, finish: Finish | None) -> dict[str, Any]:
        """See `CallReader`."""
        self._open += text
        while self._read():
            pass
        cut = finish == "length" and (self._forced or (bool(self._form.mark) and self._read == self._next))
        if finish and self._read == self._arguments:
            self._argue(self._open)
        elif finish and not cut and (not self.calls or self._open.strip(f" \n,;[]{self._last}")):
            self._say(self._mark + self._open)
        return self._taken()

    def _begin(self) -> bool:
        """Whether an answer begins with a brace, or with a mark before one."""
        bare = self._open.lstrip()
        if _OPTIONAL_MARK.startswith(bare[: len(_OPTIONAL_MARK)]) and len(bare) <= len(_OPTIONAL_MARK):
            return False
        bare = bare.removeprefix(_OPTIONAL_MARK).lstrip()
        self._read = self._next if bare.startswith("{") else self._text
        self._open = bare if bare.startswith("{") else self._open
        return True

    def _text(self) -> bool:
        """Text, but for the space before a call, and what a mark may begin with."""
        mark = self._form.mark
        before, found, after = self._open.partition(mark) if mark else (self._open, "", "")
        if found:
            self._say(before.rstrip())
            self._open, self._mark, self._read = after, mark, self._next
            return True
        held = max((size for size in range(1, len(mark)) if before.endswith(mark[:size])), default=0)
        told = before[: len(before) - held].rstrip() if mark else before
        self._say(told)
        self._open = before[len(told) :]
        return False

    def _next(self) -> bool:
        """A call, or the end of calls."""
        rest = self._open.lstrip(" \t\r\n,;[]")
        if not rest or (self._last.startswith(rest) and rest != self._last):
            return False
        if rest.startswith("{"):
            return self._header(rest)
        if self._last and rest.startswith(self._last) and not self._mark:
            self._open, self._read = rest.removeprefix(self._last), self._text
            return True
        self._no_call(self._open)
        return True

    def _header(self, rest: str) -> bool:
        """A call of the usual order, or, when all of it is there, of another; else text."""
        if found := _HEADER.match(rest):
            self._call(found[1])
            self._mark, self._open, self._read = "", rest[found.end() :], self._arguments
            return True
        if "}" not in rest:
            return False
        try:
            whole, upto = json.JSONDecoder(strict=False).raw_decode(rest)
        except (ValueError, RecursionError):
            return False
        name, given = whole.get("name"), whole.get(self._form.arguments, {})
        if isinstance(name, str) and NAME.fullmatch(name):
            self._call(name, given if isinstance(given, str) else json.dumps(given))
            self._mark, self._open = "", rest[upto:]
        else:
            self._no_call(self._open)
        return True

    def _no_call(self, text: str) -> None:
        """It is text, up to the next mark."""
        self._say(self._mark)
        self._mark, self._open, self._read = "", text, self._text

    def _arguments(self) -> bool:
        """The rest of an object that is open."""
        at, over = 0, False
        for found in _SIGN.finditer(self._open):
            at, sign = found.end(), found[0]
            if sign == '"':
                self._quoted = not self._quoted
            elif sign in "{}" and not self._quoted:
                self._depth += 1 if sign == "{" else -1
                if over := not self._depth:
                    break
        if not over:  # but for an escape of which the other half has not come
            at = len(self._open) - (at < len(self._open) and self._open.endswith("\\"))
        self._argue(self._open[:at])
        self._open = self._open[at:]
        if over:
            self._read = self._after
        return over

    def _after(self) -> bool:
        """The brace that closes a call."""
        rest = self._open.lstrip()
        if rest:
            self._open, self._read = rest.removeprefix("}"), self._next
        return bool(rest)


class TemplateReader(_Delta):
    """Of a tokenizer with a `response_template`. Each call is told when it is whole. prefix: the prompt's text."""

    def __init__(self, tokenizer: Any, prefix: str, tools: list[dict[str, Any]], most: int) -> None:  # noqa: ANN401
        super().__init__(most)
        self._parser = tokenizer.get_response_parser(prefix=prefix, tools=tools)
        self._open, self._failed = "", False  # what was not told yet

    def feed(self, text: str, finish: Finish | None) -> dict[str, Any]:
        """See `CallReader`."""
        self._open += text
        read = False
        try:
            if not self._failed:
                self._tell(self._parser.feed(text))
                read = True
                self._tell(self._parser.finalize()[1] if finish else ())
        except (ValueError, TypeError, KeyError, AttributeError):  # a call that is none: from here on, all is text
            self._failed = True
            self._open = "" if read and finish == "length" else self._open  # or the rest of it was cut off
        if self._failed:
            self._say(self._open)
            self._open = ""
        return self._taken()

    def _tell(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            if event["field"] != "tool_calls" and event["type"] == "region_chunk":
                self._say(event["text"], event["field"])
                self._open = self._open[len(event["text"]) :]
            elif event["field"] == "tool_calls" and event["type"] == "region_close":
                self._take(event["value"])
                self._open = ""

    def _take(self, value: Any) -> None:  # noqa: ANN401 - as the model's own template makes it
        for each in value if isinstance(value, list) else [value]:
            made = each.get("function", each)
            given = made.get("arguments", {})
            self._call(str(made["name"]), given if isinstance(given, str) else json.dumps(given))
