"""How well the parties fill a real network of limited speed: bytes / bandwidth / time.

Parties are processes that talk TCP inside network namespaces of their own, whose links Linux slows down (`tc tbf`):

--topology loopback   one namespace; all parties and the client share one loopback device of --rate Mbit/s.
                      Saturation: all bytes of a run / rate / time (PIGEON's definition, the device as the network).
--topology switch     a namespace for each party and for the client, joined by a switch, with mutual TLS; every
                      machine sends and receives at most --rate Mbit/s at the same time. Saturation: the mean over
                      the parties; and for the busiest direction of a party, which bounds a run.

python scripts/pages/bench_network.py                            ReLU of 2^20 and VGG-16 (batch 16, 32 bits) at 1 Gbit/s
python scripts/pages/bench_network.py --parallel-sessions 1 2 6  with other numbers (above 1: rotating roles)
python scripts/pages/bench_network.py --write                    measure and write what docs/studies/pigeon.md shows
python scripts/pages/bench_network.py --tiny                     smallest shapes: does everything run?

Needs Linux, root (or the right to make network namespaces), `ip` and `tc` (iproute2). Nothing outside the namespaces is
changed, and they go away with the script.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from generated import taken

sys.path.append(str(Path(__file__).resolve().parent.parent / "studies"))  # which measure in namespaces, too
import scripts_folder  # noqa: F401 - finds `bench`
from namespaces import CLIENT_HOST, address, missing_rights, shaped, switch

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs" / "studies" / "network.jsonl"
PAGE = ROOT / "docs" / "studies" / "pigeon.md"
BEGIN, END = "<!-- network -->", "<!-- /network -->"

PORT = 7100
WORKS = {
    "relu-64": ("relu", (1 << 20,), 64),
    "relu-32": ("relu", (1 << 20,), 32),
    "vgg16": ("vgg16", (16, 3, 32, 32), 32),
}
TINY = {"relu-64": ("relu", (4096,), 64), "relu-32": ("relu", (4096,), 32), "vgg16": ("lenet", (3, 1, 28, 28), 32)}


@dataclass(frozen=True)
class Case:
    """One measurement."""

    work: str
    protocol: str
    parallel_sessions: int
    rate: float
    topology: str
    repeat: int
    tiny: bool

    def config(self) -> dict[str, Any]:
        """Settings of all endpoints, as `PrivateConfig.from_dict` takes them."""
        _, _, ring = (TINY if self.tiny else WORKS)[self.work]
        return {
            "protocol": self.protocol, "ring": ring, "frac_bits": 18 if ring == 64 else 12, "relu_bits": ring,
            "adder": "prefix", "parallel_sessions": self.parallel_sessions,
            "rotate_roles": self.parallel_sessions > 1, "timeout_s": 60.0,
        }  # fmt: skip


# -- the network -----------------------------------------------------------------------------------------------
def loopback_command(case: Case, command: Sequence[str]) -> list[str]:
    """Run `command` in a namespace whose loopback device is slow."""
    setup = f"ip link set lo up && {shaped('lo', case.rate)}" if case.rate else "ip link set lo up"
    return ["unshare", "-n", "sh", "-c", f'{setup} && exec "$@"', "sh", *command]


# -- endpoints -------------------------------------------------------------------------------------------------
def make_work(case: Case) -> Any:  # noqa: ANN401 - a Work or a WholeWork
    """The work of a case."""
    from bench.catalogue import make

    name, shape, _ = (TINY if case.tiny else WORKS)[case.work]
    return make(name, shape)


def serve(case: Case, party: int, folder: Path) -> None:
    """Be one party of the switched network."""
    from bench.measure import serve as serve_work
    from bench.whole import WholeWork
    from private_llm_hf.client.launch import serve_party

    from private_llm.net.rendezvous import connect

    config, work = remote_config(case, f"party{party}", folder), make_work(case)
    if isinstance(work, WholeWork):
        serve_party(config, party, sessions=1)
        return
    transport = connect(config, party, wait_s=60.0)
    try:
        serve_work(work, config, party, transport)
    finally:
        transport.close()


def remote_config(case: Case, endpoint: str, folder: Path) -> Any:  # noqa: ANN401 - a PrivateConfig
    """Settings of one endpoint of the switched network."""
    from private_llm.config import PrivateConfig

    count = PrivateConfig.from_dict(case.config()).parties
    return PrivateConfig.from_dict({
        **case.config(), "party_mode": "remote", "hosts": [f"{address(party)}:{PORT}" for party in range(count)],
        "tls": {"certificate": str(folder / f"{endpoint}.pem"), "key": str(folder / f"{endpoint}.key"),
                "ca": str(folder / "ca.pem")},
    })  # fmt: skip


def measured(case: Case, config: Any) -> dict[str, Any]:  # noqa: ANN401 - a PrivateConfig
    """As the client: the row, and what saturates the network."""
    from bench.measure import measure

    row = measure(make_work(case), config, case.repeat).to_dict()
    seconds, sent = row["seconds"]["median"], row["bytes_total"]
    made = {**row, "work": case.work, "rate_mbit": case.rate, "topology": case.topology}
    if case.rate:
        every = sent if case.topology == "loopback" else sent / row["parties"]
        made["saturation"] = every * 8 / (case.rate * 1e6) / seconds
        if case.topology == "switch":
            busiest = max(*row["bytes_per_party"].values(), *row["bytes_received"].values())
            made["saturation_busiest"] = busiest * 8 / (case.rate * 1e6) / seconds
    return made


# -- from outside ------------------------------------------------------------------------------------------------
def run_case(case: Case) -> dict[str, Any]:
    """Set up the network, run, tear it down."""
    text = json.dumps(asdict(case))
    command = [sys.executable, str(Path(__file__).resolve()), "--case", text]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")]), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    if case.topology == "loopback":
        return _figures(loopback_command(case, [*command, "--endpoint", "all"]), environment)
    from private_llm.config import PrivateConfig
    from private_llm.net.authority import make_certificates

    count = PrivateConfig.from_dict(case.config()).parties
    with tempfile.TemporaryDirectory() as folder, switch(count, case.rate) as names, ExitStack() as stack:
        make_certificates(Path(folder), count, 1.0)
        for party in range(count):
            place = ["ip", "netns", "exec", names[party], *command, "--folder", folder, "--endpoint", str(party)]
            process = subprocess.Popen(place, env=environment, stdout=subprocess.DEVNULL)
            stack.callback(_ended, process)
        client = ["ip", "netns", "exec", names[CLIENT_HOST], *command, "--folder", folder, "--endpoint", "client"]
        return _figures(client, environment)


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for a party, which ends with the client's session; stop it if it does not."""
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()


