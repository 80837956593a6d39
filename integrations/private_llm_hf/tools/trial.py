"""A first load of a model class that the project's tests do not compare: is its private result the plaintext one?

Rules stand for operations and modules, so most of transformers' classes run without anybody having looked at them. A
small model of the class, with the settings of the large one and random weights, runs in the clear and under `plain`, in
a batch with padding, with a cache and without, and both must agree. Takes seconds, sends nothing, knows nothing of the
weights. What passed is remembered in the user's cache folder.
"""

import functools
import hashlib
import json
import logging
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PatchMismatch, listed
from private_llm.kernels.compiling import FOLDER
from private_llm.tensor.secret import SecretTensor
from private_llm.token_sharding import ShardingPlan
from private_llm_hf.checkpoint.miniature import miniature
from private_llm_hf.checkpoint.own_code import patched_code
from private_llm_hf.checkpoint.sample_inputs import fitting_inputs, is_encoder_of_two, sample_pictures, sample_tokens
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.models.architectures import architecture, compared, reads_first_token
from private_llm_hf.models.handlers import handler_of
from private_llm_hf.patch_plan import unknown_modules
from private_llm_hf.tools.compare import compare, survey
from private_llm_hf.vision.network import Network, NetworkConfig
from private_llm_hf.wire.commands import OPENED

ON_SHARES = PrivateConfig(protocol="plain", insecure=True, party_mode="threads", calibrate=False, guard=False)
"""How the small model runs: the rules of every protocol, on numbers that are nobody's."""
AT_NODES = PrivateConfig(protocol="cascade", plan=ShardingPlan(2, 2, 1, accept_weak_plan=True), party_mode="threads")
"""The same for token sharding."""

_SPREAD = 0.05  # largest difference, in standard deviations of plaintext outputs; fixed point stays a 100th of it
_LEAST = 4e-3  # what fixed point may always be off by
_NEW = ((5, 17), (9, 23), (31, 40))  # tokens that both models are made to generate: two rows, three steps

Open = Callable[[PreTrainedModel, PrivateConfig], PreTrainedModel]  # makes a model private without a trial


@dataclass(frozen=True)
class _Case:
    """One way to call both models. run: returns outputs by name."""

    name: str
    run: Callable[[PreTrainedModel], dict[str, Tensor]]
    mask: Tensor | None = None


def require_agreement(
    model_class: type[PreTrainedModel], config: PretrainedConfig, make_private: Open,
    settings: PrivateConfig = ON_SHARES,
) -> None:  # fmt: skip
    """Compare a small model of this class with its plaintext self, once; each time with a user's handler or code.
    settings: ON_SHARES or AT_NODES. Raises PatchMismatch naming what has no rule, or differs first.
    """
    bare = skeleton(model_class, config)
    sharded = settings == AT_NODES
    of_user = bool(patched_code(bare)) or (not sharded and _has_handler_of_user(bare))
    known = model_class.__name__ in compared("token sharding" if sharded else "shares")
    if known and not of_user and (sharded or not unknown_modules(bare)):
        return
    if isinstance(config, NetworkConfig) and config.image_shape is None:
        return  # nobody knows what it could be tried on
    model = miniature(model_class, config)
    passed = None if of_user else _note(model, settings)
    with suppress(OSError):  # of a note that is not there
        if passed is not None and passed.read_text(encoding="utf-8") == model_class.__name__:
            return
    with _quiet():
        _try(model, functools.partial(make_private, model, settings), "" if sharded else "on shares")
    if passed is not None:
        with suppress(OSError):  # a full disk, or one that is read only: the next load tries again
            passed.write_text(model_class.__name__, encoding="utf-8")


def require_ring(
    model_class: type[PreTrainedModel], config: PretrainedConfig, make_private: Open, private_config: PrivateConfig
) -> None:
    """In 32 bits, try modules and users' handlers without a rule. Raises ConfigError for what needs 64 bits."""
    if private_config.ring == 64:
        return
    bare = skeleton(model_class, config)
    unknown = not isinstance(bare, Network) and unknown_modules(bare)  # networks are made of a closed list
    if not unknown and not _has_handler_of_user(bare):
        return
    model = miniature(model_class, config)
    images = fitting_inputs(model) if isinstance(model, Network) else sample_pictures(config)
    if images is None:  # nobody knows what it could be tried on
        return
    settings = replace(ON_SHARES, ring=private_config.ring, frac_bits=private_config.frac_bits)
    try:
        with _quiet(), torch.no_grad(), make_private(model, settings) as private:
            private(pixel_values=images[:1])
    except DomainError as error:
        raise ConfigError(
            f"ring: got {private_config.ring} for {model_class.__name__}, and a small model of it fails there: {error}"
        ) from None


