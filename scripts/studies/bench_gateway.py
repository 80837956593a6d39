"""A real chat model behind `private-llm gateway`: its answers beside the plaintext's, their speed, and memory.

python scripts/studies/bench_gateway.py  SmolLM2-135M-Instruct (installed by scripts/studies/real_model.py), minutes
python scripts/studies/bench_gateway.py --model FOLDER  another model
python scripts/studies/bench_gateway.py -- --protocol assisted  options of the gateway
python scripts/studies/bench_gateway.py --tiny          the bundled model, in seconds

The gateway starts the parties as services of this machine; under "assisted" the script starts both servers. The
official OpenAI client asks one question after the other, streamed; then 1, 2 and 4 questions at once, each with a
client of its own. One JSON row for each; `at_once` rows count from the first request to the last answer, bytes of an
answer are their mean, and rounds those of the answer that had most. No prompt is kept for requests that begin alike.
processor_s: of gateway and parties together, which depends less on other work on the machine. Memory is what /proc
tells of each process, in MiB: resident, at its peak, and its share where pages are shared with others. Returns 1 if an
answer is not the plaintext's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
from bench.rows import provenance
from openai import OpenAI
from private_llm_cli.commands.models import demo_model, plaintext_model, quiet, smollm2_model, tokenizer_of
from private_llm_gateway.child import child_gateway
from private_llm_hf.models import smollm2
from real_model import PROMPTS
from rich.console import Console
from rich.progress import track

from private_llm.importing import python_like_this
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.protocol_facts import ASSISTED

DEMO_PROMPTS = ("The history of", "My fellow citizens , we must")


@dataclass(frozen=True)
class Answer:
    """A streamed answer: its text, seconds to its first piece and to its end, tokens, and what it cost."""

    text: str
    first_s: float
    seconds: float
    tokens: int
    spent: dict[str, float]

    @property
    def each_s(self) -> float:
        """Seconds for each token after the first."""
        return (self.seconds - self.first_s) / max(1, self.tokens - 1)


def ask(client: OpenAI, model: str, prompt: str, new: int) -> Answer:
    """One question, streamed greedily."""
    began = time.perf_counter()
    text, first, tokens, spent = "", 0.0, 0, {"bytes": 0.0, "rounds": 0.0}
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=new, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece and not text:
            first = time.perf_counter() - began
        text += piece or ""
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        spent = getattr(chunk, "private_llm", None) or spent
    return Answer(text, first, time.perf_counter() - began, tokens, spent)


def plaintext(source: str, prompts: tuple[str, ...], new: int) -> list[str]:
    """What the model itself answers."""
    tokenizer, model = tokenizer_of(source), plaintext_model(source)
    found = []
    for prompt in prompts:
        inputs = (
            smollm2.chat(tokenizer, [prompt]) if tokenizer.chat_template else tokenizer(prompt, return_tensors="pt")
        )
        made = model.generate(**inputs, max_new_tokens=new, do_sample=False, repetition_penalty=1.0)
        whole = tokenizer.decode(made[0], skip_special_tokens=True)
        found.append(str(whole)[len(tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True)) :])
    return found


def processes() -> dict[str, int]:
    """Process ids of gateway and servers that this one started, of the process that starts parties, and of these."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            if entry.name.isdecimal():
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    started = [pid for pid, parent in parents.items() if parent == os.getpid()]
    servers = sorted(pid for pid in started if b"\0party\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    gateways = [pid for pid in started if pid not in servers]
    starters = [pid for pid, parent in parents.items() if parent in gateways]
    parties = sorted(pid for pid, parent in parents.items() if parent in starters)
    named = [("gateway", pid) for pid in gateways] + [("starter", pid) for pid in starters]
    return dict(named + [(f"party {number}", pid) for number, pid in enumerate(servers or parties)])


def processor_s() -> float:
    """Seconds of processor time that gateway and parties have taken so far."""
    ticks = [sum(map(int, _stat(pid)[11:13])) for pid in processes().values()]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def memory() -> dict[str, dict[str, int]]:
    """MiB of gateway and parties."""
    return {name: _memory_of(pid) for name, pid in processes().items()}


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _memory_of(pid: int) -> dict[str, int]:
    kept = {"VmRSS": "rss", "VmHWM": "peak", "Pss": "share"}
    text = "".join(Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "smaps_rollup"))
    told = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: round(int(told[key].split()[0]) / 1024) for key, name in kept.items()}


