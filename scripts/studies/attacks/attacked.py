"""A transformers model as an attacker runs it: rows of a layer for many candidates, and the tokens it expects.

Token sharding assumes that everybody has the weights, so every node can run this.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from private_llm_hf.token_sharding.attention_calls import attention_calls, cascade_config, listen, register
from private_llm_hf.transformers_versions import CACHE
from torch import Tensor, nn
from transformers import PreTrainedModel

from attacks.row_matching import Rows
from private_llm.errors import DomainError
from private_llm.token_sharding import ForwardStep, allowed, attend, combine, key_bias


class _Reached(Exception):
    """Carries the attacked layer's rows out of a forward: later layers are not run."""

    def __init__(self, rows: tuple[Tensor, Tensor, Tensor]) -> None:
        super().__init__()
        self.rows = rows


class RowsAt:
    """`row_matching.Attacked`: what the `layer`-th attention call (from 0) of a causal model is made of.

    Of an encoder, whose rows depend on the whole text, `row_matching.Contextual`: `of` and `everywhere`.

    Keys and values of the known text are computed once and shared by all candidates: a candidate's own tokens are all
    that is run, through the layers before `layer` only. Raises DomainError for a layer that there is not, and for a
    model that makes fewer attention calls than agreed.
    """

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        self._calls = attention_calls(type(model), model.config)
        if not 0 <= layer < len(self._calls):
            raise DomainError(f"layer: got {layer}; want 0 to {len(self._calls) - 1}")
        self.layer, self.call = layer, self._calls[layer]
        register()
        self._model = type(model)(cascade_config(model.config))
        weights = {name: tensor.float() for name, tensor in model.state_dict().items()}
        self._model.load_state_dict(weights, assign=True)
        self._model.tie_weights()
        self._model.eval()
        listen(self._model, self.attend)
        self._places = "position_ids" in inspect.signature(type(model).forward).parameters
        self._known: list[int] = []
        self._prefix: list[tuple[Tensor, Tensor]] = []
        self._fresh: list[tuple[Tensor, Tensor]] = []
        self._start = 0

    def rows(self, known: Sequence[int], tails: Tensor) -> Rows:
        """Rows at the last position of each tail [K, g] after `known`."""
        with torch.inference_mode():
            if self.layer:
                self._extend(list(known))
            q, k, v = self._run(tails, len(known))
            return q[:, :, -1], k[:, :, -1], v[:, :, -1]

    def alone(self, position: int, ids: Tensor) -> Rows:
        """Rows of layer 0 for tokens [K] at a position. Raises DomainError for a later layer."""
        if self.layer:
            raise DomainError(f"rows of layer {self.layer} depend on the tokens before; want layer 0")
        with torch.inference_mode():
            q, k, v = self._run(ids.unsqueeze(1), position)
            return q[:, :, 0], k[:, :, 0], v[:, :, 0]

    def of(self, ids: Tensor) -> Rows:
        """Rows of all positions of one text [n]."""
        q, k, v = (part[0] for part in self.everywhere(ids.unsqueeze(0)))
        return q, k, v

    def everywhere(self, texts: Tensor) -> Rows:
        """Rows of all positions of texts [K, n]: each [K, n, heads, size]."""
        self._known, self._prefix = [], []
        with torch.inference_mode():
            q, k, v = (part.transpose(1, 2) for part in self._run(texts, 0))
            return q, k, v

    def _run(self, ids: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of tokens [K, g] at positions from `start` on: [K, heads, g, size]."""
        self._start, self._fresh = start, []
        if len(self._known) != start:
            self._known, self._prefix = [], []
        positions = torch.arange(start, start + ids.shape[1]).expand(ids.shape)
        extra = {"position_ids": positions} if self._places else {}
        try:
            self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **extra)
        except _Reached as reached:
            return reached.rows
        raise DomainError(f"{type(self._model).__name__} made fewer attention calls than agreed")

    def _extend(self, known: list[int]) -> None:
        """Make the kept keys and values those of `known`."""
        if known[: len(self._known)] != self._known:
            self._known, self._prefix = [], []
        new = known[len(self._known) :]
        if not new:
            return
        self._run(torch.tensor([new]), len(self._known))
        before = self._prefix or [(k[:, :, :0], v[:, :, :0]) for k, v in self._fresh]
        self._prefix = [
            (torch.cat([k, new_k], 2), torch.cat([v, new_v], 2))
            for (k, v), (new_k, new_v) in zip(before, self._fresh, strict=True)
        ]
        self._known = known

    def attend(
        self, module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, facts: dict[str, Any]
    ) -> Tensor:
        """An attention call of the model: over each candidate's own tokens and, once for all, the known ones."""
        q, k, v = rows
        layer = len(self._fresh)
        if layer == self.layer:
            raise _Reached(rows)
        self._fresh.append((k, v))
        call = self._calls[layer]
        count, heads, new, _ = q.shape
        step = ForwardStep(None, 1, self._start, new)
        tail, text = list(range(self._start, step.total)), list(range(self._start))
        own = attend(q, k, v, allowed(call, step, tail, tail), call.scale, call.softcap, key_bias(call, step, tail))
        if not text:
            return own[0]
        seen = allowed(call, step, tail, text)
        folded = q.transpose(0, 1).reshape(1, heads, count * new, -1)
        out, lse = attend(
            folded, *self._prefix[layer], None if seen is None else seen.repeat(count, 1), call.scale, call.softcap,
            key_bias(call, step, text),
        )  # fmt: skip
        known = out.view(heads, count, new, -1).transpose(0, 1), lse.view(heads, count, new).transpose(0, 1)
        return combine([own, known])


def likely_tokens(model: PreTrainedModel, count: int, texts: int = 64, length: int = 48, seed: int = 0) -> Tensor:
    """The `count` tokens that the model itself expects most: its mean prediction over texts that it makes up.

    An attacker's prior V_0 without any data: texts are sampled from the model, from its first token on. Ascending ids.
    Raises DomainError for a count outside 1 to the vocabulary's size.
    """
    vocabulary = model.config.get_text_config().vocab_size
    if not 1 <= count <= vocabulary:
        raise DomainError(f"prior: got {count} tokens; want 1 to {vocabulary}")
    begin = model.config.bos_token_id
    ids = torch.full((texts, 1), 0 if begin is None else begin)
    chance = torch.Generator().manual_seed(seed)
    mean = torch.zeros(vocabulary)
    cache = None
    with torch.inference_mode():
        for _ in range(length):
            made = model(input_ids=ids[:, -1:], **{CACHE: cache}, use_cache=True)
            cache = made[CACHE]
            expected = made.logits[:, -1].float().softmax(-1)
            mean += expected.mean(0)
            ids = torch.cat([ids, torch.multinomial(expected, 1, generator=chance)], 1)
    if begin is not None:
        mean[begin] = float("inf")  # every text has it
    return mean.topk(count).indices.sort().values
