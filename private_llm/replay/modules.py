"""Modules of a model as units: their inputs and results are secret tensors, and what they do besides is small.

Beside its results a call may leave an input with fewer fractional bits, and put off a check of ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from private_llm.protocols.session import Session
from private_llm.replay.units import Owner, Replays, replays_of
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor

MOST_ROWS = 64
"""Rows of inputs that are repeated: tokens of a step. Prompts are longer, and Python is little of their time."""

_UNTOUCHED = -1


def repeated(
    forward: Callable[..., Any], name: str, session: Session, kind: Hashable, weights: Sequence[tuple[str, object]]
) -> Callable[..., Any]:  # fmt: skip
    """`forward`, repeated as a program where its arguments are secret tensors of few rows and nothing else.

    kind: what the module is, equal for modules that compute the same. weights: its own, by names relative to it; unless
    all of them are shares, `forward` stays as it is.
    """
    shares = [(own, each.content) for own, each in weights if isinstance(each, SecretTensor)]
    if len(shares) < len(weights):
        return forward
    parts = [part for _, fixed in shares for part in fixed.share.parts]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
    numbers = {place: number for number, place in enumerate(storages)}
    layout = tuple([
        (numbers[part.untyped_storage().data_ptr()], part.storage_offset(), tuple(part.shape), part.stride())
        for part in parts
    ])  # fmt: skip
    alike = (kind, tuple([(own, fixed.frac) for own, fixed in shares]), layout)
    owner = Owner(name, tuple(storages.values()))

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a module's own signature
        if kwargs or not args or not all(map(_small, args)):
            return forward(*args, **kwargs)
        replays = replays_of(session)
        if replays is None:
            return forward(*args)
        pending = session.known.pending
        held = None if pending is None else next((n for n, x in enumerate(args) if x is pending[0]), _UNTOUCHED)
        if held == _UNTOUCHED:  # a check of something else was put off, which may happen inside
            return forward(*args)
        return _Call(forward, owner, (alike, _ranges(session, name)), args).made(session, replays, held)

    return run


def _ranges(session: Session, name: str) -> Hashable:
    """What is known of a module and those within it, by names relative to it."""
    known = session.known.ranges.modules
    if not known:
        return ()
    group, _, own = name.rpartition(".")
    names = [f"{group}.{each}" for each in own.split("+")]
    return tuple([
        (each[len(group) :] if "+" in own else each[len(name) :], tuple(sorted(found.items())))
        for each, found in known.items()
        if each in names or each.startswith(f"{name}.")
    ])  # fmt: skip


def _small(x: object) -> bool:
    if not isinstance(x, SecretTensor) or x.hidden is not None:
        return False
    shape = x.shape
    return len(shape) > 0 and 0 < x.content.numel() <= MOST_ROWS * shape[-1]


class _Call:
    """One call of a module with secret tensors."""

    def __init__(
        self, forward: Callable[..., Any], owner: Owner, alike: Hashable, args: Sequence[SecretTensor]
    ) -> None:  # fmt: skip
        self._forward, self._owner, self._alike, self._args = forward, owner, alike, args
        self._odd: Any = None

    def made(self, session: Session, replays: Replays, held: int | None) -> Any:  # noqa: ANN401 - what it returns
        """The module's results. held: which argument's check is put off."""
        known = self._known = session.known
        bits = None if known.pending is None else known.pending[1]
        self._bits, self._held = bits, held
        key = (self._alike, held, bits, tuple([x.coarse for x in self._args]))
        values, facts = replays.run(session, key, [x.content for x in self._args], self._compute, self._owner)
        if facts is None:
            return self._odd
        alone, coarse, rebound, put_off = facts
        results = [SecretTensor(value) for value in values[: len(coarse)]]
        for result, flag in zip(results, coarse, strict=True):
            result.coarse = flag
        for (number, flag), value in zip(rebound, values[len(coarse) :], strict=True):
            self._args[number].settle(value, flag)
        if put_off is None:
            known.pending = None
        else:
            kind, number, more = put_off
            known.pending = ((results if kind == "result" else self._args)[number], more)
        return results[0] if alone else tuple(results)

    def _compute(self, inputs: Sequence[Fixed]) -> tuple[Sequence[Fixed], Hashable]:
        """Call the module with tensors of its own, and tell what became of them."""
        known = self._known
        args = [SecretTensor(x) for x in inputs]
        for mine, given in zip(args, self._args, strict=True):
            mine.coarse = given.coarse
        if self._held is not None and self._bits is not None:
            known.pending = (args[self._held], self._bits)
        made = self._forward(*args)
        alone = not isinstance(made, tuple | list)
        results, pending = [made] if alone else list(made), known.pending
        rebound = [(n, x) for n, (x, was) in enumerate(zip(args, inputs, strict=True)) if x.content is not was]
        places = [] if pending is None else [("result", n) for n, x in enumerate(results) if x is pending[0]]
        places += [] if pending is None else [("input", n) for n, x in enumerate(args) if x is pending[0]]
        known_results = all(isinstance(x, SecretTensor) and x.hidden is None for x in results)
        if not known_results or (pending is not None and not places):
            for n, x in rebound:
                self._args[n].settle(x.content, x.coarse)
            if places and pending is not None and places[0][0] == "input":
                known.pending = (self._args[places[0][1]], pending[1])
            self._odd = made
            return [], None
        known.pending = None
        put_off = None if pending is None else (*places[0], pending[1])
        flags = tuple([(n, x.coarse) for n, x in rebound])
        values = [*(x.content for x in results), *(x.content for _, x in rebound)]
        return values, (alone, tuple([x.coarse for x in results]), flags, put_off)
