"""The requests of `soak_service.py`: each kind asks for one thing, and says what became of it.

answered   as it must be: texts, log-probabilities and vectors are the plaintext model's
refused    with a status and a reason that the API foresees
left       given up by us, on purpose
failed     anything else
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import openai
import torch
from private_llm_gateway.guard import HEAD_S
from private_llm_hf import AutoPrivateModelForCausalLM
from private_llm_hf.wire.commands import OPENED, Call, Forward, Tokens
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import PartiesBusy
from private_llm.net.admission import HANDSHAKE_S

WORDS, VECTORS = "words", "vectors"
"""Names of the two models."""
ERROR = 5e-3
"""Of log-probabilities and of vectors' elements."""
_SLACK_S = 15.0
"""What a busy machine may add to a limit in seconds."""


@dataclass(frozen=True)
class Text:
    """A prompt, what the plaintext model adds to it (after 1, 2, .. tokens), and with which log-probabilities."""

    prompt: str
    ids: list[int]
    tokens: list[int]
    added: list[str]
    logprobs: list[float]
    vector: Tensor


@dataclass(frozen=True)
class Around:
    """What requests need. sessions: an open model of each user, and `configs` to open others; hosts: of the parties."""

    port: int
    token: str
    body_s: float
    texts: Sequence[Text]
    source: str
    vocabulary: int
    configs: Mapping[str, PrivateConfig]
    sessions: Mapping[str, Any]
    hosts: Sequence[tuple[str, int]]
    client: openai.OpenAI
    web: httpx.Client

    @property
    def head(self) -> str:
        """Lines of a request's head that every request has."""
        return f"Host: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {self.token}\r\n"


@dataclass(frozen=True)
class Outcome:
    """What became of a request."""

    what: str
    why: str = ""


ANSWERED, LEFT = Outcome("answered"), Outcome("left")


def _failed(why: str) -> Outcome:
    return Outcome("failed", why[:300])


def _same(got: object, want: object) -> Outcome:
    return ANSWERED if got == want else _failed(f"got {got!r}; want {want!r}")


# -- through the gateway --------------------------------------------------------------------------------------
def _asked(around: Around, random: Random) -> tuple[Text, int, dict[str, Any]]:
    """A text, how much of it, and what a chat that wants it says."""
    text = random.choice(around.texts)
    count = random.randint(1, len(text.tokens))
    messages = [{"role": "user", "content": text.prompt}]
    return text, count, {"model": WORDS, "messages": messages, "max_tokens": count, "temperature": 0}


def chat(around: Around, random: Random) -> Outcome:
    """A stream by OpenAI's client."""
    text, count, body = _asked(around, random)
    parts = [chunk.choices[0] for chunk in around.client.chat.completions.create(**body, stream=True) if chunk.choices]
    got = "".join(part.delta.content or "" for part in parts)
    return _same((got, parts[-1].finish_reason), (text.added[count - 1], "length"))


def completion(around: Around, random: Random) -> Outcome:
    """Two answers at once, with log-probabilities."""
    text, count, _ = _asked(around, random)
    prompt: Any = random.choice((text.prompt, text.ids))
    made = around.client.completions.create(
        model=WORDS, prompt=prompt, max_tokens=count, temperature=0, n=2, logprobs=2
    )
    for choice in made.choices:
        found = choice.logprobs.token_logprobs if choice.logprobs else None
        if choice.text != text.added[count - 1] or found is None:
            return _same(choice.text, text.added[count - 1])
        worst = max(abs((a or 0.0) - b) for a, b in zip(found, text.logprobs[:count], strict=True))
        if worst > ERROR:
            return _failed(f"log-probabilities differ by {worst:g}")
    return _same(len(made.choices), 2)


def embeddings(around: Around, random: Random) -> Outcome:
    """Vectors of one to three texts of any lengths."""
    texts = random.sample(list(around.texts), random.randint(1, 3))
    made = around.client.embeddings.create(model=VECTORS, input=[text.prompt for text in texts])
    for text, found in zip(texts, made.data, strict=True):
        worst = float((torch.tensor(found.embedding) - text.vector).abs().max())
        if worst > ERROR:
            return _failed(f"vectors differ by {worst:g}")
    return ANSWERED


