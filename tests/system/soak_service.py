"""Mixed requests to a gateway and party services: every one is answered, texts are right, and nothing grows.

python tests/system/soak_service.py                       an hour
python tests/system/soak_service.py --minutes 1 --seed 7
python tests/system/soak_service.py --tiny                some seconds

Party services with two models, a gateway with sessions of its own, and clients as threads: OpenAI's client and sockets
at the gateway, users who open sessions with the parties themselves (soak_requests.py has all kinds). They stream, ask
for several answers, leave in the middle, read slowly, stay half open, ask for what there is not, and come and go. The
models are small and random, so that there are many requests; their texts are compared with the plaintext model's where
its choice is clear. One JSON row for each kind of request, one for each process, and one in all: requests sent =
answered + refused with a reason + left by us. The exit status is 1 if one failed or got no answer at all, if memory,
descriptors or threads of a process are not flat (soak_watch.py), or if a file is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import torch
from private_llm_cli.commands.models import demo_model, quiet
from private_llm_hf import AutoPrivateModel, AutoPrivateModelForCausalLM
from private_llm_hf.api import share_checkpoint
from private_llm_hf.service.local import LocalParties
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from soak_gateway import gateway
from soak_requests import KINDS, LONG, VECTORS, WORDS, Around, Outcome, Text, run
from soak_watch import Held, Watch, children, files_below
from transformers import AutoTokenizer, BertConfig, BertModel, OPTConfig, OPTForCausalLM

from private_llm.config import PrivateConfig

USERS = ("anna", "ben")
CLIENTS = 8
NEW = 10
"""Tokens of the longest answers."""
MARGIN = 0.05
"""By how much the plaintext model prefers its choices to the next ones (log-probability) where texts are compared."""
_LIMITS = {"body_s": 4.0, "connections": 64, "max_waiting": 8, "wait_s": 120.0}
_PATIENCE_S = 180.0
"""How long a request is waited for before it counts as not answered."""


class Tally:
    """What became of all requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.found: Counter[tuple[str, str]] = Counter()
        self.why: Counter[tuple[str, str]] = Counter()

    def begin(self, kind: str) -> None:
        """A request is sent."""
        with self._lock:
            self.sent[kind] += 1

    def end(self, kind: str, outcome: Outcome, seconds: float) -> None:
        """It is over."""
        with self._lock:
            self.found[kind, outcome.what] += 1
            self.seconds[kind] += seconds
            if outcome.why and (len(self.why) < 200 or outcome.what == "refused"):
                self.why[kind, f"{outcome.what}: {outcome.why}"] += 1

    def row(self, kind: str | None = None) -> dict[str, Any]:
        """For JSON: of one kind, or of all."""
        kinds = [kind] if kind else list(self.sent)
        row: dict[str, Any] = {
            "name": "soak requests",
            "kind": kind or "all",
            "sent": sum(self.sent[each] for each in kinds),
        }
        for what in ("answered", "refused", "left", "failed"):
            row[what] = sum(self.found[each, what] for each in kinds)
        row["lost"] = row["sent"] - sum(self.found[each, what] for each, what in self.found if each in kinds)
        row["seconds_mean"] = round(sum(self.seconds[each] for each in kinds) / max(1, row["sent"]), 3)
        return row


def models(folder: Path) -> tuple[OPTForCausalLM, BertModel]:
    """A decoder and an encoder with the bundled model's vocabulary, and weights that make clear choices."""
    torch.manual_seed(5)
    words = OPTForCausalLM(
        OPTConfig(
            vocab_size=4096, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            init_std=0.3,
        )
    )  # fmt: skip
    vectors = BertModel(
        BertConfig(
            vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=128,
        )
    )  # fmt: skip
    for name, model in ((WORDS, words), (VECTORS, vectors)):
        model.eval().requires_grad_(False).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(demo_model()).save_pretrained(folder / name)
    return words, vectors


