"""Module by module against plaintext: the same input through the private arithmetic (`plain`) and through float64.

Finds which module an error comes from, and names the module and operation whose values leave the ring, local steps
included (protocols/plain/checked.py). It runs where the
plaintext is known anyway, at the model owner; the arithmetic is that of the real protocols up to one unit a truncation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.net.local import LocalMesh
from private_llm.protocols.plain.checked import CheckedPlain
from private_llm.protocols.session import Session
from private_llm.protocols.share import cleartext
from private_llm.ranges import UNKNOWN, Ranges
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.model_spec import ModelSpec, describe, folds_norms
from private_llm_hf.checkpoint.weights import encode_weight, stream_loaded
from private_llm_hf.models.architectures import architecture
from private_llm_hf.models.emulation import emulated
from private_llm_hf.models.folded_norms import fold_norms
from private_llm_hf.party.model import build_party_model


@dataclass(frozen=True)
class ModuleError:
    """The output of one module: largest absolute value of the truth, largest and mean absolute error."""

    name: str
    kind: str
    largest: float
    error_max: float
    error_mean: float


@dataclass(frozen=True)
class Comparison:
    """All modules in the order in which they finished; `stopped` says why the run ended early, if it did.

    Where a value left its range, that is the module, the operation, the largest value and the limit.
    """

    modules: tuple[ModuleError, ...]
    stopped: str | None


def compare(
    model: PreTrainedModel, given: Tensor, config: PrivateConfig, ranges: Ranges = UNKNOWN
) -> Comparison:  # fmt: skip
    """Run token ids [B, S] or images [B, C, H, W] through both; of `config`, ring, frac_bits and functions count.

    ranges: what calibration found; a value that leaves them stops the run, as does one that leaves the ring.

    An encoder-decoder model reads tokens in both stacks, the decoder after its start token. Folded norms are folded on
    both sides, so that layers can be compared. Raises what patching raises.
    """
    config = replace(config, protocol="plain", insecure=True, debug_ranges=True, party_mode="auto", hosts=())
    spec = ModelSpec.of(type(model), model.config, folds_norms(config))
    truth = _truth(model, spec)
    session = _session(config, ranges)
    weights = dict(_weights(model, spec, session))
    facts = describe(type(model), model.config)
    private = build_party_model(facts.config, facts.class_, weights, session, folded=spec.folded)
    expected, found = _Outputs(truth), _Outputs(private)
    stopped = None
    with torch.no_grad():
        if architecture(model.config).kind == "vision":
            with emulated(truth, config.approximations):
                truth(given.double())
            inputs = {"pixel_values": SecretTensor(_fixed(session, given))}
        else:
            tokens = _tokens(truth, given)
            with emulated(truth, config.approximations):
                truth(**tokens, use_cache=False)
            inputs = {
                name.replace("input_ids", "inputs_embeds"): SecretTensor(_fixed(session, _embedding(truth, name)(ids)))
                for name, ids in tokens.items()
            }
        try:
            private(**inputs, return_dict=True)
        except DomainError as refused:
            stopped = found.named(str(refused))
    rows = []
    for name, value in found.values.items():
        right = expected.values.get(name)
        if right is not None and right.shape == value.shape:
            error = (value - right).abs()
            kind = type(truth.get_submodule(name)).__name__
            rows.append(ModuleError(name, kind, float(right.abs().max()), float(error.max()), float(error.mean())))
    return Comparison(tuple(rows), stopped)


def _truth(model: PreTrainedModel, spec: ModelSpec) -> PreTrainedModel:
    """The model in float64, with norms folded as the parties have them."""
    if not spec.folds:
        truth = copy.deepcopy(model)
        fold_norms(truth, spec.folded)
        taken = {fold.layer for fold in spec.norm_folds}
        held: dict[str, Tensor] = {}

        def take(name: str, value: Tensor) -> None:
            if name.rpartition(".")[0] in taken:
                held[name] = value

        stream_loaded(model, spec.source, spec.folding(take))
        truth.load_state_dict(held, strict=False, assign=True)
        return truth.to(torch.float64).eval()
    made: dict[str, Tensor] = {}
    sink = spec.folding(lambda name, value: made.update({name: value.to(torch.float64)}))
    stream_loaded(model, spec.source, sink)
    spec.model.load_state_dict(made, assign=True)
    return spec.model


def _tokens(model: PreTrainedModel, input_ids: Tensor) -> dict[str, Tensor]:
    """Token ids by the argument that takes them."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": input_ids}
    start = input_ids.new_full((len(input_ids), 1), model.config.decoder_start_token_id)
    return {"input_ids": input_ids, "decoder_input_ids": torch.cat([start, input_ids[:, :-1]], 1)}


def _embedding(model: PreTrainedModel, argument: str) -> nn.Module:
    owner = model.get_decoder() if argument.startswith("decoder_") else model
    found: nn.Module = owner.get_input_embeddings()
    return found


class _Outputs:
    """The first tensor that each module returns, in float64, by name; the last call of a module counts."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Tensor] = {}
        self._running: list[str] = []
        for name, module in model.named_modules():
            if name:
                module.register_forward_pre_hook(lambda module, inputs, name=name: self._running.append(name))
                module.register_forward_hook(self._hook(name))

    def named(self, refusal: str) -> str:
        """What stopped the run, with the innermost module that had not finished."""
        where = f"module '{self._running[-1]}'" if self._running else ""
        return refusal if "module '" in refusal or not where else f"{where}: {refusal}"

    def _hook(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def keep(module: nn.Module, inputs: object, output: object) -> None:
            self._running.pop()
            value = _first(output)
            if value is not None:
                self.values[name] = _decoded(value)

        return keep


def _first(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    parts: Iterable[object] = ()
    if isinstance(output, dict):
        parts = output.values()
    elif isinstance(output, tuple | list):
        parts = output
    return next((part for part in parts if isinstance(part, Tensor)), None)


def _decoded(value: Tensor) -> Tensor:
    if isinstance(value, SecretTensor):
        held = value.value(full=True)
        return held.session.ring.decode(held.share.parts[0], held.frac)
    return value.to(torch.float64, copy=True)  # the model may go on in place


def _session(config: PrivateConfig, ranges: Ranges) -> Session:
    transport = LocalMesh(1).transport(0)
    session = Session(config, CheckedPlain(0, transport, Ring(config.ring)))
    session.numerics.ranges = ranges
    return session


def _weights(model: PreTrainedModel, spec: ModelSpec, session: Session) -> list[tuple[str, Fixed]]:
    made: list[tuple[str, Fixed]] = []

    def take(name: str, value: Tensor) -> None:
        frac = session.numerics.ranges.frac_of_weight(name, session.frac)
        elements = encode_weight(name, value, session.ring, frac)
        made.append((name, Fixed(session, cleartext(elements, watched=True), frac)))

    stream_loaded(model, spec.source, spec.folding(take))
    return made


def _fixed(session: Session, value: Tensor) -> Fixed:
    return Fixed(session, cleartext(session.ring.encode(value, session.frac), watched=True), session.frac)
