"""Three organisations, one gateway, three unchanged clients: the openai package, a browser and lm-eval ask in private.

python tests/system/walk_gateway.py               the whole walk
python tests/system/walk_gateway.py --tiny        few questions, commands as forks of this process
python tests/system/walk_gateway.py --loopback    without namespaces (needs no root): addresses 127.0.1.x

Three organisations and a user get a network namespace each, joined by shaped links. Keys, certificates and share files
come about as docs/deploy.md says; each organisation runs `private-llm party --config party.toml` with two models. The
user runs `private-llm gateway client --hosts ... --tls tls` (and one for the second model, whose vectors are asked
for), and at it the programs of walk_users.py, which know nothing of this library. What they get must be what the model
itself answers in plaintext; lm-eval's scores must be those of its own `hf` model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from walk_commands import Commands, Fork, Running
from walk_deploy import MODEL, PARTIES, Failed, Walk, prepare
from walk_faults import TIMEOUT_S
from walk_network import loopback, namespaces, why_no_namespaces
from walk_users import LIKELIHOOD_TASKS, LOOK_FOR, PROGRAMS, TASKS, serve

from private_llm.errors import PrivateLLMError

CLIENT_OPTION = "--client"
NAME = "demo"
SILENCE_S = 60.0
"""Seconds of silence after which an endpoint counts as dead: a busy machine may take long for a step."""
READY_S = 600.0
PROGRAM_S = 900.0
"""Seconds that gateways may take to be ready, and a client to end."""
LOGPROB_ERROR = 0.02
"""Of one token's log-probability; the bundled model's logits are off by some thousandths."""
VECTOR_ERROR = 2e-3
_IMPORTS = (
    "private_llm_gateway.app", "private_llm_cli.commands.gateway", "transformers.models.bert.modeling_bert", "openai",
    "lm_eval.models.huggingface", "lm_eval.models.openai_completions", "lm_eval.tasks",
)  # fmt: skip
"""What forks want besides."""


@dataclass
class Gateways(Walk):
    """The walk with a user who has gateways. running: these, and the clients."""

    running: list[Running] = field(default_factory=list)

    def step(self, what: str, good: bool, found: str) -> None:
        """Count a check, and say how it went in a line."""
        self.check(what, good, found)
        if good:
            print(f"  passed {what}: {found}", flush=True)

    def start_gateway(self, name: str, client: str) -> str:
        """A gateway at the user for one model; its address once it is ready. Raises Failed."""
        words = ["gateway", client, "--name", name, "--port", "0", "--hosts", ",".join(self.hosts()), "--tls", "tls"]
        print(f"  user: private-llm {' '.join(words)}", flush=True)
        log = self.folder / f"gateway-{name}.log"
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            with log.open("wb") as out:
                process = self.commands.start(self.network.names.get("user"), self.home("user"), words, out, out)
            self.running.append(process)
            while process.poll() is None and time.monotonic() < until:
                lines = log.read_text(errors="replace").splitlines()
                if any(line.startswith("ready") for line in lines):
                    (page,) = (line.split()[-1] for line in lines if line.startswith("chat page"))
                    return page.rstrip("/")
                time.sleep(0.1)
        raise Failed(f"user: no gateway within {READY_S:g} s; it said: {log.read_text(errors='replace')[-1500:]}")

    def start_program(self, name: str, place: str, settings: dict[str, Any]) -> Running:
        """One of `PROGRAMS` at a place, as a process of its own."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(settings))
        with path.with_suffix(".log").open("wb") as log:
            process: Running
            if self.commands.forks:
                place_name = self.network.names.get(place)
                process = Fork(place_name, self.home(place), partial(serve, name, path), log, log)
            else:
                words = [sys.executable, str(Path(__file__).resolve()), CLIENT_OPTION, name, str(path)]
                process = subprocess.Popen(
                    [*self.network.prefix(place), *words], cwd=self.home(place), stdout=log, stderr=log
                )
        self.running.append(process)
        return process

    def seen(self, name: str, process: Running) -> dict[str, Any]:
        """What a program saw. Raises Failed if it ends badly, subprocess.TimeoutExpired if it does not end."""
        code = process.wait(PROGRAM_S)
        if code:
            log = (self.folder / f"{name}.log").read_text(errors="replace")
            raise Failed(f"{name}: ended with {code}; it said: {log[-2500:]}")
        seen: dict[str, Any] = json.loads((self.folder / f"{name}.seen").read_text())
        return seen

    def sent(self) -> dict[str, int]:
        """Bytes that each place has sent on its link so far; nothing without namespaces."""
        found = {}
        for place in [*(f"party{n}" for n in range(PARTIES)), "user"] if self.network.names else []:
            command = ["ip", "-n", self.network.names[place], "-j", "-s", "link", "show", "eth0"]
            told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            found[place] = int(told[0]["stats64"]["tx"]["bytes"])
        return found

    def stop(self) -> None:
        """End everything."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.wait()
        super().stop()


def second_model(walk: Gateways) -> None:
    """The model owner shares a small encoder too, and each party serves it beside the first model."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    torch.manual_seed(13)
    folder = walk.home("owner") / "encoder"
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    walk.call("owner", ["share", "encoder", "--task", "features", "--out", "shares2"])
    for number in range(PARTIES):
        walk.send(f"owner/shares2/party{number}.safetensors", f"party{number}/shares2/party{number}.safetensors")
        settings = walk.home(f"party{number}") / "party.toml"
        text = settings.read_text().replace(f"timeout_s = {TIMEOUT_S}", f"timeout_s = {SILENCE_S}")
        line = f'encoder = "shares2/party{number}.safetensors"'
        settings.write_text(text.replace("\n\n[tls]", f"\n{line}\n\n[tls]", 1))
    (walk.home("user") / "client2").mkdir()
    for path in sorted((walk.home("owner") / "shares2" / "client").iterdir()):
        walk.send(f"owner/shares2/client/{path.name}", f"user/client2/{path.name}")


