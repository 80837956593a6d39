"""Keys that are padded to lengths which repeat: views of their cache, whatever else holds the same entries."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from private_llm.config import PrivateConfig
from private_llm.kv_cache.buffer import CacheRows, KVBuffer
from private_llm.net.transport import Transport
from private_llm.nn.attention import attend
from private_llm.nn.padded_keys import padded, padded_length
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session
from private_llm.replay.program import Program
from private_llm.replay.program_cache import ProgramCache, programs_of
from private_llm.tensor.dispatch import TorchArg
from private_llm.tensor.fixed import Fixed
from tests.session import run_session
from tests.tensor.secrets import fixed, noise, opened, plain_session

S = plain_session()
B, G, D = 2, 2, 4


def _filled(count: int, seed: int = 1) -> tuple[KVBuffer, Tensor]:
    """A cache of a prompt, and its keys; values are minus the keys."""
    buffer, keys = KVBuffer(), noise(B, G, count, D, seed=seed)
    buffer.append(fixed(S, keys), fixed(S, -keys))
    return buffer, keys


def _grown(buffer: KVBuffer, keys: Tensor, seed: int) -> Tensor:
    """All keys, after one more."""
    new = noise(len(keys), G, 1, D, seed=seed)
    buffer.append(fixed(S, new), fixed(S, -new))
    return torch.cat([keys, new], 2)


def _padded(buffer: KVBuffer, keys: Tensor) -> Fixed:
    """Its padded keys, which are right, and lie where its entries lie."""
    made = _right(buffer.keys, keys)
    held = buffer.keys
    assert held is not None
    assert made.share.parts[0].data_ptr() == held.share.parts[0].data_ptr(), "a view of the cache"
    _right(buffer.values, -keys)
    return made


def _right(held: Fixed | None, keys: Tensor) -> Fixed:
    assert held is not None
    made, more = padded(held), padded_length(keys.shape[2]) - keys.shape[2]
    assert torch.equal(opened(made), torch.cat([keys, keys[:, :, -1:].expand(-1, -1, more, -1)], 2))
    return made


@pytest.mark.parametrize("prompt", [1, 37, 70])
def test_a_cache_that_grows_is_moved_seldom(prompt: int) -> None:
    buffer, keys = _filled(prompt)
    places = set()
    for step in range(150):
        keys = _grown(buffer, keys, step)
        places.add(_padded(buffer, keys).share.parts[0].data_ptr())
    assert len(places) <= 5


def test_entries_that_nobody_adds_to_move_once() -> None:
    """Those of an encoder: the room for copies is made at the first step."""
    buffer, keys = _filled(70)
    _right(buffer.keys, keys)
    first = _padded(buffer, keys)
    assert _padded(buffer, keys).share.parts[0].data_ptr() == first.share.parts[0].data_ptr()


def test_copies_are_those_of_the_newest_entry_that_is_left() -> None:
    buffer, keys = _filled(70)
    keys = _grown(buffer, keys, 2)
    buffer.crop(1)
    _right(buffer.keys, keys[:, :, :-1])
    keys = _grown(buffer, keys[:, :, :-1], 3)
    buffer.keep(torch.arange(2, 70))
    _right(buffer.keys, keys[:, :, 2:70])
    keys = _grown(buffer, keys[:, :, 2:70], 4)
    buffer.select(torch.tensor([1, 0]))
    _right(buffer.keys, keys[[1, 0]])


def _copied(buffer: KVBuffer, keys: Tensor) -> tuple[KVBuffer, Tensor]:
    return buffer.copy(), keys


def _cropped(buffer: KVBuffer, keys: Tensor) -> tuple[KVBuffer, Tensor]:
    twin = buffer.copy()
    twin.crop(20)
    return twin, keys[:, :, :-20]


def _beams(buffer: KVBuffer, keys: Tensor) -> tuple[KVBuffer, Tensor]:
    twin = buffer.copy()
    twin.select(torch.tensor([1, 1, 0]))
    return twin, keys[[1, 1, 0]]


def _evicted(buffer: KVBuffer, keys: Tensor) -> tuple[KVBuffer, Tensor]:
    twin = buffer.copy()
    twin.keep(torch.arange(3, 70))
    return twin, keys[:, :, 3:70]


def _stacked(buffer: KVBuffer, keys: Tensor) -> tuple[KVBuffer, Tensor]:
    other, more = _filled(keys.shape[2], seed=5)
    return KVBuffer.stacked([(buffer, CacheRows(0, 2)), (other, CacheRows(0, 2))]), torch.cat([keys, more])


@pytest.mark.parametrize("steps", [0, 3], ids=["after the prompt", "after steps"])
@pytest.mark.parametrize("twin_of", [_copied, _cropped, _beams, _evicted, _stacked])
def test_caches_with_the_same_entries_do_not_see_each_others_padding(
    twin_of: Callable[[KVBuffer, Tensor], tuple[KVBuffer, Tensor]], steps: int
) -> None:
    one, keys = _filled(70)
    for step in range(steps):
        keys = _grown(one, keys, step)
        _padded(one, keys)
    before, old = one.keys, keys
    two, more = twin_of(one, keys)
    for step in range(20):  # beyond a length that repeats
        if step % 2:
            _right(before, old)  # who still holds what the first one gave
        keys = _grown(one, keys, 10 + step)
        _padded(one, keys)
        more = _grown(two, more, 50 + step)
        _padded(two, more)
        _padded(one, keys)
    assert before is not None
    assert torch.equal(opened(before), old)
    before, old = one.keys, keys
    one.crop(1)
    keys = _grown(one, keys[:, :, :-1], 99)  # as long as before
    _right(before, old)
    _padded(one, keys)
    _padded(two, more)


LONG, HEADS, DEPTH, STEPS = 130, 2, 128, 12
CACHE = HEADS * LONG * DEPTH


class _Largest(TorchDispatchMode):
    """The most elements that an operation of PyTorch wrote."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self, func: TorchArg, types: TorchArg, args: TorchArg = (), kwargs: TorchArg = None
    ) -> TorchArg:  # fmt: skip
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_a_step_copies_no_cache(protocol: str, replay: bool) -> None:
    """Two layers, of which one is copied midway: one program for all caches, which reads them where they lie."""
    config = PrivateConfig.from_dict({"protocol": protocol, "replay": replay})
    largest = [_Largest() for _ in range(3)]
    held: list[ProgramCache | None] = [None] * 3
    ready = threading.Barrier(3)

    def party(session: Session, transport: Transport) -> None:
        def received(count: int) -> Fixed:
            return Fixed(session, session.protocol.receive_input((1, HEADS, count, DEPTH)), session.frac)

        caches = [KVBuffer(), KVBuffer()]
        for cache in caches:
            cache.append(received(LONG), received(LONG))
        for step in range(STEPS):
            if step == 8:
                caches.append(caches[0].copy())
            for cache in caches:
                query, key, value = received(1), received(1), received(1)
                keys, values = cache.append(key, value)
                ended = step in (7, STEPS - 1)
                with largest[session.party] if ended else torch.no_grad():
                    made = attend(query, keys, values, None, DEPTH**-0.5)
                session.protocol.reveal_to_client(made.share)
        ready.wait()
        held[session.party] = programs_of(session)

    def client(end: ClientEnd) -> None:
        def shared(count: int, seed: int) -> Tensor:
            x = noise(1, HEADS, count, DEPTH, seed=seed)
            end.share((x * (1 << config.frac_bits)).round().long())
            return x

        caches = [(shared(LONG, 2 * n), shared(LONG, 2 * n + 1)) for n in range(2)]
        for step in range(STEPS):
            if step == 8:
                caches.append(caches[0])
            for n, cache in enumerate(caches):
                query, *new = (shared(1, 1000 * n + 10 * step + i) for i in range(3))
                keys, values = caches[n] = tuple(torch.cat([x, y], 2) for x, y in zip(cache, new, strict=True))  # type: ignore[assignment]
                want = (query @ keys.mT * DEPTH**-0.5).softmax(-1) @ values
                got = end.open((1, HEADS, 1, DEPTH)).double() / (1 << config.frac_bits)
                assert (got - want).abs().max() < 1e-3

    run_session(config, party, client)
    assert max(each.elements for each in largest) < CACHE / 4
    if replay:
        assert all(found is not None and found.counts["recorded"] == 1 and not found.refused for found in held)
        assert all(found is not None and found.counts["repeated"] == 2 * STEPS + 4 - 4 for found in held)
        regions = [each for found in held if found for each in found._regions.values()]
        programs = [each.compiled.program for each in regions if each.compiled]
        assert len(programs) == 3
        assert all(isinstance(each, Program) and sum(x.memory.size for x in each.inputs) < CACHE for each in programs)


def test_caches_of_many_lengths_have_few_layouts() -> None:
    """A program is recorded for one."""
    found = set()
    for prompt in range(600, 700):
        buffer = KVBuffer()
        for count in (prompt, 1):
            buffer.append(fixed(S, torch.zeros(1, 1, count, 1)), fixed(S, torch.zeros(1, 1, count, 1)))
        assert buffer.keys is not None
        found.add(buffer.keys.share.parts[0].stride(1))
    assert len(found) <= 3
    assert max(found) <= 700 * 1.5 * 9 / 8 + 64