def _figures(command: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def be_endpoint(case: Case, endpoint: str, folder: Path) -> None:
    """What runs inside a namespace."""
    from private_llm.config import PrivateConfig
    from private_llm.net import children
    from private_llm.net.addresses import open_listeners

    if endpoint == "all":
        config = PrivateConfig.from_dict({**case.config(), "party_mode": "processes"})
        with mock.patch.object(children, "open_named_listeners", open_listeners):  # Linux shapes what has ports
            print(json.dumps(measured(case, config)))
    elif endpoint == "client":
        print(json.dumps(measured(case, remote_config(case, "client", folder))))
    else:
        serve(case, int(endpoint), folder)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| work | protocol | network | sessions | median | bytes, all links | saturation |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate = f"{row['topology']}, {row['rate_mbit']:g} Mbit/s" if row["rate_mbit"] else "unlimited"
        full = f"{row['saturation']:.0%}" if row["rate_mbit"] else "-"
        if "saturation_busiest" in row:
            full += f" (busiest direction {row['saturation_busiest']:.0%})"
        lines.append(
            f"| {row['work']} | {row['protocol']} | {rate} "
            f"| {row['parallel_sessions']}{', rotating' * row['rotate_roles']} "
            f"| {row['seconds']['median']:.3f} s | {row['bytes_total'] / 1e6:.1f} MB | {full} |"
        )
    return "\n".join([*lines, "", f"Parties as processes; {taken(rows)}."])


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Keep the rows and put their table into the documentation."""
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every combination that was asked for."""
    for topology, rate, protocol, work, parallel_sessions in itertools.product(
        options.topology, options.rate, options.protocol, options.works, options.parallel_sessions
    ):
        yield Case(work, protocol, parallel_sessions, rate, topology, options.repeat, options.tiny)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rate", type=float, nargs="+", default=[1000.0], help="Mbit/s; 0: as fast as the machine")
    parser.add_argument("--works", nargs="+", default=["relu-64", "vgg16"], choices=list(WORKS))
    parser.add_argument("--protocol", nargs="+", default=["trio"], choices=["trio", "quad"])
    parser.add_argument("--parallel-sessions", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--topology", nargs="+", default=["loopback", "switch"], choices=["loopback", "switch"])
    parser.add_argument("--repeat", type=int, default=5)
    for hidden in ("--case", "--endpoint", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.works, options.parallel_sessions, options.repeat = ["relu-64"], [3], 1
    return options


def main() -> int:
    """Parse, set up, measure, print."""
    options = options_of()
    if options.case:
        be_endpoint(Case(**json.loads(options.case)), options.endpoint, Path(options.folder or "."))
        return 0
    lacking = missing_rights()
    if lacking:
        instead = "`python scripts/bench/run.py NAME --bandwidth 1000` emulates the links"
        print(f"bench_network: {lacking}. Without them, {instead}.")
        return 0 if options.tiny else 1
    rows = []
    for case in cases(options):
        rows.append(run_case(case))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if options.write and not options.tiny:
        write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
