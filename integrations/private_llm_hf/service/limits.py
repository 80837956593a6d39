"""How much of the parties' memory clients may take, what they took, and whom a party keeps apart.

Every party states what it allows, and the smallest numbers hold at all of them: what follows from them must be the same
everywhere, or one party would run a request that another has refused. All sizes are public facts.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Annotated

from transformers import PretrainedConfig

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.kernels.address import memory_bytes
from private_llm.net.transport import Transport
from private_llm.protocols.registry import protocol_spec
from private_llm_hf.models.inputs import max_positions
from private_llm_hf.service.settings import ServiceSettings
from private_llm_hf.wire.codec import Between, Message
from private_llm_hf.wire.commands import MOST_BYTES, Call, recv_message, send_message

MOST_HANDLES = 64  # caches and encoder outputs that one session may keep, however little they hold
MOST_EDITS = 64  # changes of caches between two calls; a beam search or a draft needs one or two for each call
_EDITED = 4  # positions that the changes between two calls may copy, in parts of those that a session may keep
_CACHES = 4
"""One part in so many of a machine's memory is for caches, unless the settings say otherwise; a cache that grows, or
changes its company, is there twice for a moment, and buffers have room for half as much again."""
_CALL = 64  # a call takes up to 20 times its largest array (measured, attention under trio); so many fill the memory
_IMAGE = 8  # elements of the largest array of an image's network, for each of the image, about
_MESSAGE = 1 << 20
_MESSAGE_EACH = 16  # bytes of a command, and for each position of it: a mask and position numbers, as JSON

LimitSize = Annotated[int, Between(1, 1 << 62)]


class Limits(Message):
    """Told to each other party. positions: cached by one session, over all rows. of_user: by a named user's. in_all: by
    all clients'. elements: of the largest array of one call or batch.
    """

    positions: LimitSize
    of_user: LimitSize
    in_all: LimitSize
    elements: LimitSize

    @classmethod
    def own(cls, settings: ServiceSettings, config: PrivateConfig, models: Iterable[PretrainedConfig]) -> "Limits":
        """What this party allows: its settings, else what its memory holds."""
        found = list(models)
        memory, each = memory_bytes(), max(position_bytes(model, config) for model in found)
        in_all = settings.positions_in_all or max(1, memory // _CACHES // each)
        longest = max(max_positions(model) or in_all for model in found)
        positions = settings.positions or min(in_all, settings.rows * longest)
        return cls(
            positions, max(positions, -(-in_all // 2)), in_all,
            settings.elements or max(1, memory // _CALL // (config.ring // 8)),
        )  # fmt: skip

    @property
    def message_bytes(self) -> int:
        """Bytes of a client's largest command."""
        return min(MOST_BYTES, _MESSAGE + _MESSAGE_EACH * self.positions)

    def check_edits(self, held: int, edits: int) -> None:
        """Raise DomainError for more changes of caches than a client needs. held: positions that they copy."""
        if edits > MOST_EDITS:
            raise DomainError(f"caches: got more than {MOST_EDITS} changes between two calls")
        if held > _EDITED * self.positions:
            raise DomainError(
                f"caches: the changes between two calls copy {held} positions; this service takes "
                f"{_EDITED * self.positions}"
            )

    def check_call(self, config: PretrainedConfig, call: Call, past: int) -> None:
        """Raise DomainError for a call that would take too much memory and time."""
        size = elements_of(config, call, past)
        if size > self.elements:
            raise DomainError(
                f"this call makes arrays of {size} elements; this service takes {self.elements}: want fewer rows, a "
                "shorter text, or logits_to_keep"
            )


def meet(links: Transport, parties: int, own: Limits) -> Limits:
    """The limits that hold at all parties: the smallest that any of them states."""
    others = [party for party in range(parties) if party != links.me]
    for party in others:
        send_message(links, party, own)
    each: list[Limits] = [own, *(recv_message(links, party, (Limits,)) for party in others)]
    return Limits(*(min(getattr(one, field.name) for one in each) for field in fields(Limits)))


