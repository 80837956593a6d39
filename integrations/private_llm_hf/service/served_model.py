"""A model that a party serves: read from its share file once, and used again whenever the parties connect anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, ShareFileError
from private_llm.protocols.session import NumericContext, RangeChecks, Session
from private_llm.ranges import Ranges
from private_llm_hf.checkpoint.offload import Offloaded
from private_llm_hf.checkpoint.share_files import ShareFile
from private_llm_hf.models.sparse_blocks import adopted
from private_llm_hf.party.model import build_party_model, empty_model, release
from private_llm_hf.party.placement import weights_of_file, weights_of_model
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.patch_plan import check_ring, make_patch_plan
from private_llm_hf.wire.answers import StoredFile


class ServedModel:
    """One model at one party. `session`, `model` and `state` are of the parties' present links."""

    session: Session
    model: PreTrainedModel
    state: SessionState

    def __init__(self, name: str, path: Path, config: PrivateConfig, number: int) -> None:
        """Reads the header and checks the whole file. Raises as `open_model`."""
        self.name, self.file = name, open_model(path, config, number)
        self._built: PreTrainedModel | None = None
        self._offloaded: dict[str, Offloaded] = {}
        self._seeds = False

    @property
    def digest(self) -> str:
        """Of its configuration and class: by this a client names it."""
        return self.file.description.model

    @property
    def stored(self) -> StoredFile:
        """What a client is told of it."""
        return StoredFile(self.digest, self.file.sharing)

    @property
    def ranges(self) -> Ranges:
        """With which it was shared."""
        return Ranges(self.file.description.ranges)

    def begin(self, session: Session) -> None:
        """Build the model for the parties' new session; no cache is left of the one before. Local.

        Raises PatchMismatch for a model that cannot run under the session's settings.
        """
        self.session = replace(session, numerics=NumericContext(), checks=RangeChecks())
        self.session.numerics.ranges, self.session.numerics.lazy_masks = self.ranges, self._seeds
        before = self._built
        if before is None:
            weights = weights_of_file(self.session, self.file)
            self._seeds = self.session.numerics.lazy_masks
            self._offloaded = {name: value for name, value in weights.items() if isinstance(value, Offloaded)}
        else:
            weights = weights_of_model(self.session, before, self._offloaded)
        facts = self.file.description
        self.model = self._built = build_party_model(
            facts.config, facts.class_, weights, self.session, folded=facts.folded
        )
        self.state = SessionState(self.model, self.session)
        if before is not None:
            release(before)


def open_model(path: Path, config: PrivateConfig, number: int) -> ShareFile:
    """A party's share file of a model that it can run.

    Raises ShareFileError for a file that is not this party's or is damaged, ConfigError and PatchMismatch for a model
    that cannot run under these settings.
    """
    file = ShareFile.open(path, config, number)
    facts = file.description
    model, own = empty_model(facts.config, facts.class_, facts.folded), adopted(config, facts.config)
    make_patch_plan(model, own)
    check_ring(model, own)
    return file


def open_models(
    paths: Mapping[str, Path], config: PrivateConfig, number: int
) -> tuple[dict[str, ServedModel], PrivateConfig]:
    """A party's models by digest, and the configuration with which they run.

    Raises as `open_model`, and for a model that is there twice, or is not alone and has predictors.
    """
    found: dict[str, ServedModel] = {}
    for name, path in paths.items():
        model = ServedModel(name, path, config, number)
        if model.digest in found:
            raise ShareFileError(f"models: {name} and {found[model.digest].name} are the same model; want it once")
        found[model.digest] = model
        own = adopted(config, model.file.description.config)
        if own != config and len(paths) > 1:
            raise ConfigError(f"models: {name} was shared with predictors; want it alone in a service")
        config = own
    return found, config
