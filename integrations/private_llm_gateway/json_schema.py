"""JSON, and JSON of a schema, as a grammar.

The grammar matches a part of what a schema allows, which is enough to write by: properties come in the schema's order,
at most one space stands where JSON allows any, strings have no `\\u` escapes, numbers at most 15 digits, and properties
that a schema merely tolerates are not written.
"""

from __future__ import annotations

import json
from typing import Any

from private_llm_gateway.errors import ApiError, bad
from private_llm_gateway.grammar import CharClass, Choice, GrammarNode, Reference, Repeat, Sequence, Text

_SAYS_NOTHING = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "$defs"}
_SAYS_NOTHING |= {"definitions"}
_KNOWN = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "number": set(), "integer": set(), "boolean": set(), "null": set(),
}  # fmt: skip
_MOST_REPEATS = 1 << 16
_MOST_DEPTH = 128
_MOST_NODES = 5000
_MOST_TEXT = 1 << 16
"""Characters of all names, enums and constants together, each of which is walked through at every token."""
_MOST_SHORTEST = 1 << 14
"""Characters of a shortest text: every model's context is full before."""
_PARAM = "response_format.json_schema.schema"

_SPACE = Choice((Text(""), Text(" ")))
_DIGIT = CharClass(lambda c: c in "0123456789", "0")
_NATURAL = Choice((Text("0"), Sequence((CharClass(lambda c: c in "123456789", "1"), Repeat(_DIGIT, 0, 14)))))
_SIGN = Choice((Text(""), Text("-")))
_INTEGER = Sequence((_SIGN, _NATURAL))
_FRACTION = Choice((Text(""), Sequence((Text("."), Repeat(_DIGIT, 1, 15)))))
_EXPONENT = Sequence(
    (CharClass(lambda c: c in "eE", "e"), Choice((Text(""), CharClass(lambda c: c in "+-", "+"))), _DIGIT)
)
_NUMBER = Sequence((_SIGN, _NATURAL, _FRACTION, Choice((Text(""), _EXPONENT))))
_PLAIN = CharClass(lambda c: c >= " " and c not in '"\\\ufffd\x7f' and not "\ud800" <= c <= "\udfff", "a")
_ESCAPED = Sequence((Text("\\"), CharClass(lambda c: c in '"\\/bfnrt', "n")))
_CHARACTER = Choice((_PLAIN, _ESCAPED))
_BOOLEAN = Choice((Text("true"), Text("false")))
_NULL = Text("null")


def any_object() -> GrammarNode:
    """`{"type": "json_object"}`: an object of anything."""
    return _object_of(_ANY)


def of_schema(schema: object) -> GrammarNode:
    """The grammar of a JSON schema. Raises ApiError (400) naming what is not supported."""
    made = _Schemas(schema).node(schema, "")
    if made.size > _MOST_SHORTEST:
        raise _unsupported(f"size: its shortest text has {_short(made.size)} characters; want {_MOST_SHORTEST} at most")
    return made


def _listed(opening: str, part: GrammarNode, closing: str, least: int = 0, most: int | None = None) -> GrammarNode:
    """`part`s with commas between brackets."""
    further = Sequence((Text(","), _SPACE, part))
    some = Sequence((part, Repeat(further, max(0, least - 1), None if most is None else most - 1)))
    inner: GrammarNode = some if least else Choice((Text(""), some))
    return Sequence((Text(opening), Text("") if most == 0 else inner, Text(closing)))


def _string(least: int = 0, most: int | None = None) -> GrammarNode:
    return Sequence((Text('"'), Repeat(_CHARACTER, least, most), Text('"')))


def _object_of(value: GrammarNode) -> GrammarNode:
    return _listed("{", Sequence((_string(), Text(":"), _SPACE, value)), "}")


_ANY_REFERENCE = Reference(lambda: _ANY, "0")
_ANY: GrammarNode = Choice(
    (_NULL, _string(), _NUMBER, _BOOLEAN, _object_of(_ANY_REFERENCE), _listed("[", _ANY_REFERENCE, "]"))
)


