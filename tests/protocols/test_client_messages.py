"""What a client sends to one party says nothing about its tokens and inputs, whatever the party makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.transport import PassingTransport, Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session
from private_llm.ring.dpf import expand, key_words
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from tests.protocols.test_uniform import CHI_SQUARE_255, RECEIVERS, Tap, assert_unrelated, chi_square
from tests.session import run_session

PARTIES = {"trio": 3, "quad": 4}
every = pytest.mark.parametrize("protocol", list(PARTIES))
RING = Ring(64)
TOKENS = torch.tensor([0, 17, 49, 17])
DOMAIN = 50
N = 4096


def config(protocol: str) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol})


# -- tokens ---------------------------------------------------------------------------------------------------------
def keys_sent(protocol: str, *indices: Tensor, domain: int = DOMAIN) -> list[Tensor]:
    """All keys that each party gets for these indices [T], sent one after the other in one session: [keys, T, words]"""
    tap = Tap()

    def at_party(session: Session, transport: Transport) -> None:
        for each in indices:
            session.protocol.receive_index(each.numel(), domain)
        session.protocol.reveal_to_client(session.protocol.receive_input((1,)))

    def at_client(client: ClientEnd) -> None:
        for each in indices:
            client.share_index(each, domain)
        client.share(torch.zeros(1, dtype=torch.int64))
        client.open((1,))

    run_session(config(protocol), at_party, at_client, wrap=tap)
    payloads = [tap.from_client(party, "index") for party in range(PARTIES[protocol])]
    shape = (-1, indices[0].numel(), key_words(domain))
    return [torch.frombuffer(bytearray(b"".join(each)), dtype=torch.int64).view(shape) for each in payloads]


def readings(keys: Tensor) -> list[Tensor]:
    """Everything [T, DOMAIN] that comes of one key alone, or of two: both roles of each, their sum and difference."""
    alone = [rows for key in keys for rows in expand((key, key), DOMAIN, (0, 1), RING)]
    return alone + [made for a, b in itertools.combinations(alone, 2) for made in (a + b, a - b)]


def standing_out(keys: Tensor) -> set[tuple[int, int]]:
    """Tokens that a reading gives away, with their positions: all entries of the row but one are the same."""
    found = set()
    for rows in readings(keys):
        usual = rows.mode(dim=1, keepdim=True).values
        odd = rows != usual
        for position in torch.nonzero(odd.sum(dim=1) == 1).flatten().tolist():
            found.add((position, int(odd[position].nonzero())))
    return found


@every
def test_no_keys_of_one_party_are_two_halves(protocol: str) -> None:
    """The halves of a pair differ in their roots alone, and summed they give the row of the token."""
    held = keys_sent(protocol, TOKENS, TOKENS)
    everything = {(position, token) for position, token in enumerate(TOKENS.tolist())}
    for party, keys in enumerate(held):
        assert standing_out(keys) == set(), f"party {party} can read tokens"
        for rows in readings(keys):
            assert all(row.unique().numel() == DOMAIN for row in rows), f"party {party} sees a pattern"
        pairs = keys[:, :, 2:].reshape(-1, keys.shape[2] - 2)
        assert pairs.unique(dim=0).shape == pairs.shape, f"party {party} holds two keys of one pair"
    for one, other in itertools.combinations(held, 2):
        assert standing_out(torch.cat([one, other])) == everything, "two parties together read all: the check can see"


@every
@pytest.mark.parametrize("token", [0, 49_999])
def test_keys_are_uniform_and_never_come_twice(protocol: str, token: int) -> None:
    """Every word of a key but two kinds of bits: the cleared control bit of a block, and the corrections of these."""
    domain, count = 50_000, 512
    tokens = torch.full((count,), token)
    for keys in keys_sent(protocol, tokens, tokens, domain=domain):
        words = keys.view(-1, keys.shape[2])
        assert words[:, :2].unique(dim=0).shape[0] == words.shape[0], "a root came twice"
        packed = words.shape[1] - 3
        octets = words.contiguous().numpy().view(np.uint8).reshape(-1, words.shape[1], 8)
        blocks = np.delete(octets, packed, axis=1)
        blocks[:, :packed:2, 0] = np.random.default_rng(0).integers(0, 256, (len(blocks), (packed + 1) // 2))
        assert chi_square(blocks.tobytes()) < CHI_SQUARE_255
        for level in range(packed - 2):
            ones = float(((words[:, packed] >> level) & 1).float().mean())
            assert abs(ones - 0.5) < 6 * 0.5 / len(words) ** 0.5


# -- inputs ---------------------------------------------------------------------------------------------------------
SECTIONS = ("", "plan 1 call 0", "plan 1 call 1", "")
"""A session's requests: with masks of the session's own streams, and of streams of their own."""


def inputs_sent(protocol: str, values: Tensor) -> tuple[list[list[Tensor]], list[list[Seed]]]:
    """What each party gets from a client that shares the same values twice in each section, and its mask keys."""
    tap = Tap()

    def stretched(end: Session | ClientEnd, label: str, work: Callable[[], object]) -> None:
        protocol_end = end.protocol if isinstance(end, Session) else end
        if not label:
            work()
            return
        with protocol_end.section(label):  # type: ignore[union-attr]
            work()

    def at_party(session: Session, transport: Transport) -> None:
        for label in SECTIONS:
            stretched(session, label, lambda: [session.protocol.receive_input((N,)) for _ in range(2)])

    def at_client(client: ClientEnd) -> None:
        for label in SECTIONS:
            stretched(client, label, lambda: [client.share(values) for _ in range(2)])

    run_session(config(protocol), at_party, at_client, wrap=tap)
    parties = range(PARTIES[protocol])
    payloads = [[_elements(each) for each in tap.from_client(party, "input")] for party in parties]
    return payloads, [[Seed(raw) for raw in tap.from_client(party, "input key")] for party in parties]


@pytest.mark.parametrize("altered", [None, 0, 1])
def test_parties_of_quad_compare_every_input(altered: int | None) -> None:
    """A client may give one party another first input than the others, and the same last one."""

    class Altered(PassingTransport):
        inputs = 0

        def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            payload = super()._recv(frm, tag, shape, dtype)
            if tag == "input":
                payload = payload + int(self.me == 1 and self.inputs == altered)
                self.inputs += 1
            return payload

    taken: dict[int, str] = {}

    def at_party(session: Session, transport: Transport) -> None:
        for _ in range(2):
            session.protocol.receive_input((3,))
        taken[session.party] = session.protocol.take_inputs()

    run_session(
        config("quad"), at_party, lambda client: [client.share(torch.arange(3)) for _ in range(2)], wrap=Altered
    )
    assert taken[0] == taken[2]
    assert (taken[0] == taken[1]) == (altered is None)


def _elements(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.int64)


def stripped(message: Tensor, known: Sequence[Seed], label: str, skipped: int) -> list[Tensor]:
    """The message less any of the masks that its receiver knows, which has drawn `skipped` elements before."""
    streams = [key.stream("client input" + (f"/{label}" if label else "")) for key in known]
    masks = [stream.elements(skipped + N, RING)[skipped:] for stream in streams]
    chosen = itertools.product((0, 1), repeat=len(masks))
    return [message - sum((mask for mask, taken in zip(masks, take, strict=True) if taken), 0) for take in chosen]


@every
@pytest.mark.parametrize("secret", [0, 12345])
def test_every_input_has_a_mask_of_its_own_that_its_receiver_lacks(protocol: str, secret: int) -> None:
    """The same values eight times in each of two sessions: whatever a party subtracts, uniform numbers are left, and
    none comes twice."""
    values = torch.full((N,), secret, dtype=torch.int64)
    left: dict[int, list[list[Tensor]]] = {party: [] for party in RECEIVERS[protocol]}
    labels = [label for label in SECTIONS for _ in range(2)]
    for _ in range(2):
        messages, keys = inputs_sent(protocol, values)
        assert len({key.raw() for held in keys for key in held}) == max(len(held) for held in keys)
        assert [party for party, heard in enumerate(messages) if heard] == list(left)
        for party in left:
            for number, (label, message) in enumerate(zip(labels, messages[party], strict=True)):
                left[party].append(stripped(message, keys[party], label, N * labels[:number].count(label)))
    for rests in left.values():
        assert all(chi_square(rest.numpy().tobytes()) < CHI_SQUARE_255 for each in rests for rest in each)
        for alike in zip(*rests, strict=True):  # less the same masks
            assert_unrelated(itertools.combinations([rest.numpy().tobytes() for rest in alike], 2))
            elements = torch.cat(alike)
            assert elements.unique().numel() == elements.numel(), "an element of a mask served twice, at another place"