def judge_official_client(walk: Gateways, seen: dict[str, Any], right: dict[str, Any]) -> None:
    """What the openai package got."""
    pieces = f"{seen['text']!r} in {seen['pieces']} pieces"
    walk.step("openai: a streamed chat is the plaintext's", seen["text"] == right["text"] and seen["pieces"] > 1,
              pieces if seen["text"] == right["text"] else f"{pieces}; want {right['text']!r}")  # fmt: skip
    walk.step("openai: a completion with its prompt", seen["whole"] == right["whole"], repr(seen["whole"]))
    found, wanted = seen["logprobs"] or [None], right["logprobs"]
    errors = [abs(a - b) for a, b in zip(found[1:], wanted, strict=False)]
    good = found[0] is None and len(errors) == len(wanted) == len(found) - 1 and max(errors) < LOGPROB_ERROR
    walk.step("openai: log-probabilities", good, f"off by {max(errors, default=9.9):.4f} of {len(wanted)} tokens")
    error = max(
        (abs(a - b) for mine, its in zip(seen["vectors"], right["vectors"], strict=False)
         for a, b in zip(mine, its, strict=False)), default=9.9,
    )  # fmt: skip
    walk.step("openai: vectors of the second model", error < VECTOR_ERROR and len(seen["vectors"]) == 2,
              f"off by {error:.5f}")  # fmt: skip
    walk.step("openai: a wrong model name is a 404 that names the right one", NAME in seen["refused"], seen["refused"])


def judge_page(walk: Gateways, seen: dict[str, Any]) -> None:
    """What the browser showed."""
    if "skipped" in seen:
        print(f"  skipped the chat page: {seen['skipped']}", flush=True)
        return
    grew = all(after.startswith(before) for before, after in zip(seen["seen"], seen["seen"][1:], strict=False))
    many = len(seen["seen"]) > 2 and len(seen["seen"][-1]) >= LOOK_FOR
    walk.step("page: an answer streams in", grew and many, f"{seen['text']!r}, seen {len(seen['seen'])} times")
    walk.step("page: it tells what that costs", "tokens/s" in seen["cost"][0] and "MB" in seen["cost"][1],
              ", ".join(seen["cost"]))  # fmt: skip
    stopped = seen["text"].startswith(seen["seen"][-1] if seen["seen"] else "-") and not seen["trouble"]
    walk.step("page: stop ends it and keeps the text", stopped, seen["spent"])
    named = [host for host in walk.hosts() if any(host in told for told in seen["parties"])]
    walk.step("page: it names the three parties", len(named) == PARTIES, ", ".join(named) or str(seen["parties"]))
    walk.step("page: it warns of parties on one machine if they are", seen["warned"] is not bool(walk.network.names),
              "warned" if seen["warned"] else "not warned")  # fmt: skip
    walk.step("page: no complaint of the browser", not seen["complaints"], str(seen["complaints"]))


def judge_evaluation(walk: Gateways, seen: dict[str, Any], right: dict[str, Any]) -> None:
    """What lm-eval measured."""
    plain, completions = right["evaluation"], seen["completions"]
    for task in TASKS:
        for measure, wanted in plain["scores"][task].items():
            found = completions["scores"][task].get(measure, float("nan"))
            near = 5e-3 * wanted if measure == "perplexity" else 0.0
            what = f"lm-eval: {task} {measure}"
            walk.step(what, abs(found - wanted) <= near, f"{found:.4f}, in plaintext {wanted:.4f}")
    worst, count, same = 0.0, 0, True
    for task in LIKELIHOOD_TASKS:
        for mine, its in zip(completions["answers"][task], plain["answers"][task], strict=True):
            for ((found, likeliest),), ((wanted, wanted_likeliest),) in zip(mine, its, strict=True):
                worst, count, same = max(worst, abs(found - wanted)), count + 1, same and likeliest == wanted_likeliest
    walk.step("lm-eval: each likelihood", same and worst < 5 * LOGPROB_ERROR, f"{count}, off by {worst:.4f} at most")
    texts = plain["answers"][TASKS[-1]]
    for which in ("completions", "chats"):
        got = seen[which]["answers"][TASKS[-1]]
        walk.step(f"lm-eval: texts by /v1/{'chat/' if which == 'chats' else ''}completions", got == texts,
                  f"{len(got)}, each the same" if got == texts else f"{got}; want {texts}")  # fmt: skip