def facts(around: Around, random: Random) -> Outcome:
    """What needs no party."""
    path = random.choice(("/health", "/v1/models", "/metrics", "/v1/private/info", "/"))
    return _same(around.web.get(path).status_code, 200)


def leave(around: Around, random: Random) -> Outcome:
    """A client that closes its stream after a few lines."""
    _, _, body = _asked(around, random)
    with around.web.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            return _status(response.status_code, response.read())
        for _, at in zip(response.iter_lines(), range(random.randint(1, 6)), strict=False):
            del at
    return LEFT


def vanish(around: Around, random: Random) -> Outcome:
    """A client whose connection is reset while it waits."""
    _, _, body = _asked(around, random)
    with _line(around) as line:
        line.sendall(_request(around, {**body, "stream": random.random() < 0.5}))
        time.sleep(random.random() / 5)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return LEFT


def slow(around: Around, random: Random) -> Outcome:
    """A client that reads a few bytes at a time."""
    text, count, body = _asked(around, random)
    got = bytearray()
    with _line(around) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        line.sendall(_request(around, {**body, "stream": True}))
        while piece := line.recv(64):
            got += piece
            time.sleep(0.01)
    head, _, rest = bytes(got).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status != 200:
        return _status(status, rest)
    events = [line.removeprefix("data: ") for line in rest.decode().splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    if any("error" in chunk for chunk in chunks) or events[-1:] != ["[DONE]"]:
        return _failed(f"the stream ended with {events[-1:]}")
    return _same("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks), text.added[count - 1])


def half_open(around: Around, random: Random) -> Outcome:
    """A connection that says nothing, half a head or half a body: the gateway ends it in its time."""
    whole = _request(around, _asked(around, random)[2])
    body = whole.index(b"\r\n\r\n") + 4
    begun = random.choice((0, random.randint(1, body - 1), random.randint(body, len(whole) - 1)))
    until = time.monotonic() + max(HEAD_S, around.body_s) + _SLACK_S
    with _line(around) as line:
        line.sendall(whole[:begun])
        return _ended(line, until, b"HTTP/1.1 408")


def wrong(around: Around, random: Random) -> Outcome:
    """Requests that no model can answer."""
    _, _, body = _asked(around, random)
    path, mistake, status = random.choice(
        (
            ("/v1/chat/completions", {**body, "model": "nobody"}, 404),
            ("/v1/chat/completions", {**body, "model": VECTORS}, 400),
            ("/v1/chat/completions", {**body, "max_tokens": 100_000}, 400),
            ("/v1/chat/completions", {**body, "messages": []}, 400),
            ("/v1/chat/completions", {**body, "temperature": "hot"}, 400),
            ("/v1/chat/completions", {**body, "tools": [{}]}, 400),
            ("/v1/completions", {"model": WORDS, "prompt": [1 << 40]}, 400),
            ("/v1/embeddings", {"model": VECTORS, "input": []}, 400),
            ("/v1/nothing", {}, 404),
        )
    )
    found = around.web.post(path, json=mistake)
    if found.status_code != status:
        return _failed(f"{mistake}: got {found.status_code} {found.text}; want {status}")
    return _status(found.status_code, found.content)


def stranger(around: Around, random: Random) -> Outcome:
    """Somebody without the token."""
    found = around.web.post("/v1/completions", json={}, headers={"Authorization": f"Bearer {random.random()}"})
    return _status(found.status_code, found.content) if found.status_code == 401 else _failed(found.text)


def _status(status: int, raw: bytes) -> Outcome:
    """A refusal that gives its reason in the envelope."""
    told = json.loads(raw)["error"]
    if status in (400, 401, 404, 429) and told["message"] and set(told) == {"message", "type", "param", "code"}:
        return Outcome("refused", f"{status} {told['code']}")
    return _failed(f"{status}: {told}")


def _line(around: Around) -> socket.socket:
    return socket.create_connection(("127.0.0.1", around.port), timeout=120.0)


def _request(around: Around, body: Mapping[str, Any]) -> bytes:
    """A whole request behind whose answer the connection ends."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\n{around.head}Content-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def _ended(line: socket.socket, until: float, *words: bytes) -> Outcome:
    """Wait until the other end closes the connection, without a word or with one of these."""
    got = bytearray()
    try:
        while True:
            line.settimeout(max(0.01, until - time.monotonic()))
            piece = line.recv(4096)
            if not piece:
                break
            got += piece
    except TimeoutError:
        return _failed(f"the connection is still open after its time; got {bytes(got)!r}")
    except OSError:
        pass  # reset
    if got and not any(bytes(got).startswith(word) for word in words):
        return _failed(f"got {bytes(got)!r}")
    return Outcome("refused", "connection ended" if not got else "408")


# -- past the gateway -----------------------------------------------------------------------------------------
def session(around: Around, random: Random) -> Outcome:
    """A user who opens a session with the parties, generates, and leaves."""
    user, text = random.choice(list(around.sessions)), random.choice(around.texts)
    try:
        model = _opened(around, random, user)
    except PartiesBusy as error:
        return Outcome("refused", f"busy: {str(error)[:60]}")
    with model:
        ids = torch.tensor([text.ids])
        made = model.generate(ids, max_new_tokens=len(text.tokens), do_sample=False)
    return _same(made[0, ids.shape[1] :].tolist(), text.tokens)


def deserter(around: Around, random: Random) -> Outcome:
    """One whose connections end in the middle of a call, with a cache that is still held, or before the inputs came."""
    user, text = random.choice(list(around.sessions)), random.choice(around.texts)
    try:
        model = _opened(around, random, user)
    except PartiesBusy as error:
        return Outcome("refused", f"busy: {str(error)[:60]}")
    with model:
        if random.random() < 0.5:
            model(input_ids=torch.tensor([text.ids]), use_cache=True)
        tokens = Tokens("input_ids", (1, len(text.ids)), around.vocabulary)
        model.parties.tell(Forward(Call({"use_cache": True}, (tokens,), 1, None, None, OPENED), ()))
        model.parties.transport.close()
    return LEFT


def caller(around: Around, random: Random) -> Outcome:
    """Somebody at a party's port who says nothing, noise, or half of a TLS greeting: the party hangs up in its time."""
    until = time.monotonic() + HANDSHAKE_S + _SLACK_S
    noise = random.choice((b"", random.randbytes(random.randint(1, 200)), _HELLO[: random.randint(1, len(_HELLO) - 1)]))
    with socket.create_connection(random.choice(list(around.hosts))) as line:
        line.sendall(noise)
        return _ended(line, until, b"\x15")  # an alert of TLS


def _opened(around: Around, random: Random, user: str) -> Any:
    if random.random() < 0.5:
        return around.sessions[user].open_session()
    return AutoPrivateModelForCausalLM.from_pretrained(around.source, around.configs[user])


def _hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="party0").do_handshake()
    return outgoing.read()


_HELLO = _hello()
"""What a client of TLS says first."""

KINDS: Mapping[Callable[[Around, Random], Outcome], int] = {
    chat: 24, completion: 14, embeddings: 12, facts: 6, leave: 8, vanish: 6, slow: 5, half_open: 2, wrong: 10,
    stranger: 3, session: 6, deserter: 3, caller: 2,
}  # fmt: skip
"""Kinds of requests, and how often each comes up."""
LONG = (half_open, caller)
"""Those that take as long as the other end lets them: ten seconds and more."""


def run(kind: Callable[[Around, Random], Outcome], around: Around, random: Random) -> Outcome:
    """One request; errors become outcomes."""
    try:
        return kind(around, random)
    except openai.APIStatusError as error:
        return _status(error.status_code, error.response.content)
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error}")
