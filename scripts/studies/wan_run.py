"""Runs of whole models over a network, for bench_wan.py: in namespaces where this machine has them, else simulated.

In namespaces every party, and the client, is a process in a network namespace of its own (`namespaces.py`), with mutual
TLS. The kernel limits the speed of their links; it delays what parties send if it has netem, and else the parties do,
before they send (`net/transport.py`). Simulated, parties are threads behind a `SlowMesh`, which has a wire of that
speed between any two in each direction, where a machine has one for all.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.link import LinkSpeed, SlowMesh
from namespaces import CLIENT_HOST, address, can_delay, missing_rights, switch
from torch import Tensor
from wan_models import WanModel, plaintext, quiet

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed
from private_llm.kernels.parallel import threads_per_party
from private_llm.protocol_facts import ASSISTED

DRAFTS = 4
"""Tokens that are looked up in the prompt and checked at once."""
Sent = dict[tuple[int, int], int]
_PORT, _PASSES = 7200, "passes.json"
_READY_S, _LOOK_S = 600.0, 0.1
_ENDPOINT = "import json, sys, wan_run; wan_run.be_endpoint(json.load(open(sys.argv[1])), sys.argv[2])"
"""What a process in a namespace runs, with the path of an order and the endpoint's number, or "client"."""
_BURST_KB = 16
"""At least what a link may send at once: more than a millisecond's would hide a slow link behind a token's pauses."""


@dataclass(frozen=True)
class Passes:
    """What a generation took. first, later: bytes by link, and rounds, of the first pass and of all others.

    seconds, tokens: of every later pass. error: largest difference of a logit from plaintext. equal: the same text.
    """

    first_seconds: float
    first: tuple[Sent, int]
    seconds: list[float]
    tokens: list[int]
    later: tuple[Sent, int]
    error: float
    equal: bool

    def to_json(self) -> str:
        """Links as lists."""
        booked = {name: [[*link, n] for link, n in sent.items()] for name, (sent, _) in self._booked().items()}
        rounds = {name: each for name, (_, each) in self._booked().items()}
        return json.dumps({**dataclasses.asdict(dataclasses.replace(self, first=({}, 0), later=({}, 0))),
                           "booked": booked, "rounds": rounds})  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> "Passes":
        """What `to_json` wrote."""
        found = json.loads(text)
        booked, rounds = found.pop("booked"), found.pop("rounds")
        for name in booked:
            found[name] = ({(frm, to): n for frm, to, n in booked[name]}, rounds[name])
        return cls(**found)

    def _booked(self) -> Mapping[str, tuple[Sent, int]]:
        return {"first": self.first, "later": self.later}


@dataclass(frozen=True)
class Place:
    """Where parties run. netem: the kernel delays."""

    kind: Literal["namespaces", "simulated", "loopback"]
    netem: bool = False

    @classmethod
    def here(cls) -> "Place":
        """What this machine and this user allow."""
        return cls("simulated") if missing_rights() else cls("namespaces", can_delay())

    @property
    def words(self) -> str:
        """As a row says it."""
        if self.kind == "simulated":
            return "simulated: threads, a wire of this speed between any two"
        if self.kind == "loopback":
            return "sockets of this machine"
        return "namespaces: netem" if self.netem else "namespaces: tbf, and parties that send later"

    @property
    def party_mode(self) -> str:
        """As a row says it."""
        return "threads" if self.kind == "simulated" else "processes"


def measured_passes(
    model: WanModel, config: PrivateConfig, network: LinkSpeed, prompt: int, new: int, drafts: int, place: Place
) -> Passes:  # fmt: skip
    """Generate `new` tokens greedily after a prompt. drafts: tokens to look up for each pass (0: none).

    Raises ConfigError for a model that is not installed, PartyFailed if a process does not do its part.
    """
    quiet()
    folder = model.folder()
    ids = model.prompt(folder, prompt)
    if place.kind != "namespaces":
        slow = network if place.kind == "simulated" else None
        return _in_this_process(model, config, slow, ids, new, drafts)
    return _in_namespaces(folder, config, network, ids, new, drafts, place.netem)


