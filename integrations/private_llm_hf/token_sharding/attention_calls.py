"""Token-sharded attention as a transformers attention implementation, and what a model's attention calls look like.

A CompNode runs the model's own forward on its rows; whenever an attention layer calls the attention interface, the
rows' queries, keys and values leave for the AttnNodes and the result for all tokens comes back. Masks are made
by the AttnNodes from positions, so the model's own mask is a placeholder that carries its rule.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.falcon import modeling_falcon as falcon

from private_llm.errors import PatchMismatch, UnsupportedOp
from private_llm.token_sharding import AttentionCall

NAME = "private_llm_cascade"  # what `config._attn_implementation` is set to

_ATTEND = "private_llm_attend"  # under which a module keeps what its attention calls are handed to

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' mask function: (batch, head, query, key) indices to whether the query sees the key."""

_LONGEST = 1 << 17  # positions over which a mask's rule is examined, if the model has no limit of its own


Attend = Callable[[nn.Module, tuple[Tensor, Tensor, Tensor], Tensor | None, dict[str, Any]], Tensor]
"""What a model's attention calls are handed to: module, queries, keys and values [B, heads, n, D], mask and further
arguments; returns attention [B, H, n, E]."""


def shape_alone(module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], *_: object) -> Tensor:
    """An attention that has a shape and nothing else."""
    q, _k, v = rows
    return q.new_empty(*q.shape[:3], v.shape[3])


def register() -> None:
    """Make `NAME` known to transformers."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    falcon.FALCON_ATTENTION_CLASSES[NAME] = InterfaceFalconAttention


def listen(model: PreTrainedModel, attend: Attend) -> None:
    """Send this model's attention calls to `attend`."""
    for module in model.modules():
        module.__dict__[_ATTEND] = attend
        if type(module) is bloom.BloomAttention:
            module.__class__ = InterfaceBloomAttention
            module.config = model.config


def _mask(*_: object, mask_function: MaskRule, device: torch.device | str = "cpu", **__: object) -> Tensor:
    placeholder = torch.ones(1, dtype=torch.bool, device=device)
    placeholder._cascade_rule = mask_function  # type: ignore[attr-defined]
    return placeholder


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **facts: object
) -> tuple[Tensor, None]:
    for name in ("position_bias", "s_aux", "head_mask"):
        if facts.get(name) is not None:
            raise UnsupportedOp(f"{type(module).__name__}: token sharding has no rule for '{name}' in attention")
    out: Tensor = module.__dict__[_ATTEND](module, (query, key, value), attention_mask, facts)
    return out.transpose(1, 2).contiguous(), None


# -- what the calls look like ------------------------------------------------------------------------------------
def span(rule: MaskRule, longest: int) -> tuple[int | None, int | None]:
    """(back, ahead) of a mask by distance alone; None: no limit within `longest`. Raises PatchMismatch for others."""
    zero = torch.zeros((), dtype=torch.int64)
    seen = {}
    for query in (longest, longest - 1):
        keys = torch.arange(query - longest, query + longest + 1)
        visible = rule(zero, zero, torch.tensor(query), keys).expand(keys.shape)
        offsets = (keys[visible] - query).tolist()
        if not offsets or offsets != list(range(offsets[0], offsets[-1] + 1)) or not offsets[0] <= 0 <= offsets[-1]:
            raise PatchMismatch("attention mask: token sharding knows full, causal and sliding-window masks only")
        seen[query] = (offsets[0], offsets[-1])
    first, second = seen.values()
    if first != second:
        raise PatchMismatch("attention mask: it depends on absolute positions, not on distances alone")
    return (None if -first[0] == longest else -first[0], None if first[1] == longest else first[1])


def cascade_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a node's model: sharded attention, float32, no cache of its own."""
    made = copy.deepcopy(config)
    made._attn_implementation = NAME
    made.dtype = torch.float32
    made.use_cache = False
    return made


