"""Which operations of a model have no rule: all of them, not the first, found on a small model with random weights.

One party computes on numbers that are nobody's (`plain`). Where an operation is refused, its result is computed from
the decoded numbers, so that the run goes on to the next. Nothing of this runs where there are secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import PrivateLLMError
from private_llm.net.local import LocalMesh
from private_llm.protocols.plain.party import Plain
from private_llm.protocols.session import Session
from private_llm.protocols.share import cleartext
from private_llm.ring.ring import Ring
from private_llm.tensor.dispatch import TorchArg, op_name
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.model_spec import ModelSpec, describe, folds_norms
from private_llm_hf.checkpoint.weights import encode_weight, stream_loaded
from private_llm_hf.party.model import build_party_model


def survey(model: PreTrainedModel, run: Callable[[nn.Module, Callable[[Tensor], SecretTensor]], object]) -> list[str]:
    """Run a model of random weights; every refusal as "module (class): what was refused", in order, each once.

    run: calls the private model, given what makes a secret of a tensor of numbers.
    """
    config = PrivateConfig(protocol="plain", insecure=True, guard=False)
    session = Session(config, Plain(0, LocalMesh(1).transport(0), Ring(config.ring)))
    weights: dict[str, Fixed] = {}

    def take(name: str, value: Tensor) -> None:
        elements = encode_weight(name, value, session.ring, session.frac)
        weights[name] = Fixed(session, cleartext(elements), session.frac)

    spec = ModelSpec.of(type(model), model.config, folds_norms(config))
    stream_loaded(model, spec.source, spec.folding(take))
    facts = describe(type(model), model.config)
    private = build_party_model(facts.config, facts.class_, weights, session, folded=spec.folded)
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
            module.register_forward_pre_hook(lambda module, _, name=name: self._enter(name, module))
            module.register_forward_hook(lambda *_: self._leave(), always_call=False)

    def _enter(self, name: str, module: nn.Module) -> None:
        self._running.append(f"{name or '(model)'} ({type(module).__name__})")

    def _leave(self) -> None:
        self._running.pop()

    def note(self, refusal: str) -> None:
        """One refusal, with the innermost module that runs."""
        self.refusals.append(f"{self._running[-1] if self._running else '(model)'}: {refusal}")

    def secret(self, value: Tensor) -> SecretTensor:
        """A tensor of numbers as a secret of this session."""
        elements = self._session.ring.encode(value.float(), self._session.frac)
        return SecretTensor(Fixed(self._session, cleartext(elements), self._session.frac))

    def __torch_function__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        """One operation of the model's forward."""
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except PrivateLLMError:
            self.note(op_name(func))
        result = func(*_each(args, self._open), **_each(kwargs, self._open))
        made = _each(result, self._close)
        if args and isinstance(args[0], SecretTensor) and isinstance(made, SecretTensor) and _in_place(op_name(func)):
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


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
