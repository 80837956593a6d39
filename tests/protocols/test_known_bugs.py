"""Bugs that other libraries published about themselves, or that were seen in the reference code: one test each.

First the security fixes listed in MP-SPDZ's change log, as far as they apply to protocols without MACs, sacrifices,
shuffles and homomorphic encryption; then the weak points of the reference code of Trio and Quad.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ProtocolAbort, TransportError
from private_llm.net.transport import CLIENT
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.quad.records import TranscriptMac
from private_llm.protocols.share import Share
from private_llm.ring.prg import Prg, Seed
from tests.protocols.cheating import Outcome, play, replaced
from tests.protocols.parties import ring_values, run_ring
from tests.protocols.test_uniform import CHI_SQUARE_255, chi_square
from tests.recording import Message, RecordingTransport, flip

QUAD, TRIO = PrivateConfig(protocol="quad"), PrivateConfig()
both = pytest.mark.parametrize("config", [TRIO, QUAD], ids=["trio", "quad"])


def all_kinds(p: Protocol, x: Share, y: Share) -> Share:
    """Every primitive once; exact, but for at most one unit of the two divisions."""
    bits = p.and_(p.a2b(x).row(7), p.invert(p.msb(y)))
    chosen = p.inject(bits, y, [1], [0])
    square = p.poly(p.truncate(chosen, 4), [0, 0, 1])
    return p.mul(p.matmul(square.map(lambda t: t.view(-1, 1)), p.public(torch.ones(1, 1))).map(_row), y, 3)


def _row(part: Tensor) -> Tensor:
    return part.reshape(-1)


def run(config: PrivateConfig, x: Tensor, y: Tensor, **more: object) -> Outcome:
    return play(config, [x, y], all_kinds, tuple(x.shape), **more)  # type: ignore[arg-type]


def received(outcome: Outcome, party: int) -> list[Message]:
    kept = [m for m in outcome.recorders[party].messages if m.direction == "received"]
    return [m for m in kept if m.tag not in ("hello", "cipher key", "input key", "group key", "group digest", "input")]


# -- MP-SPDZ's list ----------------------------------------------------------------------------------------------


def test_missing_check_in_probabilistic_truncation() -> None:
    """Both exchanges of a division are covered, the small one that only carries wraps too."""
    x = ring_values(64, (64,), 30)
    program = lambda p, a: p.truncate(p.mul(a, a, 5), 9)  # noqa: E731
    reference = play(QUAD, [x], program, (64,))
    for cheater in (1, 2):
        between = [n for n in reference.steps(cheater) if reference.sent(cheater)[n].peer == 3 - cheater]
        assert len(between) == 3
        for number in between:
            assert play(QUAD, [x], program, (64,), cheater, flip(number, 1)).caught(cheater)


def test_mac_key_kept_after_a_failure() -> None:
    """Keys of a view are used for one tag, and a session that found a lie opens nothing any more.

    Party 3's lie to party 2 makes parties 1 and 2 hold one wrong value between them, and later records agree again.
    """
    pair = Seed.fresh()
    mine, theirs = TranscriptMac(pair), TranscriptMac(pair)
    tags = []
    for _ in range(3):
        for view in (mine, theirs):
            view.absorb(torch.tensor([1, 2, 3]))
        tags.append(mine.close())
        assert theirs.close() == tags[-1]
    assert len(set(tags)) == 3
    again: list[BaseException] = []

    def stubborn(p: Protocol, x: Share) -> Share:
        square = p.mul(x, x)
        for _ in range(2):
            try:
                p.reveal_to_client(square)
            except ProtocolAbort as error:
                again.append(error)
        return square

    x = ring_values(64, (4,), 10)
    reference = play(QUAD, [x], lambda p, a: p.mul(a, a), (4,))
    number = next(n for n in reference.steps(3) if reference.sent(3)[n].peer == 2)
    outcome = play(QUAD, [x], stubborn, (4,), 3, flip(number))
    assert outcome.caught(3)
    assert any("earlier in this session" in str(error) for error in again)


@both
def test_remotely_caused_buffer_overflows(config: PrivateConfig) -> None:
    """A message of another length or type is refused, never copied into what was expected."""
    x = ring_values(64, (64,), 10)
    reference = run(config, x, x)
    sender = 3 if config is QUAD else 0
    for lie in (
        lambda payload: torch.cat([payload.view(-1), payload.view(-1)]),
        lambda payload: payload.view(-1)[:1].contiguous(),
        lambda payload: payload.contiguous().view(torch.int32),
        lambda payload: payload[:0].contiguous(),
    ):
        outcome = run(config, x, x, cheater=sender, alter=replaced(reference.steps(sender)[0], lie))
        assert outcome.caught(sender)
        assert any(isinstance(error, TransportError) for error in outcome.errors.values())


@both
def test_missing_randomisation_before_revealing_to_a_client(config: PrivateConfig) -> None:
    """A product opens as a fresh uniform mask and the value plus that mask, not as what the parties computed with."""
    x = torch.full((4096,), 3)
    seen = []
    for _ in range(2):
        outcome = play(config, [x], lambda p, a: p.mul(a, a), (4096,), payloads=True)
        sent = [m for p in range(config.parties) for m in outcome.recorders[p].messages if m.peer == CLIENT]
        opened = [m.payload for m in sent if m.direction == "sent" and m.nbytes == 8 * 4096]
        assert len(opened) == 2
        for payload in opened:
            assert payload is not None
            assert chi_square(payload.numpy().tobytes()) < CHI_SQUARE_255
        seen += [payload.numpy().tobytes() for payload in opened if payload is not None]
    assert len(set(seen)) == 4


def test_missing_checks_where_several_threads_compute() -> None:
    """Two sessions side by side, one with a liar: each has its own records and its own verdict."""
    from threading import Thread

    x, y = ring_values(64, (64,), 20, 1), ring_values(64, (64,), 20, 2)
    number = run(QUAD, x, y).steps(1)[4]
    outcomes: dict[bool, Outcome] = {}

    def session(lies: bool) -> None:
        outcomes[lies] = run(QUAD, x, y, cheater=1, alter=flip(number)) if lies else run(QUAD, x, y)

    threads = [Thread(target=session, args=(lies,)) for lies in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes[True].caught(1)
    assert outcomes[False].errors == {}


def test_race_between_check_and_opening() -> None:
    """No party sends the client anything before it has read the verdict."""
    x = ring_values(64, (64,), 20)
    outcome = run(QUAD, x, x)
    for party in range(4):
        transcript = [(m.direction, m.tag, m.peer) for m in outcome.recorders[party].messages]
        opening = min(n for n, (way, tag, _) in enumerate(transcript) if way == "sent" and tag.startswith("reveal"))
        last_check = max(n for n, (_, tag, _) in enumerate(transcript) if tag == "verify")
        assert last_check < opening


@both
def test_race_on_memory_that_was_sent(config: PrivateConfig) -> None:
    """Whoever sends or receives a tensor leaves its memory alone afterwards: others may read it much later."""
    kept: list[tuple[int, str, Tensor, Tensor]] = []

    class Keeper(RecordingTransport):
        def _send(self, to: int, tag: str, payload: Tensor) -> None:
            kept.append((self.me, f"{tag} sent", payload, payload.clone()))
            super()._send(to, tag, payload)

        def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            payload = super()._recv(frm, tag, shape, dtype)
            kept.append((self.me, f"{tag} received", payload, payload.clone()))
            return payload

    x, y = ring_values(64, (20_000,), 16, 1), ring_values(64, (20_000,), 16, 2)
    run_ring(config, [x, y], all_kinds, (20_000,), wrap=Keeper)
    assert len(kept) > 50
    assert not [(party, tag) for party, tag, now, then in kept if not torch.equal(now, then)]


@both
def test_insufficient_drowning(config: PrivateConfig) -> None:
    """Masks cover the whole ring: the top byte of what an evaluator receives is uniform for a secret of few bits."""
    x = torch.zeros(1 << 15, dtype=torch.int64)
    outcome = play(config, [x], lambda p, a: p.mul(a, a, 18), tuple(x.shape), payloads=True)
    for party in range(config.parties):
        for message in received(outcome, party):
            if message.nbytes == 8 << 15 and message.payload is not None:
                top = message.payload.numpy().view(np.uint8)[7::8]
                assert chi_square(top.tobytes()) < CHI_SQUARE_255


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Keys of all streams that are opened, in order."""
    keys: list[bytes] = []
    original = Prg.__init__

    def init(self: Prg, key: bytes) -> None:
        keys.append(key)
        original(self, key)

    monkeypatch.setattr(Prg, "__init__", init)
    return keys


