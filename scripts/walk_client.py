"""The user in `walk_deploy.py`: a process at the user's place that asks when it is told to, and says how it went."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "walk_deploy.py"
CLIENT_OPTION = "--client"
"""With it the script is the user's process."""


@dataclass(frozen=True)
class Answer:
    """How a request ended: with a text, or with an error. ended: by this machine's monotonic clock."""

    text: str | None
    error: str | None
    ended: float

    def __str__(self) -> str:
        return repr(self.text) if self.error is None else self.error


class Client:
    """A process that generates; use as a context manager."""

    def __init__(
        self, folder: Path, prefix: list[str], home: Path, hosts: list[str], tokens: int, timeout_s: float
    ) -> None:
        settings = folder / "client.json"
        settings.write_text(json.dumps({"hosts": hosts, "tokens": tokens, "timeout_s": timeout_s}))
        with (folder / "client.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(SCRIPT), CLIENT_OPTION, str(settings)],
                cwd=home, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            told = json.loads(line)
            self._answers.put(Answer(told.get("text"), told.get("error"), time.monotonic()))

    def begin(self, prompt: str) -> None:
        """Send a request."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(prompt) + "\n")
            self._process.stdin.flush()

    def end(self, within_s: float) -> Answer | None:
        """How it ended; None if it has not."""
        try:
            return self._answers.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None

    def ask(self, prompt: str, within_s: float) -> Answer | None:
        """Send a request and wait for its end."""
        self.begin(prompt)
        return self.end(within_s)


def serve(settings: Path) -> None:
    """Answer each line of stdin, on a new session, with a line of JSON."""
    from private_llm_hf import AutoPrivateModelForCausalLM
    from transformers import AutoTokenizer

    from private_llm.config import PrivateConfig, TLSConfig
    from private_llm.errors import PrivateLLMError

    values = json.loads(settings.read_text())
    tls = TLSConfig("tls/client.pem", "tls/client.key", "tls/ca.pem")
    config = PrivateConfig(party_mode="remote", hosts=tuple(values["hosts"]), tls=tls, timeout_s=values["timeout_s"])
    tokenizer = AutoTokenizer.from_pretrained("client")
    for line in sys.stdin:
        try:
            with AutoPrivateModelForCausalLM.from_pretrained("client", config) as private:
                inputs = tokenizer(json.loads(line), return_tensors="pt")
                out = private.generate(**inputs, max_new_tokens=values["tokens"], do_sample=False)
            answer = {"text": tokenizer.decode(out[0], skip_special_tokens=True)}
        except PrivateLLMError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
