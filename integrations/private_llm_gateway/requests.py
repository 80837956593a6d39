"""What a request of each kind asks for: settings and prompts' tokens, checked against the model that it names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from private_llm_gateway.completion import Completion, SamplingParams
from private_llm_gateway.constrained import Grammar
from private_llm_gateway.errors import ApiError, bad
from private_llm_gateway.fields import Fields, refuse_others, refuse_unsupported
from private_llm_gateway.prompts import check_context, of_field, of_messages
from private_llm_gateway.served import Served
from private_llm_gateway.tools import Tools, read_tools

_MOST_LOGPROBS = 20
_COMPLETION_TOKENS = 16  # of a completion that does not say how many, as OpenAI defines it
_ANY = 1 << 62


@dataclass(frozen=True)
class Wanted:
    """A text that is wanted. groups: answers by prompt. logprobs, echo, stream, usage: what is sent. tools: to call."""

    served: Served
    chat: bool
    groups: tuple[tuple[Completion, ...], ...]
    stream: bool
    usage: bool
    logprobs: bool
    echo: bool = False
    tools: Tools | None = None

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
        told = f"The model does not exist here; want one of: {', '.join(models)}"
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
    tools = read_tools(fields, served)
    prompt = of_messages(served, fields, tools.listed if tools else None)
    told = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, _MOST_LOGPROBS)
    if top and not told:
        raise bad("top_logprobs", "want logprobs true as well")
    limit = _chat_limit(fields, served, len(prompt))
    params = _sampling_params(fields, served, limit, (top or 0) if told else None, tools)
    if tools is None and served.thoughts:  # what is no content has special tokens around it, which are read
        tools = Tools(())
    return _wanted(served, fields, [prompt], params, most, chat=True, logprobs=told, tools=tools)


def _chat_limit(fields: Fields, served: Served, prompt: int) -> int:
    """Tokens that an answer may have. As at OpenAI, `max_completion_tokens` bounds them, and `max_tokens` must fit."""
    bound, older = (fields.integer(name, 1, _ANY) for name in ("max_completion_tokens", "max_tokens"))
    if None not in (bound, older) and bound != older:
        raise bad("max_tokens", "got another number than max_completion_tokens; want one of the two")
    room = _ANY if served.context is None else max(1, served.context - prompt)
    if bound is not None and served.context is not None and bound > served.context:
        raise bad("max_completion_tokens", f"too large: this model supports at most {served.context}")
    limit = min(bound or 1 << 20, room) if older is None or bound is not None else older
    check_context(served, prompt, limit, "messages")
    return limit


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
    logprobs: bool, echo: bool = False, tools: Tools | None = None,
) -> Wanted:  # fmt: skip
    n = fields.integer("n", 1, most) or 1
    if n * len(prompts) > most:
        raise bad("n", f"{len(prompts)} prompts with {n} answers each; want {most} answers at most")
    texts = served.call_texts if tools else served.texts
    groups = tuple(
        tuple(Completion(number * n + sample, prompt, params, texts, served.ends, sample) for sample in range(n))
        for number, prompt in enumerate(prompts)
    )
    stream = fields.flag("stream")
    options = fields.mapping("stream_options")
    if options and not stream:
        raise bad("stream_options", "want stream true as well")
    refuse_others(options, ("include_usage",), {"include_obfuscation": (False,)}, "stream_options.")
    return Wanted(served, chat, groups, stream, Fields(options).flag("include_usage"), logprobs, echo, tools)


def _sampling_params(
    fields: Fields, served: Served, limit: int, logprobs: int | None, tools: Tools | None = None
) -> SamplingParams:
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1)
    only_token = served.config.reveal == "token"
    default = 0.0 if only_token else 1.0
    form = _schema(fields)
    params = SamplingParams(
        max_tokens=limit, temperature=default if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p, seed=fields.integer("seed", -_ANY, _ANY),
        presence=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency=fields.number("frequency_penalty", -2, 2) or 0.0,
        bias=fields.bias(served.vocabulary), stop=fields.stops(), logprobs=logprobs,
        grammar=tools.grammar(served, form) if tools else Grammar(form[0], served.table) if form else None,
    )  # fmt: skip
    if only_token and not (params.plain and params.top_p == 1):
        names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
                 "response_format", "tools")  # fmt: skip
        given = next((name for name in names if fields.body.get(name)), "temperature")
        told = "the parties open only the most likely token (reveal='token'), so logits cannot be used; leave it out, "
        raise bad(given, f"{told}or start the gateway with --reveal logits", "unsupported_parameter")
    return params


def _schema(fields: Fields) -> tuple[object, ...]:
    """The schema of `response_format`, if it has one."""
    form, place, wanted = fields.mapping("response_format"), "response_format", "want text, json_object or json_schema"
    if form and "type" not in form:
        raise bad(f"{place}.type", f"missing; {wanted}", "missing_required_parameter")
    kind = form.get("type", "text")
    if kind != "json_schema" and form.keys() & {"schema", "json_schema"}:
        raise bad(place, "a schema wants type json_schema, and to be named json_schema", "unsupported_parameter")
    refuse_others(form, ("type", "json_schema"), {}, f"{place}.")
    if kind == "text":
        return ()
    if kind == "json_object":
        return ({"type": "object"},)
    if kind != "json_schema":
        raise bad(f"{place}.type", wanted)
    named, place = form.get("json_schema"), f"{place}.json_schema"
    if not isinstance(named, dict) or "schema" not in named:
        raise bad(place, "want an object with name and schema", "missing_required_parameter")
    refuse_others(named, ("name", "description", "schema", "strict"), {}, f"{place}.")
    return (named["schema"],)
