"""Four parties, one of them lies: whatever it alters in whatever message, nobody opens a result.

The cheater's code is honest but for what its transport alters (`cheating.Liar`), and it never warns the others, so
what is seen here is what the honest parties find out by themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed, ProtocolAbort, TransportError
from private_llm.kernels.forms import Conv2d
from private_llm.net.transport import CLIENT
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.quad.records import QuadParty
from private_llm.protocols.share import Share, ShuffledBits, owner_order
from tests.protocols.cheating import Mislabels, Outcome, Program, Swaps, added, play, replaced, replayed
from tests.protocols.parties import ring_values
from tests.recording import Alter, flip

N = 64
"""Elements: words and packed fields without unused bits."""
PARTIES = range(4)
SPEAKERS = (1, 2, 3)
"""Party 0 sends nothing while it computes."""
RINGS = [64, 32]


def config(ring: int, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": "quad", "ring": ring, "frac_bits": 12, **more})


def _bit(p: Protocol, bits: object) -> Share:
    return p.inject(bits, None, [0], [1])  # type: ignore[arg-type]


def _square(x: Share) -> Share:
    return x.map(lambda part: part.view(8, 8))


def _convolution(p: Protocol, x: Share, y: Share) -> Share:
    """Four groups of 16 outputs."""
    image, kernel = x.map(lambda part: part.view(1, 4, 4, 4)), y.map(lambda part: part.view(16, 1, 2, 2))
    return _flat(p.conv2d(image, kernel, Conv2d(stride=(2, 2), groups=4), 4))


def _there_and_back(p: Protocol, x: Share, y: Share) -> Share:
    order = p.permutation(N)
    return p.shuffle(p.add(p.shuffle(x, order), y), order, undo=True)


def _opened(p: Protocol, x: Share, y: Share) -> Share:
    """What is opened decides what is added."""
    found = p.open_shuffled(p.shuffle_bits(p.msb(x, bits=9), p.permutation(N)))
    return p.add_public(y, found.view(-1).to(p.ring.dtype))  # type: ignore[union-attr]


def _nothing(p: Protocol, x: Share, y: Share) -> Share:
    """Random bits that are both set and not."""
    bits = p.random_bits(1, N)
    return p.add(x, _bit(p, p.and_(bits, p.invert(bits))))


def _units(p: Protocol, x: Share, y: Share) -> Share:
    """As `opened_units` does it: bits are moved in blocks, changed, moved back and opened in their owner's order."""
    moved = p.shuffle_bits(p.msb(x, bits=9), p.permutation(N, blocks=4))
    back = p.unshuffle_bits(ShuffledBits(p.invert(moved.bits), moved.order))
    found = p.open_shuffled(ShuffledBits(back, owner_order(N)))
    return p.add_public(y, found.view(-1).to(p.ring.dtype))  # type: ignore[union-attr]


def _flat(x: Share) -> Share:
    return x.map(lambda part: part.reshape(-1))


@dataclass(frozen=True)
class Case:
    """A program over two shares of N elements and the tags of the messages that belong to it alone."""

    name: str
    program: Program
    tags: tuple[str, ...]
    every: int = 1
    adder: str = "prefix"

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("mul", lambda p, x, y: p.mul(x, y), ("mul",)),
    Case("mul and divide", lambda p, x, y: p.mul(x, y, 7), ("mul",)),
    Case("truncate", lambda p, x, y: p.truncate(x, 7), ("truncate",)),
    Case("matmul", lambda p, x, y: _flat(p.matmul(_square(x), _square(y))), ("matmul",)),
    Case("matmul and divide", lambda p, x, y: _flat(p.matmul(_square(x), _square(y), 9)), ("matmul",)),
    Case("convolution", _convolution, ("conv2d",)),
    Case("square", lambda p, x, y: p.poly(x, [1, 2, 3]), ("poly",)),
    Case("cubic and divide", lambda p, x, y: p.poly(x, [1, 2, 3, 4], 5), ("poly",)),
    Case("sign", lambda p, x, y: _bit(p, p.msb(x)), ("msb",)),
    Case("sign of two bits", lambda p, x, y: _bit(p, p.msb(x, bits=2)), ("msb",)),
    Case("three thresholds", lambda p, x, y: p.inject(p.msb(x, [0, 3, 9], 11), None, [0] * 3, [1, 2, 4]), ("msb",)),
    Case("sign by ripples", lambda p, x, y: _bit(p, p.msb(x, [0, 3], 5).row(1)), ("a2b", "and"), adder="ripple"),
    Case("and", lambda p, x, y: _bit(p, p.and_(p.msb(x), p.invert(p.msb(y)))), ("and",)),
    Case("random bits", _nothing, ("and",)),
    Case("all bits", lambda p, x, y: _bit(p, p.a2b(x).row(9)), ("a2b", "and"), every=13),
    Case("bits to numbers", lambda p, x, y: _bit(p, p.msb(x, bits=2)), ("inject",)),
    Case("chosen numbers", lambda p, x, y: p.inject(p.msb(x, [0, 1], 9), y, [3, 0], [7, 1]), ("inject",)),
    Case("shuffle", lambda p, x, y: p.shuffle(x, p.permutation(N)), ("shuffle",)),
    Case("shuffle and back", _there_and_back, ("shuffle",)),
    Case("shuffled bits opened", _opened, ("shuffle", "open")),
    Case("units opened", _units, ("shuffle", "open")),
    Case("chosen and divided", lambda p, x, y: p.inject(p.msb(x, bits=9), y, [1], [0], 3), ("inject",)),
]


