"""Checkpoints in every form in which transformers reads them: plain ones as a stream, all others as a whole model.

GGUF files, quantised checkpoints and adapters (LoRA) have no tensor under the name of each weight. transformers or peft
loads them, and `dense.py` makes plain weights of them in the owner's memory, or refuses, before anything is sent.
"""

import contextlib
import copy
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PatchMismatch, PrivateLLMError, listed, meant
from private_llm_hf.checkpoint import want_config
from private_llm_hf.checkpoint.dense import FOREIGN, TIED, dense_model, first_line, without_quantisation
from private_llm_hf.checkpoint.loaded import as_built
from private_llm_hf.checkpoint.sentence_vectors import copy_sentence_files
from private_llm_hf.checkpoint.source import check_attention, check_options, readable_files
from private_llm_hf.checkpoint.weights import LOADING, Sink, WeightList, stream_checkpoint, stream_loaded
from private_llm_hf.models.architectures import architecture

_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of from_pretrained that say where a checkpoint lies."""
_LOADING = ("use_safetensors", "variant", "disable_mmap", "key_mapping")


def has_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer knows more than special tokens. For a folder without one transformers makes up some that know
    no others (T5's also a space), and read any text as unknown.
    """
    return bool({*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens, "▁"})


class Checkpoint:
    """One checkpoint of somebody's: what it needs to be read, and its weights.

    source: folder or hub id. options: arguments of from_pretrained. A dtype changes nothing: every weight goes into
    fixed point from the value that the checkpoint holds, and outputs are float32. Raises ConfigError for a dtype that
    is none, for the path of a GGUF file where its folder is wanted and for arguments without a meaning here.
    """

    def __init__(self, source: str, **options: Any) -> None:  # noqa: ANN401 - as transformers
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(f"checkpoint: got {type(source).__name__} as source; want a model folder or a hub id")
        check_options(options)
        self.source = str(source)
        self.gguf_file: str | None = options.pop("gguf_file", None)
        if self.gguf_file is None and self.source.endswith(".gguf") and Path(self.source).is_file():
            folder, name = Path(self.source).parent, Path(self.source).name
            raise ConfigError(
                f"got the GGUF file {name!r} itself; want its folder {str(folder)!r} and "
                f"gguf_file={name!r} (--gguf-file)"
            )
        self._where = {name: options.pop(name) for name in _DOWNLOAD if name in options}
        self._loading = {name: options.pop(name) for name in _LOADING if name in options}
        self._settings = options  # of the model's configuration
        self._base = None if self.gguf_file is not None else _base_of_adapter(self.source, self._where, options)
        self._quantised: Any = None
        self._whole: PreTrainedModel | None = None

    def config(self) -> PretrainedConfig:
        """The configuration as if weights were plain. Raises PatchMismatch where they cannot be, ConfigError for
        missing packages and folders, and for arguments that it has no use for.
        """
        given = self._settings.get("config")
        if given is not None:
            return self._plain_config(given)
        if self._base is not None:
            return self._base.config()
        if self.gguf_file is None:
            want_config("configuration", self.source)
        options = {**self._where, **self._settings, **self.tokenizer_options}
        with self._readable():
            try:
                config, unused = transformers.AutoConfig.from_pretrained(
                    self.source, return_unused_kwargs=True, **options
                )
            except (OSError, ValueError) as error:
                if isinstance(error, PrivateLLMError) or self.gguf_file is not None:
                    raise
                said = "" if Path(self.source).exists() else "no such folder here; as a hub id: "
                raise ConfigError(
                    f"configuration of {self.source!r}: {said}{first_line(error)} (want a model folder, or a hub id "
                    "and a network)"
                ) from error
        unused.pop("gguf_file", None)
        if unused:
            ours = [name for name in sorted(unused) if name in PrivateConfig.__dataclass_fields__]
            hint = f"; {', '.join(ours)} belongs in PrivateConfig(...), the second argument" if ours else ""
            near = meant(unused, {"private_config", "ranges", "start", *_DOWNLOAD, *_LOADING, *config.to_dict()})
            raise ConfigError(f"unknown argument(s) {', '.join(sorted(unused))} for from_pretrained{hint or near}")
        return self._plain_config(config)

    def settled(self, model_class: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
        """The configuration of the weights as they are shared: an adapter may resize the vocabulary, or untie the head.
        The whole model of an adapter is loaded for that, and kept until it is shared. Raises as `load`.
        """
        if self._base is None:
            return config
        self._whole = self.load(model_class, config)
        return self._whole.config

    def _plain_config(self, config: PretrainedConfig) -> PretrainedConfig:
        """A configuration without quantisation, which is kept for loading, and without another machine's attention
        (FlashAttention). Raises ConfigError for attention of somebody's own.
        """
        self._quantised = getattr(config, "quantization_config", None) or self._quantised
        check_attention(config._attn_implementation)
        config = copy.deepcopy(config)
        config._attn_implementation = None
        return without_quantisation(config)

    @property
    def tokenizer_options(self) -> dict[str, str]:
        """What AutoTokenizer.from_pretrained needs beside the source."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    @property
    def tokenizer_source(self) -> str:
        """Where a tokenizer is: with the checkpoint, or with the base model of an adapter that brings none."""
        has_one = self._base is None or (Path(self.source) / "tokenizer_config.json").is_file()
        return self.source if has_one or self._base is None else self._base.tokenizer_source

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer; None without one."""
        try:
            found = transformers.AutoTokenizer.from_pretrained(
                self.tokenizer_source, **self.tokenizer_options, **self._where
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if has_words(found) else None

    def stream(
        self, model_class: type[PreTrainedModel], config: PretrainedConfig, wanted: WeightList, sink: Sink,
        local: bool = False,
    ) -> None:  # fmt: skip
        """Pass on every weight, as it is read or from the whole model in memory. local: without download. Raises
        PatchMismatch for weights that are missing or cannot be made plain, OSError without a checkpoint.
        """
        if not self._special:
            with readable_files(self.source):
                stream_checkpoint(model_class, self.source, config, wanted, sink, **self._options(local))
        else:
            stream_loaded(self.load(model_class, config, local), wanted, sink)

    def _options(self, local: bool) -> dict[str, object]:
        return {**self._where, **self._loading, **({"local_files_only": True} if local else {})}

    def load(
        self, model_class: type[PreTrainedModel], config: PretrainedConfig, local: bool = False
    ) -> PreTrainedModel:
        """The whole plaintext model, plain float32 weights, evaluating. Raises PatchMismatch, OSError as `stream`."""
        if self._whole is not None:
            return self._whole
        model, missing = self._load(model_class, config, self._options(local))
        if missing:
            raise PatchMismatch(
                f"checkpoint {self.source!r} lacks {len(missing)} weight(s) of {model_class.__name__}: "
                f"{listed(sorted(missing))}; load one that was trained with this head, or this one for what it was "
                "trained for (vectors of texts: AutoPrivateModel, `private-llm share --task features`, gateway)"
            )
        return as_built(model, without_quantisation(model.config)) if self._special else model

    def _load(
        self, model_class: type[PreTrainedModel], config: PretrainedConfig, hf: dict[str, object]
    ) -> tuple[PreTrainedModel, set[str]]:
        if self._base is not None:
            return self._merged(*self._base._load(model_class, config, _of_base(hf)))
        settings = copy.deepcopy(config)
        more: dict[str, object] = {}
        if self.gguf_file is not None:
            more["gguf_file"] = self.gguf_file
            unpack = getattr(transformers, "GgufConfig", None)  # transformers before 5.23 unpacks always
            if unpack is not None:
                more["quantization_config"] = unpack(dequantize=True)
        elif self._quantised is not None:
            settings.quantization_config = unpacking = copy.deepcopy(self._quantised)
            if isinstance(unpacking, dict):
                unpacking["dequantize"] = True  # loaders that do not know it ignore it
            elif hasattr(unpacking, "dequantize"):
                unpacking.dequantize = True
        with self._readable(), readable_files(self.source), LOADING:
            model, info = model_class.from_pretrained(
                self.source, config=settings, dtype=torch.float32, output_loading_info=True, **more, **hf
            )
        return dense_model(model), set(info["missing_keys"])

    def _merged(self, model: PreTrainedModel, missing: set[str]) -> tuple[PreTrainedModel, set[str]]:
        with self._readable():
            from peft import PeftModel, load_peft_weights

            _resize(model, load_peft_weights(self.source, device="cpu", **self._where))
            with warnings.catch_warnings():  # peft goes on with adapters that it made up
                warnings.filterwarnings("error", message="Found missing adapter keys")
                warnings.filterwarnings("ignore", message=TIED)
                adapted = PeftModel.from_pretrained(model, self.source, **self._where)
            own = {part for settings in adapted.peft_config.values() for part in settings.modules_to_save or ()}
            return dense_model(adapted, owned=True), {name for name in missing if own.isdisjoint(name.split("."))}

    # -- what the user of share files gets: configuration, generation settings, tokenizer, no weights ----------------
    def write_client_folder(self, folder: Path, config: PretrainedConfig, model_class: type[PreTrainedModel]) -> None:
        """Configuration, generation settings and tokenizer for the user of share files, and how vectors are made."""
        config.architectures = [model_class.__name__]
        config.save_pretrained(folder)
        generation = self.generation_config(model_class, config)
        if generation is not None:
            generation.save_pretrained(folder)
        if architecture(config).kind == "vision":
            with contextlib.suppress(OSError, ValueError):  # plain networks and tests have none
                transformers.AutoImageProcessor.from_pretrained(self.source, **self._where).save_pretrained(folder)
            return
        copy_sentence_files(self.source, folder, **self._where)
        tokenizer = self.tokenizer()
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def generation_config(
        self, model_class: type[PreTrainedModel], config: PretrainedConfig
    ) -> GenerationConfig | None:
        """The checkpoint's generation settings, as from_pretrained finds them."""
        if not model_class.can_generate():
            return None
        try:
            return GenerationConfig.from_pretrained(self.source, **self._where)
        except OSError:
            return GenerationConfig.from_model_config(config)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Put the errors of packages that read this checkpoint in one sentence; a missing file stays an OSError."""
        try:
            yield
        except PrivateLLMError:
            raise
        except ImportError as error:
            wanted = "gguf (pip install 'private-llm[gguf]')" if self.gguf_file is not None else error.name or ""
            raise ConfigError(
                f"checkpoint {self._called}: a package is missing to read it: {wanted or first_line(error)}"
            ) from None
        except (*FOREIGN, UserWarning) as error:
            if not self._special:
                raise
            raise PatchMismatch(
                f"checkpoint {self._called}: transformers cannot make plain weights of it ({first_line(error)}); use "
                "the model's checkpoint in float or half precision"
            ) from None

    @property
    def _special(self) -> bool:
        return self.gguf_file is not None or self._base is not None or self._quantised is not None

    @property
    def _called(self) -> str:
        if self.gguf_file is not None:
            return f"{self.source!r} with gguf_file={self.gguf_file!r}"
        if self._quantised is not None:
            settings = self._quantised if isinstance(self._quantised, dict) else vars(self._quantised)
            method = settings.get("quant_method")
            return f"{self.source!r} (quantised: {getattr(method, 'value', method)})"
        return f"{self.source!r}" + ("" if self._base is None else f" (adapter of {self._base.source!r})")


def _resize(model: PreTrainedModel, adapter: dict[str, Tensor]) -> None:
    """Give the base model the vocabulary that its adapter was trained with: peft stores resized embeddings."""
    names = {name for name, module in model.named_modules() if module is model.get_input_embeddings()}
    for name, value in adapter.items():
        inner, _, own = name.removeprefix("base_model.model.").rpartition(".")
        rows = value.shape[-1] if own == "lora_embedding_A" else value.shape[0]
        whole = own in ("weight", "lora_embedding_A") and ".lora_" not in name
        if whole and any(inner == each or inner.startswith(f"{each}.") for each in names):
            if rows != model.get_input_embeddings().weight.shape[0]:
                model.resize_token_embeddings(rows, mean_resizing=False)
            return


def _base_of_adapter(source: str, where: dict[str, Any], settings: dict[str, Any]) -> Checkpoint | None:
    try:
        found = find_adapter_config_file(source, **where)
    except (OSError, ValueError):
        return None  # whatever is wrong with the source, loading says it
    if found is None:
        return None
    base = json.loads(Path(found).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or str(base) == source:
        raise ConfigError(
            f"checkpoint {source!r} holds an adapter (adapter_config.json) that does not name its base model"
        )
    return Checkpoint(base, **_of_base({**where, **settings}))


def _of_base(options: dict[str, Any]) -> dict[str, Any]:
    """An adapter's options without those that say where in its repository it lies."""
    return {key: value for key, value in options.items() if key not in ("revision", "subfolder")}