@both
def test_random_elements_not_accounted_and_reused_triples(config: PrivateConfig, streams: list[bytes]) -> None:
    """A stream belongs to one purpose of one group (masks of inputs: its parties and the client), and no message
    repeats: the same product of the same operands, three times over, shares nothing."""
    x = torch.full((512,), 7)

    def thrice(p: Protocol, a: Share) -> Share:
        return p.add(p.mul(a, a, 2), p.add(p.mul(a, a, 2), p.mul(a, a, 2)))

    outcome = play(config, [x], thrice, (512,), payloads=True)
    assert max(streams.count(key) for key in set(streams)) == config.parties
    for party in range(config.parties):
        payloads = [m.payload.numpy().tobytes() for m in received(outcome, party) if m.payload is not None]
        long = [payload for payload in payloads if len(payload) >= 16]
        assert len(set(long)) == len(long)


def test_insufficient_sacrifice() -> None:
    """Nothing is checked by a sample or by a part of a tag: every bit of every 16-byte tag counts."""
    x = ring_values(64, (4,), 10)
    program = lambda p, a: p.mul(a, a)  # noqa: E731
    reference = play(QUAD, [x], program, (4,))
    for cheater in (1, 2):
        (number,) = [n for n, m in enumerate(reference.sent(cheater)) if m.tag == "verify"]
        assert reference.sent(cheater)[number].nbytes == 16
        for bit in range(0, 128, 5):
            assert play(QUAD, [x], program, (4,), cheater, flip(number, bit)).caught(cheater)


