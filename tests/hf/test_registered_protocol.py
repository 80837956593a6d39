"""A protocol that this library does not know, registered from outside, runs everywhere: nothing else names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from private_llm_hf import GeneratePlan, PrivateConfig, patch
from private_llm_hf.tools.estimate import estimate
from torch import Tensor

from private_llm.errors import ConfigError, DomainError, PartyFailed, ProtocolAbort, UnsupportedOp
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocol_facts import ProtocolFacts, Threat
from private_llm.protocols.plain import CheckedPlain, Plain, PlainClient
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import ProtocolSpec, protocol_names, protocol_spec, register, unregister
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.share import Share, cleartext
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm.threat import entries, markdown
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, worst
from tests.protocols.parties import ring_values, run_ring
from tests.session import run_session

THREAT = Threat("toy", "protocol", "nobody", (("both parties", "everything"),), "a test", "protocol='toy'")
PLAIN = PrivateConfig(protocol="plain", insecure=True, debug_ranges=True)
FACTS = ProtocolFacts("toy", 2, THREAT, rings=(64,), hides=False)


class Twin(Plain):
    """One of two parties that compute the same in the clear."""

    name = "toy"


class TwinClient(PlainClient):
    """Gives both parties the same, and compares what they answer."""

    def share(self, elements: Tensor) -> None:
        for party in range(2):
            self.transport.send(party, "input", elements.contiguous())

    def share_index(self, indices: Tensor, domain: int) -> None:
        for party in range(2):
            self.transport.send(party, "index", indices.reshape(-1).contiguous())

    def open(self, shape: tuple[int, ...]) -> Tensor:
        return open_both(self.transport, self.ring, shape)


def open_both(transport: Transport, ring: Ring, shape: tuple[int, ...]) -> Tensor:
    first, second = (transport.recv(party, "reveal", shape, ring.dtype) for party in range(2))
    if not first.is_meta and not torch.equal(first, second):
        raise ProtocolAbort("the twins opened different results")
    return first


TOY = ProtocolSpec(
    FACTS,
    party=lambda setup: Twin(setup.party, setup.transport, setup.ring),
    client=TwinClient,
    open=open_both,
    hold=lambda config, party, masks, part: Share((part,)),
)


@pytest.fixture
def config() -> Iterator[PrivateConfig]:
    """Settings of the toy protocol, which is registered for the time of a test."""
    register(TOY)
    try:
        yield PrivateConfig(protocol="toy", insecure=True, timeout_s=20)
    finally:
        unregister("toy")


def test_calls_cannot_be_preprocessed_without_a_helper() -> None:
    with pytest.raises(UnsupportedOp, match="no separate preprocessing; want 'trio', 'quad' or 'dealer'"):
        TwinClient(LocalMesh(2).transport(CLIENT), Ring(64)).section("a call")


def test_a_model_generates_and_its_cost_is_known_before(config: PrivateConfig) -> None:
    model = tiny.build("llama")
    with patch(model, config) as private, torch.no_grad():
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
    with patch(model, replace(config, calibrate=False)) as private:
        private(torch.ones(1, 6, dtype=torch.int64))
        spent = private.cost().cost
    assert {(0, CLIENT), (1, CLIENT), (CLIENT, 0), (CLIENT, 1)} <= set(spent.sent)
    assert estimate(type(model), model.config, replace(config, calibrate=False), sequence=6).costs.cost == spent


def test_primitives_run_at_both_parties(config: PrivateConfig) -> None:
    x = ring_values(64, (5, 3), 20)
    assert torch.equal(run_ring(config, [x], lambda p, v: p.mul(v, v, 8), (5, 3)).result, (x * x) >> 8)


def test_its_client_compares(config: PrivateConfig) -> None:
    def at_party(session: Session, transport: Transport) -> None:
        transport.send(CLIENT, "reveal", torch.tensor([session.party]))

    with pytest.raises(ProtocolAbort, match="twins"):
        run_session(config, at_party, lambda client: client.open((1,)))


def test_the_command_line_offers_it(config: PrivateConfig, run: Callable[..., str]) -> None:
    assert "toy" in run("estimate", "opt-125m", "--seq", "8", "--new", "0", "--protocol", "toy", "--json")
    assert "works with 64 bits" in run("estimate", "opt-125m", "--protocol", "toy", "--ring", "32", code=2)
    wrong = run("estimate", "opt-125m", "--protocol", "toys", code=2)
    assert "'toys' is not one of" in wrong
    assert "'toy'" in wrong
    assert "## toy (protocol)" in markdown()
    assert THREAT in entries()


def test_what_it_cannot_do_is_refused(config: PrivateConfig) -> None:
    for wrong, reason in (
        ({"insecure": False}, "'toy' hides nothing"),
        ({"ring": 32, "frac_bits": 12}, "works with 64 bits"),
        ({"debug_ranges": True}, "needs protocol='plain'"),
        ({"matmul": "remask"}, "a way of protocol='dealer'"),
        ({"parallel_sessions": 2, "rotate_roles": True}, "want protocol 'trio' or 'quad'"),
        ({"split": 1}, "want a protocol of secret shares"),
        ({"party_mode": "remote", "hosts": ("a:1",)}, "want 2 for 'toy'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            replace(config, **wrong)
    no_helper = pytest.raises(ConfigError, match="want protocol 'trio', 'quad' or 'dealer'")
    with patch(tiny.build("llama"), config) as private, no_helper:
        private.preprocess(GeneratePlan(prompt=4, new_tokens=2))


def test_ranges_are_checked_as_the_facts_say_or_the_session_is_refused() -> None:
    class Watched(CheckedPlain):
        name = "toy"

    def program(p: Protocol, x: Share) -> Share:
        return p.mul(x, x, 8)

    values = torch.full((2,), 1 << 40)
    toy = replace(TOY, facts=replace(FACTS, checks_ranges=True))
    checking = replace(
        toy,
        party=lambda setup: Watched(setup.party, setup.transport, setup.ring),
        hold=lambda config, party, masks, part: cleartext(part, config.debug_ranges),
    )
    for spec, error, reason in (
        (toy, ConfigError, r"protocol 'toy' says checks_ranges=True, and its end \(Twin\) checks none"),
        (checking, DomainError, "a product .*reaches 2"),
    ):
        register(spec)
        try:
            debug = PrivateConfig(protocol="toy", insecure=True, timeout_s=20, debug_ranges=True)
            with pytest.raises(error, match=reason):
                run_ring(debug, [values], program, (2,))
        finally:
            unregister("toy")
    session = Session(PLAIN, Watched(0, LocalMesh(2).transport(0), Ring(64)))
    large = SecretTensor(Fixed(session, cleartext(torch.full((2,), 1 << 62), watched=True), session.frac))
    with pytest.raises(DomainError, match="the result"):
        large + large  # local: no method of the protocol runs


def test_a_session_is_refused_without_the_primitives_of_every_model() -> None:
    """As soon as it begins, and with a flag of a primitive, which nothing would read."""

    class Unlike(Protocol):
        name = "toy"
        receive_input = Plain.receive_input
        reveal = Plain.reveal

    class Flagged(Twin):
        has_piecewise = True

    for end, reason in (
        (Unlike, r"'toy': its end \(Unlike\) lacks add_public, bilinear, mul, .*, which every model needs"),
        (Flagged, r"'toy': its end \(Flagged\) sets has_piecewise, which nothing reads: .* \(`primitives`\)"),
    ):
        register(replace(TOY, party=lambda setup, end=end: end(setup.party, setup.transport, setup.ring)))  # type: ignore[misc]
        try:
            with pytest.raises(ConfigError, match=reason):
                meta_session(PrivateConfig(protocol="toy", insecure=True), 0)
        finally:
            unregister("toy")


def test_who_needs_a_missing_primitive_is_named(config: PrivateConfig) -> None:
    class Fewer(Twin):
        msb = Protocol.msb

    unregister("toy")
    register(replace(TOY, party=lambda setup: Fewer(setup.party, setup.transport, setup.ring)))
    reason = "msb: protocol 'toy' lacks it here, which model.layers.0.input_layernorm needs; want another"
    with patch(tiny.build("llama"), config) as private, pytest.raises(UnsupportedOp, match=reason):
        private(torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.full
def test_parties_in_fresh_processes_do_not_know_it(config: PrivateConfig, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PartyFailed, match="did not start"):
        patch(tiny.build("llama"), replace(config, party_mode="processes"))
    assert "protocol: got 'toy'; want one of 'trio'" in capfd.readouterr().err


def test_names_are_taken_once_and_unknown_ones_are_refused(config: PrivateConfig) -> None:
    assert protocol_spec("toy") is TOY
    for name in ("toy", "trio", "cascade"):
        spec = replace(TOY, facts=replace(FACTS, name=name, threat=replace(THREAT, name=name)))
        with pytest.raises(ConfigError, match=f"'{name}' is registered already"):
            register(spec)
    unregister("toy")
    try:
        wanted = "want one of 'trio', 'quad', 'dealer', 'plain', 'cascade', 'assisted'"
        for refused in (
            lambda: protocol_spec("toy"),
            lambda: unregister("toy"),
            lambda: replace(config, parallel_sessions=1),
        ):
            with pytest.raises(ConfigError, match=f"got 'toy'; {wanted}"):
                refused()
        assert protocol_names() == ("trio", "quad", "dealer", "plain")
    finally:
        register(TOY)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"parties": 0}, "got 0 parties"),
        ({"threat": replace(THREAT, name="other")}, "threat entry"),
        ({"helper": 2}, "different parties of 0 to 1"),
        ({"offline_receivers": (1,)}, "no receivers without a helper"),
        ({"helper": 1, "offline_receivers": (1,)}, "different parties"),
        ({"key_receivers": (1,)}, "no receivers without a helper"),
        ({"helper": 0, "key_receivers": (1, 2)}, r"key_receivers \(1, 2\); want different parties"),
        ({"helper": 1, "dealer": True}, "a dealer is party 0"),
    ],
)
def test_facts_that_contradict_each_other_are_refused(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(FACTS, **wrong)  # type: ignore[arg-type]


def test_masks_are_held_by_parties() -> None:
    with pytest.raises(ConfigError, match="want parties of 0 to 1"):
        replace(TOY, mask_holders=((0, 2),))
