"""Training one predictor on a recording: weighted cross-entropy, early stop, checkpoints, calibration.

Each epoch begins with validation: the best threshold that reaches the target recall is taken off the bias, and the
weight of active units becomes the one under which the mean score stays there: both classes then pull at the bias with
the same force. The epoch with the best F1 is kept. If it has a budget, the threshold becomes the one with the best
recall of what a run draws within it. Epochs have their own seeds: an interrupted run ends as one that was not.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from private_llm.errors import ConfigError
from private_llm_hf.sparsity.predictor import Measures, Predictor, Scored, measures_of, threshold_for
from private_llm_hf.sparsity.recordings import Recording
from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig

_RUN = 512  # consecutive positions that are held out together: neighbours in a text are too alike to be on both sides
_READ = 4096
_LIGHTEST, _HEAVIEST = 0.02, 500.0  # bounds of the weight of active units

Report = Callable[[int, float], None]  # called after each epoch with its number and the best F1 so far


@dataclass(frozen=True)
class Trained:
    """A calibrated predictor and what it reached on the validation part of its recording."""

    predictor: Predictor
    validation: Measures
    epochs: int


@dataclass
class _Progress:
    """How far a run has got. weight: of active units in the next epoch. best: F1."""

    epoch: int = 0
    weight: float = 1.0
    best: float = -1.0
    since: int = 0
    finished: bool = False


def train_predictor(
    recording: Recording, config: PredictorConfig, training: TrainingConfig, checkpoint: Path | None = None,
    accelerator: Accelerator | None = None, report: Report | None = None,
) -> Trained:  # fmt: skip
    """Train, or go on from `checkpoint`, written after each epoch. Raises ConfigError for a recording of another kind
    or tolerance, or too short to hold out part of it, and for a checkpoint of other settings.
    """
    _check(recording, config)
    accelerator = accelerator or Accelerator(cpu=True)
    train, held_out = split_rows(len(recording), training)
    grouped = training.group and config.block > 1
    grouping = grouping_of(recording, train, config.block) if grouped else None
    predictor = Predictor(recording.site.width, recording.site.units, config, training.seed, grouping)
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=training.rate, weight_decay=training.decay)
    done = _Progress()
    best: dict[str, Tensor] = {}
    site, settings = recording.site.to_dict(), config.to_dict()
    facts: dict[str, object] = {"site": site, "config": settings, "training": training.to_dict()}
    if checkpoint is not None and checkpoint.exists():
        done, best = _load(checkpoint, facts, predictor, optimizer)
    elif config.hidden == "linear":
        read = recording.batches(train, _READ)
        start_from_regression(predictor, ((x, (predictor.counts(active) > 0).double()) for x, active in read))
    model, optimizer = accelerator.prepare(predictor, optimizer)
    scored = partial(_scored, predictor, recording, held_out)
    while not done.finished:
        if done.epoch:  # the first validation is of the starting point
            _epoch(recording, train, predictor, training, done, model, optimizer, accelerator)
        with torch.no_grad():
            predictor.fc2.bias.sub_(threshold_for(config.target_recall, scored))
            f1 = _measure(scored, 0.0).f1
            done.weight = min(max(balance(scored), _LIGHTEST), _HEAVIEST)
        if f1 > done.best:
            done.best, done.since = f1, 0
            best = {name: value.detach().cpu().clone() for name, value in predictor.state_dict().items()}
        else:
            done.since += 1
        done.finished = done.epoch >= training.epochs or done.since >= training.patience
        done.epoch += 1
        if checkpoint is not None:
            _save(checkpoint, facts, predictor, optimizer, done, best)
        if report is not None:
            report(done.epoch - 1, done.best)
    predictor.load_state_dict(best)
    predictor.cpu()
    with torch.no_grad():
        if config.budget is not None:
            predictor.fc2.bias.sub_(_within_budget(predictor, recording, held_out))
        validation = _measured(predictor, recording, held_out)
    return Trained(predictor, validation, done.epoch - 1)


def measure(predictor: Predictor, recording: Recording, rows: Tensor | None = None) -> Measures:
    """Recall and precision on (rows of) a recording, as the predictor decides. Raises ConfigError for another site."""
    _check(recording, predictor.config)
    if (recording.site.width, recording.site.units) != (predictor.width, predictor.neurons):
        raise ConfigError(
            f"recording of '{recording.site.name}': width {recording.site.width} and {recording.site.units} units; the "
            f"predictor has {predictor.width} and {predictor.neurons}: record the model that it was trained for"
        )
    chosen = torch.arange(len(recording)) if rows is None else rows
    with torch.no_grad():
        return _measured(predictor, recording, chosen)


def split_rows(rows: int, training: TrainingConfig) -> tuple[Tensor, Tensor]:
    """Row numbers to train on and to hold out: runs of up to 512 positions, spread evenly. Raises ConfigError."""
    rows = min(rows, training.most_rows or rows)
    every = max(2, round(1 / training.validation))
    run = max(1, min(_RUN, rows // (2 * every)))
    held = (torch.arange(rows) // run) % every == every // 2
    train, held_out = (~held).nonzero()[:, 0], held.nonzero()[:, 0]
    if not len(train) or not len(held_out):
        raise ConfigError(
            f"{rows} recorded positions are too few to hold out {training.validation:g} of them; record more"
        )
    return train, held_out


def _check(recording: Recording, config: PredictorConfig) -> None:
    if recording.site.kind != config.kind:
        raise ConfigError(f"kind: got {config.kind!r} for a recording of {recording.site.kind!r}; want the same")
    if config.kind == "heads" and recording.tolerance != config.tolerance:
        raise ConfigError(
            f"tolerance: got {config.tolerance} for heads recorded with {recording.tolerance}; record again, or train "
            "with the recording's"
        )


def _epoch(
    recording: Recording, train: Tensor, predictor: Predictor, training: TrainingConfig, done: _Progress,
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator,
) -> None:  # fmt: skip
    """All training rows once, in an order that the seed and the epoch decide."""
    chance = torch.Generator().manual_seed(training.seed * 1_000_003 + done.epoch)
    parts = train[torch.randperm(len(train), generator=chance)].split(training.batch)
    total = max(1, training.epochs * len(parts))
    model.train()
    for number, part in enumerate(parts):
        x, active = recording.read(part.sort().values)
        counts = predictor.counts(active).to(accelerator.device)
        rate = training.rate * (1 - ((done.epoch - 1) * len(parts) + number) / total)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = weighted_loss(model(x.to(accelerator.device)), counts, done.weight)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def weighted_loss(scores: Tensor, counts: Tensor, weight: float) -> Tensor:
    """Cross-entropy of scores [N, units]; active units weigh by counts [N, units], on average `weight`, others 1."""
    active = counts > 0
    weights = torch.where(active, counts / _mean(counts).clamp_min(1e-12) * weight, 1.0)
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, active.float(), weights)


def balance(scored: Scored) -> float:
    """The weight of active units under which the bias of `weighted_loss` stays: the pull of the others over theirs."""
    down = up = 0.0
    for scores, counts in scored():
        weights, chances = counts / _mean(counts).clamp_min(1e-12), scores.sigmoid()
        down += float(chances[counts == 0].double().sum())
        up += float((weights * (1 - chances)).double().sum())
    return down / max(up, 1e-12)


def _mean(counts: Tensor) -> Tensor:
    return counts.sum() / (counts > 0).sum().clamp_min(1)


def _scored(predictor: Predictor, recording: Recording, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for x, active in recording.batches(rows, _READ):
        yield predictor(x.to(predictor.fc1.weight.device)).cpu(), predictor.counts(active)


def _within_budget(predictor: Predictor, recording: Recording, rows: Tensor) -> float:
    """The threshold that loses least where a run draws within the budget: the higher it is, the surer what is drawn."""
    scored = partial(_scored, predictor, recording, rows)
    scores, _ = next(scored())
    shares = predictor.most / predictor.units * 2.0 ** torch.arange(-2.0, 2.5, 0.5)
    some = scores.flatten()[:: max(1, scores.numel() >> 20)]
    tried = [0.0, *torch.quantile(some, (1 - shares).clamp_min(0)).tolist()]
    return float(max(tried, key=lambda threshold: _measure(scored, threshold, predictor.most).recall))


def _measured(predictor: Predictor, recording: Recording, rows: Tensor) -> Measures:
    budget = None if predictor.config.budget is None else predictor.most
    return _measure(partial(_scored, predictor, recording, rows), predictor.config.threshold, budget)


def _measure(scored: Scored, threshold: float, budget: int | None = None) -> Measures:
    return measures_of(((scores > threshold, counts) for scores, counts in scored()), budget)


def _save(
    path: Path, facts: dict[str, object], predictor: Predictor, optimizer: torch.optim.Optimizer, done: _Progress,
    best: dict[str, Tensor],
) -> None:  # fmt: skip
    """Weights, the best ones, and AdamW's state in one file that replaces the last whole."""
    tensors = {f"now/{name}": value for name, value in predictor.state_dict().items()}
    tensors |= {f"best/{name}": value for name, value in best.items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"adam/{index}/{name}": value for name, value in values.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    whole = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(whole, new, {"facts": json.dumps(facts), "progress": json.dumps(asdict(done))})
    new.replace(path)


def _load(
    path: Path, facts: dict[str, object], predictor: Predictor, optimizer: torch.optim.Optimizer
) -> tuple[_Progress, dict[str, Tensor]]:
    """What `_save` wrote. Raises ConfigError for other settings."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        if json.loads(metadata["facts"]) != json.loads(json.dumps(facts)):
            raise ConfigError(
                f"{path}: a checkpoint of other settings or another site; give the same, or another folder"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    predictor.load_state_dict({n.removeprefix("now/"): v for n, v in tensors.items() if n.startswith("now/")})
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("adam/"):
            _, index, key = name.split("/")
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    best = {n.removeprefix("best/"): v for n, v in tensors.items() if n.startswith("best/")}
    return _Progress(**json.loads(metadata["progress"])), best


# -- where training starts: the best linear guess of the activity (reduced-rank regression) ---------------------------
# With x centred, S = E[x x^T] = L L^T and C = E[x (y - p)^T], the regression of rank r that leaves the least squared
# error is B = L^-T U U^T L^-1 C, where U holds the first r left singular vectors of L^-1 C (Izenman 1975). So W1 = U^T
# L^-1 makes r uncorrelated features of unit variance, and W2 is C^T L^-T U, scaled by unit from a probability to log
# odds as in linear discriminant analysis.
_RIDGE = 1e-4  # of inputs' mean variance: they may span less than their width (a layer norm takes one dimension)
_UNEXPLAINED = 0.1  # least share of a unit's variance that is taken as unexplained


def start_from_regression(predictor: Predictor, data: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set weights from inputs [N, width] and activity [N, units], one pass. Memory: width^2 + width * units float64."""
    width, units = predictor.width, predictor.units
    rows = 0
    x_sum, y_sum = torch.zeros(width, dtype=torch.float64), torch.zeros(units, dtype=torch.float64)
    xx, xy = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, units, dtype=torch.float64)
    for given, y in data:
        x = given.double()
        rows += len(x)
        x_sum += x.sum(0)
        y_sum += y.sum(0)
        xx += x.T @ x
        xy += x.T @ y
    if not rows:
        return
    mean, share = x_sum / rows, y_sum / rows
    s = xx / rows - mean[:, None] * mean
    s.diagonal().add_(_RIDGE * s.diagonal().mean().clamp_min(1e-12))
    c = xy / rows - mean[:, None] * share
    lower = torch.linalg.cholesky(s)
    whitened = torch.linalg.solve_triangular(lower, c, upper=False)  # L^-1 C, [width, units]
    features = torch.linalg.svd(whitened, full_matrices=False).U[:, : predictor.config.rank]
    w2 = whitened.T @ features  # [units, rank or fewer]
    w1 = torch.linalg.solve_triangular(lower.T, features, upper=True).T
    chances = share.clamp(0.5 / rows, 1 - 0.5 / rows)
    variance = chances * (1 - chances)
    explained = w2.square().sum(1) / variance
    w2 = w2 / (variance * (1 - explained).clamp_min(_UNEXPLAINED))[:, None]
    with torch.no_grad():
        used = w1.shape[0]  # fewer than the rank if there are fewer units
        predictor.fc1.weight[:used].copy_(w1)
        predictor.fc1.bias[:used].copy_(-w1 @ mean)
        predictor.fc2.weight[:, :used].copy_(w2)
        predictor.fc2.weight[:, used:] = 0.0
        predictor.fc2.bias.copy_(chances.log() - (1 - chances).log())