def position_bytes(model: PretrainedConfig, config: PrivateConfig) -> int:
    """Bytes that one position of a cache takes at one party."""
    text = model.get_text_config()
    layers = _number(text, 1, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _number(text, 1, "hidden_size", "n_embd", "d_model")
    heads = _number(text, 1, "num_attention_heads", "n_head", "num_heads")
    groups = _number(text, heads, "num_key_value_heads")
    size = _number(text, max(1, hidden // heads), "head_dim", "d_kv")
    return 2 * layers * groups * size * (config.ring // 8) * max(1, len(protocol_spec(config.protocol).mask_holders))


def elements_of(config: PretrainedConfig, call: Call, past: int) -> int:
    """Elements of the largest array that a call makes, about: scores of attention, logits, hidden states."""
    shape = call.secret[0].shape
    if len(shape) not in (2, 3) or call.secret[0].name == "pixel_values":
        return _IMAGE * math.prod(shape)
    rows, length = shape[:2]
    text = config.get_text_config()
    heads = _number(text, 1, "num_attention_heads", "n_head", "num_heads")
    hidden = _number(text, 1, "hidden_size", "n_embd", "d_model")
    wide = max(_number(text, 4 * hidden, "intermediate_size", "n_inner", "d_ff"), hidden)
    keep = call.public.get("logits_to_keep", 0)
    kept = keep if isinstance(keep, int) and 0 < keep < length else length
    logits = kept * _number(text, 1, "vocab_size") if "logits" in call.outputs else 0
    return rows * max(heads * length * (past + length), length * wide, logits)


def _number(config: PretrainedConfig, default: int, *names: str) -> int:
    """The first of these facts that a configuration has."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), default)


class KVCacheQuota:
    """What sessions keep at all parties: the same account everywhere, since it changes with batches alone."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._held: dict[tuple[str, str, str], int] = {}  # by owner, user and model

    def reserve(self, owner: str, user: str, model: str, positions: int) -> None:
        """A session keeps so many positions of a model from now on. Raises DomainError for more than it may."""
        others = {key: held for key, held in self._held.items() if (key[0], key[2]) != (owner, model)}
        own = positions + sum(held for key, held in others.items() if key[0] == owner)
        of_user = positions + sum(held for key, held in others.items() if key[1] == user)
        in_all = positions + sum(others.values())
        if own > self.limits.positions:
            raise DomainError(f"caches: got {own} positions; this service keeps {self.limits.positions} for a session")
        if user and of_user > self.limits.of_user:
            raise DomainError(
                f"caches: the sessions of user {user!r} would hold {of_user} positions; this service keeps "
                f"{self.limits.of_user} for a user"
            )
        if in_all > self.limits.in_all:
            raise DomainError(
                f"caches: the sessions of all clients would hold {in_all} positions; this service keeps "
                f"{self.limits.in_all}: try again later"
            )
        self._held = {**others, (owner, user, model): positions}

    def release(self, owner: str) -> None:
        """A session is over."""
        self._held = {key: held for key, held in self._held.items() if key[0] != owner}


# -- users in whose batches the parties' records differed (quad) ------------------------------------------------------
# Inputs of a client that do not fit together look as a party's lie does, and nobody can tell which it was. So the users
# of such a batch run alone for a while: the next time it is one of them only. Who is alone when it happens again is not
# let in for a while. Both times grow with each time. Clients without a name cannot be told apart and stay in.
_ALONE_S, _BARRED_S, _GROWS = 60.0, 600.0, 4.0  # the first time alone and barred, and the factor of the next
_LONGEST_S = 86400.0


@dataclass
class _User:
    times: int = 0
    alone: int = 0
    alone_until: float = 0.0
    barred_until: float = 0.0


class ClientQuarantine:
    """What a party remembers of users; one thread writes. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users: dict[str, _User] = {}

    def record_abort(self, users: Iterable[str]) -> None:
        """The records of a batch differed that served these users."""
        now, named = self._clock(), {user for user in users if user}
        for user in named:
            found = self._users.setdefault(user, _User())
            found.times += 1
            found.alone_until = now + min(_LONGEST_S, _ALONE_S * _GROWS**found.times)
            if len(named) == 1:
                found.alone += 1
                if found.alone > 1:
                    found.barred_until = now + min(_LONGEST_S, _BARRED_S * _GROWS ** (found.alone - 2))

    def runs_alone(self, user: str) -> bool:
        """Whether a user's requests share no batch now."""
        found = self._users.get(user)
        return found is not None and self._clock() < found.alone_until

    def seconds_barred(self, user: str) -> float:
        """Seconds for which a user is not let in."""
        found = self._users.get(user)
        return 0.0 if found is None else max(0.0, found.barred_until - self._clock())
