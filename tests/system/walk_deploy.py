"""Walks the guide for operators (docs/deploy.md) in network namespaces of its own, and pulls plugs.

python tests/system/walk_deploy.py               the guide, then ten faults at random moments
python tests/system/walk_deploy.py --tiny        the guide in forks of one process, then two faults
python tests/system/walk_deploy.py --loopback    without namespaces (needs no root): 127.0.1.x, parties are killed only

Three organisations and a user get a network namespace each, joined by a bridge with shaped links. Each runs, in a
folder of its own, the commands that the guide names for it; files travel between the folders as it says. The user's
text must be the plaintext model's. A certificate is renewed and a user taken off a list for a while, without a restart.
Then, while the user generates, a party's link goes down for a while, or a party is
killed and started again (walk_faults.py): each request must end in time, with the right text or an error that names the
party; the service must come back, and the other parties' processes must be the same as before.
"""

from __future__ import annotations

import argparse
import json
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
from pathlib import Path

from walk_client import CLIENT_OPTION, Answer, Client, serve
from walk_commands import Commands, Running
from walk_faults import BACK_S, NEXT, PROMPT, START_S, TIMEOUT_S, TOKENS, happen, plan, until_right
from walk_network import Network, loopback, namespaces, why_no_namespaces

from private_llm.errors import PrivateLLMError

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "deploy.md"
MODEL = Path(str(resources.files("private_llm_hf") / "demo_model"))
PARTIES = 3
PLACES = ("ca", "owner", "party", "user")


class Failed(Exception):
    """A step of the guide did not do what the guide says."""


def guide_commands(text: str) -> list[tuple[str, list[str]]]:
    """(place, words) of each command of the guide's blocks that begin with `# at PLACE`."""
    found = []
    for block in text.split("```bash\n# at ")[1:]:
        head, _, rest = block.partition("\n")
        for line in rest.partition("```")[0].splitlines():
            if line.startswith("private-llm "):
                found.append((head.split()[0], shlex.split(line, comments=True)[1:]))
    return found


@dataclass
class Walk:
    """What happens where: a folder for each place, and the processes of the parties."""

    folder: Path
    network: Network
    commands: Commands
    passed: int = 0
    failures: list[str] = field(default_factory=list)
    parties: dict[int, Running] = field(default_factory=dict)

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
        home = self.home(place)
        with (self.folder / "out").open("wb+") as out, (self.folder / "err").open("wb+") as err:
            process = self.commands.start(self.network.names.get(place), home, words, out, err)
            code = process.wait(START_S)
        printed = (self.folder / "out").read_text()
        if code:
            raise Failed(f"{place}: private-llm {' '.join(words)}: {(self.folder / 'err').read_text() or printed}")
        return printed

    def send(self, source: str, target: str) -> None:
        """A file from one place's folder to another's, keeping its mode."""
        (self.folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.folder / source, self.folder / target)

    def start(self, number: int) -> None:
        """Start a party's process; its log goes to a file."""
        home = self.home(f"party{number}")
        with (home / "log").open("ab") as log:
            words = ["party", "--config", "party.toml"]
            namespace = self.network.names.get(f"party{number}")
            self.parties[number] = self.commands.start(namespace, home, words, log, log)

    def link(self, number: int, *, up: bool) -> None:
        """Plug a party in, or out."""
        self.network.link(f"party{number}", up=up)

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


def rotate(walk: Walk, client: Client, right: Answer) -> None:
    """The guide's rotation: party 1 gets a new certificate, and party 2 takes the user off its list for a while."""
    home = walk.home("party1")
    walk.call("party1", ["certs", "request", "--name", "party1", "--out", "tls-new"])
    walk.send("party1/tls-new/party1.csr", "ca/inbox/new/party1.csr")
    walk.call("ca", ["certs", "sign", "inbox/new/party1.csr", "--ca", "ca", "--name", "party1", "--out", "signed-new"])
    walk.send("ca/signed-new/party1.pem", "party1/tls-new/party1.pem")
    walk.call("party1", ["certs", "show", "tls-new/party1.pem"])
    for name in ("party1.key", "party1.pem"):
        (home / "tls-new" / name).replace(home / "tls" / name)
    users = walk.home("party2") / "users.txt"
    users.write_text("bob\n")
    answer = client.ask(PROMPT, NEXT, START_S)
    refused = answer is not None and "list" in str(answer.error) and not answer.ids
    walk.check("a user who was taken off a list is refused", refused, str(answer))
    users.write_text("alice\n")
    until_right(walk, client, right, BACK_S, "a request after the rotation")
    renewed = "certificate of party1 renewed" in (home / "log").read_text(errors="replace")
    walk.check("the new certificate is used", renewed, "no word of it in the log of party 1")


def run(walk: Walk, client: Client, count: int, seed: int) -> None:
    """The whole walk."""
    print(f"1. the guide's steps ({walk.network.words})", flush=True)
    client.begin(PROMPT, TOKENS, plain=True)
    walk.commands.prepare()
    prepare(walk)
    for number in range(PARTIES):
        walk.start(number)
    began = time.monotonic()
    right = client.end(START_S)
    if right is None:
        raise Failed(f"user: no text of the plaintext model within {START_S:g} s")
    until_right(walk, client, right, START_S, "the user's text is the plaintext model's")
    first = time.monotonic() - began
    began = time.monotonic()
    answer = client.ask(PROMPT, NEXT, START_S)
    usual = time.monotonic() - began
    walk.check("a second request", answer is not None and answer.ids == right.ids[:NEXT], str(answer))
    print(f"   first answer after {first:.1f} s, {NEXT} tokens take {usual:.1f} s; whole: {right.text!r}", flush=True)
    print("2. the guide's rotation of a certificate and of the list of users", flush=True)
    rotate(walk, client, right)
    faults = plan(count, walk.network.faults, PARTIES, random.Random(seed))
    print(f"3. {count} faults (seed {seed}, timeout {TIMEOUT_S:g} s)", flush=True)
    row = "   {:<8}{:<9}{:>6}{:>6}{:>7}{:>7}{:>7}  {}".format
    print(row("fault", "party", "after", "kept", "for s", "ended", "back", "the request"), flush=True)
    for fault in faults:
        print(row(*happen(walk, client, right, fault, usual / NEXT)), flush=True)


def main() -> int:
    """Walk, and tell how many checks passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two faults, and commands in forks")
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
        walk = Walk(folder, network, Commands(forks=arguments.tiny))
        stack.callback(walk.stop)
        settings = {"hosts": walk.hosts(), "timeout_s": TIMEOUT_S, "model": str(MODEL)}
        (folder / "client.json").write_text(json.dumps(settings))
        client = stack.enter_context(Client(folder / "client.json", network.prefix("user"), walk.home("user")))
        try:
            run(walk, client, faults, arguments.seed)
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
