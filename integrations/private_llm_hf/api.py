"""The two entry points: `AutoPrivate*.from_pretrained(id_or_folder, PrivateConfig(...))` and `patch(model, ...)`."""

import copy
import dataclasses
import functools
import itertools
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from private_llm.approximations import warn_of_functions
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PatchMismatch, ShareFileError, undoing
from private_llm.net.local import LocalMesh
from private_llm.protocol_facts import ASSISTED, CASCADE
from private_llm.ranges import UNKNOWN, Ranges
from private_llm.replay.ahead import compile_ahead
from private_llm_hf.checkpoint.calibration_runs import check_ranges, checkpoint_ranges, loaded_ranges
from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.dense import dense_model, unwrapped, without_quantisation
from private_llm_hf.checkpoint.loaded import as_built
from private_llm_hf.checkpoint.model_spec import ModelSpec, describe, folds_norms
from private_llm_hf.checkpoint.own_code import patched_code, patched_methods
from private_llm_hf.checkpoint.sample_inputs import check_images
from private_llm_hf.checkpoint.share_files import ShareWriter, refuse_taken
from private_llm_hf.checkpoint.weights import Sink, WeightList, WeightsDigest, WeightSource, stream_loaded
from private_llm_hf.client.assisted_model import open_assisted
from private_llm_hf.client.corrections import check_online, make_corrections
from private_llm_hf.client.launch import choose_mode, start_parties
from private_llm_hf.client.model import PrivateModel, private_class
from private_llm_hf.client.nodes import check_sharding
from private_llm_hf.client.parties import Parties
from private_llm_hf.models.architectures import architecture, require_inputs
from private_llm_hf.models.handlers import handler_of
from private_llm_hf.models.sparse_blocks import adopted, check_sparsity
from private_llm_hf.patch_plan import PatchPlan, check_ring, make_patch_plan
from private_llm_hf.sparsity.sharing import SharedPredictors, shared_predictors
from private_llm_hf.tools.trial import AT_NODES, require_agreement, require_ring
from private_llm_hf.vision.network import Network
from private_llm_hf.wire.commands import Description

Start = Callable[[PrivateConfig, LocalMesh | None], Parties]


class _AutoPrivate:
    """Base of the auto classes: one transformers auto class each."""

    auto_class: type[_BaseAutoModelClass]

    def __init_subclass__(cls, auto: type[_BaseAutoModelClass] | None = None) -> None:
        if auto is not None:  # a user's subclass has its base's, or states `auto_class`
            cls.auto_class = auto

    def __init__(self) -> None:
        raise ConfigError(f"{type(self).__name__} is not instantiated; use {type(self).__name__}.from_pretrained(...)")

    @classmethod
    def from_pretrained(
        cls, source: str, private_config: PrivateConfig | None = None, ranges: Ranges | None = None,
        start: Start = start_parties,
        **hf_kwargs: Any,  # noqa: ANN401 - as transformers
    ) -> PreTrainedModel:  # fmt: skip
        """Share a checkpoint (hub id or folder) with the parties; returns the model to use like any other.

        private_config: how to run it (default: three parties, semi-honest, on this machine). ranges: those of
        `private-llm calibrate` (default: calibrated now, on the bundled text, unless calibrate=False). start: begins
        sessions, such as `PartyGroups`. hf_kwargs: transformers' download and loading arguments (`gguf_file` too; a
        `dtype` changes nothing, see `Checkpoint`); others change the model's configuration. Quantised weights are
        unpacked and adapters merged where transformers or peft can.
        Raises, before anything is sent, DomainError naming a module whose values fit no fixed-point format;
        PatchMismatch for what has no rule (architectures, modules, checkpoints); ConfigError for unknown arguments.
        """
        private_config = _checked(private_config, ranges)
        compile_ahead(private_config)
        checkpoint, model_class, config = _found(source, cls, hf_kwargs, private_config)

        def again(wanted: WeightList, sink: Sink, local: bool) -> None:
            found, kind, config = _found(source, cls, hf_kwargs, private_config)
            found.stream(kind, config, wanted, sink, local)

        return _open(
            model_class, config, private_config, functools.partial(checkpoint.stream, model_class, config),
            checkpoint.generation_config(model_class, config),
            ranges or (lambda: checkpoint_ranges(checkpoint, model_class, config, private_config)), start=start,
            again=again,
        )  # fmt: skip


class AutoPrivateModelForCausalLM(_AutoPrivate, auto=transformers.AutoModelForCausalLM):
    """Decoders that generate text."""


