"""A gateway as a child process, for programs and tests that bring their own: `with child_gateway() as gateway: ...`."""

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from private_llm.errors import ConfigError
from private_llm.importing import python_like_this

_END_S = 30.0  # seconds that a gateway may take to end before it is killed


@dataclass(frozen=True)
class ChildGateway:
    """Where a gateway is. url: of the chat page; openai_url: what OpenAI's clients call base_url; token: their key."""

    url: str
    token: str = field(repr=False)

    @property
    def openai_url(self) -> str:
        """The address of the API."""
        return f"{self.url}/v1"


@contextmanager
def child_gateway(model: str = "", *options: str) -> Iterator[ChildGateway]:
    """`private-llm gateway MODEL --port 0 OPTIONS` on loopback, ready to be asked, and ended at the end. model: "" for
    the bundled one. Its messages go to standard error. Raises ConfigError if it does not start.
    """
    token = secrets.token_urlsafe(24)
    words = ["gateway", *filter(None, [model]), "--port", "0", *options]
    command, environment = python_like_this("from private_llm_cli.app import main; main()", *words)
    environment["PRIVATE_LLM_GATEWAY_TOKEN"] = token  # other users can read a command line
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield ChildGateway(_ready(child), token)
    finally:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _ready(child: subprocess.Popen[str]) -> str:
    """The address of the page, once the gateway says that it is ready."""
    url = ""
    for line in child.stdout or ():
        if line.startswith("chat page"):
            url = line.split()[-1].partition("/#")[0].rstrip("/")
        if line.startswith("ready") and url:
            return url
    raise ConfigError(f"gateway: it ended with status {child.wait()} before it was ready; its message is above")