def _has_handler_of_user(model: PreTrainedModel) -> bool:
    found = (handler_of(module) for module in model.modules())
    return any(handler is not None and handler.settings is not None for handler in found)


def _try(model: PreTrainedModel, make_private: Callable[[], PreTrainedModel], on_shares: str) -> None:
    name = type(model).__name__
    with torch.no_grad():
        try:
            cases = list(_cases(model))
            wanted = [case.run(model) for case in cases]
        except Exception as error:  # whatever a foreign forward raises
            raise PatchMismatch(
                f"{name}: a small model of this class does not run in the clear on a text or images alone "
                f"({type(error).__name__}: {error}); want a class that does, since nothing else can be shared"
            ) from error
        try:
            with make_private() as private:
                found = (_difference(case, right, case.run(private)) for case, right in zip(cases, wanted, strict=True))
                difference = next(filter(None, found), None)
        except Exception as refused:  # whatever a foreign forward raises at a party or here
            first = str(refused) or type(refused).__name__
            raise PatchMismatch(f"{name}: {_refusals(model, first) if on_shares else first}") from refused
        if difference is not None:
            raise PatchMismatch(
                f"{name}: its private result would be wrong, so nothing was sent. A small copy with random weights, "
                f"{difference}. {_first_difference(model) if on_shares else ''}Report the class, "
                "or replace the modules that differ with private_llm_hf.register_handler"
            )


def _difference(case: _Case, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    """Where the two results of a case are not the same."""
    for output in sorted(set(wanted) & set(found)):
        right, value = wanted[output].float(), found[output].float()
        if right.shape != value.shape:
            return f"{case.name}, gives {output} of shape {tuple(value.shape)} instead of {tuple(right.shape)}"
        rows = right.shape[:2] if case.mask is not None and right.shape[:2] == case.mask.shape else None
        if rows is not None and case.mask is not None:
            right, value = right[case.mask.bool()], value[case.mask.bool()]
        allowed = max(_SPREAD * float(right.std()), _LEAST)
        error = float((right - value).abs().max())
        if not error <= allowed:
            return f"{case.name}, is off by {error:.3g} in {output} where {allowed:.2g} is allowed"
    if not set(wanted) & set(found):
        return f"{case.name}, opens {sorted(found) or 'nothing'} where the model gives {sorted(wanted)}"
    return None


# -- the cases --------------------------------------------------------------------------------------------------------
def _cases(model: PreTrainedModel) -> Iterator[_Case]:
    facts = architecture(model.config)
    if facts.kind == "vision":
        yield _Case("on two images", _forward(pixel_values=sample_pictures(model.config)))
        return
    ids, left = sample_tokens(model.config)
    kind = "encoder" if is_encoder_of_two(model) else facts.kind
    if kind == "encoder-decoder":
        yield _Case("on two texts", _forward(input_ids=ids, decoder_input_ids=ids.flip(1)))
    else:
        yield _Case("on two texts", _forward(input_ids=ids))
    if kind == "encoder":
        right = left.flip(1)
        for side, mask in (("right", right), ("left", left))[: 1 if reads_first_token(type(model)) else 2]:
            padded = _forward(input_ids=_padded(ids, mask, model), attention_mask=mask)
            yield _Case(f"with padding on the {side}", padded, mask)
    elif kind == "decoder":
        yield _Case("with padding", _forward(input_ids=_padded(ids, left, model), attention_mask=left), left)
    if facts.caches and model.can_generate():
        yield _Case("with padding and a cache", _generate(_padded(ids, left, model), left, model.config))


def _padded(ids: Tensor, mask: Tensor, model: PreTrainedModel) -> Tensor:
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    return ids.masked_fill(mask == 0, pad if isinstance(pad, int) and pad >= 0 else 0)


def _forward(**given: Tensor) -> Callable[[PreTrainedModel], dict[str, Tensor]]:
    def run(model: PreTrainedModel) -> dict[str, Tensor]:
        if isinstance(model, Network):
            return {"logits": model(**given)}  # the private one's too is a tensor
        output = model(**given, return_dict=True)
        return {name: output[name] for name in OPENED if isinstance(output.get(name), Tensor)}

    return run


def _generate(ids: Tensor, mask: Tensor, config: PretrainedConfig) -> Callable[[PreTrainedModel], dict[str, Tensor]]:
    start = getattr(config, "decoder_start_token_id", None)
    settings = GenerationConfig(
        max_new_tokens=len(_NEW), do_sample=False, num_beams=1, pad_token_id=0, eos_token_id=None, bos_token_id=1,
        decoder_start_token_id=1 if start is None else start, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip

    def run(model: PreTrainedModel) -> dict[str, Tensor]:
        made = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=settings,
            logits_processor=LogitsProcessorList([_Forced()]),
        )  # fmt: skip
        return {"logits": torch.stack(made.logits)}

    return run


class _Forced(LogitsProcessor):  # type: ignore[misc]
    """Makes both models go on with the same tokens, however close their logits are."""

    def __init__(self) -> None:
        self._step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, float("-inf"))
        for row, token in enumerate(_NEW[self._step]):
            forced[row, token % scores.shape[-1]] = 0.0
        self._step += 1
        return forced


