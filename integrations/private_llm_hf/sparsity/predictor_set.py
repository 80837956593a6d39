"""All predictors of one model in a folder: predictors.safetensors and predictors.json, no pickle.

predictors.json (version 2):

- `format`, `version`: what and which.
- `model`: `name`; `class`, `config` and their digest `model`, as `describe` makes them; `weights`, the `WeightsDigest`
  of the model's weights.
- `tensors`: the `WeightsDigest` of the tensor file, so that the two files belong together.
- `predictors`: in the order in which the model runs them, `site` (names of modules, widths, layer: `Site`), `config`
  (`PredictorConfig`), `measures` (`Measures` by the name of the data they were taken on).

predictors.safetensors holds, float32, `<site>.fc1.weight` [rank, width], `<site>.fc1.bias` [rank], `<site>.fc2.weight`
[units, rank] and `<site>.fc2.bias` [units], where `<site>` is the site's name and units are blocks where neurons are
predicted in blocks. `<site>.grouping`, int32 [neurons], is there where blocks are not of neighbours: unit u is the
neurons grouping[u * block : (u + 1) * block]. Version 1 had no groupings and is read as it is.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import ConfigError, refuse_unknown
from private_llm_hf.checkpoint.model_spec import describe, model_class
from private_llm_hf.checkpoint.weights import WeightList, WeightsDigest, skeleton, stream_loaded
from private_llm_hf.sparsity.predictor import Measures, Predictor
from private_llm_hf.sparsity.settings import PredictorConfig
from private_llm_hf.sparsity.sites import Site

FORMAT, VERSION = "private-llm predictors", 2
_FACTS, _TENSORS = "predictors.json", "predictors.safetensors"
_READ = (1, VERSION)
_FILE: dict[str, type] = {"format": str, "version": int, "model": dict, "tensors": str, "predictors": list}
_MODEL: dict[str, type] = {"class": str, "config": dict, "model": str, "weights": str}
_ROW: dict[str, type] = {"site": dict, "config": dict, "measures": dict}
_SITE: dict[str, type] = {
    "name": str, "kind": str, "layer": int, "width": int, "units": int, "readers": list, "writer": str
}  # fmt: skip
_CALLED = {str: "a text", dict: "an object", list: "a list", int: "a whole number"}
OTHER_ACTIVITY = (
    ": what they predict is another model's activity; load the checkpoint that they were trained on, or train anew"
)
_SHOWN, _LONG = 4, 60  # differing settings that an error names, and characters of a value that it shows


@dataclass(frozen=True)
class SitePredictor:
    """One predictor, where it belongs, and what it reached: measures by the name of the data."""

    site: Site
    predictor: Predictor
    measures: Mapping[str, Measures] = field(default_factory=dict)


class PredictorSet:
    """Predictors by site name, for one model; prints as a table. model: facts of `fingerprint`. Raises ConfigError for
    a predictor that does not fit its site, or a site named twice.
    """

    def __init__(self, model: Mapping[str, Any], members: list[SitePredictor]) -> None:
        self.model = dict(model)
        self._members = {member.site.name: member for member in members}
        if len(self._members) != len(members):
            raise ConfigError("predictors: a site is named twice; want one predictor for each")
        for member in members:
            found = (member.predictor.config.kind, member.predictor.width, member.predictor.neurons)
            want = (member.site.kind, member.site.width, member.site.units)
            if found != want:
                raise ConfigError(f"site '{member.site.name}': got a predictor of {found}; want {want}")

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[SitePredictor]:
        return iter(self._members.values())

    def __getitem__(self, name: str) -> SitePredictor:
        if name not in self._members:
            raise ConfigError(f"no predictor for '{name}'; there are {', '.join(self._members)}")
        return self._members[name]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{member.site.name}.{name}": (value if name == "grouping" else value.detach().float()).contiguous()
            for member in self
            for name, value in member.predictor.state_dict().items()
        }
        save_file(tensors, folder / _TENSORS)
        rows = [
            {
                "site": member.site.to_dict(),
                "config": member.predictor.config.to_dict(),
                "measures": {name: found.to_dict() for name, found in member.measures.items()},
            }
            for member in self
        ]
        facts = {"format": FORMAT, "version": VERSION, "model": self.model}
        facts |= {"tensors": _digest(tensors), "predictors": rows}
        (folder / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "PredictorSet":
        """Read both files. Raises ConfigError if there are none, or damaged, mixed up or of another version."""
        folder = Path(folder)
        facts = _facts(folder)
        try:
            tensors = load_file(folder / _TENSORS)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{folder / _TENSORS}: cannot be read ({error}); copy the folder again") from None
        if _digest(tensors) != facts["tensors"]:
            raise ConfigError(f"{folder}: {_TENSORS} and {_FACTS} do not belong together; copy both from one place")
        try:
            members = [_member(row, tensors, facts["version"]) for row in facts["predictors"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / _FACTS}: not as this version writes it ({error}); copy it again") from None
        if tensors:
            raise ConfigError(f"{folder / _TENSORS}: unknown tensors: {', '.join(sorted(tensors)[:_SHOWN])}")
        return cls(facts["model"], members)

    def check(
        self, model: PreTrainedModel | PretrainedConfig, loaded_as: type[PreTrainedModel] | None = None
    ) -> None:  # fmt: skip
        """Raise ConfigError unless these were made for this model: class, configuration, weights (if it has some).
        loaded_as: the class of the model that a configuration is of (default: the predictors' own).
        """
        made_for = self.model["class"]
        config = model.config if isinstance(model, PreTrainedModel) else model
        known = type(model) if isinstance(model, PreTrainedModel) else loaded_as
        if known is not None and known.__name__ != made_for:
            raise ConfigError(f"predictors of a {made_for}; got a {known.__name__}: load the model as that class")
        cls = model_class(made_for) if known is None else known
        found = describe(cls, config)
        if found.model != self.model["model"]:
            raise ConfigError(
                f"predictors of another model{self._named()}: {_differences(self.model['config'], found.config)}; "
                "train predictors for this one (`private-llm predictors train`)"
            )
        if not isinstance(model, PreTrainedModel) or any(value.is_meta for value in model.parameters()):
            return
        if weights_digest(model) != self.model["weights"]:
            raise ConfigError(f"predictors of the same architecture with other weights{self._named()}{OTHER_ACTIVITY}")

    def with_measures(self, data: str, found: Mapping[str, Measures]) -> "PredictorSet":
        """The same set, with measures of each named site on some data."""
        members = [replace(m, measures={**m.measures, data: found[m.site.name]}) for m in self]
        return PredictorSet(self.model, members)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=f"predictors of {self.model.get('name') or self.model['class']}")
        right = ("rank", "block", "units", "recall", "precision", "active", "predicted", "most", "budget")
        for heading in ("site", *right[:3], "data", *right[3:]):
            table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
        for member in self:
            predictor, config = member.predictor, member.predictor.config
            block = f"{config.block}" + ("" if predictor.grouping is None else " grouped")
            facts = (member.site.name, str(config.rank), block, str(predictor.units))
            budget = "none" if config.budget is None else str(predictor.most)
            if not member.measures:
                table.add_row(*facts, "not measured")
            for data, found in member.measures.items():
                shares = (found.recall, found.precision, found.activity, found.predicted)
                table.add_row(*facts, data, *(f"{100 * share:.1f} %" for share in shares), str(found.most), budget)
        yield table

    def _named(self) -> str:
        name = self.model.get("name")
        return f" ({name})" if name else ""


def fingerprint(model: PreTrainedModel, name: str = "") -> dict[str, Any]:
    """What tells a model from others: class, configuration, their digest, and a digest of the weights."""
    facts = describe(type(model), model.config).to_dict()
    kept = {key: facts[key] for key in ("class", "config", "model")}
    return {"name": name, **kept, "weights": weights_digest(model)}


def weights_digest(model: PreTrainedModel) -> str:
    """`WeightsDigest` of all weights that are shared, tied ones once."""
    digest = WeightsDigest()
    stream_loaded(model, WeightList.of(skeleton(type(model), model.config)), digest)
    return digest.text()


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / _FACTS
    if not path.is_file():
        raise ConfigError(f"{folder}: no {_FACTS}; want a folder that `private-llm predictors train` wrote")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}); copy it again") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ConfigError(f"{path}: not of format {FORMAT!r}; want a folder that `private-llm predictors train` wrote")
    if facts.get("version") not in _READ:
        read = " and ".join(map(str, _READ))
        raise ConfigError(f"{path}: version {facts.get('version')!r}; this private-llm reads {read}: train again")
    refuse_unknown(facts, _FILE, f"{path}: ")
    _of_types(facts, _FILE, f"{path}: ")
    _of_types(facts["model"], _MODEL, f"{path}: model: ")
    for row in facts["predictors"]:
        _of_types({"predictor": row}, {"predictor": dict}, f"{path}: ")
        refuse_unknown(row, _ROW, f"{path}: ")
        _of_types(row, _ROW, f"{path}: a predictor: ")
        _of_types(row["site"], _SITE, f"{path}: a predictor's site: ")
    return facts


def _of_types(values: Mapping[str, Any], wanted: Mapping[str, type], where: str) -> None:
    """Raise ConfigError unless each of these keys is there with a value of its type."""
    for key, kind in wanted.items():
        if key not in values or type(values[key]) is not kind:
            got = f"got {str(values[key])[:_LONG]!r}" if key in values else "is not there"
            raise ConfigError(f"{where}{key}: {got}; want {_CALLED[kind]}: copy the folder again, or train again")


def _member(row: Mapping[str, Any], tensors: dict[str, Tensor], version: int) -> SitePredictor:
    """The predictor of one row; takes its tensors, whose sizes are compared before anything of that size is made."""
    site, config = Site.from_dict(row["site"]), PredictorConfig.from_dict(row["config"])
    rank, units = config.rank, math.ceil(site.units / config.block)
    shapes = {"fc1.weight": (rank, site.width), "fc1.bias": (rank,), "fc2.weight": (units, rank), "fc2.bias": (units,)}
    own = {name: tensors.pop(f"{site.name}.{name}") for name in shapes}
    grouping = tensors.pop(f"{site.name}.grouping", None) if version > 1 else None
    for name, value in own.items():
        if tuple(value.shape) != shapes[name] or value.dtype != torch.float32:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ConfigError(f"site '{site.name}': {name} is {got}; want {torch.float32} {shapes[name]}")
        if not bool(value.isfinite().all()):
            raise ConfigError(f"site '{site.name}': {name} holds NaN or infinity; train again")
    if grouping is not None and grouping.shape != (site.units,):
        raise ConfigError(f"site '{site.name}': grouping is {tuple(grouping.shape)}; want {(site.units,)}")
    predictor = Predictor(site.width, site.units, config, grouping=grouping)
    predictor.load_state_dict({**own, **({} if grouping is None else {"grouping": grouping})})
    measures = {name: Measures(**found) for name, found in row["measures"].items()}
    return SitePredictor(site, predictor.eval(), measures)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = WeightsDigest()
    for name, value in tensors.items():
        digest(name, value)
    return digest.text()


def _differences(want: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    names = sorted(name for name in {*want, *found} if want.get(name) != found.get(name))
    shown = [f"{n} is {found.get(n)!r}, theirs was {want.get(n)!r}" for n in names[:_SHOWN]]
    return "; ".join(shown) + (f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
