"""Functions that a chat offers: what the model is told of them, and the calls that the official client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, cast

import httpx
import jsonschema
import openai
import pytest
import torch
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from private_llm_gateway import engine, requests
from private_llm_gateway.call_formats import TemplateReader, format_of
from private_llm_gateway.completion import Finish, choose
from private_llm_gateway.constrained import Grammar
from private_llm_gateway.decoding import DecodedText, TokenTexts
from private_llm_gateway.errors import ApiError
from private_llm_gateway.fields import Fields
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.prompts import of_messages
from private_llm_gateway.responses import Response
from private_llm_gateway.served import Served
from private_llm_gateway.usage import Usage
from private_llm_hf import patch
from tokenizers import AddedToken
from transformers import OPTConfig, OPTForCausalLM

from tests.gateway.small_gateway import PLAIN, TOKEN, Gateway, serving, tokenizer
from tests.gateway.test_decoding import pieces
from tests.gateway.test_json_mode import HEAVY, nested
from tests.gateway.test_types import checked
from tests.hf.service.conftest import eventually

ROUND = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}%s
{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}
{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}<assistant>"""
QWEN, LLAMA, MISTRAL = (ROUND.replace("%s", sign) for sign in ("<tool_call>", "ipython", "[TOOL_CALLS]"))
DEEP = '{"a": ' + "[" * 900 + "]" * 900 + "}"
WEATHER: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "when": {"$ref": "#/$defs/day"}},
    "required": ["city", "when"], "additionalProperties": False,
    "$defs": {"day": {"enum": ["today", "tomorrow"]}},
}  # fmt: skip
CITY: dict[str, Any] = {
    "type": "object", "properties": {"in": {"$ref": "#"}}, "additionalProperties": False,
}  # fmt: skip


