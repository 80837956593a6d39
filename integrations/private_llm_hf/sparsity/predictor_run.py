"""Predictors for one model from text or images: record what the model does, train, measure, save. All in plaintext."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from private_llm.errors import ConfigError
from private_llm_hf.checkpoint.model_spec import describe, named_class
from private_llm_hf.checkpoint.sample_inputs import text_arguments
from private_llm_hf.models.architectures import architecture
from private_llm_hf.sparsity.predictor import Measures, Predictor
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.recordings import Recording, record, recordings
from private_llm_hf.sparsity.relufy import FACTS, load_relufied
from private_llm_hf.sparsity.settings import KINDS, Kind, PredictorConfig, TrainingConfig
from private_llm_hf.sparsity.sites import Site, find_sites
from private_llm_hf.sparsity.training import measure, split_rows, train_predictor
from private_llm_hf.tools.texts import encode, first_token, load_texts, total_nll, windows

Images = Callable[[], Iterable[Tensor]]  # prepared images anew, in batches [n, channels, height, width]

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@dataclass(frozen=True)
class PredictorRun:
    """What to train on, how, and where it goes.

    model: a folder or hub id. text, dataset: files, or a `datasets` name and maybe its configuration's. test: unseen
    text to measure on. images, test_images: in place of text, for models of images. out: for the set and checkpoints.
    recordings: for what the model did (default: out/recordings), 2 bytes for each input and 1 bit for each neuron,
    position and layer. resume: use complete recordings, and go on from checkpoints. predictors: a setting for each kind
    of unit. budget_share: give each layer the budget that this share of positions keeps to. rows, test_rows: positions
    to record. length: tokens in a row. batch: rows in a call. cpu: no accelerator. Raises ConfigError.
    """

    model: str
    predictors: tuple[PredictorConfig, ...]
    training: TrainingConfig
    text: tuple[Path, ...] = ()
    dataset: tuple[str, ...] = ()
    test: Path | None = None
    images: Images | None = None
    test_images: Images | None = None
    out: Path = Path("predictors")
    recordings: Path | None = None
    resume: bool = False
    budget_share: float | None = None
    rows: int = 200_000
    test_rows: int = 50_000
    length: int = 256
    batch: int = 8
    cpu: bool = False

    def __post_init__(self) -> None:
        if not self.text and not self.dataset and self.images is None:
            raise ConfigError("no text to train on: give --text FILE, --dataset NAME, or --images FOLDER")
        if self.images is not None and (self.text or self.dataset or self.test is not None):
            raise ConfigError("images: got texts as well; want one of them, which the model reads")
        if self.test_images is not None and self.images is None:
            raise ConfigError("test-images: got no --images to train on")
        for name, least in (("rows", 1), ("test_rows", 1), ("length", 2), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: got {getattr(self, name)}; want at least {least}")
        for path in (*self.text, *([] if self.test is None else [self.test])):
            if not path.is_file():
                raise ConfigError(f"text: found no file at {path}; want a text file")
        if self.budget_share is not None and not 0 < self.budget_share <= 1:
            raise ConfigError(f"budget-share: got {self.budget_share}; want a number above 0 and at most 1")
        if len({config.kind for config in self.predictors}) != len(self.predictors) or not self.predictors:
            raise ConfigError("kinds: want ffn, heads, or both once")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What is predicted."""
        return tuple(config.kind for config in self.predictors)

    @property
    def recorded(self) -> Path:
        """Where recordings lie."""
        return self.recordings or self.out / "recordings"

    @property
    def tests(self) -> bool:
        """Whether there is something unseen to measure on."""
        return self.test is not None or self.test_images is not None