class AutoPrivateModelForSeq2SeqLM(_AutoPrivate, auto=transformers.AutoModelForSeq2SeqLM):
    """Encoder-decoders that generate text."""


class AutoPrivateModelForMaskedLM(_AutoPrivate, auto=transformers.AutoModelForMaskedLM):
    """Encoders that fill in masked tokens."""


class AutoPrivateModelForSequenceClassification(_AutoPrivate, auto=transformers.AutoModelForSequenceClassification):
    """Classifiers of sentences."""


class AutoPrivateModelForTokenClassification(_AutoPrivate, auto=transformers.AutoModelForTokenClassification):
    """Classifiers of every token, for instance of names."""


class AutoPrivateModelForQuestionAnswering(_AutoPrivate, auto=transformers.AutoModelForQuestionAnswering):
    """Models that find an answer in a text: logits of its first and its last token."""


class AutoPrivateModelForImageClassification(_AutoPrivate, auto=transformers.AutoModelForImageClassification):
    """Classifiers of images."""


class AutoPrivateModel(_AutoPrivate, auto=transformers.AutoModel):
    """Models without a head: hidden states, sentence and image features."""


def patch(
    model: nn.Module, private_config: PrivateConfig | None = None, mesh: LocalMesh | None = None,
    start: Start = start_parties, ranges: Ranges | None = None, images: Tensor | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Share a model that is already loaded; the original stays as it is.

    A module that is not a transformers model (an `nn.Sequential`, a network of one's own) becomes a `Network`, which is
    called with images and returns logits. mesh: see `start_parties`, for which `start` may stand in. ranges: as for
    `from_pretrained`. images: a batch like those to come, on which a network of images is calibrated (default: pictures
    of noise, if the model says what shape it takes).
    Raises PatchMismatch for somebody else's class of a transformers model, modules without a rule, hooks and missing
    weights; ConfigError for settings that it cannot follow; DomainError as `from_pretrained`, and for other images.
    """
    private_config = _checked(private_config, ranges)
    if not isinstance(mesh, LocalMesh | None) or not callable(start):
        raise ConfigError(f"mesh, start: got {mesh!r} and {start!r}; want a LocalMesh or None, and a function")
    compile_ahead(private_config)
    if images is not None and ranges is not None:
        raise ConfigError("images, ranges: got both; ranges are what calibration on images finds, so leave one out")
    if not isinstance(model, nn.Module):
        raise PatchMismatch(f"patch: got {type(model).__name__}; want a transformers model or a torch.nn.Module")
    if isinstance(model, PrivateModel):
        raise PatchMismatch(f"patch: got a {type(model).__name__}, which is private already; want the plaintext model")
    # copies: whoever sets something in the private model's configuration does not mean the plaintext model
    generation, given = copy.deepcopy(getattr(unwrapped(model), "generation_config", None)), weakref.ref(model)
    model = _loaded(model, private_config)
    if images is not None:
        images = check_images(type(model), model.config, images)

    def again(wanted: WeightList, sink: Sink, local: bool) -> None:
        found = given()
        if found is None:
            raise ConfigError("sessions: servers want the weights again, and the plaintext model is gone; keep it")
        stream_loaded(_loaded(found, private_config), wanted, sink, local)

    return _open(
        type(model), copy.deepcopy(model.config), private_config, functools.partial(stream_loaded, model), generation,
        ranges or (lambda: loaded_ranges(model, private_config, images)), mesh, start, again=again,
    )  # fmt: skip


def _loaded(model: nn.Module, private_config: PrivateConfig) -> PreTrainedModel:
    """What parties can build of a model in memory: transformers' own class, or a `Network`. Raises PatchMismatch."""
    inner = unwrapped(model)
    if isinstance(inner, PreTrainedModel) and private_config.protocol != ASSISTED:  # there the client runs the model
        require_inputs(type(inner), inner.config)
    model = dense_model(model)
    if not isinstance(model, PreTrainedModel):
        return _network(model)
    if isinstance(model, Network):
        return model
    if type(model) is not getattr(transformers, type(model).__name__, None):
        raise PatchMismatch(
            f"patch: {type(model).__name__} is not a model class of transformers, so the parties cannot build it; load "
            "the weights into the class of transformers that it extends, and run what it adds in the clear"
        )
    return as_built(model, without_quantisation(model.config))


def _network(model: nn.Module) -> Network:
    """A network of standard modules. Raises PatchMismatch, for one around a model of transformers with what to do."""
    try:
        return Network.of(model)
    except PatchMismatch as error:
        inside = [(name, part) for name, part in model.named_modules() if isinstance(part, PreTrainedModel)]
        if not inside:
            raise
        name, part = inside[0]
        raise PatchMismatch(
            f"patch: {type(model).__name__} is a module of its own around a {type(part).__name__}; patch that one "
            f"(private = patch(model.{name})) and run the layers around it in the clear on what it returns, or load "
            f"both as one class of transformers, such as one for sequence classification ({error})"
        ) from None


def _open(
    model_class: type[PreTrainedModel], config: PretrainedConfig, private_config: PrivateConfig, weights: WeightSource,
    generation: GenerationConfig | None, ranges: Ranges | Callable[[], Ranges], mesh: LocalMesh | None = None,
    start: Start = start_parties, tried: bool = False, again: WeightSource | None = None,
) -> PreTrainedModel:  # fmt: skip
    """Try an untested class, plan, start parties; calibrate and share what they lack. again: reads weights anew."""
    if private_config.protocol == ASSISTED:

        def joins(mesh: LocalMesh | None = None) -> Parties:
            check_online(private_config)
            return start(private_config, mesh)

        assisted = open_assisted(model_class, config, weights, joins(mesh), generation)
        assisted.joins, assisted.reads = joins, again or weights
        return assisted
    plain, private_config = config, adopted(private_config, config)
    config, sparse, spec = _specified(model_class, config, private_config)
    _check_code(spec.model, private_config)

    def mine() -> str | None:
        digest = WeightsDigest()
        try:
            weights(spec.source, spec.folding(digest), True)
        except OSError:  # configuration and tokenizer only
            return None
        return digest.text()

    if private_config.plan is not None:
        check_sharding(model_class, config, private_config.plan, private_config.split)
    if not tried:
        warn_of_functions(model_class.__name__, private_config.approximations)
        if private_config.protocol != CASCADE:
            require_agreement(model_class, plain, _open_small)
        if private_config.plan is not None:
            require_agreement(model_class, plain, _open_small, AT_NODES)
    patch_plan = _fitting(model_class, plain, spec, private_config, tried)
    name = model_class.__name__
    if private_config.reveal == "token" and not spec.model.can_generate():
        raise ConfigError(f"reveal: got 'token' for {name}; want a model that generates, or reveal='logits'")
    classifies = issubclass(model_class, Network) or name.endswith("Classification")
    if private_config.reveal == "class" and not classifies:
        raise ConfigError(f"reveal: got 'class' for {name}; want a classifier, or reveal='logits'")
    parties = start(private_config, mesh)
    with undoing(parties.close):
        description = describe(model_class, config, folded=spec.folded)
        stored = parties.use_stored(description, mine)
        if not stored:
            known = ranges if isinstance(ranges, Ranges) else ranges()
            check_ranges(spec.model, known)
            description = dataclasses.replace(description, ranges=known.to_dict())
            with parties.loading(description) as sink:
                _stream(lambda into: weights(spec.source, into, False), spec, sparse, sink)
    patch_plan = dataclasses.replace(patch_plan, ranges=parties.ranges)
    made = private_class(model_class)(config, parties, patch_plan, generation)
    made.stored, made.joins = stored, functools.partial(_join_again, private_config, description, start)
    return made


def _specified(
    model_class: type[PreTrainedModel], config: PretrainedConfig, private_config: PrivateConfig
) -> tuple[PretrainedConfig, SharedPredictors | None, ModelSpec]:
    """The configuration that parties build, its predictors of activity, and its weights. Raises ConfigError."""
    sparse = shared_predictors(private_config.sparsity, model_class, config)
    config = config if sparse is None else sparse.config
    spec = ModelSpec.of(model_class, config, folds_norms(private_config))
    check_sparsity(spec.model, private_config.sparsity)
    return config, sparse, spec


def _fitting(
    model_class: type[PreTrainedModel], plain: PretrainedConfig, spec: ModelSpec, private_config: PrivateConfig,
    tried: bool = False,
) -> PatchPlan:  # fmt: skip
    patch_plan = make_patch_plan(spec.model, private_config)
    check_ring(spec.model, private_config)
    if not tried:
        require_ring(model_class, plain, _open_small, private_config)
    return patch_plan


def _check_code(model: PreTrainedModel, private_config: PrivateConfig) -> None:
    """Raises PatchMismatch for code that was replaced here and that parties elsewhere do not have."""
    mode = choose_mode(private_config)
    found = [] if mode == "threads" else patched_code(model)
    if found:
        raise PatchMismatch(
            f"{type(model).__name__}: {len(found)} part(s) of transformers or torch were replaced in this process, "
            f"such as {found[0]}, and parties in other processes (party_mode={mode!r}) run the original; undo that, or "
            "use party_mode='threads', which tries the replacement first"
        )
    handlers = {type(module): handler_of(module) for module in model.modules()}
    ours = {kind for kind, handler in handlers.items() if handler and handler.make and handler.settings is None}
    theirs = [kind for kind in (*ours, nn.Linear) if kind.__module__.startswith(("torch.", "transformers."))]
    undone = [name for kind in theirs for name in patched_methods(kind) if name.endswith(".forward")]
    if undone:
        raise PatchMismatch(
            f"{type(model).__name__}: {undone[0]} was replaced in this process, and parties run something else "
            "in its place, which would undo that; undo it, or register_handler() what parties should run"
        )


def _join_again(private_config: PrivateConfig, description: Description, start: Start) -> Parties:
    """Another session of parties that hold the model already. Raises ConfigError and ShareFileError if none can be."""
    mode = choose_mode(private_config)
    if mode != "remote":
        raise ConfigError(
            f"sessions: the parties of party_mode={mode!r} end with their session; want parties on hosts, or those of "
            "`private-llm gateway`, which hold share files"
        )
    parties = start(private_config, None)
    with undoing(parties.close):
        if not parties.use_stored(description, lambda: None):
            raise ShareFileError("the parties hold no share file, and the model's weights are not here any more")
    return parties


def _stream(weights: Callable[[Sink], None], spec: ModelSpec, sparse: SharedPredictors | None, sink: Sink) -> None:
    """Pass a model's weights to the parties, folded, and put in order beside predictors of their activity."""
    if sparse is None:
        weights(spec.folding(sink))
    else:
        sparse.stream(weights, spec, sink)


def _open_small(model: PreTrainedModel, settings: PrivateConfig) -> PreTrainedModel:
    generation, weights = getattr(model, "generation_config", None), functools.partial(stream_loaded, model)
    return _open(type(model), model.config, settings, weights, generation, UNKNOWN, tried=True)


def ranges_of_checkpoint(
    source: str, private_config: PrivateConfig | None = None, auto: type[_AutoPrivate] = AutoPrivateModelForCausalLM,
    text: str | None = None, images: Tensor | None = None,
    **hf_kwargs: Any,  # noqa: ANN401 - as transformers
) -> Ranges:  # fmt: skip
    """Calibrate a checkpoint on `text` (default: a bundled one) for `from_pretrained(..., ranges=...)`.

    images: a prepared batch for a model of images (default: pictures of noise). Runs the plaintext model here. Raises
    DomainError naming a module whose values fit no fixed-point format; else as `from_pretrained` (PatchMismatch,
    ConfigError).
    """
    return checkpoint_ranges(*_found(source, auto, hf_kwargs), _checked(private_config), text, images)


def share_checkpoint(
    source: str, folder: str | Path, private_config: PrivateConfig | None = None,
    auto: type[_AutoPrivate] = AutoPrivateModelForCausalLM, progress: Callable[[str, int, int], None] | None = None,
    ranges: Ranges | None = None, overwrite: bool = False,
    **hf_kwargs: Any,  # noqa: ANN401 - as transformers
) -> list[Path]:  # fmt: skip
    """Split a checkpoint into one share file per party, tensor by tensor.

    Also writes `folder`/client with configuration and tokenizer: all a user needs. `progress` hears each weight's name,
    how many are done and how many there are. ranges: as for `from_pretrained`, stored with the shares. Returns the
    parties' files, in order; only their owner may open them. Raises ShareFileError for a folder that holds a sharing
    already, unless `overwrite`, else as `from_pretrained`, and ConfigError for weights="public"; a failure leaves none.
    """
    private_config = _checked(private_config, ranges)
    if private_config.weights == "public":
        raise ConfigError("share files hold secret weights; with weights='public' parties get the checkpoint")
    checkpoint, model_class, source_config = _found(source, auto, hf_kwargs)
    require_agreement(model_class, source_config, _open_small)
    config, sparse, spec = _specified(model_class, source_config, private_config)
    _fitting(model_class, source_config, spec, private_config)
    wanted, target = spec.shared, Path(folder)
    client = target / "client"
    if client.is_symlink() or (client.exists() and not client.is_dir()):
        raise ShareFileError(f"{client} is a link or a file; want a folder there, or nothing")
    if not overwrite:
        refuse_taken(client)
    if ranges is None:
        ranges = checkpoint_ranges(checkpoint, model_class, source_config, private_config)
    check_ranges(spec.model, ranges)
    description = describe(model_class, config, ranges, spec.folded)
    remove = functools.partial(shutil.rmtree, client, ignore_errors=True)
    with (
        undoing(remove if not client.exists() else lambda: None),
        ShareWriter(target, private_config, description, wanted, overwrite) as writer,
    ):
        done = itertools.count(1)

        def sink(name: str, tensor: Tensor) -> None:
            writer(name, tensor)
            if progress is not None:
                progress(name, next(done), len(wanted.shapes))

        _stream(functools.partial(checkpoint.stream, model_class, source_config, spec.source), spec, sparse, sink)
        checkpoint.write_client_folder(client, config, model_class)
    return writer.paths


def prepare_corrections(
    source: str | PreTrainedModel, private_config: PrivateConfig, tokens: int = 0, keep: int = 0,
    auto: type[_AutoPrivate] = AutoPrivateModelForCausalLM, progress: Callable[[str, int, int], None] = lambda *_: None,
    notice: Callable[[str], None] = lambda _: None, stop: Callable[[], bool] = lambda: False,
    **hf_kwargs: Any,  # noqa: ANN401 - as transformers
) -> int:  # fmt: skip
    """Store products of masks for PrivateConfig(protocol="assisted", corrections=FOLDER), for so many tokens more.

    source: a checkpoint, or a model in memory. private_config: also has `hosts` and `tls` of another host that computes
    them; without hosts this machine does. keep: then run on until it is interrupted or `stop`, asked twice a second,
    says so, and add some whenever the folder has fewer tokens; in a thread, beside a model that runs. notice: is told
    the size before it begins, and refills. progress: hears a layer or what is read, tokens done, and all tokens.
    Returns how many tokens are in the folder. Raises ConfigError for a full disk and a folder that others may open,
    ShareFileError for one with corrections of another model, ProtocolAbort naming a host that computes wrongly,
    PatchMismatch as `from_pretrained`.
    """
    private_config = _checked(private_config)
    if isinstance(source, str):
        checkpoint, model_class, config = _found(source, auto, hf_kwargs, private_config)
        weights = functools.partial(checkpoint.stream, model_class, config)
    else:
        model = _loaded(source, private_config)
        model_class, config = type(model), copy.deepcopy(model.config)
        weights = functools.partial(stream_loaded, model)
    return make_corrections(model_class, config, weights, private_config, tokens, keep, progress, notice, stop)


def _checked(private_config: PrivateConfig | None, ranges: Ranges | None = None) -> PrivateConfig:
    if not isinstance(ranges, Ranges | None):
        raise ConfigError(f"ranges: got {type(ranges).__name__}; want Ranges, as `ranges_of_checkpoint` returns them")
    if private_config is None:
        return PrivateConfig()
    if not isinstance(private_config, PrivateConfig):
        hint = "; transformers' own goes into config=..." if isinstance(private_config, PretrainedConfig) else ""
        raise ConfigError(f"private_config: got {type(private_config).__name__}; want a PrivateConfig{hint}")
    return private_config


def _found(
    source: str, auto: type[_AutoPrivate], options: dict[str, Any], private_config: PrivateConfig | None = None
) -> tuple[Checkpoint, type[PreTrainedModel], PretrainedConfig]:
    checkpoint = Checkpoint(source, **options)
    config = checkpoint.config()
    shared = private_config is None or private_config.protocol != ASSISTED
    if shared:
        architecture(config)
    mapping = auto.auto_class._model_mapping
    if type(config) not in mapping:
        raise PatchMismatch(f"{auto.auto_class.__name__} has no class for '{config.model_type}' models")
    found = mapping[type(config)]
    classes: tuple[type[PreTrainedModel], ...] = found if isinstance(found, tuple) else (found,)
    named = {known.__name__: known for known in classes}
    names = [name for name in getattr(config, "architectures", None) or [] if name in named]
    model_class = named[names[0]] if names else classes[0]
    if shared:
        require_inputs(model_class, config)
    return checkpoint, model_class, checkpoint.settled(model_class, config)