def tool(name: str, schema: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    told = {"name": name, "description": f"Tells {name}.", **more}
    return {"type": "function", "function": told if schema is None else {**told, "parameters": schema}}


TOOLS = [tool("weather", WEATHER), tool("city", CITY)]
CHAT: list[Any] = [{"role": "user", "content": "Rain?"}]
ASKED: dict[str, Any] = {"model": "caller", "messages": CHAT, "max_tokens": 200, "tools": TOOLS}
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def caller(name: str, template: str, special: Sequence[str] = ()) -> Served:
    """A small random model with a chat template that knows tools."""
    torch.manual_seed(5)
    config = OPTConfig(
        vocab_size=4100, hidden_size=16, word_embed_proj_dim=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0, init_std=0.3,
    )  # fmt: skip
    coder = copy(tokenizer())
    if special:
        coder = type(coder).from_pretrained(coder.name_or_path)
        coder.add_tokens([AddedToken(each, special=True) for each in special], special_tokens=True)
    coder.chat_template = template
    return Served(name, SessionPool(patch(OPTForCausalLM(config).eval(), PLAIN), 1), coder)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving(caller("caller", QWEN), caller("mistral", MISTRAL, ["[TOOL_CALLS]"]), caller("llama", LLAMA)) as made:
        yield made


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with gateway.client() as made:
        yield made


def says(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """The model writes these texts, a few letters at a time."""

    def write(served: Served, groups: Any, tell: Any, *_: Any) -> Usage:
        for answer, text in zip([each for group in groups for each in group], texts, strict=True):
            ids = served.tokenizer(text, add_special_tokens=False)["input_ids"]
            for token in [*ids, 2][: answer.left]:
                answer.take(token)
                if (piece := answer.new()) is not None:
                    tell(piece, Usage())
        return Usage()

    monkeypatch.setattr(engine, "write", write)


def both(gateway: Gateway, **asked: Any) -> list[Any]:
    """The choices of an answer, which its stream has as well, all of the official client's types."""
    with gateway.client() as client:
        whole = client.chat.completions.with_raw_response.create(**asked)
        found: Any = checked(ChatCompletion, json.loads(whole.text))
        with client.chat.completions.stream(**asked) as stream:
            chunks = [event.chunk for event in stream if event.type == "chunk"]
            streamed = stream.get_final_completion()
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    for one, other in zip(found.choices, streamed.choices, strict=True):
        assert (one.finish_reason, one.message.content or "") == (other.finish_reason, other.message.content or "")
        calls = [
            [(c.function.name, c.function.arguments) for c in each.message.tool_calls or ()] for each in (one, other)
        ]
        assert calls[0] == calls[1]
    return list(found.choices)


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


ONE, TWO = (
    '{"name": "weather", "arguments": {"city": "Ro}m\\"e", "when": {}}}',
    '{"arguments": {"a": [1]}, "name": "city"}',
)
BOTH = [("weather", {"city": 'Ro}m"e', "when": {}}), ("city", {"a": [1]})]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("caller", f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>\n"),
        ("mistral", f"Let me see.[TOOL_CALLS] [{ONE}, {TWO}]"),
        ("llama", f" {ONE.replace('arguments', 'parameters')}; {TWO.replace('arguments', 'parameters')}"),
    ],
)
def test_calls_are_found(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, model: str, text: str) -> None:
    says(monkeypatch, text)
    (choice,) = both(gateway, **{**ASKED, "model": model})
    assert (choice.finish_reason, calls_of(choice)) == ("tool_calls", BOTH)
    assert choice.message.content == (None if model == "llama" else "Let me see.")
    assert len({call.id for call in choice.message.tool_calls}) == 2
    (choice,) = both(gateway, **{**ASKED, "model": model}, parallel_tool_calls=False)
    assert calls_of(choice) == BOTH[:1]


@pytest.mark.parametrize(
    "text",
    ["Hello. ", "<tool_call>\n{\n", "<tool_call>hello</tool_call> ", "a <tool", '<tool_call>{"a": "}"} and', "", "\n",
     '<tool_call>{"name": 3, "arguments": {}}'],
)  # fmt: skip
def test_what_is_no_call_is_text(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    says(monkeypatch, text)
    (choice,) = both(gateway, **ASKED)
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (text, "stop", None)


@pytest.mark.parametrize("model", ["caller", "mistral", "llama"])
@pytest.mark.parametrize("choice", ["required", "city"])
def test_forced_calls_are_of_their_schema(gateway: Gateway, model: str, choice: str) -> None:
    """Written at random by a model that would rather write anything else."""
    forced: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    asked = {**ASKED, "model": model, "temperature": 1.5, "seed": 3, "tool_choice": forced, "max_tokens": 90}
    wanted = requests.chat(gateway.models, asked, 4)
    (answer,) = wanted.answers
    while answer.finish is None:
        answer.take(choose(answer, torch.zeros(gateway.models[model].vocabulary)))
    (made,) = ChatCompletion.model_validate(Response(wanted).whole(Usage())).choices
    assert (answer.finish, made.message.content) == ("stop", None)
    assert made.finish_reason == ("tool_calls" if choice == "required" else "stop")
    called = calls_of(made)
    assert {name for name, _ in called} <= {"city", "weather"} if choice == "required" else len(called) == 1
    for name, arguments in called:
        jsonschema.validate(arguments, {"weather": WEATHER, "city": CITY}[name])


def test_a_forced_call_of_the_model(gateway: Gateway) -> None:
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    schema = {"$id": "https://a/b", "$ref": "#/$defs/c", "$defs": {"c": {"const": {}}}}
    (made,) = both(gateway, **{**ASKED, "seed": 1, "max_tokens": 40, "tools": [tool("a", schema)], **one})
    assert calls_of(made)[0] == ("a", {})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_forced_call_that_does_not_fit_is_cut_off_and_says_so(gateway: Gateway, choice: Any) -> None:
    """As at OpenAI: what there is of its arguments, and length."""
    asked = {**ASKED, "max_tokens": 50, "tools": TOOLS[:1], "tool_choice": choice, "temperature": 0}
    with gateway.client() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        parts = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole.finish_reason == parts[-1].finish_reason == "length"
    arguments = "".join(call.function.arguments for part in parts for call in part.delta.tool_calls or ())
    assert [call.function.arguments for call in whole.message.tool_calls] == [arguments]
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(arguments)


def cut_off(gateway: Gateway, **asked: Any) -> tuple[str | None, str]:
    """Content of an answer that ends with its length, without a call, and that of its stream."""
    with gateway.client() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        parts = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole.finish_reason == parts[-1].finish_reason == "length"
    assert not whole.message.tool_calls
    assert not any(part.delta.tool_calls for part in parts)
    return whole.message.content, "".join(part.delta.content or "" for part in parts)


@pytest.mark.parametrize("model", ["caller", "mistral", "llama"])
@pytest.mark.parametrize("most", [1, 3])
def test_a_forced_call_that_has_no_arguments_yet_is_not_told(gateway: Gateway, model: str, most: int) -> None:
    asked = {**ASKED, "model": model, "max_tokens": most, "tools": TOOLS[:1], "tool_choice": "required"}
    assert cut_off(gateway, **asked) == (None, "")


@pytest.mark.parametrize(
    ("model", "text", "content"),
    [
        ("caller", 'See.\n<tool_call>\n{"name": "weat', "See."),
        ("caller", "See.\n<tool_call>", "See."),
        ("caller", "See <tool", "See <tool"),
        ("mistral", '[TOOL_CALLS] [{"name"', ""),
        ("llama", '{"name": "weat', '{"name": "weat'),  # no mark: it may be an answer in JSON
    ],
)
def test_a_chosen_call_that_is_cut_off_after_its_mark_is_not_told(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, model: str, text: str, content: str
) -> None:
    ids = gateway.models[model].tokenizer(text, add_special_tokens=False)["input_ids"]
    says(monkeypatch, text)
    assert cut_off(gateway, **{**ASKED, "model": model, "max_tokens": len(ids)}) == (content, content)


def fits(served: Served, grammar: Grammar, text: str) -> bool:
    written = grammar.written()
    while text:  # by the longest tokens that fit
        allowed = written.allowed(served.vocabulary).nonzero()[:, 0].tolist()
        names = {served.call_texts.name_of(token): token for token in allowed}
        name = max((name for name in names if text.startswith(name)), key=len, default=None)
        if name is None:
            return False
        written.take(names[name])
        text = text[len(name) :]
    return True


@pytest.mark.parametrize("model", ["caller", "mistral", "llama"])
def test_strict_functions_are_held_to_their_schema(gateway: Gateway, model: str) -> None:
    """Text may come before a call of a strict function; its arguments are of its schema. Others may have any."""
    served = gateway.models[model]
    strict = [tool("weather", WEATHER, strict=True), TOOLS[1]]
    both_ = {"response_format": {"type": "json_object"}}
    for form in ({}, both_)[: 1 if model == "llama" else 2]:
        wanted = requests.chat(gateway.models, {**ASKED, "model": model, "tools": strict, **form}, 4)
        grammar = wanted.answers[0].params.grammar
        assert grammar is not None
        begins = {"caller": "<tool_call>\n", "mistral": "[TOOL_CALLS] [", "llama": ""}[model]
        named = "parameters" if model == "llama" else "arguments"

        head = f'{begins}{{"name": "weather", "{named}": {{"city": "Rome", "when": '
        assert fits(served, grammar, head + '"today"}}')
        assert not fits(served, grammar, head + '"never"}}')
        assert fits(served, grammar, f'{begins}{{"name": "city", "{named}": {{"any": [1]}}}}')
        assert not fits(served, grammar, begins + '{"name": "another')
        assert fits(served, grammar, "Let me see") == (not form)
        assert fits(served, grammar, '{"a": 1}') == (model != "llama")


def test_what_the_template_is_told(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls as objects, results with their ids, functions without `strict`; an answer goes back as it came."""
    says(monkeypatch, f"<tool_call>{ONE}</tool_call>")
    with gateway.client() as client:
        made = client.chat.completions.create(**ASKED).choices[0].message
        served, told = gateway.models["caller"], []
        monkeypatch.setattr(Served, "encode", lambda self, text, special=True: [told.append(text) or 5])
        assert made.tool_calls is not None
        back: list[Any] = [
            *CHAT,
            made.model_dump(),
            {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "no", "name": "w"},
        ]
        says(monkeypatch, "No.")
        client.chat.completions.create(
            **{**ASKED, "messages": back, "tools": [tool("a", {"type": "object"}, strict=False)]}
        )
        client.chat.completions.create(**{**ASKED, "messages": back}, tool_choice="none")
    assert served.knows_tools
    call = f'{made.tool_calls[0].id}weather{{"city": "Ro}}m\\"e", "when": {{}}}}'
    assert call in told[0]
    assert f"<tool>no={made.tool_calls[0].id}" in told[0]
    assert '"name": "a"' in told[0]
    assert "strict" not in told[0]
    assert '"description"' not in told[1]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', DEEP])
def test_arguments_that_no_template_can_write_go_back_as_text(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    encode = Served.encode
    monkeypatch.setattr(Served, "encode", lambda *given, **more: encode(*given, **more)[:9])
    call = {"id": "c", "type": "function", "function": {"name": "city", "arguments": arguments}}
    chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {**ASKED, "messages": chat, "max_tokens": 1, "tool_choice": "none"}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=20)
    assert answer.status_code == 200, answer.text


WRONG: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "invalid_value": [
        ("tool_choice", {"tool_choice": "another"}), ("tool_choice", {"tools": [], "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "another"}}}),
        ("tools", {"tools": [tool("a"), tool("a")]}), ("tools", {"tools": [tool(f"a{at}") for at in range(129)]}),
        ("tools[0].function.name", {"tools": [tool("a b")]}), ("tools", {"tools": [tool("a", json.loads(DEEP))]}),
    ],
    "invalid_type": [
        ("tools", {"tools": "a"}), ("tools[0].function.parameters", {"tools": [tool("a", parameters=[])]}),
        ("parallel_tool_calls", {"parallel_tool_calls": "yes"}),
        ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}),
    ],
    "missing_required_parameter": [
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "a"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ],
    "unsupported_parameter": [
        ("tools[0]", {"tools": [{"type": "custom", "custom": {"name": "a"}}]}), ("functions", {"functions": [{}]}),
        ("messages[0].role", {"messages": [{"role": "function", "content": "a", "name": "a"}]}),
        ("tools[0].function.more", {"tools": [tool("a", more=1)]}),
    ],
    "unsupported_schema": [
        ("response_format", {"model": "llama", "response_format": {"type": "json_object"}}),
        ("tools[1].function.parameters", {"tool_choice": "required", "tools": [tool("a"), tool("b", {"allOf": []})]}),
        ("tools", {"tool_choice": "required", "tools": [tool("a", {"not": {}})]}),
        *(("tools[0].function.parameters", {"tools": [tool("a", {"type": "object", **held}, strict=True)]})
          for held in ({"$defs": "b"}, {"$defs": [["a", "b"]]}, {"definitions": {"b": [1, 2]}})),
        ("tools", {"tool_choice": "required", "tools": [tool("a", {"properties": {"a": {"$ref": "#/$defs/b"}}})]}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "param", "more"), [(code, *case) for code, cases in WRONG.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_wrong_is_named(client: OpenAI, code: str, param: str, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/chat/completions", body={**ASKED, **more}, cast_to=object)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.sampled(6)) for name in HEAVY])
def test_heavy_schemas_are_written_or_refused(gateway: Gateway, name: str) -> None:
    """With the bounds of `response_format`, also where several functions add up."""
    body = {
        **ASKED,
        "tool_choice": "required",
        "max_tokens": 3,
        "tools": [tool("a", HEAVY[name]), tool("b", nested(99, {}))],
    }
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=20)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    ("template", "told"), [("{{ messages }}", "knows no tools"), ("{{ tools }}<function=", "how this model writes")]
)
def test_templates_without_a_form_of_calls(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch, template: str, told: str
) -> None:
    monkeypatch.setattr(Served, "chat_template", property(lambda _: template))
    monkeypatch.setattr(Served, "call_format", property(lambda _: None))
    with pytest.raises(openai.BadRequestError, match=told) as refused:
        client.chat.completions.create(**ASKED)
    assert (refused.value.param, format_of(template)) == ("tools", None)


def test_tokenizers_that_read_calls_themselves() -> None:
    """transformers' `response_template`; what it cannot read is text."""
    coder = copy(tokenizer())
    coder.response_template = {
        "start_anchor": "<assistant>", "fields": {
            "content": {}, "tool_calls": {"open": "[call]", "close": "[end]", "content": "json", "repeats": True,
                                          "transform": {"type": "function", "function": "{content}"}}},
    }  # fmt: skip
    for text, content, calls, finish in (
        (f"See. [call]{ONE}[end][call]{TWO}[end]", "See. ", BOTH, "stop"),
        (f"See. [call]{ONE[:-3]}[end] so", f"See. [call]{ONE[:-3]}[end] so", [], "length"),
        (f"See. [call]{ONE[:-3]}", "See. ", [], "length"),
        (f"See. [call]{ONE[:-3]}", f"See. [call]{ONE[:-3]}", [], "stop"),
    ):  # fmt: skip
        reader, said, called = TemplateReader(coder, "<assistant>", [], 9), "", []
        for at, letter in enumerate(text):
            told = reader.feed(letter, cast(Finish, finish) if at + 1 == len(text) else None)
            said += told.get("content", "")
            made = [call["function"] for call in told.get("tool_calls", ())]
            called += [(each["name"], json.loads(each["arguments"])) for each in made]
        assert (said, called) == (content, calls)


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_who_leaves_in_the_middle_of_a_call_frees_its_session(gateway: Gateway, path: str) -> None:
    served, long = gateway.models["caller"], tool("long", {"const": {"a": "the river and " * 40}})
    body: dict[str, Any] = {"model": "caller", "tool_choice": "required", "stream": True}
    if path == "responses":
        body |= {"input": "Rain?", "tools": [{"type": "function", **long["function"]}]}
    else:
        body |= {"messages": CHAT, "tools": [long]}
    with httpx.stream("POST", f"{gateway.url}/v1/{path}", json=body, headers=HEADERS, timeout=60) as answer:
        assert next(line for line in answer.iter_lines() if '"arguments":"{' in line or '"delta":"{' in line)
        assert served.pool.in_use == 1
    assert eventually(lambda: served.pool.in_use == 0)


def test_answers_go_back_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model thought goes to its template; an answer whose call was cut off before it began says nothing."""
    served = caller("thinker", QWEN.replace("{{ m.content }}", "{{ m.thinking }}{{ m.content }}"))
    served.tokenizer.response_template = {
        "start_anchor": "<assistant>", "fields": {"content": {}, "thinking": {"open": "<think>", "close": "</think>"}}
    }  # fmt: skip
    asked: dict[str, Any] = {**ASKED, "model": "thinker"}
    with serving(served) as gateway, gateway.client() as client:
        cut = client.chat.completions.create(**{**asked, "max_tokens": 1}, tool_choice="required").choices[0].message
        says(monkeypatch, "<think>Rain, hm.</think>Yes.")
        thought = client.chat.completions.create(**asked).choices[0].message
        del asked["tools"]
        alone = client.chat.completions.create(**asked).choices[0].message
    assert (cut.content, thought.content, thought.model_extra) == (None, "Yes.", {"thinking": "Rain, hm."})
    assert (alone.content, alone.model_extra, alone.tool_calls) == ("Yes.", {"thinking": "Rain, hm."}, None)
    for said, wanted in ((cut, "<assistant>"), (thought, "<assistant>Rain, hm.Yes.")):
        prompt = of_messages(served, Fields({"messages": [*CHAT, said.model_dump()]}))
        assert wanted in served.tokenizer.decode(prompt)
    for wrong in ({"role": "user", "content": "a", "thinking": "b"}, {"role": "assistant", "thinking": 3}):
        with pytest.raises(ApiError, match="thinking: "):
            of_messages(served, Fields({"messages": [wrong]}))


def test_marks_that_are_special_tokens() -> None:
    """They belong to the text that is read, also where a tokenizer joins words itself."""
    made = pieces()
    made.add_tokens([AddedToken("[TOOL_CALLS]", special=True)], special_tokens=True)
    mark = made.convert_tokens_to_ids("[TOOL_CALLS]")
    assert DecodedText(TokenTexts(made), [1, mark, 2]).text == "the city"
    assert DecodedText(TokenTexts(made, frozenset({mark})), [1, mark, 2]).text == "the[TOOL_CALLS]city"
