"""A model that a party serves: read from its share file once, and used again whenever the parties connect anew."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, ShareFileError
from private_llm.protocols.session import NumericContext, RangeChecks, Session
from private_llm.ranges import Ranges
from private_llm_hf.checkpoint.share_files import ShareFile
from private_llm_hf.models.sparse_blocks import adopted
from private_llm_hf.party.loading import LoadedModel
from private_llm_hf.party.model import empty_model, release
from private_llm_hf.party.placement import weights_of_file
from private_llm_hf.patch_plan import check_ring, make_patch_plan
from private_llm_hf.wire.answers import StoredFile
from private_llm_hf.wire.commands import LoadModel


class ServedModel:
    """One model at one party. `session`, `model` and `state` are of the parties' present links."""

    session: Session
    model: PreTrainedModel
    state: LoadedModel

    def __init__(self, name: str, path: Path, config: PrivateConfig, number: int) -> None:
        """Reads the header and checks the whole file. Raises as `open_model`."""
        self.name, self.file = name, open_model(path, config, number)
        description = self.file.description
        self.digest, self.ranges = description.model, Ranges(description.ranges)
        self.stored = StoredFile(self.digest, self.file.sharing)
        self._built: LoadedModel | None = None

    def begin(self, session: Session) -> None:
        """Build the model for a new session, without caches. Local. Raises PatchMismatch where it cannot run."""
        self.session, before = replace(session, numerics=NumericContext(), checks=RangeChecks()), self._built
        if before is None:
            description, weights = LoadModel(self.file.description, None), weights_of_file(self.session, self.file)
            self.state = self._built = LoadedModel(self.session, description, weights)
        else:
            self.state = self._built = before.again(self.session)
            release(before.model)
        self.model = self.state.model


def open_model(path: Path, config: PrivateConfig, number: int) -> ShareFile:
    """A party's share file. Raises ShareFileError; ConfigError or PatchMismatch for a model that cannot run here."""
    file = ShareFile.open(path, config, number)
    facts = file.description
    model, own = empty_model(facts.config, facts.class_, facts.folded), adopted(config, facts.config)
    make_patch_plan(model, own)
    check_ring(model, own)
    return file


def open_models(
    paths: Mapping[str, Path], config: PrivateConfig, number: int
) -> tuple[dict[str, ServedModel], PrivateConfig]:
    """Models by digest, and their configuration. Raises as `open_model`, and for doubles, predictors beside others."""
    if not paths:
        raise ConfigError("models: got none; want the share file of at least one model, {name: path}")
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