def attention_calls(model_class: type[PreTrainedModel], config: PretrainedConfig) -> list[AttentionCall]:
    """The attention calls of one forward without values. Raises PatchMismatch for attention outside transformers'
    interface, and for masks and arguments without a rule.
    """
    calls: list[AttentionCall] = []
    longest = int(getattr(config, "max_position_embeddings", 0) or _LONGEST)

    def note(
        module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, facts: dict[str, Any]
    ) -> Tensor:
        q, k, v = rows
        rule = getattr(mask, "_cascade_rule", None)
        if rule is None and (mask is not None or getattr(module, "is_causal", False)):
            raise PatchMismatch(f"{type(module).__name__}: its mask does not come from transformers' mask functions")
        back, ahead = (None, None) if rule is None else span(rule, longest)
        scale = facts.get("scaling")
        calls.append(
            AttentionCall(
                q.shape[1], k.shape[1], q.shape[3], v.shape[3],
                float(q.shape[3] ** -0.5 if scale is None else scale), facts.get("softcap"), back, ahead,
                facts.get("slopes"), bool(facts.get("coarse")),
            )
        )  # fmt: skip
        return shape_alone(module, rows)

    run_without_values(model_class, config, attend=note)
    if not calls:
        raise PatchMismatch(
            f"{model_class.__name__}: its attention does not go through transformers' attention interface"
        )
    return calls


def run_without_values(
    model_class: type[PreTrainedModel], config: PretrainedConfig,
    prepare: Callable[[PreTrainedModel], object] = lambda model: None, attend: Attend = shape_alone,
) -> None:  # fmt: skip
    """One forward over two tokens on meta, after `prepare` hung its hooks. Raises PatchMismatch if it cannot run so."""
    register()
    name = model_class.__name__
    try:
        with torch.device("meta"):
            model = model_class(cascade_config(config)).eval()
    except (KeyError, ValueError) as error:
        raise PatchMismatch(f"{name} does not take another attention implementation: {error}") from None
    listen(model, attend)
    prepare(model)
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    facts = {"position_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids), "use_cache": False}
    try:
        with torch.no_grad():
            model(input_ids=ids, return_dict=True, **facts)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise PatchMismatch(f"{name} does not run on plain token ids [batch, length]: {error}") from None


# -- Falcon and Bloom, whose own attention bypasses transformers' attention interface: here it goes through it ---------
# Both fuse queries, keys and values. ALiBi leaves as `slopes`, one a head, for whoever computes the scores: Bloom adds
# slope x position to scaled scores, Falcon (`coarse`) rounds that product to bfloat16 and scales it with the scores.
class InterfaceFalconAttention(falcon.FalconAttention):  # type: ignore[misc]
    """Falcon's attention: rotary or ALiBi; one key and value head, one a group, or one a query head."""

    def forward(
        self, hidden_states: Tensor, alibi: Tensor | None, attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor], **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """States [B, n, hidden] to attention [B, n, hidden]."""
        q, k, v = (rows.transpose(1, 2) for rows in self._split_heads(self.query_key_value(hidden_states)))
        if self.new_decoder_architecture:  # it repeats each group's keys and values for all queries of the group
            share = self.num_heads // self.num_kv_heads
            k, v = k[:, ::share], v[:, ::share]
        facts = {}
        if alibi is None:
            q, k = falcon.apply_rotary_pos_emb(q, k, *position_embeddings)
        else:
            facts = {"slopes": slopes(falcon.build_alibi_tensor, self.num_heads), "coarse": True}
        return self.dense(_through(self, (q, k, v), attention_mask, facts)), None


class InterfaceBloomAttention(bloom.BloomAttention):  # type: ignore[misc]
    """Bloom's attention: ALiBi, and the residual is added within."""

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **_: object
    ) -> tuple[Tensor, None]:
        """States and residual [B, n, hidden] to their sum after attention."""
        rows = self._reshape(self.query_key_value(hidden_states))
        facts = {"slopes": slopes(bloom.build_alibi_tensor, self.num_heads)}
        return residual + self.dense(_through(self, rows, attention_mask, facts)), None


@functools.cache
def slopes(build_alibi_tensor: Callable[[Tensor, int, torch.dtype], Tensor], heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head: what a family's own function adds at the second of two positions."""
    return tuple(build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1].tolist())


def _through(module: Any, rows: tuple[Tensor, ...], mask: Tensor | None, facts: dict[str, Any]) -> Tensor:  # noqa: ANN401
    """Queries, keys, values [B, heads, n, D] to attention [B, n, heads x D]."""
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    out: Tensor = attend(module, *rows, mask, scaling=module.inv_norm_factor, **facts)[0]
    return out.flatten(2)