# -- what is wrong ----------------------------------------------------------------------------------------------------
def _first_difference(model: PreTrainedModel) -> str:
    """The first module whose output differs, without padding and cache; nothing if none does."""
    vision = architecture(model.config).kind == "vision"
    given = sample_pictures(model.config) if vision else sample_tokens(model.config)[0]
    try:
        rows = compare(model, given, ON_SHARES).modules
    except Exception:  # noqa: BLE001 - an explanation that fails must not hide what it was to explain
        return ""
    for row in rows:
        if not row.error_max <= max(_SPREAD * row.largest, _LEAST):
            return f"The first module that differs is {row.name} ({row.kind}). "
    return "Without padding and cache all its modules agree. "


def _refusals(model: PreTrainedModel, first: str) -> str:
    def run(private: nn.Module, secret: Callable[[Tensor], SecretTensor]) -> object:
        if architecture(model.config).kind == "vision":
            return private(pixel_values=secret(sample_pictures(model.config)), return_dict=True)
        ids, _ = sample_tokens(model.config)
        embedded = secret(model.get_input_embeddings()(ids))
        if architecture(model.config).kind == "encoder-decoder" and not is_encoder_of_two(model):
            return private(inputs_embeds=embedded, decoder_inputs_embeds=embedded, return_dict=True)
        return private(inputs_embeds=embedded, return_dict=True)

    try:
        found = survey(model, run)
    except Exception as refused:  # noqa: BLE001 - a survey that fails has found nothing
        found = [f"{type(refused).__name__}: {refused}"]
    if not found:
        return f"no private rule: a small random copy failed as parties would compute it ({first})"
    return (
        f"no private rule for {len(found)} module(s) or operation(s), found with a small model and random weights "
        f"before anything was sent: {listed(found, between='; ')}. Give modules a rule with "
        "private_llm_hf.register_handler, operations one with private_llm.tensor.dispatch.implements"
    )


# -- what is remembered -----------------------------------------------------------------------------------------------
def _note(model: PreTrainedModel, settings: PrivateConfig) -> Path | None:
    """The file that says that this class with these settings agreed, under these versions; None without a folder."""
    if FOLDER is None:
        return None
    versions = [type(model).__name__, settings.protocol, transformers.__version__, torch.__version__, _sources()]
    noted = json.dumps(versions) + model.config.to_json_string(use_diff=False)
    digest = hashlib.sha256(noted.encode()).hexdigest()[:16]
    folder = FOLDER.parent / "agreed"
    return folder / digest if _is_ours(FOLDER.parent) and _is_ours(folder) else None


def _is_ours(folder: Path) -> bool:
    """Whether a folder is this user's alone to write; made if it is not there."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and not writable and (not hasattr(os, "getuid") or found.st_uid == os.getuid())


def _sources() -> str:
    """A digest of this library's code: a change may change what agrees."""
    made = hashlib.sha256()
    for root in (Path(str(resources.files(package))) for package in ("private_llm", "private_llm_hf")):
        for path in sorted((*root.rglob("*.py"), *root.rglob("*.json"))):
            made.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return made.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without advice on a model that no user has asked for: transformers', and why its parties stopped."""
    ours = logging.getLogger("private_llm")
    before = transformers.logging.get_verbosity(), ours.level
    transformers.logging.set_verbosity_error()
    ours.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before[0])
        ours.setLevel(before[1])
