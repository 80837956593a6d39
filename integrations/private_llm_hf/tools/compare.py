"""Module by module against plaintext: the same input through the private arithmetic (`plain`) and through float64.

`compare` finds which module an error comes from, and names the module and operation whose values leave the ring, local
steps included (protocols/plain.py). It runs where the plaintext is known anyway, at the model owner; the
arithmetic is that of the real protocols up to one unit a truncation. `survey` finds all operations without a rule.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from private_llm.approximations import emulated
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, PrivateLLMError
from private_llm.net.local import LocalMesh
from private_llm.protocols.plain import CheckedPlain, Plain
from private_llm.protocols.session import Session
from private_llm.protocols.share import cleartext
from private_llm.ranges import UNKNOWN, Ranges
from private_llm.ring.ring import Ring
from private_llm.tensor.dispatch import TorchArg, op_name
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.folds import fold_norms
from private_llm_hf.checkpoint.model_spec import ModelSpec, describe, folds_norms
from private_llm_hf.checkpoint.sample_inputs import tensors_in
from private_llm_hf.checkpoint.weights import encode_weight, stream_loaded
from private_llm_hf.models.architectures import architecture
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
    """Modules in the order in which they finished. stopped: why, or which value left its range, and the limit."""

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
    private, session = _under_plain(model, spec, config, ranges, CheckedPlain)
    expected, found = _ModuleOutputs(truth), _ModuleOutputs(private)
    stopped = None
    with torch.no_grad():
        if architecture(model.config).kind == "vision":
            with emulated(config.approximations, truth):
                truth(given.double())
            inputs = {"pixel_values": _secret(session, given)}
        else:
            tokens = _tokens(truth, given)
            with emulated(config.approximations, truth):
                truth(**tokens, use_cache=False)
            inputs = {
                name.replace("input_ids", "inputs_embeds"): _secret(session, _embedding(truth, name)(ids))
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
    if not model.config.is_encoder_decoder:
        return {"input_ids": input_ids}
    start = input_ids.new_full((len(input_ids), 1), model.config.decoder_start_token_id)
    return {"input_ids": input_ids, "decoder_input_ids": torch.cat([start, input_ids[:, :-1]], 1)}


def _embedding(model: PreTrainedModel, argument: str) -> nn.Module:
    owner = model.get_decoder() if argument.startswith("decoder_") else model
    found: nn.Module = owner.get_input_embeddings()
    return found


class _ModuleOutputs:
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
            value = next(tensors_in(output), None)
            if value is not None:
                self.values[name] = _decoded(value)

        return keep


def _decoded(value: Tensor) -> Tensor:
    if isinstance(value, SecretTensor):
        held = value.value(full=True)
        return held.session.ring.decode(held.share.parts[0], held.frac)
    return value.to(torch.float64, copy=True)  # the model may go on in place


def _under_plain(
    model: PreTrainedModel, spec: ModelSpec, config: PrivateConfig, ranges: Ranges, protocol: type[Plain]
) -> tuple[PreTrainedModel, Session]:
    """The model as the one party of `plain` runs it, and its session."""
    session = Session(config, protocol(0, LocalMesh(1).transport(0), Ring(config.ring)))
    session.numerics.ranges = ranges
    weights: dict[str, Fixed] = {}

    def take(name: str, value: Tensor) -> None:
        frac = ranges.frac_of_weight(name, session.frac)
        weights[name] = _fixed(session, encode_weight(name, value, session.ring, frac), frac)

    stream_loaded(model, spec.source, spec.folding(take))
    facts = describe(type(model), model.config)
    return build_party_model(facts.config, facts.class_, weights, session, folded=spec.folded), session


def _fixed(session: Session, elements: Tensor, frac: int) -> Fixed:
    return Fixed(session, cleartext(elements, watched=isinstance(session.protocol, CheckedPlain)), frac)


def _secret(session: Session, value: Tensor) -> SecretTensor:
    """A tensor of numbers as a secret of this session."""
    return SecretTensor(_fixed(session, session.ring.encode(value, session.frac), session.frac))


# -- which operations have no rule: all of them, not the first, found on a small model with random weights -------------
# Where one is refused, its result is computed from the decoded numbers, which are nobody's, so that the run goes on.
def survey(model: PreTrainedModel, run: Callable[[nn.Module, Callable[[Tensor], SecretTensor]], object]) -> list[str]:
    """`run` a private model of random weights (given what makes secrets); each refusal as "module (class): what"."""
    config = PrivateConfig(protocol="plain", insecure=True, guard=False)
    spec = ModelSpec.of(type(model), model.config, folds_norms(config))
    private, session = _under_plain(model, spec, config, UNKNOWN, Plain)
    mode = _Noting(private, session)
    try:
        with torch.no_grad(), mode:
            run(private, mode.secret)
    except Exception as error:  # noqa: BLE001 - whatever stops a foreign forward is what the survey is to find
        mode.note(f"{type(error).__name__}: {error}" if not isinstance(error, PrivateLLMError) else str(error))
    return list(dict.fromkeys(mode.refusals))


class _Noting(TorchFunctionMode):
    """Notes each refused operation with the module that called it, and goes on with its result in the clear."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        super().__init__()
        self._session = session
        self._running: list[str] = []
        self.refusals: list[str] = []
        for name, module in model.named_modules():
            called = f"{name or '(model)'} ({type(module).__name__})"
            module.register_forward_pre_hook(lambda *_, called=called: self._running.append(called))
            module.register_forward_hook(lambda *_: self._leave())

    def _leave(self) -> None:
        self._running.pop()

    def note(self, refusal: str) -> None:
        self.refusals.append(f"{self._running[-1] if self._running else '(model)'}: {refusal}")

    def secret(self, value: Tensor) -> SecretTensor:
        """A tensor of numbers as a secret of this session."""
        return _secret(self._session, value.float())

    def __torch_function__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except PrivateLLMError:
            self.note(op_name(func))
        result = func(*_each(args, self._open), **_each(kwargs, self._open))
        made, name = _each(result, self._close), op_name(func)
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place and args and isinstance(args[0], SecretTensor) and isinstance(made, SecretTensor):
            return args[0].rebind(made)
        return made

    def _open(self, value: TorchArg) -> TorchArg:
        if not isinstance(value, SecretTensor):
            return value
        held = value.shown().value(full=True)
        shown = self._session.ring.decode(held.share.parts[0], held.frac).float()
        return shown if value.hidden is None else shown.masked_fill(value.hidden, float("-inf"))

    def _close(self, value: TorchArg) -> TorchArg:
        floating = isinstance(value, Tensor) and not isinstance(value, SecretTensor) and value.is_floating_point()
        return self.secret(value.nan_to_num(0.0).clamp(-1e4, 1e4)) if floating else value


def _each(values: TorchArg, change: Callable[[TorchArg], TorchArg]) -> TorchArg:
    """Change what is in tuples, lists and dictionaries."""
    if isinstance(values, dict):
        return {name: _each(value, change) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_each(value, change) for value in values)
    return change(values)
