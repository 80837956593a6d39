"""Reading predictors in the public format of PowerInfer and ProSparse: one MLP for each layer's neurons.

A folder holds model_0.pt, model_1.pt, ... (or .safetensors), one for each layer, each with `fc1.weight` [rank, width]
and `fc2.weight` [neurons, rank], no biases, and a ReLU in between (`ReluMLP` in PowerInfer's
convert-hf-to-powerinfer-gguf.py). Their scores are log odds, so the threshold is 0. Files are read without running
what is in them (`weights_only=True`).
"""

import pickle  # noqa: TID251 - for the name of the error that torch.load raises
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.errors import ConfigError
from private_llm_hf.sparsity.predictor import Predictor
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.settings import PredictorConfig
from private_llm_hf.sparsity.sites import Site

_NAME = re.compile(r"model_(\d+)\.(?:pt|safetensors)")
_KEYS = {"fc1.weight", "fc2.weight"}


def read_powerinfer(folder: Path, model: PreTrainedModel, sites: list[Site], name: str = "") -> PredictorSet:
    """Predictors for the feed-forward `sites` of `model`, in order of layers; not measured yet. Raises ConfigError for
    a folder without them, a layer that is missing or too many, and files of another form.
    """
    blocks = [site for site in sites if site.kind == "ffn"]
    files = {int(m.group(1)): path for path in sorted(folder.glob("model_*")) if (m := _NAME.fullmatch(path.name))}
    if sorted(files) != list(range(len(blocks))):
        raise ConfigError(
            f"{folder}: files for layers {sorted(files)}; want model_0.pt to model_{len(blocks) - 1}.pt, one for each "
            f"feed-forward block of {type(model).__name__}"
        )
    members = [SitePredictor(site, _predictor(files[number], site)) for number, site in enumerate(blocks)]
    return PredictorSet(fingerprint(model, name), members)


def _predictor(path: Path, site: Site) -> Predictor:
    tensors = _tensors(path)
    fc1, fc2 = tensors["fc1.weight"].float(), tensors["fc2.weight"].float()
    if fc1.dim() != 2 or fc2.dim() != 2 or (fc1.shape[1], fc2.shape) != (site.width, (site.units, fc1.shape[0])):
        raise ConfigError(
            f"{path}: fc1 {tuple(fc1.shape)} and fc2 {tuple(fc2.shape)}; '{site.name}' wants [rank, {site.width}] and "
            f"[{site.units}, rank]: are these the predictors of this model?"
        )
    if not bool(fc1.isfinite().all() and fc2.isfinite().all()):
        raise ConfigError(f"{path}: holds NaN or infinity; copy it again")
    made = Predictor(site.width, site.units, PredictorConfig(rank=fc1.shape[0], hidden="relu"))
    zeros = {"fc1.bias": torch.zeros(fc1.shape[0]), "fc2.bias": torch.zeros(site.units)}
    made.load_state_dict({"fc1.weight": fc1, "fc2.weight": fc2, **zeros})
    return made.eval()


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{path}: cannot be read as tensors alone ({str(error).splitlines()[0][:120]})") from None
    if not isinstance(found, dict) or set(found) != _KEYS or not all(isinstance(v, Tensor) for v in found.values()):
        keys = ", ".join(sorted(map(str, found))) if isinstance(found, dict) else type(found).__name__
        raise ConfigError(f"{path}: got {keys}; want fc1.weight and fc2.weight")
    return found
