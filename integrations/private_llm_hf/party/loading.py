"""A model at a party: from its share file, from what a client sends, or from another session of the party."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.session import Session
from private_llm.protocols.weight_sharing import KEY_BYTES, assemble, keys_held, pieces, sends_parts, unpacked_key
from private_llm.ranges import Ranges
from private_llm.ring.prg import Seed
from private_llm.tensor.fixed import Fixed
from private_llm_hf.checkpoint.offload import Offloaded, OffloadFile
from private_llm_hf.party.model import build_party_model
from private_llm_hf.party.model_description import take_described, validate_model_description
from private_llm_hf.party.placement import Weights, keeps_seeds, warn_of_copies, weights_of_model
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.token_sharding.cut import stop_after
from private_llm_hf.wire.commands import Description, LoadModel, recv_weight


class LoadedModel(SessionState):
    """A model that was built for a session, and what is kept for it."""

    def __init__(
        self, session: Session, loaded: LoadModel, weights: Weights, progress: Callable[[], None] = lambda: None,
        offloaded: dict[str, Offloaded] | None = None,
    ) -> None:  # fmt: skip
        """weights: emptied. offloaded: as first read. Raises PatchMismatch, ConfigError (`build_party_model`)."""
        facts = loaded.description
        session.numerics.ranges = Ranges(facts.ranges)
        stored = {name: value for name, value in weights.items() if isinstance(value, Offloaded)}
        self.loaded, self.offloaded = loaded, stored if offloaded is None else offloaded
        model = build_party_model(facts.config, facts.class_, weights, session, progress, facts.folded)
        if loaded.stop_after is not None:
            stop_after(model, loaded.stop_after)
        super().__init__(model, session)

    def again(self, session: Session, progress: Callable[[], None] = lambda: None) -> "LoadedModel":
        """The same shares as a model for another session; nothing is copied, no cache goes along. Local."""
        session.numerics.lazy_masks = self.session.numerics.lazy_masks
        weights = weights_of_model(session, self.model, self.offloaded)
        return LoadedModel(session, self.loaded, weights, progress, self.offloaded)


def receive_weights(
    session: Session, links: Transport, description: Description, progress: Callable[[], None]
) -> Weights:
    """The weights of the model that a client describes, as it sends them; the session learns whether masks stay seeds.
    Raises PatchMismatch for a model that this party does not build, and for another weight than the next.
    """
    config, public = session.config, session.config.weights == "public"
    count, sends = keys_held(config, session.party), sends_parts(config, session.party)
    parts = sends + (count if config.weights_at_rest == "resident" else 0)
    each = torch.float32.itemsize if public else session.ring.bytes * max(1, parts)
    wanted = validate_model_description(description, each, whole=config.offload_folder is None)
    session.numerics.lazy_masks = keeps_seeds(session, wanted.values())
    raw = [links.recv(CLIENT, "weight key", (KEY_BYTES,), torch.uint8) for _ in range(0 if public else count)]
    keys, ranges = [unpacked_key(key) for key in raw], Ranges(description.ranges)
    warn_of_copies(session, keys)
    offload = None if config.offload_folder is None else OffloadFile(config.offload_folder)
    found: Weights = {}
    while (header := recv_weight(links)) is not None:
        progress()
        name, shape, sent = header.name, take_described(wanted, header), None
        if public:
            sent = _in_pieces(links, shape, torch.int32).view(torch.float32)
        elif sends:
            sent = _in_pieces(links, shape, session.ring.dtype)
        made = functools.partial(_weight, session, keys, shape, name, ranges)
        if offload is None:
            found[name] = made(sent)
            continue
        if sent is not None:
            offload.write(name, sent)
        found[name] = Offloaded(shape, functools.partial(_read, made, offload, name))
    return found


def _in_pieces(links: Transport, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for piece in pieces(whole):
        piece.copy_(links.recv(CLIENT, "weight", tuple(piece.shape), dtype))
    return whole


def _weight(
    session: Session, keys: list[Seed], shape: tuple[int, ...], name: str, ranges: Ranges, sent: Tensor | None
) -> Fixed | Tensor:
    """One weight from what the client sent for it; masks come from their seeds."""
    if session.config.weights == "public" and sent is not None:
        return sent
    share = assemble(session.config, session.party, keys, sent, shape, name, session.numerics.lazy_masks)
    return Fixed(session, share, ranges.frac_of_weight(name, session.frac))


def _read(made: Callable[[Tensor | None], Fixed | Tensor], offload: OffloadFile, name: str) -> Fixed | Tensor:
    return made(offload.read(name))