def run(settings: PredictorRun) -> tuple[PredictorSet, dict[str, Any]]:
    """Record, train, test and save: the set, and a row of its figures (`summary`). Shows progress on stderr. Raises
    ConfigError for unfit settings or an earlier run's, PatchMismatch for activations without zeros.
    """
    if not settings.resume and (settings.out / "checkpoints").exists():
        raise ConfigError(f"{settings.out} holds checkpoints of an earlier run: add --resume, or give another --out")
    accelerator = Accelerator(cpu=settings.cpu)
    model = load_model(settings.model).to(accelerator.device)
    parts = {"train": settings.rows, **({"test": settings.test_rows} if settings.tests else {})}
    for part, most in parts.items():
        folder = settings.recorded / part
        if settings.resume and (folder / "order.json").exists():
            continue
        images = settings.images if part == "train" else settings.test_images
        if images is not None:
            record_images(settings, model, images, folder, most)
            continue
        if part == "test" and settings.test is not None:
            texts = [settings.test.read_text(encoding="utf-8")]
        else:
            texts = list(load_texts(list(settings.text), list(settings.dataset))["text"])
        record_text(settings, model, texts, folder, most)
    found = _trained(settings, model, accelerator)
    found.save_pretrained(settings.out)
    row = {"model": Path(settings.model).name, **summary(found), "out": str(settings.out)}
    if settings.test is not None and architecture(model.config).kind == "decoder":
        row["perplexity"] = _perplexities(settings, settings.test, model, found)
    return found, row


def load_model(source: str) -> PreTrainedModel:
    """A model as its configuration says, float32, or of scripts/relufy.py. Raises ConfigError for what is none."""
    try:
        if (Path(source) / FACTS).is_file():
            return load_relufied(source)
        kind = named_class(source, AutoConfig.from_pretrained(source))
        model: PreTrainedModel = kind.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model {source!r}: {str(error).strip().splitlines()[0]} (want a folder or hub id)") from None
    return model.eval()


def batches(model: PreTrainedModel, rows: Tensor, size: int) -> Iterator[dict[str, Any]]:
    """Calls' arguments; an encoder-decoder writes each row's second half. Raises ConfigError for models of images."""
    kind = architecture(model.config).kind
    if kind == "vision":
        raise ConfigError(f"{type(model).__name__} takes images: give --images FOLDER")
    for part in rows.split(size):
        if kind == "encoder-decoder":
            source, target = part.chunk(2, dim=1)
            yield {"input_ids": source, "decoder_input_ids": target}
        else:
            yield text_arguments(model.config, part)


def record_text(settings: PredictorRun, model: PreTrainedModel, texts: list[str], folder: Path, most: int) -> None:
    """Run texts in rows, and record `most` positions below `folder`. Raises ConfigError for rows that are too long."""
    tokenizer, length = AutoTokenizer.from_pretrained(settings.model), settings.length
    ids = torch.cat([encode(tokenizer, text) for text in texts])
    rows = windows(ids, length, first_token(tokenizer))
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ConfigError(f"length: got {length}; {settings.model} has {limit} positions: want at most that")
    if not len(rows):
        raise ConfigError(f"the text has {len(ids)} tokens; want at least {length}: give more, or lower --length")
    first, total = next(batches(model, rows[:1], 1)), min(most, rows.numel())
    _record(settings, model, first, batches(model, rows, settings.batch), folder, most, total)


def record_images(settings: PredictorRun, model: PreTrainedModel, images: Images, folder: Path, most: int) -> None:
    """Run images, and record `most` positions below `folder`. Raises ConfigError for a model of text, or no images."""
    if architecture(model.config).kind != "vision":
        raise ConfigError(f"{type(model).__name__} takes text: give --text FILE")
    first = next(iter(images()), None)
    if first is None:
        raise ConfigError("images: got none; want a folder of them")
    given = ({"pixel_values": part} for part in images())
    _record(settings, model, {"pixel_values": first[:1]}, given, folder, most, most)