def test_missing_check_of_binary_gates() -> None:
    x = ring_values(64, (64,), 60)
    program = lambda p, a: p.inject(p.and_(p.msb(a), p.msb(a)), None, [0], [1])  # noqa: E731
    reference = play(QUAD, [x], program, (64,))
    for cheater in (1, 2, 3):
        for number in reference.steps(cheater, ("and",)):
            for parallel_session in range(0, 64, 9):
                assert play(QUAD, [x], program, (64,), cheater, flip(number, parallel_session)).caught(cheater)


@both
def test_skewed_random_bits(config: PrivateConfig) -> None:
    """Rows of masked bits are balanced in every parallel session, for secrets that are all equal."""
    n = 1 << 16
    x = torch.full((n,), -5)
    outcome = play(config, [x], lambda p, a: p.inject(p.msb(a), None, [0], [1]), (n,), payloads=True)
    rows = 0
    for party in range(config.parties):
        for message in received(outcome, party):
            if message.tag == "msb" and message.payload is not None:
                assert chi_square(message.payload.numpy().tobytes()) < CHI_SQUARE_255
                rows += message.nbytes // (n // 8)
    assert rows >= 100


def test_unchecked_inputs() -> None:
    """A client that hands parties 1 and 2 different values is found out before anything is opened."""
    from private_llm.net.local import LocalMesh
    from private_llm.protocols.session import join, join_as_client
    from tests.net.mesh import run_threads

    mesh = LocalMesh(4, timeout=10)
    x = ring_values(64, (8,), 20)
    ends = {p: mesh.transport(p) for p in range(4)}

    def party(transport: object) -> type[BaseException] | None:
        protocol = join(QUAD, transport.me, transport).protocol  # type: ignore[attr-defined, arg-type]
        share = protocol.receive_input((8,))
        try:
            protocol.reveal_to_client(share)
        except ProtocolAbort as error:
            return type(error)
        return None

    def client(transport: object) -> None:
        recorder = RecordingTransport(transport)  # type: ignore[arg-type]
        end = join_as_client(QUAD, recorder)
        recorder._alter = flip(recorder._sent + 1)
        end.share(x)

    raised = run_threads({**ends, CLIENT: mesh.transport(CLIENT)}, {**dict.fromkeys(range(4), party), CLIENT: client})
    assert [raised[p] for p in range(4)] == [ProtocolAbort] * 4


