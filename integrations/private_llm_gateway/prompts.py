"""Turning messages, texts and token ids into the tokens of a prompt, and refusing what does not fit the model."""

from __future__ import annotations

from typing import Any

import jinja2

from private_llm_gateway.errors import ApiError, bad
from private_llm_gateway.fields import refuse_others
from private_llm_gateway.served import Served

_ROLES = ("system", "developer", "user", "assistant")
_MOST_MESSAGES = 4096
_MOST_CHARACTERS = 256
"""Of a token, on an average: more than any text has."""
_OUT_OF_BAND = ("id", "annotations", "cache_control")
"""Of messages and their parts: no part of the text, and no wish."""
_NO_CALLS: dict[str, tuple[object, ...]] = {"tool_calls": ([],), "refusal": ("",), "reasoning_content": ("",)}
"""As answers come back with the next question."""


def of_messages(served: Served, messages: object) -> list[int]:
    """Tokens of a chat, by the model's template or, without one, of the messages joined by line ends.

    Raises ApiError (400) for messages that are no text, and those that the template refuses.
    """
    wanted = f'want a list of 1 to {_MOST_MESSAGES} messages, as [{{"role": "user", "content": "Hello"}}]'
    if messages is None:
        raise bad("messages", f"messages: missing; {wanted}", "missing_required_parameter")
    if not isinstance(messages, list):
        raise bad("messages", f"messages: got no list; {wanted}", "invalid_type")
    if not 0 < len(messages) <= _MOST_MESSAGES:
        raise bad("messages", f"messages: got {len(messages)}; {wanted}", "invalid_value")
    listed = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    if not served.tokenizer.chat_template:
        text = "\n".join(message["content"] for message in listed)
        return _checked(served, served.encode(_short(served, text, "messages")), "messages")
    try:
        text = served.tokenizer.apply_chat_template(listed, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError:
        raise bad(
            "messages", "messages: the model's chat template refuses this order of roles", "invalid_value"
        ) from None
    return _checked(served, served.encode(_short(served, text, "messages"), special=False), "messages")


def of_field(served: Served, name: str, value: object, most: int) -> list[list[int]]:
    """Token rows of a field that is a text, token ids, or a list of either. Raises ApiError (400)."""
    if value is None:
        raise bad(name, f"{name}: missing; want a text, token ids, or a list of these", "missing_required_parameter")
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad(name, f"{name}: want a text, token ids, or a list of these", "invalid_type")
    if len(value) > most:
        raise bad(name, f"{name}: got {len(value)} items; want {most} at most", "invalid_value")
    rows = []
    for item in value:
        if isinstance(item, str):
            rows.append(_checked(served, served.encode(_short(served, item, name)), name))
        elif _is_ids(item):
            rows.append(_checked(served, item, name))
        else:
            raise bad(name, f"{name}: want a text, token ids, or a list of these", "invalid_type")
    return rows


def check_context(served: Served, prompt: int, wanted: int, param: str) -> None:
    """Raises ApiError (400) where prompt and answer do not fit the model: nothing is cut off."""
    limit = served.context
    if limit is not None and prompt + wanted > limit:
        raise bad(
            param,
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + wanted} tokens "
            f"({prompt} in the {param}, {wanted} in the completion). Please reduce the length of the {param} or "
            "completion.",
            "context_length_exceeded",
        )


def _short(served: Served, text: str, param: str) -> str:
    """A text that may fit the model: others are not taken apart, which others would wait for."""
    if served.context is not None and len(text) > served.context * _MOST_CHARACTERS:
        told = f"This model's maximum context length is {served.context} tokens. However, the {param} has {len(text)} "
        raise bad(param, f"{told}characters. Please reduce its length.", "context_length_exceeded")
    return text


def _message(message: object, where: str) -> dict[str, str]:
    """What a chat template is told of a message. It may make something of a name; most do not."""
    if not isinstance(message, dict):
        raise bad(where, f"{where}: want an object with role and content", "invalid_type")
    role, name = message.get("role"), message.get("name")
    if role in ("tool", "function"):
        raise _unsupported(f"{where}.role")
    if role not in _ROLES:
        raise bad(f"{where}.role", f"{where}.role: want one of {', '.join(_ROLES)}", "invalid_value")
    refuse_others(message, ("role", "content", "name", *_OUT_OF_BAND), _NO_CALLS, f"{where}.")
    if name is not None and not isinstance(name, str):
        raise bad(f"{where}.name", f"{where}.name: want a text", "invalid_type")
    told = {"role": "system" if role == "developer" else role}
    told["content"] = _content(message.get("content"), f"{where}.content")
    return {**told, "name": name} if name else told


def _content(content: Any, where: str) -> str:  # noqa: ANN401 - as it came
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(where, f"{where}: want a text, or a list of parts of type 'text'", "invalid_type")
    parts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise _unsupported(f"{where}[{at}].type")
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}[{at}].text", f"{where}[{at}].text: want a text", "invalid_type")
        refuse_others(part, ("type", "text", *_OUT_OF_BAND), {}, f"{where}[{at}].")
        parts.append(part["text"])
    return "".join(parts)


def _unsupported(where: str) -> ApiError:
    return bad(where, f"{where}: unsupported here; this model reads and writes text only", "unsupported_parameter")


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _checked(served: Served, ids: list[int], name: str) -> list[int]:
    if not ids:
        raise bad(name, f"{name}: got no tokens; want at least one", "invalid_value")
    vocabulary = served.vocabulary
    if not all(0 <= token < vocabulary for token in ids):
        raise bad(name, f"{name}: a token id is out of range; want 0 to {vocabulary - 1}", "invalid_value")
    return ids
