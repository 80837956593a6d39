"""Walks the guide for operators (docs/deploy.md) in network namespaces of its own, and pulls plugs.

python scripts/walk_deploy.py               the guide, then ten faults at random moments
python scripts/walk_deploy.py --tiny        the guide, then two faults
python scripts/walk_deploy.py --loopback    without namespaces (needs no root): 127.0.1.x, parties are killed only

Three organisations and a user get a network namespace each, joined by a bridge with shaped links. Each runs, in a
folder of its own, the commands that the guide names for it; files travel between the folders as it says. The user's
text must be the plaintext model's. Then, while the user generates, a party's link goes down for a while, or a party is
killed and started again: each request must end in time, with the right text or an error that names the party; the
service must come back, and the other parties' processes must be the same as before.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from walk_client import CLIENT_OPTION, Answer, Client, serve
from walk_network import Network, loopback, namespaces, why_no_namespaces

from private_llm.errors import PrivateLLMError

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "deploy.md"
MODEL = Path(str(resources.files("private_llm_hf") / "demo_model"))
PRIVATE_LLM = (sys.executable, "-m", "private_llm")
PARTIES = 3
PROMPT = "The history of"
TOKENS = 12
TIMEOUT_S = 6.0
"""Of parties and user: seconds of silence after which another endpoint counts as dead."""
SLACK_S = 12.0
"""Seconds beyond the timeouts and the time that a link is down, within which a request must have ended."""
START_S = 120.0
BACK_S = 90.0
"""Seconds in which the service must be back."""
PLACES = ("ca", "owner", "party", "user")


class Failed(Exception):
    """A step of the guide did not do what the guide says."""


def guide_commands(text: str) -> list[tuple[str, list[str]]]:
    """(place, words) of each command of the guide's blocks that begin with `# at PLACE`."""
    found = []
    for block in text.split("```bash\n# at ")[1:]:
        head, _, rest = block.partition("\n")
        for line in rest.partition("```")[0].splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["private-llm"]:
                found.append((head.split()[0].rstrip(":"), words[1:]))
    return found


@dataclass
class Walk:
    """What happens where: a folder for each place, and the processes of the parties."""

    folder: Path
    network: Network
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    parties: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def home(self, place: str) -> Path:
        """The folder of a place: ca, owner, party0, ..., user."""
        path = self.folder / place
        path.mkdir(exist_ok=True)
        return path

    def hosts(self) -> list[str]:
        """Addresses of the parties."""
        return [f"{self.network.addresses[f'party{n}']}:7000" for n in range(PARTIES)]

    def fits(self, words: list[str], number: int) -> list[str]:
        """A command of the guide with this walk's model and addresses, for party `number`."""
        written = ",".join(f"party{n}.example.org:7000" for n in range(PARTIES))
        found = []
        for word in words:
            word = word.replace(written, ",".join(self.hosts())).replace("facebook/opt-125m", str(MODEL))
            found.append(word.replace("party1", f"party{number}"))
        return found

    def call(self, place: str, words: list[str]) -> str:
        """Run `private-llm` to its end at a place. Raises Failed."""
        print(f"  {place}: private-llm {' '.join(words)}", flush=True)
        command = [*self.network.prefix(place), *PRIVATE_LLM, *words]
        result = subprocess.run(command, cwd=self.home(place), capture_output=True, text=True, timeout=START_S)
        if result.returncode:
            raise Failed(f"{place}: private-llm {' '.join(words)}: {result.stderr.strip() or result.stdout.strip()}")
        return result.stdout

    def send(self, source: str, target: str) -> None:
        """A file from one place's folder to another's, keeping its mode."""
        (self.folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.folder / source, self.folder / target)

    def start(self, number: int) -> None:
        """Start a party's process; its log goes to a file."""
        home = self.home(f"party{number}")
        with (home / "log").open("ab") as log:
            words = ["party", "--config", "party.toml"]
            if find_spec("private_llm_hf.service.party_service") is None:
                files = ["--shares", f"shares/party{number}.safetensors", "--tls", "tls", "--allow", "users.txt"]
                words = ["party", "--index", str(number), "--hosts", ",".join(self.hosts()), *files]
                words += ["--timeout", str(TIMEOUT_S)]
            self.parties[number] = subprocess.Popen(
                [*self.network.prefix(f"party{number}"), *PRIVATE_LLM, *words],
                cwd=home, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self) -> None:
        """End all parties."""
        for process in self.parties.values():
            process.kill()
            process.wait()

    def check(self, what: str, good: bool, why: str = "") -> None:
        """Count a check."""
        if good:
            self.passed += 1
        else:
            self.failures.append(f"{what}: {why}")
            print(f"  FAILED {what}: {why}", flush=True)