def _record(
    settings: PredictorRun, model: PreTrainedModel, first: dict[str, Any], given: Iterable[dict[str, Any]],
    folder: Path, most: int, total: int,
) -> None:  # fmt: skip
    sites = find_sites(model, first, settings.kinds)
    tolerance = next((config.tolerance for config in settings.predictors if config.kind == "heads"), 0.1)
    with Progress(*_COLUMNS, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"recording {folder.name}", total=total)
        record(model, sites, given, folder, tolerance, most, lambda done: bar.update(task, completed=done))


def summary(found: PredictorSet) -> dict[str, Any]:
    """Means over the layers of each kind, on the test text if there is one."""
    rows: dict[str, Any] = {}
    for kind in KINDS:
        members = [member for member in found if member.site.kind == kind]
        data = [latest(member.measures) for member in members]
        names = ("recall", "precision", "activity", "predicted")
        if members:
            rows[kind] = {n: round(sum(getattr(m, n) for m in data) / len(data), 4) for n in names}
            rows[kind] |= {"rank": members[0].predictor.config.rank, "block": members[0].predictor.config.block}
    return rows


def latest(measures: Mapping[str, Measures]) -> Measures:
    """Measures on the test text, or on the validation part where there is none. Raises ConfigError without either."""
    for data in ("test", "validation"):
        if data in measures:
            return measures[data]
    raise ConfigError("these predictors were not measured; train them, or measure them with `with_measures`")


def _trained(settings: PredictorRun, model: PreTrainedModel, accelerator: Accelerator) -> PredictorSet:
    epochs = settings.training.epochs + 1
    count = sum(found.site.kind in settings.kinds for found in recordings(settings.recorded / "train"))
    with Progress(*_COLUMNS, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=count * epochs)
        started: list[str] = []

        def step(site: Site, epoch: int, f1: float) -> None:
            if site.name not in started:
                started.append(site.name)
            done = (len(started) - 1) * epochs + epoch + 1
            bar.update(task, completed=done, description=f"{site.name}: F1 {f1:.3f}")

        return train_set(
            model, settings.recorded / "train", {config.kind: config for config in settings.predictors},
            settings.training, settings.out / "checkpoints", settings.recorded / "test" if settings.tests else None,
            settings.budget_share, Path(settings.model).name, accelerator, step,
        )  # fmt: skip