def texts(words: OPTForCausalLM, vectors: BertModel, tokenizer: Any, count: int) -> list[Text]:
    """Prompts of 3 to 40 tokens, with clear choices of the plaintext model, where every token adds whole characters."""
    whole = resources.files("private_llm_hf").joinpath("data", "shakespeare.txt").read_text(encoding="utf-8").split()
    random, found = Random(1), []  # type: tuple[Random, list[Text]]
    for _ in range(200 * count):
        at = random.randrange(len(whole) - 40)
        prompt = " ".join(whole[at : at + random.randint(2, 28)])
        ids = tokenizer(prompt)["input_ids"]
        before = tokenizer.decode(ids, skip_special_tokens=True)
        given = torch.tensor([ids])
        made = words.generate(given, max_new_tokens=NEW, do_sample=False)[0, len(ids) :].tolist()
        logprobs = words(torch.tensor([[*ids, *made]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        best = logprobs.topk(2).values
        added = [tokenizer.decode([*ids, *made[: n + 1]], skip_special_tokens=True)[len(before) :] for n in range(NEW)]
        clear = bool((best[:, 0] - best[:, 1]).min() > MARGIN) and before == prompt and len(made) == NEW
        if not clear or any("\ufffd" in each for each in added) or set(made) & {0, 1, 2}:
            continue
        own = [float(row[token]) for row, token in zip(logprobs, made, strict=True)]
        states = vectors(given).last_hidden_state[0].mean(0)
        found.append(Text(prompt, ids, made, added, own, torch.nn.functional.normalize(states, dim=0)))
        if len(found) == count:
            return found
    raise RuntimeError(f"texts: found {len(found)} with clear choices; want {count}")


@contextlib.contextmanager
def running(folder: Path, protocol: str, count: int) -> Iterator[tuple[Around, dict[str, int | str]]]:
    """Everything that requests need, and the processes to watch. Ends it all."""
    words, vectors = models(folder)
    config = PrivateConfig(protocol=protocol, timeout_s=30.0, busy_wait_s=1.0)
    shares = {name: folder / f"{name}-shares" for name in (WORDS, VECTORS)}
    for name, auto in ((WORDS, AutoPrivateModelForCausalLM), (VECTORS, AutoPrivateModel)):
        share_checkpoint(str(folder / name), shares[name], config, auto=auto)
    token, source = "a-token-of-soaking", str(shares[WORDS] / "client")
    with contextlib.ExitStack() as stack:
        parties = stack.enter_context(
            LocalParties(config, shares, users=("gateway", *USERS), sessions=10, sessions_per_user=5, waiting=4)
        )
        order = {
            "config": parties.config.to_dict(), "token": token, "limits": _LIMITS,
            "models": [[name, str(shares[name] / "client"), name == WORDS, 3 if name == WORDS else 1]
                       for name in shares],
        }  # fmt: skip
        (forker,) = children(os.getpid())
        processes: dict[str, int | str] = {"clients": "self"}
        processes |= {f"party {number}": pid for number, pid in enumerate(children(forker))}
        processes["gateway"], port = stack.enter_context(gateway(order))
        configs = {user: parties.config_of(user) for user in USERS}
        sessions = {
            user: stack.enter_context(AutoPrivateModelForCausalLM.from_pretrained(source, configs[user]))
            for user in USERS
        }
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=_PATIENCE_S)
        web = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=_PATIENCE_S)
        stack.enter_context(web)
        stack.callback(client.close)
        hosts = [(host.rpartition(":")[0], int(host.rpartition(":")[2])) for host in parties.config.hosts]
        tokenizer = AutoTokenizer.from_pretrained(source)
        yield (
            Around(port, token, _LIMITS["body_s"], texts(words, vectors, tokenizer, count), source, 4096, configs,
                   sessions, hosts, client, web),
            processes,
        )  # fmt: skip


def ask(around: Around, tally: Tally, seed: str, until: float, brief: bool) -> None:
    """Be a client: one request after the other. brief: none that takes long by its nature."""
    random = Random(seed)
    kinds = [kind for kind in KINDS if not (brief and kind in LONG)]
    weights = [KINDS[kind] for kind in kinds]
    while time.monotonic() < until:
        (kind,) = random.choices(kinds, weights)
        began = time.monotonic()
        tally.begin(kind.__name__)
        tally.end(kind.__name__, run(kind, around, random), time.monotonic() - began)


def soak(
    around: Around, processes: Mapping[str, int | str], seconds: float, seed: int, show: Any
) -> tuple[Tally, Sequence[Held]]:  # fmt: skip
    """Let all clients ask for so long; `show` is told now and then."""
    warm = max(2.0, min(60.0, seconds / 10))
    for span, last in ((warm, False), (seconds, True)):
        tally, until = Tally(), time.monotonic() + span
        clients = [
            threading.Thread(
                target=ask, args=(around, tally, f"{seed}/{last}/{number}", until, seconds < 20), daemon=True
            )
            for number in range(CLIENTS)
        ]
        watch = Watch(processes, max(0.5, span / 400))
        for client in clients:
            client.start()
        while time.monotonic() < until:
            time.sleep(0.5)
            show(tally, watch.held, max(0.0, until - time.monotonic()) + (0 if last else seconds), warm + seconds)
        for client in clients:
            client.join(max(0.0, until + _PATIENCE_S - time.monotonic()))
        held = watch.stop()
    return tally, held


def report(tally: Tally, held: Sequence[Held], left: Sequence[str], judged: bool) -> bool:
    """Print all rows; whether all was well. judged: whether processes must be flat, which some seconds do not show."""
    for kind in KINDS:
        print(json.dumps(tally.row(kind.__name__)))
    for (kind, why), count in sorted(tally.why.items()):
        print(json.dumps({"name": "soak reasons", "kind": kind, "why": why, "count": count}))
    for each in held:
        print(json.dumps(each.row()))
    row = tally.row()
    well = not row["failed"] and not row["lost"] and not left and all(each.flat() or not judged for each in held)
    print(json.dumps({**row, "files_left": left, "well": well}), flush=True)
    return well


def main() -> None:
    """Parse, soak, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--protocol", default="trio")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="some seconds")
    given = parser.parse_args()
    seconds = 4.0 if given.tiny else 60.0 * given.minutes
    quiet()
    logging.disable()  # refusals by the hundred
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        tempfile.tempdir = os.environ["TMPDIR"] = name  # what any process leaves is found there
        folder = Path(name) / "models"
        folder.mkdir()
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=1) as progress:
            bar: TaskID = progress.add_task("soak", total=None, note="begins")

            def show(tally: Tally, held: Sequence[Held], left: float, whole: float) -> None:
                row = tally.row()
                memory = " ".join(f"{each.series['mb'][-1]:.0f}" for each in held if each.series["mb"])
                note = f"{row['sent']} sent, {row['failed']} failed; MB {memory}"
                progress.update(bar, total=whole, completed=whole - left, note=note)

            try:
                with running(folder, given.protocol, 8 if given.tiny else 60) as (around, processes):
                    before = set(files_below(Path(name)))
                    tally, held = soak(around, processes, seconds, given.seed, show)
                    after = set(files_below(Path(name)))
                    fine = report(tally, held, sorted(after - before), judged=not given.tiny)
            except RuntimeError as error:
                sys.exit(str(error))
        left = sorted(path for path in files_below(Path(name)) if not path.startswith("models/"))
        print(json.dumps({"name": "soak end", "files_left": left}))
    sys.exit(not fine or bool(left))


if __name__ == "__main__":
    main()