def write_settings(walk: Walk, number: int, example: str) -> None:
    """party.toml of a party: the example, edited as the guide says."""
    text = example.replace("party = 0", f"party = {number}").replace("party0.pem", f"party{number}.pem")
    text = text.replace("party0.key", f"party{number}.key").replace("party0.safetensors", f"party{number}.safetensors")
    for n, host in enumerate(walk.hosts()):
        text = text.replace(f'"party{n}.example.org:7000"', f'"{host}"')
    text = text.replace("timeout_s = 120.0", f"timeout_s = {TIMEOUT_S}")
    text = text.replace("127.0.0.1:9100", f"127.0.0.1:{walk.network.operator_port(number)}")
    (walk.home(f"party{number}") / "party.toml").write_text(text)
    (walk.home(f"party{number}") / "users.txt").write_text("alice\n")


def prepare(walk: Walk) -> None:
    """All steps of the guide up to running parties."""
    for place, words in guide_commands(GUIDE.read_text(encoding="utf-8")):
        if place not in PLACES:
            continue
        each = range(PARTIES) if place == "party" or "inbox/party1.csr" in words else [1]
        if words == ["party", "--config", "party.toml"] or words[0] == "generate":
            continue  # what follows when everything is prepared
        for number in each:
            where = f"party{number}" if place == "party" else place
            printed = walk.call(where, walk.fits(words, number))
            if words == ["party", "--example-config"]:
                write_settings(walk, number, printed)
            if words[:2] == ["certs", "request"]:
                stem = "client" if place == "user" else f"party{number}"
                walk.send(f"{where}/tls/{stem}.csr", f"ca/inbox/{'alice/' if place == 'user' else ''}{stem}.csr")
            if words[:2] == ["certs", "sign"]:
                user = "inbox/alice/client.csr" in words
                stem, target = ("alice/client", "user") if user else (f"party{number}", f"party{number}")
                walk.send(f"ca/signed/{stem}.pem", f"{target}/tls/{Path(stem).name}.pem")
                walk.send("ca/ca/ca.pem", f"{target}/tls/ca.pem")
            if words[0] == "share":
                for n in range(PARTIES):
                    walk.send(f"owner/shares/party{n}.safetensors", f"party{n}/shares/party{n}.safetensors")
                shutil.copytree(walk.folder / "owner/shares/client", walk.folder / "user/client")


