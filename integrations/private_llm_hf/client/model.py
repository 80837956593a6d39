"""The user's model object: a PreTrainedModel whose forward runs at the parties.

`private_class(OPTForCausalLM)` makes `PrivateOPTForCausalLM`, a subclass of it without modules or weights, so that
transformers' own generate() runs here, at the client, who alone sees token ids and logits.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PretrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import ModelOutput
from transformers.models.auto import modeling_auto

from private_llm.errors import ConfigError, PlaintextLeak, PrivateLLMError, UnsupportedOp
from private_llm.kernels.compile_note import Streamed
from private_llm.kv_cache.policies.policy import NoCache
from private_llm_hf.checkpoint.sample_inputs import output_shape
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.client.costs import Costs
from private_llm_hf.client.dropped import close_when_dropped
from private_llm_hf.client.forward import ForwardCall, encode_prompt
from private_llm_hf.client.generation_settings import as_config_errors, check_arguments, check_token_alone
from private_llm_hf.client.prefix import Prefix
from private_llm_hf.client.preprocess import CallPlan, Preprocessed, dry_run
from private_llm_hf.client.session_client import PrivateCache, SessionClient, check_cache
from private_llm_hf.client.speculation import SpeculationConfig, check_drafts
from private_llm_hf.client.speculative_loop import decoding
from private_llm_hf.models.architectures import architecture
from private_llm_hf.models.inputs import GENERATED, check_positions
from private_llm_hf.patch_plan import PatchPlan
from private_llm_hf.transformers_versions import CACHE, with_cache_named

_ELSEWHERE = (
    "the weights are with the parties, secret ones only as shares; to store shares run `private-llm share` on the "
    "checkpoint"
)

_NOT_GENERATED = {
    "assistant_early_exit": "it drafts with the model's own first layers, which are with the parties; want "
    "speculation=SpeculationConfig(...), assistant_model or prompt_lookup_num_tokens",
    "use_mtp": "layers that propose several tokens are with the parties; want speculation=SpeculationConfig(...)",
    "is_assistant": "a private model drafts for no other; give the smaller model as assistant_model",
}
"""Settings of generate() that reach into the model."""


def _refused(error: type[PrivateLLMError], reason: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise error(reason)

    refuse.__doc__ = f"Raises {error.__name__}: {reason}."
    return refuse


class PrivateModel:
    """What all private models share; `private_class` mixes it into a subclass of the original class."""

    config: PretrainedConfig
    original_class: type[PreTrainedModel]
    accepts: frozenset[str]
    # from the class that this one is mixed into
    generate: Callable[..., Any]
    __call__: Callable[..., Any]

    def __init__(
        self, config: PretrainedConfig, parties: SessionClient, patch_plan: PatchPlan,
        generation_config: GenerationConfig | None = None,
    ) -> None:  # fmt: skip
        # Only the root constructor: the architecture's own would build modules and weights.
        PreTrainedModel.__init__(self, config)
        # who asks the first parameter for device and dtype gets an answer, and no weight
        self.weights_with_the_parties = nn.Parameter(torch.empty(0), requires_grad=False)
        self.parties = parties
        self.patch_plan = patch_plan
        self.accepts = frozenset(inspect.signature(self.original_class.forward).parameters)
        self.asked = 0
        """Calls of the model so far."""
        self.on_chunk: Callable[[int, int], None] | None = None
        """Told after each chunk of a long prompt how many of its tokens were read, and how many there are."""
        self._outputs: dict[tuple[int, ...], tuple[int, ...]] = {}
        if generation_config is not None:
            self.generation_config = generation_config
        self.joins: Callable[[], SessionClient] | None = None
        self.stored = False  # whether the parties had its weights already, so that those here were not shared
        self._end = close_when_dropped(self, parties.close)
        self.training = False

    # -- images of any size ---------------------------------------------------------------------------------
    def fit(self, shape: torch.Size) -> None:
        """Raises DomainError if images of this shape cannot go through the layers (tried without values, once)."""
        if architecture(self.config).images == "any" and tuple(shape) not in self._outputs:
            self._outputs[tuple(shape)] = output_shape(self.original_class, self.config, shape)

    def classes(self, shape: Sequence[int]) -> int:
        """How many classes there are."""
        return int(self._outputs.get(tuple(shape), (self.config.num_labels,))[-1])

    # -- what a user asks -----------------------------------------------------------------------------------
    def explain(self) -> PatchPlan:
        """Print the patch plan (every module, what runs in its place, what stays public) and return it."""
        console = Console()
        Console(width=max(console.width, 140)).print(self.patch_plan)
        return self.patch_plan

    def extra_repr(self) -> str:
        """What `print(model)` shows in place of layers, which are not here."""
        return f"protocol={self.parties.config.protocol!r}, weights with the parties: see explain()"

    def prefix(self, input_ids: torch.Tensor) -> Prefix:
        """Read a beginning that several texts share, once; input_ids: int64 [1, n]. Raises as `Prefix`."""
        return Prefix(self, input_ids)

    def preprocess(self, *plans: CallPlan) -> Preprocessed:
        """Let the helping party (party 0, the dealer, in quad party 3) do its part of future calls now.

            model.preprocess(GeneratePlan(prompt=12, new_tokens=32))
            model.generate(**inputs, max_new_tokens=32)       # 12 tokens of prompt

        Online it is then silent. Its receivers store what it sends, encrypted, in `PrivateConfig.offline_folder`, until
        it is used (once) or the session ends. Planned calls must come in their order (else DomainError); after the last
        the session is as before. A new plan, or none, throws away what is left. A party service does this while nobody
        else waits, up to its `offline_bytes`, and runs planned calls alone. Raises ConfigError for a protocol without a
        helping party, a full disk, and, before anything runs, sparsity and calls that evict entries by secrets.
        """
        if self.parties.config.sparsity is not None:
            raise ConfigError(
                "preprocess: with sparsity the helping party cannot run ahead, because it learns only then which "
                "neurons and heads are computed; leave preprocess or sparsity out"
            )
        selection = self.parties.config.kv_cache.selection
        if selection is not None and selection.gather == "shuffled-scores":
            raise ConfigError(
                "preprocess: gather='shuffled-scores' opens places of a secret order, which the helping party cannot "
                "be told ahead; want gather='scores' or 'auto'"
            )
        entries = dry_run(self, plans)
        return Preprocessed(len(entries), self.parties.preprocess(entries))

    def cost(self, reset: bool = False) -> Costs:
        """Bytes, rounds, multiply-adds and seconds of all calls since the last reset, by link, module and operation.

        Raises PartyFailed if the session is over, ConfigError where nothing is counted.
        """
        return replace(self.parties.costs(reset), kinds={row.name: row.kind for row in self.patch_plan.rows})

    def open_session(self) -> "PrivateModel":
        """Another model object, on a session of its own of the same parties: its calls run beside this one's.

        A party service merges what its sessions ask at the same time. Close it when it is not needed any more. Raises
        ConfigError for parties that end with their session, PartiesBusy and TransportError as `from_pretrained`.
        """
        made = type(self)(self.config, self._joined(), self.patch_plan, self.generation_config)
        made.joins = self.joins
        return made

    def reconnect(self) -> None:
        """Go on in a new session, after this one has ended: a party failed, or nothing was asked for too long.

        Caches of the old session are gone. Raises as `open_session`; the model may try again then.
        """
        parties = self._joined()
        self._end()
        self.parties, self._end = parties, close_when_dropped(self, parties.close)

    def _joined(self) -> SessionClient:
        if self.joins is None:
            raise ConfigError("sessions: this model was not made by from_pretrained() or patch()")
        return self.joins()

    def close(self) -> None:
        """Stop the parties (of a service: end this session); the model can be used again only by `reconnect`."""
        self.parties.close()

    def __enter__(self) -> "PrivateModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the faces transformers looks at ----------------------------------------------------------------------
    @functools.cached_property
    def embedding_width(self) -> int | None:
        """Numbers of an embedded token, if the model has a table of tokens."""
        with suppress(NotImplementedError):
            return getattr(skeleton(self.original_class, self.config).get_input_embeddings(), "embedding_dim", None)
        return None

    device, dtype = torch.device("cpu"), torch.float32
    """Where inputs are expected and outputs appear, and what outputs are."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Weights that the parties hold."""
        return 0 if only_trainable else self.patch_plan.parameters(exclude_embeddings)

    def get_encoder(self, *_: object, **__: object) -> nn.Module:
        """The encoder: its call runs at the parties and returns a handle. Raises UnsupportedOp where there is none."""
        if not self.config.is_encoder_decoder:
            raise UnsupportedOp(f"{type(self).__name__} has no encoder of its own")
        return _Encoder(self)

    def shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """What a decoder reads whose outputs are compared with labels. Raises UnsupportedOp where nothing says so."""
        prepare = getattr(self, "prepare_decoder_input_ids_from_labels", None)
        shift = getattr(sys.modules[self.original_class.__module__], "shift_tokens_right", None)
        made, reason = None, "its class does not say what its decoder reads for them"
        try:
            if prepare is not None:
                made = prepare(labels)
            elif shift is not None:
                settings = self.config.pad_token_id, self.config.decoder_start_token_id
                made = shift(labels, *settings[: len(inspect.signature(shift).parameters) - 1])
        except ValueError as error:  # a token that the configuration does not name
            reason = str(error)
        if isinstance(made, torch.Tensor):
            return made
        raise UnsupportedOp(f"labels: {self.original_class.__name__}: {reason}; give decoder_input_ids as well")

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: object = None,
        batch_size: int = 1, max_cache_length: int = 0,
    ) -> None:  # fmt: skip
        """Generate() starts: all positions must exist, and the cache will live at the parties."""
        for name, reason in _NOT_GENERATED.items():
            if getattr(generation_config, name, None) not in (None, False):
                raise UnsupportedOp(f"{name}: {reason}")
        if not self.config.is_encoder_decoder:
            check_positions(self.config, max_cache_length, GENERATED)
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            config = self.parties.config
            check_drafts(config.kv_cache, generation_config.max_length, None, config.expert_capacity)
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ConfigError(
                f"cache_implementation: got {generation_config.cache_implementation!r}; want None (the parties "
                "hold the cache)"
            )
        given = model_kwargs.get(CACHE)
        if given is not None:
            check_cache(given, self.parties)._is_user_defined = True
        elif isinstance(self.parties.config.kv_cache, NoCache):
            generation_config.use_cache = model_kwargs["use_cache"] = False
        elif generation_config.use_cache is not False:
            cache = model_kwargs[CACHE] = PrivateCache(self.parties, 0)
            self.parties.keep_together(cache.handle, generation_config.num_beams or 1)

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: object, **kwargs: object
    ) -> LogitsProcessorList:
        """As the original's; with reveal="token" everything that needs more than the arg max is refused."""
        original = super()._get_logits_processor  # type: ignore[misc]
        processors: LogitsProcessorList = original(generation_config, *args, **kwargs)
        if self.parties.config.reveal == "token":
            check_token_alone(generation_config, processors)
        return processors

    # -- what a model without weights here cannot do --------------------------------------------------------------
    save_pretrained = state_dict = __reduce_ex__ = _refused(PlaintextLeak, _ELSEWHERE)  # so neither pickle nor a copy
    push_to_hub = _refused(
        PlaintextLeak, "the weights are with the parties, secret ones only as shares; there is nothing to upload"
    )
    resize_token_embeddings = _refused(
        UnsupportedOp, "resize the embeddings of the plaintext model, then patch() it again"
    )
    get_input_embeddings = _refused(UnsupportedOp, "the embeddings are with the parties, secret ones only as shares")
    get_output_embeddings = _refused(UnsupportedOp, "the output head is with the parties, a secret one only as shares")

    def tie_weights(self, *_: object, **__: object) -> None:
        """Nothing to do: tied weights are one at the parties, and the client computes nothing worth compiling."""

    compile = tie_weights

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PrivateModel":
        """What to(), cuda(), half() and others do to weights, here and in a module that holds this one: nothing.

        Raises ConfigError for another device than the CPU, UnsupportedOp for another dtype than float32.
        """
        try:
            made = fn(torch.zeros(1))
        except (RuntimeError, AssertionError):  # what torch raises for a device that is not here
            made = None
        if made is None or made.device.type != "cpu":
            raise ConfigError(
                "a private model has no weights to move: it takes inputs and gives outputs on the CPU (pipelines: "
                "device='cpu'); the parties compute on a GPU with PrivateConfig(device='cuda')"
            )
        config = self.parties.config
        if made.dtype != torch.float32:
            raise UnsupportedOp(
                f"{made.dtype}: a private model has no dtype to change: it computes in fixed point ({config.ring} "
                f"bits, {config.frac_bits} of them fractional) and gives float32; for another precision load it with "
                "another PrivateConfig.ring and frac_bits, and convert the outputs"
            )
        return self

    def train(self, mode: bool = True) -> "PrivateModel":
        """The model as it is for mode=False (evaluation). Raises UnsupportedOp for True."""
        if mode:
            raise UnsupportedOp("private models run inference only; train the plaintext model")
        return self