@both
def test_over_revealing_when_opening_linear_combinations(config: PrivateConfig) -> None:
    """Opening x + y sends one value's worth, made of sums: neither summand's masked value nor mask is sent."""
    x, y = ring_values(64, (64,), 20, 1), ring_values(64, (64,), 20, 2)
    outcome = play(config, [x, y], lambda p, a, b: p.add(a, b), (64,), payloads=True)
    assert torch.equal(outcome.result, x + y)  # type: ignore[arg-type]
    sent = [m for p in range(config.parties) for m in outcome.recorders[p].messages if m.peer == CLIENT]
    inputs = {m.payload.numpy().tobytes() for m in sent if m.tag == "input" and m.payload is not None}
    opened = [m.payload for m in sent if m.tag == "reveal" and m.payload is not None and m.nbytes == 512]
    assert len(opened) == 2
    assert not inputs & {payload.numpy().tobytes() for payload in opened}
    assert torch.equal(opened[1] - opened[0], x + y) or torch.equal(opened[0] - opened[1], x + y)


# -- the reference code's weak points ----------------------------------------------------------------------------------


def test_equal_differences_do_not_cancel() -> None:
    """Party 3 shifts the values that party 0 records with parties 1 and 2 by the same amount: xors would cancel."""
    x = ring_values(64, (4,), 10)
    program = lambda p, a: p.mul(a, a)  # noqa: E731
    reference = play(QUAD, [x], program, (4,))
    (number,) = [n for n in reference.steps(3) if reference.sent(3)[n].peer == 0]
    assert play(QUAD, [x], program, (4,), 3, flip(number)).caught(3)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_short_messages_and_last_bytes_are_checked(count: int) -> None:
    """No buffer is too short to be compared: the last bit of the only, the third and the seventh element."""
    config = PrivateConfig(protocol="quad", ring=32, frac_bits=12)
    x = ring_values(32, (count,), 10)
    program = lambda p, a: p.mul(a, a)  # noqa: E731
    reference = play(config, [x], program, (count,))
    for cheater in (1, 2, 3):
        for number in reference.steps(cheater):
            last = 8 * reference.sent(cheater)[number].nbytes - 1
            assert play(config, [x], program, (count,), cheater, flip(number, last)).caught(cheater)


@both
def test_wrong_indices_and_wrong_terms(config: PrivateConfig) -> None:
    """Honest parties agree, and all elements are right, where every element differs from its neighbours."""
    x, y = ring_values(64, (1001,), 16, 1), ring_values(64, (1001,), 16, 2)
    outcome = run(config, x, y)
    assert outcome.errors == {}
    chosen = ((x >> 7) & 1) * (y >= 0) * y
    exact, above = ((value * value * y) >> 3 for value in (chosen >> 4, (chosen >> 4) + 1))
    low, high = torch.minimum(exact, above), torch.maximum(exact, above) + 1
    assert torch.all((outcome.result >= low) & (outcome.result <= high))  # type: ignore[operator]


@both
def test_constant_seeds(config: PrivateConfig) -> None:
    """Two sessions on the same inputs share no message of more than a byte."""
    x = torch.full((64,), 5)
    first, second = (run(config, x, x, payloads=True) for _ in range(2))

    def payloads(outcome: Outcome) -> set[bytes]:
        kept = [m for p in range(config.parties) for m in outcome.recorders[p].messages]
        return {m.payload.numpy().tobytes() for m in kept if m.payload is not None and m.nbytes > 1}

    assert not payloads(first) & payloads(second)


@both
def test_uninitialised_shares(config: PrivateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody filled holds a pattern here; no result may contain it."""
    original = torch.empty
    pattern = 0x5A5A5A5A

    def poisoned(*size: object, **kwargs: object) -> Tensor:
        made: Tensor = original(*size, **kwargs)  # type: ignore[call-overload]
        return made.fill_(pattern & 0x7F) if made.is_cpu and made.dtype == torch.uint8 else _filled(made, pattern)

    monkeypatch.setattr(torch, "empty", poisoned)
    test_wrong_indices_and_wrong_terms(config)


def _filled(made: Tensor, pattern: int) -> Tensor:
    return made.fill_(pattern) if made.is_cpu and not made.is_floating_point() else made
