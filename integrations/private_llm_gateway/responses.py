"""OpenAI's response objects, made of answers."""

import base64
import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from private_llm_gateway.call_formats import CallReader
from private_llm_gateway.completion import CompletionChunk, Likelihood
from private_llm_gateway.decoding import DecodedText
from private_llm_gateway.requests import Wanted
from private_llm_gateway.served import Served
from private_llm_gateway.usage import Usage

_LEAST = -9999.0  # what OpenAI writes for the logarithm of nothing, which JSON cannot say


class Response:
    """The objects of one request, which share a number and a time."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        kind = "chatcmpl" if wanted.chat else "cmpl"
        self._readers: list[CallReader] = []  # of each answer, where there may be calls
        if wanted.tools:
            self._readers = [wanted.tools.reader(wanted.served, each.prompt) for each in wanted.answers]
        self._head = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": wanted.served.name}

    def whole(self, spent: Usage) -> dict[str, Any]:
        """All answers at once."""
        choices = []
        for answer in self.wanted.answers:
            text = self._echoed(answer.prompt) + answer.text if self.wanted.echo else answer.text
            piece = CompletionChunk(answer.index, text, tuple(answer.likelihoods), answer.finish, answer.ahead)
            choices.append(self._choice(piece, "message"))
        made = {**self._head, "object": "chat.completion" if self.wanted.chat else "text_completion"}
        return {**made, "choices": choices, "usage": self._counts(spent), "private_llm": spent.to_dict()}

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        if self.wanted.chat:
            blank = {"role": "assistant", "content": ""}
            rows = [{"index": answer.index, "delta": blank, "logprobs": None, "finish_reason": None}
                    for answer in self.wanted.answers]  # fmt: skip
            return [self._chunk([row], None) for row in rows]
        if not self.wanted.echo or self.wanted.logprobs:  # a prompt with its likelihoods comes when these are known
            return []
        echoed = ((each.index, self._echoed(each.prompt)) for each in self.wanted.answers)
        return [self.chunk(CompletionChunk(*each, (), None), None) for each in echoed]

    def chunk(self, piece: CompletionChunk, spent: Usage | None) -> dict[str, Any]:
        """A part of a stream."""
        if piece.ahead:
            echoed = self._echoed(self.wanted.answers[piece.index].prompt)
            piece = dataclasses.replace(piece, text=echoed + piece.text)
        return self._chunk([self._choice(piece, "delta")], spent)

    def usage(self, spent: Usage) -> dict[str, Any]:
        """The last part of a stream that was asked to count tokens."""
        return {**self._chunk([], spent), "usage": self._counts(spent)}

    def _counts(self, spent: Usage) -> dict[str, Any]:
        return {**self.wanted.counts, "prompt_tokens_details": {"cached_tokens": spent.kept}}

    def _chunk(self, choices: list[dict[str, Any]], spent: Usage | None) -> dict[str, Any]:
        made = {**self._head, "object": "chat.completion.chunk" if self.wanted.chat else "text_completion"}
        made["choices"] = choices
        if self.wanted.usage:
            made["usage"] = None
        return made if spent is None else {**made, "private_llm": spent.to_dict()}

    def _choice(self, piece: CompletionChunk, field: str) -> dict[str, Any]:
        made: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish, "logprobs": None}
        if not self.wanted.chat:
            made["text"] = piece.text
            if self.wanted.logprobs and (piece.likelihoods or piece.ahead or field == "message"):
                prompt = self.wanted.answers[piece.index].prompt
                echoed = self._echoed(prompt) if self.wanted.echo else ""
                made["logprobs"] = _completion_logprobs(self.wanted.served, piece.ahead, piece.likelihoods, echoed)
            return made
        told: dict[str, Any] = {"content": piece.text} if piece.text or piece.likelihoods else {}
        if self._readers:
            reader = self._readers[piece.index]
            told = reader.feed(piece.text, piece.finish)
            if piece.finish == "stop" and reader.calls and self.wanted.tools and not self.wanted.tools.named:
                made["finish_reason"] = "tool_calls"  # as OpenAI says whether the model chose to call something
        if field == "message":
            for call in told.get("tool_calls", ()):
                del call["index"]
            calls = told.get("tool_calls") or (self.wanted.tools and self.wanted.tools.forced)
            told = {"role": "assistant", "content": None if calls else "", "refusal": None, **told}
        made[field] = told
        if self.wanted.logprobs and (piece.likelihoods or field == "message"):
            rows = [_chat_logprob(self.wanted.served, each) for each in piece.likelihoods]
            made["logprobs"] = {"content": rows, "refusal": None}
        return made

    def _echoed(self, prompt: list[int]) -> str:
        """A prompt's text, but for a character that is not whole: that belongs to the answer."""
        return DecodedText(self.wanted.served.texts, prompt).text


def embeddings(served: Served, vectors: Tensor, tokens: int, encoded: bool, spent: Usage) -> dict[str, Any]:
    """Vectors [B, hidden] as lists of numbers, or as base64 of little-endian float32."""
    rows = vectors.float().numpy().astype("<f4")
    data = [
        {"object": "embedding", "index": at,
         "embedding": base64.b64encode(row.tobytes()).decode() if encoded else row.tolist()}
        for at, row in enumerate(rows)
    ]  # fmt: skip
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": served.name, "usage": usage, "private_llm": spent.to_dict()}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _chat_logprob(served: Served, each: Likelihood) -> dict[str, Any]:
    def one(token: int, logprob: float | None) -> dict[str, Any]:
        added = served.texts.bytes_of(token)
        told = {"token": served.texts.name_of(token), "logprob": _finite(logprob or 0.0)}
        return {**told, "bytes": None if added is None else list(added)}

    return {**one(each.token, each.logprob), "top_logprobs": [one(*pair) for pair in each.top]}


def _completion_logprobs(
    served: Served, ahead: Sequence[Likelihood], rows: Sequence[Likelihood], echoed: str
) -> dict[str, Any]:
    """ahead: of the prompt, whose text is `echoed`."""
    every = [*ahead, *rows]
    names = [served.texts.name_of(each.token) for each in every]
    for at, each in enumerate(ahead):
        if each.at == 0 and not echoed.startswith(names[at]):  # tokenizers of words strip what begins a text
            names[at] = names[at].removeprefix(" ")
    top: list[dict[str, float] | None] = []
    for each in every:
        named: dict[str, float] = {}
        for token, logprob in each.top:
            named.setdefault(served.texts.name_of(token), _finite(logprob))
        top.append(None if each.logprob is None else named)
    return {
        "tokens": names,
        "token_logprobs": [None if each.logprob is None else _finite(each.logprob) for each in every],
        "top_logprobs": top,
        "text_offset": [each.at for each in ahead] + [each.at + len(echoed) for each in rows],
    }