# -- which neurons form a block: those that are active together -------------------------------------------------------
# A neuron's place in its layer means nothing to the model, so its owner may group neurons at will (as MoEfication does
# by balanced clustering, Zhang et al., ACL 2022). What counts is the number of pairs of a position and a block that has
# an active neuron there. Blocks are filled one after the other: each begins with the rarest neuron that is left, and
# takes the one that adds the fewest positions to those at which the block is active already, until it is full. Rare
# neurons so share blocks that are seldom active, and those that are nearly always active the last ones.
MOST_ROWS = 8192  # positions that decide; more change the share of active blocks by less than a hundredth


def grouping_of(recording: Recording, rows: Tensor, block: int) -> Tensor:
    """`group` of up to 8192 of these rows, spread evenly: int32 [neurons]."""
    count = min(len(rows), MOST_ROWS)
    chosen = rows[torch.arange(count) * len(rows) // count]
    return group(recording.read(chosen)[1], block)


def group(active: Tensor, block: int) -> Tensor:
    """The permutation, int32 [neurons], whose runs of `block` are blocks, of bool [N, neurons]; ties go to the lower
    number. N * neurons bytes, and time N * neurons * blocks active at a position.
    """
    neurons = active.shape[1]
    often = active.sum(0)
    taken = len(active) + 1  # more positions than there are
    added = torch.zeros_like(often)
    used = torch.zeros(len(active), dtype=torch.bool)
    placed = torch.zeros_like(often)
    found: list[int] = []
    for number in range(neurons):
        if number % block == 0:
            added, used = often + placed, torch.zeros_like(used)
        chosen = int(added.argmin())
        found.append(chosen)
        placed[chosen] = taken
        new = active[:, chosen] & ~used
        used |= new
        added = added - active[new].sum(0)
        added[chosen] += taken
    return torch.tensor(found, dtype=torch.int32)