# -- one generation ------------------------------------------------------------------------------------------------
class _Passes:
    """Takes the time and the costs of every pass: what `generate` puts into a streamer (the prompt comes first)."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a private model
        self._model = model
        self._since: float | None = None
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.costs: list[Any] = []

    def put(self, value: Tensor) -> None:
        """One pass is over."""
        now = time.perf_counter()
        cost = self._model.cost(reset=True).cost
        if self._since is not None:
            self.seconds.append(now - self._since)
            self.tokens.append(value.numel())
            self.costs.append(cost)
        self._since = time.perf_counter()

    def end(self) -> None:
        """Nothing to do."""


def generated(private: Any, plain: Any, ids: Tensor, new: int, drafts: int) -> Passes:  # noqa: ANN401 - models
    """The passes of a private model, its text and logits beside those of the plaintext model."""
    mask, drafting = torch.ones_like(ids), {"prompt_lookup_num_tokens": drafts} if drafts else {}
    limits = {"do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    with torch.no_grad():
        private.generate(ids[:, -4:], **{**limits, "attention_mask": mask[:, -4:]}, max_new_tokens=2)  # makes kernels
        clock = _Passes(private)
        limits |= {"max_new_tokens": new, "min_new_tokens": new, "output_logits": True, "return_dict_in_generate": True}
        made = private.generate(ids, streamer=clock, **limits, **drafting)
        want = plain.generate(ids, **limits).sequences
        logits = plain(made.sequences).logits[:, ids.shape[1] - 1 : -1].double()
    later: Counter[tuple[int, int]] = Counter()
    for cost in clock.costs[1:]:
        later.update(cost.sent)
    error = float((torch.stack(made.logits, dim=1).double() - logits).abs().max())
    return Passes(
        clock.seconds[0], (dict(clock.costs[0].sent), clock.costs[0].rounds), clock.seconds[1:], clock.tokens[1:],
        (dict(later), sum(cost.rounds for cost in clock.costs[1:])), error, bool(torch.equal(made.sequences, want)),
    )  # fmt: skip


def _in_this_process(
    model: WanModel, config: PrivateConfig, network: LinkSpeed | None, ids: Tensor, new: int, drafts: int
) -> Passes:  # fmt: skip
    """The client; parties are threads behind links of this speed, or processes of this machine."""
    from private_llm_hf import patch

    plain = plaintext(model.folder())
    mesh = None if network is None else SlowMesh(config.parties, config.timeout_s, network, instant="control")
    if mesh is None:
        config = dataclasses.replace(config, party_mode="processes")
    private: Any = patch(plain, config, mesh, ranges=None if config.protocol == ASSISTED else model.ranges(config))
    try:
        return generated(private, plain, ids, new, drafts)
    finally:
        private.close()


# -- in namespaces -------------------------------------------------------------------------------------------------
def _in_namespaces(
    folder: str, config: PrivateConfig, network: LinkSpeed, ids: Tensor, new: int, drafts: int, netem: bool
) -> Passes:  # fmt: skip
    from private_llm.net.authority import make_certificates
    from private_llm.net.transport import CLIENT

    parties = config.parties
    remote = dataclasses.replace(
        config, party_mode="remote", hosts=tuple(f"{address(party)}:{_PORT}" for party in range(parties))
    )
    burst = max(_BURST_KB, round(network.bandwidth_mbit / 8))
    with tempfile.TemporaryDirectory(prefix="private-llm-") as place, ExitStack() as stack:
        certificates = make_certificates(Path(place) / "certs", parties)
        order = {
            "config": remote.to_dict(), "shares": _shares(folder, config.protocol).name, "state": place,
            "ids": ids.tolist(), "new": new,
            "drafts": drafts, "folder": folder, "delay_ms": 0.0 if netem else network.latency_ms,
            "tls": [dataclasses.asdict(certificates[end]) for end in (*range(parties), CLIENT)],
        }  # fmt: skip
        text = Path(place) / "order.json"
        text.write_text(json.dumps(order))
        latency = network.latency_ms if netem else 0.0
        names = stack.enter_context(switch(parties, network.bandwidth_mbit, latency, burst))
        for party in range(parties):
            stack.enter_context(_running(names[party], text, str(party), parties))
        _await(Path(place), parties)
        with _running(names[CLIENT_HOST], text, "client", parties) as client:
            status = client.wait(_READY_S * 6)
        if status:
            raise PartyFailed(f"wan: the client's process ended with status {status}")
        return Passes.from_json((Path(place) / _PASSES).read_text())


@lru_cache(maxsize=2)
def _shares(folder: str, protocol: str) -> tempfile.TemporaryDirectory[str]:
    """Share files of a model, which are the same for every network; they go with this process."""
    from private_llm_hf.api import share_checkpoint

    place = tempfile.TemporaryDirectory(prefix="private-llm-")
    share_checkpoint(folder, place.name, PrivateConfig.from_dict({"protocol": protocol}))
    return place


@contextmanager
def _running(namespace: str, order: Path, endpoint: str, parties: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is an endpoint, in a namespace, ended with the context."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", _ENDPOINT, str(order), endpoint]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads_per_party(parties))}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _await(state: Path, parties: int) -> None:
    """Until all parties are ready. Raises PartyFailed if one says that it cannot be, or they take too long."""
    until = time.monotonic() + _READY_S
    while missing := [party for party in range(parties) if not (state / f"up{party}").exists()]:
        for party in missing:
            if (state / f"failed{party}").exists():
                raise PartyFailed(f"party {party} did not start: {(state / f'failed{party}').read_text()}")
        if time.monotonic() > until:
            raise PartyFailed(f"parties {missing}: not ready within {_READY_S:g} s")
        time.sleep(_LOOK_S)


def be_endpoint(order: dict[str, Any], endpoint: str) -> None:
    """What runs inside a namespace: a party's service until it is ended, or the client's one generation."""
    quiet()
    if endpoint == "client":
        from private_llm_hf import AutoPrivateModelForCausalLM

        config = PrivateConfig.from_dict({**order["config"], "tls": order["tls"][-1]})
        plain, ids = plaintext(order["folder"]), torch.tensor(order["ids"])
        with AutoPrivateModelForCausalLM.from_pretrained(f"{order['shares']}/client", config) as private:
            passes = generated(private, plain, ids, order["new"], order["drafts"])
        (Path(order["state"]) / _PASSES).write_text(passes.to_json())
        return
    from delayed_links import serve

    from private_llm.net.addresses import listen, parse_address

    party, config = int(endpoint), PrivateConfig.from_dict(order["config"])
    listener = listen(parse_address(config.hosts[party]), anywhere=True)
    named = {"tls": order["tls"], "models": {"model": order["shares"]}, "limits": {}, "state": order["state"]}
    serve(config, party, listener, order["delay_ms"], **named)