def inputs(ring: int) -> list[Tensor]:
    return [ring_values(ring, (N,), 8, 1), ring_values(ring, (N,), 8, 2)]


def honest(case: Case, ring: int) -> Outcome:
    outcome = play(config(ring, adder=case.adder), inputs(ring), case.program, (N,))
    assert outcome.errors == {}
    assert outcome.result is not None
    return outcome


def bits_of(nbytes: int, number: int) -> tuple[int, ...]:
    """Which bits of a message to flip: one in the middle and the very last (the top bit of a ring element)."""
    return ((number * 37 + 5) % (8 * nbytes), 8 * nbytes - 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_flipped_bit_of_any_message(case: Case, ring: int) -> None:
    reference, tried = honest(case, ring), 0
    for cheater in PARTIES:
        for number in reference.steps(cheater, case.tags)[:: case.every]:
            for bit in bits_of(reference.sent(cheater)[number].nbytes, number):
                settings = config(ring, adder=case.adder)
                outcome = play(settings, inputs(ring), case.program, (N,), cheater, flip(number, bit))
                assert outcome.caught(cheater), (cheater, number, bit, outcome.errors)
                tried += 1
    assert tried >= 8


BROAD = Case(
    "a bit of everything",
    lambda p, x, y: p.inject(p.msb(p.mul(x, y, 3), [0, 5]), p.poly(y, [1, 2, 3], 1), [1, 2], [0, 1], 2),
    (),
)


UNITS = 3
"""Two honest runs of it may differ by that: a unit of the inner division, twice times at most 3 / 4, and one more."""


@pytest.fixture(scope="module")
def broad() -> Outcome:
    return honest(BROAD, 64)


def lie(cheater: int, alter: Alter | None = None, **more: object) -> Outcome:
    return play(config(64), inputs(64), BROAD.program, (N,), cheater, alter, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("cheater", SPEAKERS)
def test_lies_that_are_more_than_a_bit(broad: Outcome, cheater: int) -> None:
    """Errors that keep linear relations, elements in another order, older messages again, all zeros."""
    sent = [(message.dtype, message.nbytes) for message in broad.sent(cheater)]
    replays = 0
    for number in broad.steps(cheater):
        lies = [added(number, 1), added(number, -(2**63)), replaced(number, torch.zeros_like)]
        if sent[number][1] > 8:
            lies.append(replaced(number, lambda payload: payload.roll(1)))
        if sent[number] in sent[:number]:
            lies.append(replayed(number))
            replays += 1
        for alter in lies:
            assert lie(cheater, alter).caught(cheater), number
    assert replays


@pytest.mark.parametrize("cheater", PARTIES)
def test_every_message_of_keys_verdict_and_opening(broad: Outcome, cheater: int) -> None:
    """A flipped bit of a key may go unnoticed where the key is not used; the result is then right."""
    count = len(broad.sent(cheater))
    for number in [*range(broad.started[cheater]), *range(broad.ended[cheater], count)]:
        for bit in (3, 8 * broad.sent(cheater)[number].nbytes - 1):
            outcome = lie(cheater, flip(number, bit))
            if number >= broad.ended[cheater]:
                assert outcome.stopped(cheater), (number, bit)
            elif outcome.result is not None:
                assert int((outcome.result - broad.result).abs().max()) <= UNITS  # type: ignore[operator]


@pytest.mark.parametrize("cheater", SPEAKERS)
def test_two_messages_in_each_others_place(broad: Outcome, cheater: int) -> None:
    """Neighbours on a link; each arrives under the other's name."""
    sent, tried = broad.sent(cheater), 0
    for first in broad.steps(cheater):
        second = next((n for n in broad.steps(cheater) if n > first and sent[n].peer == sent[first].peer), None)
        if second is None:
            continue

        class FromHere(Swaps):
            number = first

        assert lie(cheater, liar=FromHere, timeout=2).caught(cheater), first
        tried += 1
    assert tried >= 6


@pytest.mark.parametrize("cheater", SPEAKERS)
def test_messages_of_another_length_or_name(broad: Outcome, cheater: int) -> None:
    for number in broad.steps(cheater)[::3]:
        outcome = lie(cheater, replaced(number, lambda payload: payload.view(-1)[:-1].contiguous()))
        assert outcome.caught(cheater)

    class FromHere(Mislabels):
        start = broad.started[cheater] + 1

    outcome = lie(cheater, liar=FromHere)
    assert outcome.caught(cheater)
    assert any(isinstance(error, TransportError) for error in outcome.errors.values())


@pytest.mark.parametrize("cheater", PARTIES)
def test_a_silent_party_stops_everybody(broad: Outcome, cheater: int) -> None:
    last = len(broad.sent(cheater)) - 1
    for number in {(broad.started[cheater] + last) // 2, last}:

        def stop(index: int, tag: str, payload: Tensor, number: int = number) -> Tensor:
            if index == number:
                raise RuntimeError("silence")
            return payload

        outcome = lie(cheater, stop, timeout=0.7)
        assert outcome.stopped(cheater)
        assert isinstance(outcome.errors[CLIENT], PartyFailed)


@pytest.mark.parametrize("public", [False, True])
def test_one_flipped_bit_of_a_lookup(public: bool) -> None:
    table, index = ring_values(64, (9, 8), 64, 3), (torch.tensor([0, 8, 4, 4, 1, 7, 2, 3]), 9)
    program = lambda p, t, i: _flat(p.lookup(i, table if public else t))  # noqa: E731
    reference = play(config(64), [table], program, (N,), secret_index=index)
    assert torch.equal(reference.result, table[index[0]].view(-1))  # type: ignore[arg-type]
    for cheater in SPEAKERS:
        for number in reference.steps(cheater):
            for bit in bits_of(reference.sent(cheater)[number].nbytes, number):
                outcome = play(config(64), [table], program, (N,), cheater, flip(number, bit), secret_index=index)
                assert outcome.caught(cheater), (cheater, number, bit)


# -- no selective failure: whether a lie is noticed never depends on what is hidden ------------------------------------


def exhausted(
    program: Program, values: list[Tensor], tags: tuple[str, ...], bits: Callable[[int], Iterable[int]],
    cheaters: Iterable[int] = SPEAKERS,
) -> int:  # fmt: skip
    """Flip the bits that `bits` names for a message's length, in every message of `tags`, for every input, one by one.

    Returns the number of sessions; each must be caught.
    """
    settings, caught = config(32 if values[0].dtype == torch.int32 else 64, adder="prefix"), 0
    reference = play(settings, [values[0]], program, (1,))
    assert reference.errors == {}
    for value, cheater in itertools.product(values, cheaters):
        for number in reference.steps(cheater, tags):
            for bit in bits(reference.sent(cheater)[number].nbytes):
                outcome = play(settings, [value], program, (1,), cheater, flip(number, bit))
                assert outcome.caught(cheater), (int(value), cheater, number, bit)
                caught += 1
    return caught


def _rows(nbytes: int) -> range:
    """The parallel session of the only element in each row of words."""
    return range(0, 8 * nbytes, 64)


def test_every_sign_of_three_bits_notices_every_lie() -> None:
    """One block of two positions: 3 monomials and the top bit each to parties 2 and 0, one row otherwise."""
    values = [torch.tensor([v]) for v in range(-4, 4)]
    assert exhausted(lambda p, x: _bit(p, p.msb(x, bits=3)), values, ("msb",), _rows) == 8 * (4 + 4 + 1 + 1 + 1)


@pytest.mark.full  # three bits are in the gate
def test_every_sign_of_five_bits_notices_every_lie_of_the_helper() -> None:
    """Blocks of one and three positions and a join: 8 monomials, 1 product, the top bit; 3 + 1 rows opened."""
    values = [torch.tensor([v]) for v in range(-16, 16)]
    assert exhausted(lambda p, x: _bit(p, p.msb(x, bits=5)), values, ("msb",), _rows, [3]) == 32 * (10 + 4)


def test_every_division_notices_every_lie() -> None:
    """Both bits of the fields that carry wraps, and the low bits of elements."""
    values = [torch.tensor([v]) for v in range(-3, 4)]
    assert exhausted(lambda p, x: p.truncate(x, 2), values, ("truncate",), lambda nbytes: (0, 1)) == 7 * 5 * 2


@pytest.mark.parametrize("ring", RINGS)
def test_every_chosen_number_notices_every_lie(ring: int) -> None:
    """Errors of the top bit vanish wherever they meet an even factor: no message may meet a secret one."""
    dtype = torch.int64 if ring == 64 else torch.int32
    values = [torch.tensor([v], dtype=dtype) for v in (-2, -1, 0, 1)]
    program = lambda p, x: p.inject(p.msb(x, bits=4), x, [2], [4])  # noqa: E731
    assert exhausted(program, values, ("inject",), lambda nbytes: (0, 8 * nbytes - 1)) == 4 * 5 * 2


def test_every_product_notices_every_lie() -> None:
    values = [torch.tensor([v]) for v in (-1, 0, 1, 2)]
    program = lambda p, x: p.mul(x, p.mul_public(x, 2))  # noqa: E731
    assert exhausted(program, values, ("mul",), lambda nbytes: (0, 63)) == 4 * 5 * 2


@pytest.mark.parametrize("case", [CASES[8], CASES[12], CASES[15]], ids=str)
def test_a_lie_of_party_three_is_itself_the_difference_of_records(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What party 0 records differs from what party 1 records by the very error, whatever it meets on its way."""
    records: dict[int, list[Tensor]] = {}
    original = QuadParty._confirm

    def confirm(self: QuadParty, value: Tensor) -> None:
        records.setdefault(self.party, []).append(value.reshape(-1).clone())
        original(self, value)

    monkeypatch.setattr(QuadParty, "_confirm", confirm)
    reference = honest(case, 64)
    for number in [n for n in reference.steps(3, case.tags) if reference.sent(3)[n].peer == 0]:
        records.clear()
        words = reference.sent(3)[number].nbytes // 8
        play(config(64), inputs(64), case.program, (N,), 3, flip(number, 64 * (words // 3) + 7))
        first = next(n for n, (a, b) in enumerate(zip(records[0], records[1], strict=False)) if not torch.equal(a, b))
        error = records[0][first] - records[1][first]
        place = words // 3
        assert abs(int(error[place])) == 1 << 7
        assert not error[:place].any()


def test_the_verdict_does_not_tell_a_cheater_whether_its_guess_was_right() -> None:
    """Party 2 alters a coefficient it tells party 0, which alters party 0's value by that times a secret mask bit;
    it then guesses the product in its own view. Whatever it guesses, the answer is the same."""
    reference = honest(CASES[12], 64)
    number = next(n for n in reference.steps(2, ("and",)) if reference.sent(2)[n].peer == 0)
    for guess in (0, 1):

        def patch(protocol: Protocol, guess: int = guess) -> None:
            confirm = protocol._confirm  # type: ignore[attr-defined]
            protocol._confirm = lambda values: confirm(values ^ guess)  # type: ignore[attr-defined]

        for _ in range(4):
            outcome = play(config(64), inputs(64), CASES[12].program, (N,), 2, flip(number, 0), patch=patch)
            assert outcome.caught(2)
            assert {type(outcome.errors[p]) for p in (0, 1, 3)} <= {ProtocolAbort, PartyFailed}