def run(walk: Gateways, tokens: int, limit: int) -> None:
    """The whole walk. Raises Failed."""
    token = secrets.token_urlsafe(24)
    os.environ["PRIVATE_LLM_GATEWAY_TOKEN"] = token  # other users can read a command line
    began = time.monotonic()
    print(f"1. the guide's steps ({walk.network.words})", flush=True)
    walk.commands.prepare()
    for name in _IMPORTS if walk.commands.forks else ():
        importlib.import_module(name)
    prepare(walk)
    second_model(walk)
    print("2. three parties, and the user's gateways", flush=True)
    for number in range(PARTIES):
        walk.start(number)
    settings = {
        "name": NAME, "token": token, "tokens": tokens, "limit": limit, "model": str(MODEL),
        "encoder": str(walk.home("owner") / "encoder"),
    }  # fmt: skip
    owner = walk.start_program("plaintext", "owner", settings)
    settings["url"] = walk.start_gateway(NAME, "client")
    settings["encoder_url"] = walk.start_gateway("encoder", "client2")
    walk.step("gateways are ready", True, f"after {time.monotonic() - began:.0f} s")
    right = walk.seen("plaintext", owner)
    print("3. three clients", flush=True)
    before = walk.sent()
    began = time.monotonic()
    asked = walk.seen("openai", walk.start_program("openai", "user", settings))
    judge_official_client(walk, asked, right)
    judge_page(walk, walk.seen("page", walk.start_program("page", "user", settings)))
    evaluated = walk.seen("lm-eval", walk.start_program("lm-eval", "user", settings))
    judge_evaluation(walk, evaluated, right)
    seconds, after = time.monotonic() - began, walk.sent()
    others = [number for number, party in walk.parties.items() if party.poll() is not None]
    walk.step("all parties still run", not others, f"ended: {others}" if others else f"{seconds:.0f} s")
    print("4. figures", flush=True)
    spent, cost = asked["spent"], evaluated["cost"]
    each = (asked["seconds"] - asked["first_s"]) / max(1, asked["tokens"] - 1)
    print(
        f"  chat: {asked['tokens']} tokens, first after {asked['first_s']:.2f} s, {1 / each:.2f} tokens/s, "
        f"{spent.get('bytes', 0) / 1e6:.2f} MB, {spent.get('rounds', 0):,} rounds"
    )
    print(
        f"  lm-eval: {evaluated['seconds']:.1f} s, {cost['tokens']:.0f} tokens read and written, "
        f"{cost['bytes'] / 1e6:.1f} MB, {cost['rounds']:,.0f} rounds"
    )
    for place, count in after.items():
        print(f"  {place} sent {(count - before[place]) / 1e6:.1f} MB on its link")


def main() -> int:
    """Walk, and tell how many steps passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few questions, and commands in forks")
    parser.add_argument("--loopback", action="store_true", help="no namespaces")
    parser.add_argument("--tokens", type=int, default=None, help="of the chat's answer")
    parser.add_argument("--limit", type=int, default=None, help="questions of each of lm-eval's tasks")
    parser.add_argument(CLIENT_OPTION, nargs=2, metavar=("NAME", "SETTINGS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        name, settings = arguments.client
        if name not in PROGRAMS:
            parser.error(f"{CLIENT_OPTION}: got {name!r}; want one of {', '.join(PROGRAMS)}")
        serve(name, Path(settings))
        return 0
    names = ("ca", "owner", *(f"party{n}" for n in range(PARTIES)), "user")
    why = "asked for" if arguments.loopback else why_no_namespaces()
    if why is not None:
        print(f"no network namespaces ({why}): addresses 127.0.1.x instead")
    with ExitStack() as stack:
        network = stack.enter_context(loopback(names) if why is not None else namespaces(names))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        walk = Gateways(folder, network, Commands(forks=arguments.tiny))
        stack.callback(walk.stop)
        try:
            run(
                walk,
                arguments.tokens or (4 if arguments.tiny else 24),
                arguments.limit or (1 if arguments.tiny else 20),
            )
        except (Failed, PrivateLLMError, subprocess.TimeoutExpired) as error:
            walk.check("the walk", False, str(error))
        if walk.failures:
            for log in sorted((*folder.glob("party*/log"), *folder.glob("gateway-*.log"))):
                lines = log.read_text(errors="replace").splitlines()[-15:]
                print(f"-- {log.relative_to(folder)} --", *lines, sep="\n", file=sys.stderr)
    print(f"{walk.passed} passed, {len(walk.failures)} failed")
    return 1 if walk.failures else 0


if __name__ == "__main__":
    sys.exit(main())
