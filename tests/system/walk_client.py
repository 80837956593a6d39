"""The user in `walk_deploy.py`: a process at the user's place that asks when it is told to, and says how it goes."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent / "walk_deploy.py"
CLIENT_OPTION = "--client"
"""With it the script is the user's process."""


@dataclass(frozen=True)
class Answer:
    """How a request ended. ids: the new tokens that came, all of them or (with an error) those until then. ended: by
    this machine's monotonic clock.
    """

    ids: tuple[int, ...]
    text: str
    error: str | None
    ended: float

    def __str__(self) -> str:
        return repr(self.text) if self.error is None else self.error


class Client:
    """A process that generates; use as a context manager."""

    def __init__(self, settings: Path, prefix: list[str], home: Path) -> None:
        """settings: a JSON file with hosts and timeout_s, read when the first request comes."""
        with settings.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(SCRIPT), CLIENT_OPTION, str(settings)],
                cwd=home, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._ids: list[int] = []
        self._came = threading.Condition()
        self._ended = True
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            told = json.loads(line)
            with self._came:
                if "id" in told:
                    self._ids.append(told["id"])
                else:
                    self._ended = True
                    error = told.get("error")
                    self._answers.put(Answer(tuple(self._ids), told.get("text", ""), error, time.monotonic()))
                self._came.notify_all()

    def begin(self, prompt: str, tokens: int, *, plain: bool = False) -> None:
        """Send a request, which must not be done while another one runs. plain: to the plaintext model, here."""
        with self._came:
            self._ids, self._ended = [], False
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens, "plain": plain}) + "\n")
            self._process.stdin.flush()

    def running(self, count: int, within_s: float) -> bool:
        """Wait until `count` tokens have come. Whether the request still runs then."""
        with self._came:
            self._came.wait_for(lambda: self._ended or len(self._ids) >= count, within_s)
            return not self._ended and len(self._ids) >= count

    @property
    def ended(self) -> bool:
        """Whether no request runs."""
        with self._came:
            return self._ended

    def end(self, within_s: float) -> Answer | None:
        """How it ended; None if it has not."""
        try:
            return self._answers.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None

    def ask(self, prompt: str, tokens: int, within_s: float, *, plain: bool = False) -> Answer | None:
        """Send a request and wait for its end."""
        self.begin(prompt, tokens, plain=plain)
        return self.end(within_s)


def serve(settings: Path) -> None:
    """For each line of stdin, on a new session: a line of JSON for each new token, and one for the end."""
    from private_llm_hf import AutoPrivateModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from private_llm.config import PrivateConfig
    from private_llm.errors import PrivateLLMError
    from private_llm.tls_config import TLSConfig

    for line in sys.stdin:
        values, asked = json.loads(settings.read_text()), json.loads(line)
        tls = TLSConfig("tls/client.pem", "tls/client.key", "tls/ca.pem")
        remote = {"party_mode": "remote", "hosts": tuple(values["hosts"]), "timeout_s": values["timeout_s"]}
        tokenizer = AutoTokenizer.from_pretrained(values["model"])
        inputs = tokenizer(asked["prompt"], return_tensors="pt")
        try:
            if asked["plain"]:
                out = AutoModelForCausalLM.from_pretrained(values["model"]).generate(**inputs, **_how(asked))
            else:
                config = PrivateConfig(**remote, tls=tls)
                with AutoPrivateModelForCausalLM.from_pretrained("client", config) as private:
                    out = private.generate(**inputs, **_how(asked))
            _tell({"text": tokenizer.decode(out[0], skip_special_tokens=True)})
        except PrivateLLMError as error:
            _tell({"error": str(error)})


class _Stream:
    """Tells each new token as it comes."""

    def __init__(self) -> None:
        self._prompt = True

    def put(self, value: Any) -> None:
        """The prompt, and then a token at a time."""
        if not self._prompt:
            _tell({"id": int(value)})
        self._prompt = False

    def end(self) -> None:
        """Nothing: the end is told with the text."""


def _how(asked: dict[str, Any]) -> dict[str, Any]:
    count = asked["tokens"]
    return {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "streamer": _Stream()}


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)
