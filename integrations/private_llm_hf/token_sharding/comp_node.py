"""A CompNode: the model's own forward on some rows with their true positions, attention by way of the AttnNodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import PatchMismatch, TransportError
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.session import opened
from private_llm.ring.ring import Ring
from private_llm.token_sharding import Exchange, recv_floats
from private_llm_hf.checkpoint.model_spec import accepted_class
from private_llm_hf.checkpoint.weights import WithoutWeights
from private_llm_hf.models.architectures import architecture
from private_llm_hf.token_sharding.attention_calls import cascade_config, listen, register
from private_llm_hf.token_sharding.commands import CompForward, LoadNode
from private_llm_hf.token_sharding.cut import StandIn
from private_llm_hf.wire.commands import OPENED


class CompNode:
    """The model on this node's rows, on `device`; what comes and goes lies in main memory.

    links: to all endpoints by their own numbers, the parties of a split among them. Raises PatchMismatch for weights
    that are missing or surplus.
    """

    def __init__(
        self, config: PrivateConfig, links: Transport, loaded: LoadNode, exchange: Exchange,
        weights: dict[str, Tensor], device: torch.device,
    ) -> None:  # fmt: skip
        self._config, self._links, self._exchange, self._device = config, links, exchange, device
        register()
        values = dict(loaded.description.config)
        kind = accepted_class(loaded.description.class_, values)
        settings = cascade_config(AutoConfig.for_model(values.pop("model_type"), **values))
        with WithoutWeights():
            model = kind(settings)
        self._behind = None if loaded.behind is None else StandIn(model, loaded.behind)
        self.model = _with_weights(model, weights).to(device)
        self._accepts = frozenset(loaded.accepts)
        self._last_only = reads_last_token(kind, settings)
        self._width = settings.get_text_config().hidden_size
        listen(self.model, self)

    def attend(
        self, module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, facts: dict[str, Any]
    ) -> Tensor:
        """An attention call of the model."""
        return self._exchange.attend(*rows)

    def run(self, command: CompForward) -> tuple[str, dict[str, Tensor]]:
        """One forward: name of its output class, and its outputs for the wanted rows, float32.

        Raises TransportError for inputs of another kind than this model takes, and for what does not come.
        """
        batch = command.step.batch
        rows = self._exchange.begin(command.step)
        given = self._inputs(command.source, batch, command.rows)
        # The AttnNodes mask; without this, gaps would look like packed texts.
        given["attention_mask"] = torch.ones(batch, command.rows, dtype=torch.int64)
        if command.token_types is not None:
            given["token_type_ids"] = command.token_types
        if "position_ids" in self._accepts:
            given["position_ids"] = command.positions
        given = {name: value.to(self._device) for name, value in given.items()}
        wanted = torch.tensor([rows.index(p) for p in command.wanted], dtype=torch.int64, device=self._device)
        kind, outputs = self._forward(given, wanted)
        self._exchange.end()
        return kind, {n: value.to("cpu", torch.float32).contiguous() for n, value in outputs.items()}

    def _forward(self, given: dict[str, Any], wanted: Tensor) -> tuple[str, dict[str, Tensor]]:
        if self._last_only:
            states = self.model.base_model(**given, use_cache=False, return_dict=True).last_hidden_state
            return "SequenceClassifierOutputWithPast", {"logits": self.model.score(states[:, wanted])}
        if "logits_to_keep" in self._accepts:
            given["logits_to_keep"] = wanted
        result = self.model(**given, use_cache=False, return_dict=True)
        found = {name: result.get(name) for name in OPENED}
        return type(result).__name__, {name: value for name, value in found.items() if value is not None}

    def _inputs(self, source: str, batch: int, rows: int) -> dict[str, Tensor]:
        """What the model's forward is called with, as it comes from the client or from the parties of a split."""
        if self._behind is not None and source == "states":
            shape = (batch, rows, self._behind.width)
            elements = opened(self._config, self._links, shape)
            states = Ring(self._config.ring).decode(elements, self._config.frac_bits)
            self._behind.rows = states.to(self._device, torch.float32)
            return {"input_ids": torch.zeros(batch, rows, dtype=torch.int64)}  # embedded, and then replaced
        if self._behind is None and source == "tokens":
            return {"input_ids": self._links.recv(CLIENT, "tokens", (batch, rows), torch.int64)}
        if self._behind is None and source == "values":
            expected = [((batch, rows, self._width), torch.float32)]
            return {"inputs_embeds": recv_floats(self._links, CLIENT, "values", expected)[0]}
        raise TransportError(f"a forward on {source!r} does not fit the model that was loaded here")


def reads_last_token(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether a model classifies a text by the state of its last token."""
    return architecture(config).kind == "decoder" and kind.__name__.endswith("ForSequenceClassification")


def _with_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    missing, surplus = model.load_state_dict(weights, strict=False, assign=True)
    tied = set(model.get_expanded_tied_weights_keys(all_submodels=True))
    buffers = {name for name, _ in model.named_buffers()}
    lost = sorted(set(missing) - tied - buffers)
    if lost or surplus:
        raise PatchMismatch(f"weights: missing {lost[:5] or 'none'}, surplus {sorted(surplus)[:5] or 'none'}")
    model.tie_weights()
    return model.eval()
