"""OpenAI's Responses API, as chats: items become messages, and a chat's answer becomes items and events.

What a client asks to be kept for its next question stays in memory, within bounds, until the gateway ends.
"""

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from private_llm_gateway.errors import ApiError, bad
from private_llm_gateway.fields import Fields, refuse_others, refuse_unsupported

_MOST_KEPT, _MOST_SIZE = 256, 16 << 20  # responses, and characters of them and of what they go on from
_PASSED = ("model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "tool_choice", "stream")
_CHAT_NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format", "response_format": "text.format", "verbosity": "text.verbosity",
}  # fmt: skip
"""What a field of a chat is called here."""
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_STOPPED = {"length": "max_output_tokens"}


@dataclass(frozen=True, repr=False)
class _KeptResponse:
    owner: str
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class KeptResponses:
    """Responses by id, each for the key that asked. Of the key that keeps most, the oldest make room. Thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, _KeptResponse] = {}
        self._lock = threading.Lock()

    def add(self, owner: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep one, with the chat that led to it and its answer."""
        size = len(json.dumps([response, messages]))
        with self._lock:
            self._kept[response["id"]] = _KeptResponse(owner, response, messages, size)
            while len(self._kept) > _MOST_KEPT or sum(each.size for each in self._kept.values()) > _MOST_SIZE:
                shares: Counter[str] = Counter()
                for each in self._kept.values():
                    shares[each.owner] += each.size + _MOST_SIZE // _MOST_KEPT  # many small ones count, too
                ((most, _),) = shares.most_common(1)
                del self._kept[next(name for name, each in self._kept.items() if each.owner == most)]

    def find(self, owner: str, name: str, param: str | None = None) -> _KeptResponse:
        """One of that key's. Raises ApiError (404; 400 where a request's field names it, as OpenAI's service)."""
        with self._lock:
            found = self._kept.get(name)
        if found is None or found.owner != owner:
            told = "the gateway keeps no such response: it keeps the newest, in memory, and only with store"
            if param is not None:
                raise ApiError(400, told, param=param, code="previous_response_not_found")
            raise ApiError(404, told, code="response_not_found")
        return found

    def delete(self, owner: str, name: str) -> None:
        """Forget one. Raises ApiError (404)."""
        self.find(owner, name)
        with self._lock:
            self._kept.pop(name, None)