@contextlib.contextmanager
def product_servers(source: str, sessions: int) -> Iterator[list[str]]:
    """Both servers of "assisted", for so many sessions at a time; what a gateway needs to know of them."""
    listeners = open_listeners(2)
    links = ["--protocol", ASSISTED, "--hosts", ",".join(hosts_of(listeners)), "--allow-plain-loopback"]
    for listener in listeners:
        listener.close()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for number in range(2):
            words = ["party", "--index", str(number), *links, "--model", source, "--clients", str(sessions)]
            command, environment = python_like_this("from private_llm_cli.app import main; main()", *words)
            environment["PRIVATE_LLM_PARTY__OPERATOR__ADDRESS"] = ""  # no port
            with (Path(folder) / f"server {number}").open("wb") as log:
                server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(server.wait)
            stack.callback(server.terminate)
        yield [*links[2:], "--sessions", str(sessions)]


@contextlib.contextmanager
def running(source: str, name: str, sessions: int, options: Sequence[str]) -> Iterator[OpenAI]:
    """A client of a gateway that runs so many requests at a time, with parties or servers on this machine. options: of
    the gateway.
    """
    with contextlib.ExitStack() as stack:
        more = ["--sessions", str(sessions)]
        if ASSISTED in options:
            more = stack.enter_context(product_servers(source, sessions))
        words = ("--name", name, "--keep-tokens", "0", *options, *more)
        gateway = stack.enter_context(child_gateway(source, *words))
        yield OpenAI(base_url=gateway.openai_url, api_key=gateway.token, timeout=1800, max_retries=0)


def ask_at_once(client: OpenAI, model: str, asked: Sequence[tuple[str, str]], new: int) -> dict[str, Any]:
    """Columns of a row of prompts that are asked at once. asked: with what the plaintext answers."""
    busy, began = processor_s(), time.perf_counter()
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda each: ask(client, model, each[0], new), asked))
    seconds = time.perf_counter() - began
    return {
        "at_once": len(asked), "seconds": seconds, "load": os.getloadavg()[0], "processor_s": processor_s() - busy,
        "equal": all(made.text == text for made, (_, text) in zip(answers, asked, strict=True)),
        "tokens": sum(made.tokens for made in answers),
        "tokens_per_s": sum(made.tokens for made in answers) / seconds,
        "bytes": statistics.mean(made.spent["bytes"] for made in answers),
        "rounds": max(made.spent["rounds"] for made in answers),
        "first_s": statistics.median(made.first_s for made in answers),
        "each_s": statistics.median(made.each_s for made in answers),
    }  # fmt: skip


def measure(
    source: str, name: str, prompts: tuple[str, ...], new: int, at_once: list[int], options: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows as they come: one for each prompt, one for each number at a time, one of memory. options: of the gateway."""
    wanted = plaintext(source, prompts, new)
    head = {"name": "gateway", "model": name, "new": new, "options": options, **provenance()}
    began = time.perf_counter()
    with running(source, name, max(at_once), options) as client:
        started = time.perf_counter() - began
        ask(client, name, prompts[0], 2)  # compiles kernels
        for prompt, text in zip(track(prompts, "questions", console=Console(stderr=True)), wanted, strict=True):
            busy = processor_s()
            made = ask(client, name, prompt, new)
            busy = processor_s() - busy
            yield {
                **head, "prompt": prompt, "private_text": made.text, "plain_text": text, "equal": made.text == text,
                "first_s": made.first_s, "each_s": made.each_s, "tokens": made.tokens, "processor_s": busy,
                "load": os.getloadavg()[0], "bytes": made.spent["bytes"], "rounds": made.spent["rounds"],
            }  # fmt: skip
        asked = list(zip(prompts, wanted, strict=True))
        for count in track(at_once, "at once", console=Console(stderr=True)):
            yield {**head, **ask_at_once(client, name, [asked[n % len(asked)] for n in range(count)], new)}
        yield {**head, "start_s": started, "memory_mib": memory()}


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a model (default: SmolLM2)")
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer at most")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("options", nargs="*", help="of the gateway, after --")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    quiet()
    prompts: tuple[str, ...] = PROMPTS
    name = Path(args.model).name or "smollm2"
    if args.tiny:
        args.new, args.at_once, prompts, name = 3, [2], DEMO_PROMPTS, "demo"
    source = args.model or (demo_model() if args.tiny else smollm2_model())
    different = 0
    for row in measure(source, name, prompts, args.new, args.at_once, args.options):
        print(json.dumps(row), flush=True)
        different += not row.get("equal", True)
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
