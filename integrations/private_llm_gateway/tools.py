"""Functions that a chat offers to its model: which, whether it must call one, and what holds its calls to schemas."""

import copy
import json
from dataclasses import dataclass
from typing import Any

from private_llm_gateway.call_formats import NAME, CallFormat, CallReader, FormatReader, TemplateReader
from private_llm_gateway.constrained import Grammar, bounded, parts_of
from private_llm_gateway.errors import bad
from private_llm_gateway.fields import Fields, refuse_others
from private_llm_gateway.served import Served

_MOST = 128  # functions of a request, as OpenAI allows; and calls of an answer
_TEXT = r"/(.|\n)*/"
_NO_CALL = r"/([^{\s](.|\n)*)?/"  # where a brace begins a call


@dataclass(frozen=True)
class Tools:
    """Functions as OpenAI's API has them. forced: one must be called. named: just this one. parallel: or several."""

    functions: tuple[dict[str, Any], ...]
    forced: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def listed(self) -> list[dict[str, Any]]:
        """As chat templates want them."""
        return [
            {"type": "function", "function": {name: value for name, value in each.items() if name != "strict"}}
            for each in self.functions
        ]

    def reader(self, served: Served, prompt: list[int]) -> CallReader:
        """What finds calls in an answer to a prompt."""
        most = _MOST if self.parallel and not self.named else 1
        if served.call_format is not None and (self.forced or not served.reads_calls):
            return FormatReader(served.call_format, most, self.forced)
        return TemplateReader(served.tokenizer, served.tokenizer.decode(prompt), self.listed, most)

    def grammar(self, served: Served, form: tuple[object, ...]) -> Grammar | None:
        """What an answer must be: calls, if forced or strict, or `form`'s JSON; None: any. Raises ApiError (400)."""
        if not (self.forced or form or any(each.get("strict") for each in self.functions)):
            return None
        written = served.call_format
        if written is None:
            told = "the gateway does not know how this model writes calls, so it can hold none to a schema; want "
            raise bad("tools", f"{told}tool_choice auto, and neither strict nor response_format", "unsupported_schema")
        options: list[object] = []
        definitions: dict[str, object] = {}
        for at, each in enumerate(self.functions):
            if self.named in (None, each["name"]):
                held = self.forced or each.get("strict")
                schema = each["parameters"] if held else {"type": "object"}
                bounded(schema, f"tools[{at}].function.parameters")
                definitions |= _renamed(schema, f"f{at}")
                call = {"name": {"const": each["name"]}, written.arguments: {"$ref": f"#/$defs/f{at}"}}
                options.append({"type": "object", "properties": call, "required": [*call],
                                "additionalProperties": False})  # fmt: skip
        rules = self._rules(written, served, bool(form))
        used = form if not self.forced else ()
        return Grammar({"anyOf": options, "$defs": definitions}, served.table, "tools", rules, used)

    def _rules(self, written: CallFormat, served: Served, form: bool) -> str:
        special = served.special_token(written.mark)
        mark = _quoted(written.mark) if special is None else f"<[{special}]>"
        more = f"({_quoted(written.between)} payload)*" if self.parallel and not self.named else ""
        rows = [f"calls: {_quoted(written.first)} payload {more} {_quoted(written.last)}"]
        if self.forced:
            rows.append(f"start: {mark} calls")
        elif form and not written.mark:
            told = "this model's calls are JSON without a mark; want tools or a response_format"
            raise bad("response_format", told, "unsupported_schema")
        elif form:
            rows.append(f"start: form | {mark} calls")
        elif not written.mark:
            rows += ["start: TEXT | calls", f"TEXT: {_NO_CALL}"]
        elif special is not None:
            rows += [f"start: TEXT | TEXT {mark} calls", f"TEXT: {_TEXT}"]
        else:
            rows += ["start: TEXT | head calls", f"head[lazy]: TEXT {mark}", f"TEXT: {_TEXT}"]
        return "\n".join(rows)


def read_tools(fields: Fields, served: Served) -> Tools | None:
    """`tools`, `tool_choice` and `parallel_tool_calls`; None if none may be called. Raises ApiError (400)."""
    listed, choice = fields.body.get("tools"), fields.body.get("tool_choice")
    parallel = fields.body.get("parallel_tool_calls") is None or fields.flag("parallel_tool_calls")
    if listed is not None and not isinstance(listed, list):
        raise bad("tools", "want a list of functions", "invalid_type")
    if not listed:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice", "want tools as well")
        return None
    if len(listed) > _MOST:
        raise bad("tools", f"got {len(listed)}; want {_MOST} at most")
    functions = tuple(_function(each, f"tools[{at}]") for at, each in enumerate(listed))
    names = [each["name"] for each in functions]
    if len({*names}) < len(names):
        raise bad("tools", "want a name of its own for each function")
    named = None
    if isinstance(choice, dict):
        refuse_others(choice, ("type", "function"), {}, "tool_choice.")
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or named not in names:
            raise bad("tool_choice", "want none, auto, required, or a function of tools by its name")
    elif choice not in (None, "none", "auto", "required"):
        raise bad("tool_choice", "want none, auto, required, or a function of tools by its name")
    if choice == "none":
        return None
    if served.knows_tools and served.call_format is None and not served.reads_calls:
        told = "the gateway does not know how this model writes calls; want one of Qwen's, Llama's or Mistral's form, "
        raise bad("tools", f"{told}or a tokenizer with a response_template", "unsupported_parameter")
    return Tools(functions, named is not None or choice == "required", named, parallel)


def _function(tool: object, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(function, dict):
        raise bad(where, "want an object of type function, with a function", "unsupported_parameter")
    place = f"{where}.function."
    refuse_others(tool, ("type", "function"), {}, f"{where}.")
    refuse_others(function, ("name", "description", "parameters", "strict"), {}, place)
    if not NAME.fullmatch(Fields(function).text("name", place)):
        raise bad(f"{place}name", "want letters, digits, _, - and ., 64 at most")
    made = {name: value for name, value in function.items() if value is not None}
    for name, kind, wanted in (("description", str, "a text"), ("parameters", dict, "an object"),
                               ("strict", bool, "true or false")):  # fmt: skip
        if not isinstance(made.get(name, kind()), kind):
            raise bad(f"{place}{name}", f"want {wanted}", "invalid_type")
    made.setdefault("parameters", {"type": "object", "properties": {}, "additionalProperties": False})
    return made


def _renamed(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Definitions by which a schema stands in a larger one as `name`."""
    root = copy.deepcopy(schema)
    open_ = [root]
    while open_:
        part = open_.pop()
        if "$ref" in part:
            inside = str(part["$ref"]).removeprefix("#").replace("/", ".")
            part["$ref"] = f"#/$defs/{name}{inside}"
        open_ += [each for _, each in parts_of(part)]
    root.pop("$id", None)  # would change what `#` means
    kept = ("$defs", "definitions")
    made = {f"{name}.{group}.{key}": part for group in kept for key, part in root.pop(group, {}).items()}
    return {name: root, **made}


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