class _Encoder(nn.Module):
    """The encoder as generate() sees it, which asks it for its arguments."""

    main_input_name = "input_ids"

    def __init__(self, model: PrivateModel) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, so that it is no module inside this one

    def forward(
        self, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None, **_: object,
    ) -> ModelOutput:  # fmt: skip
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        return encode_prompt(self._model[0], **given)


def _with_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate(self: PrivateModel, *args: Any, speculation: SpeculationConfig | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        """As transformers' own, which runs at the client; with `speculation` drafts propose tokens, and passes of the
        private model check several at once (docs/speculation.md). The text is the same, when sampled in distribution.

        Raises, before anything is sent, ConfigError for arguments that generate() cannot use, and ConfigError,
        DomainError and UnsupportedOp for what speculation does not do (`decoding`).
        """
        check_arguments(args, kwargs, self.config.get_text_config().vocab_size, speculation)
        with ExitStack() as streaming:
            streaming.enter_context(as_config_errors(lambda: self.asked))
            if kwargs.get("streamer") is not None:
                kwargs["streamer"] = streaming.enter_context(closing(Streamed(kwargs["streamer"])))
            if speculation is not None:
                kwargs["custom_generate"] = decoding(speculation, kwargs.get("streamer"))
            return original(self, *args, **with_cache_named(kwargs))

    return generate


# -- classes, and what other libraries look at before they use one -----------------------------------------------------
# transformers' pipelines warn with a list of all classes unless a model's class is in their tables of names. And torch
# accepts a module under any attribute name, also one that the owner's class computes: sentence-transformers has a
# property `auto_model`, so assigning to it would change nothing, and texts would go through the plaintext model.
def _refuse_swallowed(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    if isinstance(module, PrivateModel) and isinstance(getattr(type(owner), name, None), property):
        others = [n for n, held in owner.named_children() if isinstance(held, PreTrainedModel)]
        hint = f"; assign to '{others[0]}', which holds the model" if others else ""
        raise ConfigError(
            f"{type(owner).__name__}.{name} is a property, so what is assigned to it is never used and the "
            f"plaintext model would go on answering{hint}"
        )


register_module_module_registration_hook(_refuse_swallowed)


_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def private_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The private subclass of a model class: one per class, so that isinstance means something."""
    if original in _CLASSES:
        return _CLASSES[original]
    signature = inspect.signature(original.forward)
    finish = getattr(original, "finish", lambda output, config: output)

    def forward(self: PrivateModel, *args: object, **kwargs: object) -> ModelOutput | tuple[object, ...]:
        bound = signature.bind(self, *args, **with_cache_named(kwargs))
        given = dict(bound.arguments)
        given.pop(next(iter(signature.parameters)))
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        return finish(ForwardCall(self, given).run(), self.config)

    forward = torch.compiler.disable(forward)  # a compiler that follows it would trace links and threads
    # generate() asks forward for its arguments, so it must answer like the original
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = f"{original.__name__}.forward, computed by the parties."
    body = {"forward": forward, "original_class": original, "__module__": __name__}
    body["__doc__"] = f"{original.__name__}, private."
    if issubclass(original, GenerationMixin):
        body["generate"] = _with_drafts(original.generate)
    made = _CLASSES[original] = type(f"Private{original.__name__}", (PrivateModel, original), body)
    tables = [table for title, table in vars(modeling_auto).items() if title.endswith("_MAPPING_NAMES")]
    for table in tables:  # into every one that has its original; no model type leads to it
        if any(original.__name__ in (names if isinstance(names, tuple) else (names,)) for names in table.values()):
            table[made.__name__] = made.__name__
    return made
