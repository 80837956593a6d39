"""Prompts: tokens of messages, texts and token ids; what does not fit the model is refused."""

import json
from itertools import takewhile
from typing import Any

import jinja2

from private_llm_gateway.errors import ApiError, bad
from private_llm_gateway.fields import EFFORTS, Fields, refuse_others
from private_llm_gateway.served import Served

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_MESSAGES = 4096
_MOST_CHARACTERS = 256  # of a token, on an average: more than any text has
_OUT_OF_BAND = ("id", "annotations", "cache_control")  # of messages and their parts: no part of the text, and no wish
_NOTHING: dict[str, tuple[object, ...]] = {"refusal": ("",), "reasoning_content": ("",)}
"""As answers come back with the next question."""
_NO_TOOLS = "the model's chat template knows no tools; want a model whose template does (as those of Qwen and Llama 3)"


def of_messages(served: Served, fields: Fields, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Tokens of a chat and its tools, by the model's template, without one of its messages joined by line ends. Raises
    ApiError (400) for messages that are no text, unknown tools, and what the template refuses.
    """
    wanted = f'want a list of 1 to {_MOST_MESSAGES} messages, as [{{"role": "user", "content": "Hello"}}]'
    messages, ends = fields.body.get("messages"), fields.flag("continue_final_message")
    if messages is None:
        raise bad("messages", f"missing; {wanted}", "missing_required_parameter")
    if not isinstance(messages, list):
        raise bad("messages", f"got {type(messages).__name__}; {wanted}", "invalid_type")
    if not 0 < len(messages) <= _MOST_MESSAGES:
        raise bad("messages", f"got {len(messages)}; {wanted}")
    listed = [_message(served, message, f"messages[{at}]") for at, message in enumerate(messages)]
    if tools and not served.knows_tools:
        raise bad("tools", _NO_TOOLS, "unsupported_parameter")
    begins = not ends if fields.body.get("add_generation_prompt") is None else fields.flag("add_generation_prompt")
    if ends and begins:
        raise bad("add_generation_prompt", "want false with continue_final_message")
    efforts = {name: fields.option(name, *values) for name, values in EFFORTS.items()}
    if not served.chat_template:
        text = "\n".join(message["content"] for message in listed)
        return _checked(served, served.encode(_short(served, text, "messages")), "messages")
    more = {name: value for name, value in efforts.items() if value and name in served.chat_template}
    try:
        text = served.tokenizer.apply_chat_template(
            listed, tools=tools, add_generation_prompt=begins, continue_final_message=ends, tokenize=False, **more
        )
    except RecursionError:  # arguments of calls are no deeper than what works
        raise bad("tools", "too deep for the model's chat template; want fewer levels") from None
    except (jinja2.TemplateError, ValueError, TypeError):
        raise bad("messages", "the model's chat template refuses this order of roles, or such calls") from None
    return _checked(served, served.encode(_short(served, text, "messages"), special=False), "messages")


def of_instructions(served: Served, text: str) -> list[int]:
    """Tokens that all chats after this system message begin with. Raises ApiError as `of_messages` does."""
    system = {"role": "system", "content": text}
    chats = [
        of_messages(served, Fields({"messages": [system, {"role": "user", "content": content}]}))
        for content in ("a", "1")
    ]
    same = list(takewhile(lambda pair: pair[0] == pair[1], zip(*chats, strict=False)))
    check_context(served, len(same), 2, "public prefix")
    return [token for token, _ in same]


def of_field(served: Served, name: str, value: object, most: int) -> list[list[int]]:
    """Token rows of a field that is a text, token ids, or a list of either. Raises ApiError (400)."""
    listed = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(item, str) or _is_ids(item) for item in listed):
        missing, code = ("missing; ", "missing_required_parameter") if value is None else ("", "invalid_type")
        raise bad(name, f"{missing}want a text, token ids, or a list of these", code)
    if len(listed) > most:
        raise bad(name, f"got {len(listed)} items; want {most} at most")
    texts = ((served.encode(_short(served, item, name)) if isinstance(item, str) else item) for item in listed)
    return [_checked(served, ids, name) for ids in texts]


def check_context(served: Served, prompt: int, wanted: int, param: str) -> None:
    """Raises ApiError (400) where prompt and answer do not fit the model: nothing is cut off."""
    limit = served.context
    if limit is not None and prompt + wanted > limit:
        told = f"you requested {prompt + wanted} tokens ({prompt} in the {param}, {wanted} in the completion). "
        raise _too_long(served, param, f"{told}Please reduce the length of the {param} or completion.")


def _short(served: Served, text: str, param: str) -> str:
    """A text that may fit the model: others are not taken apart, which others would wait for."""
    if served.context is not None and len(text) > served.context * _MOST_CHARACTERS:
        raise _too_long(served, param, f"the {param} has {len(text)} characters. Please reduce its length.")
    return text


def _too_long(served: Served, param: str, told: str) -> ApiError:
    told = f"This model's maximum context length is {served.context} tokens. However, {told}"
    return ApiError(400, told, param=param, code="context_length_exceeded")


def _message(served: Served, message: object, where: str) -> dict[str, Any]:
    """What a chat template is told of a message. It may make something of a name; most do not."""
    if not isinstance(message, dict):
        raise bad(where, "want an object with role and content", "invalid_type")
    role, name = message.get("role"), message.get("name")
    if role == "function":
        raise bad(f"{where}.role", "unsupported here; want tool, which came in its place", "unsupported_parameter")
    if role not in _ROLES:
        raise bad(f"{where}.role", f"want one of {', '.join(_ROLES)}")
    thoughts = served.thoughts & message.keys() if role == "assistant" else frozenset()
    own = {"assistant": ("tool_calls", *thoughts), "tool": ("tool_call_id",)}.get(role, ())
    refuse_others(message, ("role", "content", "name", *own, *_OUT_OF_BAND), _NOTHING | {"tool_calls": ([],)},
                  f"{where}.")  # fmt: skip
    if name is not None and not isinstance(name, str):
        raise bad(f"{where}.name", "want a text", "invalid_type")
    told: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls") or []
    if (calls or role == "tool") and not served.knows_tools:
        raise bad(f"{where}.{'tool_calls' if calls else 'role'}", _NO_TOOLS, "unsupported_parameter")
    content = message.get("content")
    silent = content is None and role == "assistant"  # as an answer is whose call was cut off before it began
    told["content"] = "" if silent else _content(content, f"{where}.content")
    told |= {each: _content(message[each], f"{where}.{each}") for each in thoughts if message[each] is not None}
    if calls:
        told["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if role == "tool":
        told["tool_call_id"] = Fields(message).text("tool_call_id", f"{where}.")
    return {**told, "name": name} if name else told


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Calls of an answer that came back. Templates want arguments as an object; what the model wrote may be none."""
    made = []
    if not isinstance(calls, list):
        raise bad(where, "want a list of calls", "invalid_type")
    for at, call in enumerate(calls):
        place = f"{where}[{at}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise bad(place, "want an object with id, type function, and function", "invalid_type")
        refuse_others(call, ("id", "type", "function", "index"), {}, f"{place}.")
        refuse_others(function, ("name", "arguments"), {}, f"{place}.function.")
        name, text = (Fields(function).text(each, f"{place}.function.") for each in ("name", "arguments"))
        try:
            arguments = json.loads(text)
            deeper = json.loads("[" * 99 + text + "]" * 99)  # as deep in the stack as a template writes it
            json.dumps(deeper, ensure_ascii=False).encode()  # refuses lone surrogates, as tokenizers do
        except (ValueError, RecursionError):
            arguments = text
        made.append(
            {"id": Fields(call).text("id", f"{place}."), "type": "function",
             "function": {"name": name, "arguments": arguments if isinstance(arguments, dict) else text}}
        )  # fmt: skip
    return made


def _content(content: Any, where: str) -> str:  # noqa: ANN401 - as it came
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(where, "want a text, or a list of parts of type 'text'", "invalid_type")
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _unsupported(f"{where}[{at}].type")
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}[{at}].text", "want a text", "invalid_type")
        refuse_others(part, ("type", "text", *_OUT_OF_BAND), {}, f"{where}[{at}].")
        parts.append(part["text"])
    return "".join(parts)


def _unsupported(where: str) -> ApiError:
    return bad(where, "unsupported here; this model reads and writes text only", "unsupported_parameter")


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _checked(served: Served, ids: list[int], name: str) -> list[int]:
    if not ids:
        raise bad(name, "got no tokens; want at least one")
    vocabulary = served.vocabulary
    if not all(0 <= token < vocabulary for token in ids):
        raise bad(name, f"a token id is out of range; want 0 to {vocabulary - 1}")
    return ids
