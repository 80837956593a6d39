"""What a request of each kind asks for: settings and prompts' tokens, checked against the model that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from private_llm_gateway.completion import Completion, SamplingParams
from private_llm_gateway.constrained import Grammar
from private_llm_gateway.errors import ApiError, bad
from private_llm_gateway.fields import Fields, refuse_others, refuse_unsupported
from private_llm_gateway.served import Served

_MOST_LOGPROBS = 20
_COMPLETION_TOKENS = 16
"""Of a completion that does not say how many, as OpenAI defines it."""
_ANY = 1 << 62
_ROLES = ("system", "developer", "user", "assistant")
_MOST_MESSAGES = 4096
_MOST_CHARACTERS = 256
"""Of a token, on an average: more than any text has."""
_OUT_OF_BAND = ("id", "annotations", "cache_control")
"""Of messages and their parts: no part of the text, and no wish."""
_NO_CALLS: dict[str, tuple[object, ...]] = {"tool_calls": ([],), "refusal": ("",), "reasoning_content": ("",)}
"""As answers come back with the next question."""


@dataclass(frozen=True)
class Wanted:
    """A text that is wanted. groups: answers by prompt. logprobs, echo, stream, usage: what is sent of it, and how."""

    served: Served
    chat: bool
    groups: tuple[tuple[Completion, ...], ...]
    stream: bool
    usage: bool
    logprobs: bool
    echo: bool = False

    @property
    def answers(self) -> list[Completion]:
        """All answers in order."""
        return [answer for group in self.groups for answer in group]

    @property
    def counts(self) -> dict[str, int]:
        """Tokens, as `usage` reports them."""
        prompt = sum(len(group[0].prompt) for group in self.groups)
        made = sum(len(answer.tokens) for answer in self.answers)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def find_model(models: Mapping[str, Served], body: Mapping[str, Any], kind: str) -> Served:
    """The model that a body names. Raises ApiError (404, 400) if there is none of that name or kind."""
    name = Fields(body).text("model")
    if name not in models:
        offered = ", ".join(models)
        told = f"The model does not exist here; want one of: {offered}"
        raise ApiError(404, told, param="model", code="model_not_found")
    served = models[name]
    if served.kind != kind:
        does = {
            "decoder": "a decoder model, which writes text (/v1/chat/completions, /v1/completions)",
            "encoder": "an encoder model, which gives vectors (/v1/embeddings)",
        }
        raise bad("model", f"{name!r} is {does[served.kind]}", "model_not_supported")
    return served


def chat(models: Mapping[str, Served], body: Mapping[str, Any], most: int) -> Wanted:
    """A request to /v1/chat/completions. Raises ApiError (400, 404)."""
    served = find_model(models, body, "decoder")
    refuse_unsupported(body, "chat")
    fields = Fields(body)
    prompt = of_messages(served, body.get("messages"))
    told = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, _MOST_LOGPROBS)
    if top and not told:
        raise bad("top_logprobs", "want logprobs true as well")
    room = _ANY if served.context is None else max(1, served.context - len(prompt))
    limit, older = (fields.integer(name, 1, _ANY) for name in ("max_completion_tokens", "max_tokens"))
    if None not in (limit, older) and limit != older:
        raise bad("max_tokens", "got another number than max_completion_tokens; want one of the two")
    limit = limit or older or min(room, 1 << 20)
    check_context(served, len(prompt), limit, "messages")
    params = _sampling_params(fields, served, limit, (top or 0) if told else None)
    return _wanted(served, fields, [prompt], params, most, chat=True, logprobs=told)


def completion(models: Mapping[str, Served], body: Mapping[str, Any], most: int) -> Wanted:
    """A request to /v1/completions. Raises ApiError (400, 404)."""
    served = find_model(models, body, "decoder")
    fields = Fields(body)
    refuse_unsupported(body, "completions", ("best_of",) if body.get("best_of") == body.get("n", 1) else ())
    prompts = of_field(served, "prompt", body.get("prompt"), most)
    echo = fields.flag("echo")
    limit = fields.integer("max_tokens", 0 if echo else 1, _ANY)
    limit = _COMPLETION_TOKENS if limit is None else limit
    check_context(served, max(map(len, prompts)), limit, "prompt")
    told = fields.integer("logprobs", 0, _MOST_LOGPROBS)
    params = _sampling_params(fields, served, limit, told)
    return _wanted(served, fields, prompts, params, most, chat=False, logprobs=told is not None, echo=echo)


def _wanted(
    served: Served, fields: Fields, prompts: list[list[int]], params: SamplingParams, most: int, chat: bool,
    logprobs: bool, echo: bool = False,
) -> Wanted:  # fmt: skip
    n = fields.integer("n", 1, most) or 1
    if n * len(prompts) > most:
        raise bad("n", f"{len(prompts)} prompts with {n} answers each; want {most} answers at most")
    groups = tuple(
        tuple(Completion(number * n + sample, prompt, params, served.texts, served.ends, sample) for sample in range(n))
        for number, prompt in enumerate(prompts)
    )
    stream = fields.flag("stream")
    options = fields.mapping("stream_options")
    if options and not stream:
        raise bad("stream_options", "want stream true as well")
    refuse_others(options, ("include_usage",), {"include_obfuscation": (False,)}, "stream_options.")
    return Wanted(served, chat, groups, stream, Fields(options).flag("include_usage"), logprobs, echo)


def _sampling_params(fields: Fields, served: Served, limit: int, logprobs: int | None) -> SamplingParams:
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1)
    only_token = served.config.reveal == "token"
    default = 0.0 if only_token else 1.0
    params = SamplingParams(
        max_tokens=limit,
        temperature=default if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=fields.integer("seed", -_ANY, _ANY),
        presence=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency=fields.number("frequency_penalty", -2, 2) or 0.0,
        bias=fields.bias(served.vocabulary),
        stop=fields.stops(),
        logprobs=logprobs,
        grammar=_grammar(fields, served),
    )
    if only_token and not (params.plain and params.top_p == 1):
        names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
                 "response_format")  # fmt: skip
        given = next((name for name in names if fields.body.get(name)), "temperature")
        told = (
            "the parties open only the most likely token (reveal='token'), so logits cannot be used; leave it out, or "
        )
        raise bad(given, f"{told}start the gateway with --reveal logits", "unsupported_parameter")
    return params


def _grammar(fields: Fields, served: Served) -> Grammar | None:
    """`response_format`: none for free text."""
    form, place, wanted = fields.mapping("response_format"), "response_format", "want text, json_object or json_schema"
    if form and "type" not in form:
        raise bad(f"{place}.type", f"missing; {wanted}", "missing_required_parameter")
    kind = form.get("type", "text")
    if kind != "json_schema" and form.keys() & {"schema", "json_schema"}:
        raise bad(place, "a schema wants type json_schema, and to be named json_schema", "unsupported_parameter")
    refuse_others(form, ("type", "json_schema"), {}, f"{place}.")
    if kind == "text":
        return None
    if kind == "json_object":
        return served.any_object
    if kind != "json_schema":
        raise bad(f"{place}.type", wanted)
    named, place = form.get("json_schema"), f"{place}.json_schema"
    if not isinstance(named, dict) or "schema" not in named:
        raise bad(place, "want an object with name and schema", "missing_required_parameter")
    refuse_others(named, ("name", "description", "schema", "strict"), {}, f"{place}.")
    return Grammar(named["schema"], served.table)


# -- prompts: tokens of messages, texts and token ids; what does not fit the model is refused ------------------------
def of_messages(served: Served, messages: object) -> list[int]:
    """Tokens of a chat, by the model's template or, without one, of the messages joined by line ends.

    Raises ApiError (400) for messages that are no text, and those that the template refuses.
    """
    wanted = f'want a list of 1 to {_MOST_MESSAGES} messages, as [{{"role": "user", "content": "Hello"}}]'
    if messages is None:
        raise bad("messages", f"missing; {wanted}", "missing_required_parameter")
    if not isinstance(messages, list):
        raise bad("messages", f"got {type(messages).__name__}; {wanted}", "invalid_type")
    if not 0 < len(messages) <= _MOST_MESSAGES:
        raise bad("messages", f"got {len(messages)}; {wanted}")
    listed = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    if not served.tokenizer.chat_template:
        text = "\n".join(message["content"] for message in listed)
        return _checked(served, served.encode(_short(served, text, "messages")), "messages")
    try:
        text = served.tokenizer.apply_chat_template(listed, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError:
        raise bad("messages", "the model's chat template refuses this order of roles") from None
    return _checked(served, served.encode(_short(served, text, "messages"), special=False), "messages")


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


def _message(message: object, where: str) -> dict[str, str]:
    """What a chat template is told of a message. It may make something of a name; most do not."""
    if not isinstance(message, dict):
        raise bad(where, "want an object with role and content", "invalid_type")
    role, name = message.get("role"), message.get("name")
    if role in ("tool", "function"):
        raise _unsupported(f"{where}.role")
    if role not in _ROLES:
        raise bad(f"{where}.role", f"want one of {', '.join(_ROLES)}")
    refuse_others(message, ("role", "content", "name", *_OUT_OF_BAND), _NO_CALLS, f"{where}.")
    if name is not None and not isinstance(name, str):
        raise bad(f"{where}.name", "want a text", "invalid_type")
    told = {"role": "system" if role == "developer" else role}
    told["content"] = _content(message.get("content"), f"{where}.content")
    return {**told, "name": name} if name else told


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