def _choice(parts: list[GrammarNode]) -> GrammarNode:
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def _limits(schema: dict[str, Any], what: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    for name, value in ((f"min{what}", least), (f"max{what}", most)):
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_REPEATS
        if not good and value is not None:
            raise bad(_PARAM, f"schema: {name} at {where or 'the top'}; want 0 to {_MOST_REPEATS}")
    least = least or 0
    if most is not None and most < least:
        raise bad(_PARAM, f"schema: max{what} is below min{what} at {where or 'the top'}")
    return least, most


class _Schemas:
    """One schema with its definitions."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.made: dict[str, GrammarNode] = {}
        self.open: list[str] = []
        self.count = self.characters = self.depth = 0

    def node(self, schema: object, where: str) -> GrammarNode:
        """The grammar of a part at `where`."""
        self._count(1)
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise bad(_PARAM, f"schema: deeper than {_MOST_DEPTH}, references counted")
        made = self._node(schema, where)
        self.depth -= 1
        return made

    def _node(self, schema: object, where: str) -> GrammarNode:
        if schema is True:
            return _ANY
        if not isinstance(schema, dict):
            raise bad(_PARAM, f"schema: got {type(schema).__name__} at {where or 'the top'}; want an object")
        if "$ref" in schema:
            self._only(schema, {"$ref"}, where)
            return self._referred(schema["$ref"], where)
        for name in ("const", "enum"):
            if name in schema:
                self._only(schema, {name, "type"}, where)
                return self._values([schema[name]] if name == "const" else schema[name], where)
        if "anyOf" in schema:
            self._only(schema, {"anyOf"}, where)
            return self._any_of(schema["anyOf"], f"{where}/anyOf")
        kind = schema.get("type", "object" if "properties" in schema else None)
        if kind is None:
            self._only(schema, set(), where)
            return _ANY
        if isinstance(kind, list):
            self._count(len(kind))
            if not kind:
                raise bad(_PARAM, f"schema: type at {where or 'the top'}; want a type, or a list of them")
            known = set().union(*(_KNOWN.get(str(one), set()) for one in kind))
            self._only(schema, {"type"} | known, where)
            parts = [self._typed(str(one), schema, where) for one in kind]
            return _choice(parts)
        self._only(schema, {"type"} | _KNOWN.get(str(kind), set()), where)
        return self._typed(str(kind), schema, where)

    def _count(self, parts: int) -> None:
        self.count += parts
        if self.count > _MOST_NODES:
            raise bad(_PARAM, f"schema: larger than {_MOST_NODES} parts, values of enums and types among them")

    def _values(self, values: object, where: str) -> GrammarNode:
        if not isinstance(values, list) or not values:
            raise bad(_PARAM, f"schema: enum at {where or 'the top'}; want a list of values")
        self._count(len(values))
        return _choice([self._text(value) for value in values])

    def _text(self, value: object) -> GrammarNode:
        try:
            made = Text(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except ValueError:
            raise bad(_PARAM, "schema: a number that no float holds; want smaller ones", "invalid_value") from None
        self.characters += made.size
        if self.characters > _MOST_TEXT:
            raise bad(_PARAM, f"schema: names and values have more than {_MOST_TEXT} characters")
        return made

    def _only(self, schema: dict[str, Any], known: set[str], where: str) -> None:
        other = sorted(set(schema) - known - _SAYS_NOTHING)
        if other:
            offered = ", ".join(sorted(known)) or "type"
            raise _unsupported(f"{', '.join(other)} at {where or 'the top'}; here it knows {offered}")

    def _typed(self, kind: str, schema: dict[str, Any], where: str) -> GrammarNode:
        if kind == "object":
            return self._object(schema, where)
        if kind == "array":
            least, most = _limits(schema, "Items", where)
            return _listed("[", self.node(schema.get("items", True), f"{where}/items"), "]", least, most)
        if kind == "string":
            return _string(*_limits(schema, "Length", where))
        simple = {"number": _NUMBER, "integer": _INTEGER, "boolean": _BOOLEAN, "null": _NULL}
        if kind not in simple:
            raise _unsupported(f"type {kind!r} at {where or 'the top'}")
        return simple[kind]

    def _object(self, schema: dict[str, Any], where: str) -> GrammarNode:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        more = schema.get("additionalProperties", True)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise bad(_PARAM, f"schema: properties or required at {where or 'the top'}; want an object and a list")
        missing = [name for name in required if not isinstance(name, str) or name not in properties]
        if missing:
            raise _unsupported(f"required names without a property at {where or 'the top'}: {len(missing)} of them")
        wanted_names = set(required)
        if not properties:
            return Text("{}") if more is False else _object_of(self.node(more, f"{where}/additionalProperties"))
        parts: list[tuple[GrammarNode, bool]] = [
            (
                Sequence((self._text(str(name)), Text(":"), _SPACE, self.node(value, f"{where}/{name}"))),
                name in wanted_names,
            )
            for name, value in properties.items()
        ]
        first: GrammarNode = Text("}")
        further: GrammarNode = Text("}")
        for part, wanted in reversed(parts):
            with_it = Sequence((part, further)), Sequence((Text(","), _SPACE, part, further))
            first = with_it[0] if wanted else Choice((first, with_it[0]))
            further = with_it[1] if wanted else Choice((further, with_it[1]))
        return Sequence((Text("{"), first))

    def _any_of(self, options: object, where: str) -> GrammarNode:
        if not isinstance(options, list) or not options:
            raise bad(_PARAM, f"schema: {where}; want a list of schemas")
        return _choice([self.node(one, f"{where}/{i}") for i, one in enumerate(options)])

    def _referred(self, name: object, where: str) -> GrammarNode:
        """A definition of this schema, made once."""
        if not isinstance(name, str) or not name.startswith("#"):
            raise _unsupported(f"$ref to another document at {where or 'the top'}")
        if name in self.made:
            return self.made[name]
        if name in self.open:
            raise _unsupported(f"$ref of a definition to itself at {where or 'the top'}")
        found = self.root
        for key in name.removeprefix("#").split("/")[1:]:
            if not isinstance(found, dict) or key not in found:
                raise bad(_PARAM, f"schema: $ref at {where or 'the top'} leads nowhere")
            found = found[key]
        self.open.append(name)
        made = self.node(found, where)
        self.open.pop()
        self.made[name] = made
        return made


def _short(size: int) -> str:
    return f"about 10^{len(str(size)) - 1}" if size > 1 << 40 else str(size)


def _unsupported(what: str) -> ApiError:
    return bad(_PARAM, f"schema: unsupported {what}", "unsupported_schema")