def expected() -> str:
    """What the plaintext model writes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    out = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=TOKENS, do_sample=False)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def until_right(walk: Walk, client: Client, text: str, limit_s: float, what: str) -> float:
    """Ask until the text is right. Returns the seconds that took; counts a wrong text as a failure."""
    began = time.monotonic()
    while True:
        answer = client.ask(PROMPT, limit_s)
        took = time.monotonic() - began
        if answer is None:
            walk.check(what, False, f"no answer within {limit_s:g} s")
            return took
        if answer.text is not None or took > limit_s:
            walk.check(what, answer.text == text, f"{answer} after {took:.1f} s")
            return took
        time.sleep(0.2)


def fault(walk: Walk, client: Client, text: str, chance: random.Random, usual_s: float, kind: str) -> list[str]:
    """One fault while the user generates. Returns a row of the table."""
    number = chance.randrange(PARTIES)
    moment, hold = chance.uniform(0.05, 1.1) * usual_s, chance.uniform(0.5, TIMEOUT_S + 3)
    others = {n: each.pid for n, each in walk.parties.items() if kind == "unplug" or n != number}
    client.begin(PROMPT)
    time.sleep(moment)
    began, name = time.monotonic(), f"party{number}"
    if kind == "unplug":
        walk.network.link(name, up=False)
        answer = client.end(hold)
        time.sleep(max(0.0, began + hold - time.monotonic()))
        walk.network.link(name, up=True)
    else:
        walk.parties[number].kill()
        walk.parties[number].wait()
        answer = client.end(hold)
        time.sleep(max(0.0, began + hold - time.monotonic()))
        walk.start(number)
    if answer is None:
        answer = client.end(began + hold + 2 * TIMEOUT_S + SLACK_S - time.monotonic())
    what = f"{kind} of party {number} at {moment:.1f} s"
    took = time.monotonic() - began if answer is None else answer.ended - began
    judge(walk, what, answer, text, number)
    back = until_right(walk, client, text, BACK_S, f"{what}: service back")
    gone = [n for n, pid in others.items() if walk.parties[n].poll() is not None or walk.parties[n].pid != pid]
    walk.check(f"{what}: other parties untouched", not gone, f"ended: {gone}")
    told = "no answer" if answer is None else "right text" if answer.text == text else str(answer)[:60]
    return [kind, name, f"{moment:.1f}", f"{hold:.1f}", told, f"{took:.1f}", f"{back:.1f}"]


def judge(walk: Walk, what: str, answer: Answer | None, text: str, number: int) -> None:
    """A request during a fault: it ended, with the right text or an error that names the party."""
    walk.check(f"{what}: the request ended", answer is not None, "no answer in time")
    if answer is None:
        return
    if answer.text is not None:
        walk.check(f"{what}: right text", answer.text == text, repr(answer.text))
    else:
        walk.check(f"{what}: the error names it", f"party {number}" in str(answer.error), str(answer.error))


def run(walk: Walk, faults: int, seed: int, folder: Path) -> None:
    """The whole walk."""
    print(f"1. the guide's steps ({walk.network.words})", flush=True)
    prepare(walk)
    text = expected()
    for number in range(PARTIES):
        walk.start(number)
    with Client(folder, walk.network.prefix("user"), walk.home("user"), walk.hosts(), TOKENS, TIMEOUT_S) as client:
        took = until_right(walk, client, text, START_S, "the user's text is the plaintext model's")
        began = time.monotonic()
        answer = client.ask(PROMPT, START_S)
        usual = time.monotonic() - began
        walk.check("a second request", answer is not None and answer.text == text, str(answer))
        print(f"   first text after {took:.1f} s, a request takes {usual:.1f} s: {text!r}", flush=True)
        chance = random.Random(seed)
        kinds = [kind for _ in range((faults + 1) // 2) for kind in walk.network.faults][:faults]
        kinds += ["kill"] * (faults - len(kinds))
        chance.shuffle(kinds)
        print(f"2. {faults} faults (seed {seed}, timeout {TIMEOUT_S:g} s)", flush=True)
        row = "   {:<8}{:<8}{:>6}{:>7}  {:<62}{:>7}{:>7}".format
        print(row("fault", "party", "at s", "for s", "the request", "ended", "back"), flush=True)
        for kind in kinds:
            print(row(*fault(walk, client, text, chance, usual, kind)), flush=True)


def main() -> int:
    """Walk, and tell how many checks passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two faults")
    parser.add_argument("--loopback", action="store_true", help="no namespaces")
    parser.add_argument("--faults", type=int, default=None)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument(CLIENT_OPTION, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        serve(arguments.client)
        return 0
    faults = arguments.faults if arguments.faults is not None else 2 if arguments.tiny else 10
    names = ("ca", "owner", *(f"party{n}" for n in range(PARTIES)), "user")
    why = "asked for" if arguments.loopback else why_no_namespaces()
    if why is not None:
        print(f"no network namespaces ({why}): addresses 127.0.1.x, and parties are killed only")
    with ExitStack() as stack:
        network = stack.enter_context(loopback(names) if why is not None else namespaces(names))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        walk = Walk(folder, network)
        stack.callback(walk.stop)
        try:
            run(walk, faults, arguments.seed, folder)
        except (Failed, PrivateLLMError, subprocess.TimeoutExpired) as error:
            walk.check("the walk", False, str(error))
        if walk.failures:
            for number in range(PARTIES):
                log = walk.home(f"party{number}") / "log"
                lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
                print(f"-- party {number} --", *lines, sep="\n", file=sys.stderr)
    print(f"{walk.passed} passed, {len(walk.failures)} failed")
    return 1 if walk.failures else 0


if __name__ == "__main__":
    sys.exit(main())