def _perplexities(settings: PredictorRun, test: Path, model: PreTrainedModel, found: PredictorSet) -> dict[str, float]:
    """Of a decoder on the test text: the model, and what is left of it if it computes only what is predicted."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    ids = encode(tokenizer, test.read_text(encoding="utf-8"))[: settings.test_rows]

    def perplexity() -> float:
        return round(math.exp(total_nll(model, ids, settings.length, first_token(tokenizer)) / len(ids)), 3)

    rows = {"model": perplexity()}
    for kind in settings.kinds:
        part = PredictorSet(found.model, [member for member in found if member.site.kind == kind])
        with predicted_only(model, part):
            rows[f"predicted {kind} only"] = perplexity()
    return rows


# -- the reference in plaintext: a model that computes only what its predictors mark as active ------------------------
# Neurons that are not predicted active count as zero before the layer that reads them, heads before the output
# projection. Keys and values of all heads are kept, as if none had been skipped.
@contextmanager
def predicted_only(model: PreTrainedModel, predictors: PredictorSet, seed: int = 0) -> Iterator[None]:
    """While it lasts, `model` leaves out what `predictors` say is inactive, and keeps to their budgets as runs do.

    seed: of what budgets leave out and fill up. Raises ConfigError for another model's.
    """
    predictors.check(model)
    chance = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for member in predictors:
            _listen(model, member, chance, stack)
        yield


def _listen(model: PreTrainedModel, member: SitePredictor, chance: torch.Generator, stack: ExitStack) -> None:
    first, last = model.get_submodule(member.site.readers[0]), model.get_submodule(member.site.writer)
    predictor = member.predictor.to(next(model.parameters()).device)
    kept: list[Tensor] = []

    def predict(_: nn.Module, received: tuple[Any, ...]) -> None:
        with torch.no_grad():
            kept.append(predictor.expand(predictor.predict(received[0], chance)))

    def leave_out(_: nn.Module, received: tuple[Any, ...]) -> tuple[Any, ...]:
        whole, mask = received[0], kept.pop()
        size = whole.shape[-1] // mask.shape[-1]  # entries of a head's output; 1 for neurons
        mask = mask.repeat_interleave(size, dim=-1)
        return (whole * mask.view(whole.shape), *received[1:])

    stack.callback(first.register_forward_pre_hook(predict).remove)
    stack.callback(last.register_forward_pre_hook(leave_out).remove)


# -- predictors for all recorded sites, one after the other; what is done already is not done again -------------------
TrainingProgress = Callable[[Site, int, float], None]  # after each epoch: site, epoch, best F1 so far


def train_set(
    model: PreTrainedModel, recorded: Path, configs: Mapping[Kind, PredictorConfig], training: TrainingConfig,
    checkpoints: Path | None = None, test: Path | None = None, budget_share: float | None = None, name: str = "",
    accelerator: Accelerator | None = None, step: TrainingProgress | None = None,
) -> PredictorSet:  # fmt: skip
    """Train a predictor for each recording whose kind is in `configs`, and measure it on those of `test`.

    checkpoints: folder of one file a site, from which an interrupted run goes on. budget_share: give each layer the
    smallest budget that this share of validation positions keeps to. Raises ConfigError for another model's recordings.
    """
    digest = describe(type(model), model.config).model
    members = []
    for recording in _of_model(recorded, digest):
        site = recording.site
        if site.kind not in configs:
            continue
        config = replace(configs[site.kind], rank=min(configs[site.kind].rank, site.width))
        if site.kind == "heads":
            config = replace(config, tolerance=recording.tolerance)

        def report(epoch: int, f1: float, site: Site = site) -> None:
            if step is not None:
                step(site, epoch, f1)

        checkpoint = None if checkpoints is None else checkpoints / f"{site.name}.safetensors"
        trained = train_predictor(recording, config, training, checkpoint, accelerator, report)
        predictor, validation = trained.predictor, trained.validation
        if budget_share is not None:
            predictor = fit_budget(predictor, recording, training, budget_share)
            validation = measure(predictor, recording, rows=split_rows(len(recording), training)[1])
        members.append(SitePredictor(site, predictor.eval(), {"validation": validation}))
    if not members:
        raise ConfigError(f"{recorded}: no recording of {', '.join(configs)}; record those kinds first")
    made = PredictorSet(fingerprint(model, name), members)
    if test is None:
        return made
    found = {recording.site.name: recording for recording in _of_model(test, digest)}
    return made.with_measures("test", {m.site.name: _tested(m, found) for m in made})


def fit_budget(predictor: Predictor, recording: Recording, training: TrainingConfig, share: float) -> Predictor:
    """The least budget that `share` of the validation positions keep to. Raises ConfigError unless it is in (0, 1]."""
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"budget share: got {share!r}; want a number above 0 and at most 1")
    _, held_out = split_rows(len(recording), training)
    free = predictor.with_config(replace(predictor.config, budget=None))
    with torch.no_grad():
        counts = torch.cat([free.predict(x).sum(1) for x, _ in recording.batches(held_out, 4096)])
    most = int(counts.sort().values[math.ceil(share * len(counts)) - 1])
    return free.with_config(replace(free.config, budget=min(1.0, (max(1, most) + 0.5) / free.units)))


def _of_model(folder: Path, digest: str) -> Iterator[Recording]:
    for recording in recordings(folder):
        if recording.model != digest:
            raise ConfigError(f"{folder}: recorded from another model; record this one, or give another folder")
        yield recording


def _tested(member: SitePredictor, found: Mapping[str, Recording]) -> Measures:
    if member.site.name not in found:
        raise ConfigError(f"site '{member.site.name}' was not recorded on the test text; record all sites of both")
    return measure(member.predictor, found[member.site.name])