class ResponseAsked:
    """A request to /v1/responses, its response while it comes, and the same as a chat. Raises ApiError (400, 404)."""

    def __init__(self, body: Mapping[str, Any], owner: str, kept: KeptResponses) -> None:
        refuse_unsupported(body, "responses")
        fields = Fields(body)
        self.owner, self.kept, self.store = owner, kept, body.get("store") is None or fields.flag("store")
        before = fields.option("previous_response_id")
        old = [] if before is None else kept.find(owner, before, "previous_response_id").messages
        self.messages = [*old, *_messages(body.get("input"))]
        instructions = fields.option("instructions")
        first = [] if instructions is None else [{"role": "developer", "content": instructions}]
        self.chat = {name: body.get(name) for name in _PASSED} | {"messages": [*first, *self.messages]}
        self.chat["max_completion_tokens"] = body.get("max_output_tokens")
        reasoning, text = fields.mapping("reasoning"), fields.mapping("text")
        refuse_others(reasoning, ("effort", "summary", "generate_summary"), {}, "reasoning.")
        refuse_others(text, ("format", "verbosity"), {}, "text.")
        refuse_others(fields.mapping("stream_options"), (), {"include_obfuscation": (False,)}, "stream_options.")
        self.chat |= {"reasoning_effort": reasoning.get("effort"), "verbosity": text.get("verbosity")}
        included = body.get("include") or []
        if not isinstance(included, list) or any(each not in _INCLUDED for each in included):
            raise bad("include", f"want a list of {', '.join(_INCLUDED)}", "unsupported_parameter")
        self.chat["logprobs"] = _INCLUDED[0] in included or bool(body.get("top_logprobs"))
        form = Fields({"text.format": text.get("format")}).mapping("text.format")
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
        self.chat["response_format"] = form or None
        tools, choice = body.get("tools") or [], body.get("tool_choice")
        if not isinstance(tools, list) or any(
            type(each) is not dict or each.get("type") != "function" for each in tools
        ):
            raise bad("tools", "want a list of functions; the gateway has no tools of its own", "unsupported_parameter")
        self.chat["tools"] = [
            {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}} for tool in tools
        ]
        if isinstance(choice, dict):
            self.chat["tool_choice"] = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        if body.get("stream"):
            self.chat["stream_options"] = {"include_usage": True}
        self.response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(24)}", "object": "response", "created_at": float(int(time.time())),
            "status": "in_progress", "error": None, "incomplete_details": None, "instructions": instructions,
            "max_output_tokens": body.get("max_output_tokens"), "metadata": _metadata(fields), "output": [],
            "model": body.get("model"), "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "previous_response_id": before, "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "temperature": 1.0, "top_p": 1.0,
            "text": {**text, "format": text.get("format") or {"type": "text"}},
            "tool_choice": choice or "auto", "tools": [{"parameters": {}, "strict": False, **tool} for tool in tools],
            "truncation": "disabled", "usage": None, "user": body.get("user"), "background": False,
        }  # fmt: skip
        self._number = 0
        self._logprobs: list[dict[str, Any]] = []
        self._finish = "stop"

    # -- events -------------------------------------------------------------------------------------------------
    def events(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What a chunk of the chat's stream says."""
        made = [] if self._number else [self._event(name, response={**self.response, "output": []}) for name in _BEGIN]
        for choice in chunk["choices"]:
            rows = (choice["logprobs"] or {}).get("content") or []
            made += self._delta(choice["delta"], rows)
            self._finish = choice["finish_reason"] or self._finish
        if chunk.get("usage"):
            made += self._end(chunk)
        return made

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """The response, of a whole chat."""
        (choice,) = chat["choices"]
        self.events({"choices": [{**choice, "delta": choice["message"]}], "usage": chat["usage"],
                     "private_llm": chat["private_llm"]})  # fmt: skip
        return self.response

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event of an error."""
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=self.response)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
        output = self.response["output"]
        return self._event(kind, item_id=output[-1]["id"], output_index=len(output) - 1, **more)

    def _delta(self, delta: Mapping[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made, text, calls = [], delta.get("content"), delta.get("tool_calls") or ()
        self._logprobs += rows
        if text:
            made += self._say(text)
        elif calls:
            self._logprobs.clear()  # a call's, which is no part of the text
        for call in calls:
            function = call["function"]
            if "id" in call:
                item = {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""}
                made += self._begin(item, "fc")
            self.response["output"][-1]["arguments"] += function["arguments"]
            if function["arguments"]:
                made.append(self._of_item("response.function_call_arguments.delta", delta=function["arguments"]))
        return made

    def _say(self, text: str) -> list[dict[str, Any]]:
        """A part of a message, with all likelihoods that came since the last one."""
        made, rows = [], self._logprobs
        self._logprobs = []
        if not self._open("message"):
            made += self._begin({"type": "message", "role": "assistant", "content": []}, "msg")
        (part,) = self.response["output"][-1]["content"]
        part["text"] += text
        for row in rows:
            tops = [{**top, "bytes": top["bytes"] or []} for top in row["top_logprobs"]]
            part["logprobs"].append({**row, "bytes": row["bytes"] or [], "top_logprobs": tops})
        bare = [_without_bytes(row) for row in rows]
        return [*made, self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=bare)]

    def _open(self, kind: str) -> bool:
        output = self.response["output"]
        return bool(output) and output[-1]["type"] == kind and output[-1]["status"] == "in_progress"

    def _begin(self, item: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
        made, output = self._close("completed"), self.response["output"]
        output.append({"id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress", **item})
        added = {**output[-1], **({"content": []} if prefix == "msg" else {})}
        made.append(self._event("response.output_item.added", output_index=len(output) - 1, item=added))
        if prefix == "msg":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            output[-1]["content"].append(part)
            made.append(self._of_item("response.content_part.added", content_index=0, part={**part, "logprobs": []}))
        return made

    def _close(self, status: str) -> list[dict[str, Any]]:
        made, output = [], self.response["output"]
        if self._open("message"):
            (part,) = output[-1]["content"]
            bare = [_without_bytes(row) for row in part["logprobs"]]
            made.append(self._of_item("response.output_text.done", content_index=0, text=part["text"], logprobs=bare))
            made.append(self._of_item("response.content_part.done", content_index=0, part=part))
        elif self._open("function_call"):
            told = {"arguments": output[-1]["arguments"], "name": output[-1]["name"]}
            made.append(self._of_item("response.function_call_arguments.done", **told))
        if made:
            output[-1]["status"] = status
            made.append(self._event("response.output_item.done", output_index=len(output) - 1, item=output[-1]))
        return made

    def _end(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        why = _STOPPED.get(self._finish)
        status, made = "incomplete" if why else "completed", []
        if not self.response["output"]:
            made = self._begin({"type": "message", "role": "assistant", "content": []}, "msg")
        if self._logprobs and self._open("message"):
            made += self._say("")
        made += self._close(status)
        counts = chunk["usage"]
        usage = {
            "input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "input_tokens_details": {"cache_write_tokens": 0, **counts["prompt_tokens_details"]},
        }  # fmt: skip
        self.response |= {"status": status, "usage": usage, "private_llm": chunk.get("private_llm")}
        self.response["incomplete_details"] = {"reason": why} if why else None
        if not why:
            self.response["completed_at"] = float(int(time.time()))
        if self.store:
            self.kept.add(self.owner, self.response, [*self.messages, *_messages(self.response["output"])])
        return [*made, self._event(f"response.{status}", response=self.response)]


_BEGIN = ("response.created", "response.in_progress")


def named_here(error: ApiError) -> ApiError:
    """An error of the chat that names the fields of this address."""
    if error.param is not None and error.param.startswith("tools["):
        error.message = error.message.replace(".function.", ".", 1)
        error.param = error.param.replace(".function.", ".", 1)
    for chat, own in _CHAT_NAMES.items():
        if error.param is not None and error.param.startswith(chat):
            rest = "" if own == "input" else error.param.removeprefix(chat)
            error.message = error.message.replace(error.param, own + rest, 1)
            error.param = own + rest
            break
    return error


def _metadata(fields: Fields) -> dict[str, str]:
    """Within the bounds of OpenAI, since it is kept."""
    given = fields.mapping("metadata")
    fits = (len(name) <= 64 and isinstance(value, str) and len(value) <= 512 for name, value in given.items())
    if len(given) > 16 or not all(fits):
        raise bad("metadata", "want up to 16 texts of 512 characters, by names of 64, at most")
    return given


def _without_bytes(row: Mapping[str, Any]) -> dict[str, Any]:
    tops = [{"token": top["token"], "logprob": top["logprob"]} for top in row["top_logprobs"]]
    return {"token": row["token"], "logprob": row["logprob"], "top_logprobs": tops}


# -- items as messages: `prompts` checks what they hold ----------------------------------------------------------------
def _messages(given: object) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        missing = ("missing; ", "missing_required_parameter") if given is None else ("", "invalid_type")
        raise bad("input", f"{missing[0]}want a text, or a list of items", missing[1])
    made: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        where = f"input[{at}]"
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "message":
            refuse_others(item, ("type", "id", "status", "role", "content", "phase"), {}, f"{where}.")
            made.append({"role": item.get("role"), "content": _content(item.get("content"))})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "type": "function",
                    "function": {"name": item.get("name"), "arguments": item.get("arguments")}}  # fmt: skip
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": None})
            made[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # what another model thought is no part of a text
            told = "want items of type message, function_call or function_call_output"
            raise bad(f"{where}.type", told, "unsupported_parameter")
    return made


def _content(content: object) -> object:
    """With parts named as those of chats."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text") else part
        for part in content
    ]  # fmt: skip
