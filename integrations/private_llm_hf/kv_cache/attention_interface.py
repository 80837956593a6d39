"""Our attention and mask functions, registered with transformers under one name.

The mask function returns a boolean mask computed from public data alone (or None where everything is allowed),
never the additive finfo.min mask, which no fixed-point number holds.
"""

import functools

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kv_cache.merged_heads import apart, merge_heads
from private_llm.nn.attention import AttentionQuery, attend, attend_and_weigh
from private_llm.nn.ops_softmax import read_mask
from private_llm.nn.predicted import SparseHeads
from private_llm.replay.graph_break import this_call
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.kv_cache.cache import AttentionBreak, HeldKeys
from private_llm_hf.models.sparse_blocks import SPARSE

NAME = "private_llm"  # what `config._attn_implementation` is set to


def register() -> None:
    """Make `NAME` known, with its mask: without one transformers silently runs causal models without a mask."""
    AttentionInterface.register(NAME, private_attention)
    AttentionMaskInterface.register(NAME, private_mask)


def private_mask(*args: object, **kwargs: object) -> Tensor | None:
    """Boolean mask [B, 1, q, kv], True where attention is allowed; None if it is everywhere."""
    sizes = [kwargs.get(name) for name in ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset")]
    batch, queries, keys, past, start = (size if isinstance(size, int) else -1 for size in sizes)
    causal = kwargs.get("mask_function") is causal_mask_function and kwargs.get("attention_mask") is None
    if causal and (queries, keys, start) == (1, past + 1, 0):
        return None  # without twenty small operations for each token
    if causal and start == 0 <= past and 0 < batch * queries * keys <= _MOST_KEPT:
        return _causal_mask(batch, queries, keys, past, kwargs.get("device"))
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask: Tensor = sdpa_mask(*args, **kwargs)
    return None if bool(mask.all()) else mask


_MOST_KEPT = 1 << 15  # entries of a mask that is kept


@functools.lru_cache(maxsize=4)
def _causal_mask(batch: int, queries: int, keys: int, past: int, device: object) -> Tensor | None:
    """Of a chunk of a text without padding. It is kept because `pattern_of` remembers on it what it finds out."""
    mask: Tensor = sdpa_mask(batch, queries, keys, past, allow_is_causal_skip=False, device=device or "cpu")
    return None if bool(mask.all()) else mask


def private_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
    position_bias: Tensor | None = None, s_aux: Tensor | None = None, **_: object,
) -> tuple[SecretTensor, None]:  # fmt: skip
    """q [B, H, q, D], k and v [B, G, kv, D], all secret, to ([B, q, H, D], no attention weights).

    s_aux: a sink for each head [H], secret or (public weights) plain.
    The mask is public, boolean or additive, or a secret addend (a learned bias, with public minus infinities). A
    boolean one is as wide as the text; of a cache whose policy evicts, the columns of its entries are taken. Cost:
    `nn.attention.attend`. Raises UnsupportedOp for plain operands, dropout, and an addend under an evicting policy;
    DomainError for a causal module without a mask.
    """
    if not (isinstance(query, SecretTensor) and isinstance(key, SecretTensor) and isinstance(value, SecretTensor)):
        raise UnsupportedOp(f"{type(module).__name__}: private attention needs secret query, key and value")
    if dropout:
        raise UnsupportedOp("attention dropout on secret tensors; call model.eval()")
    if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", False):
        raise DomainError(f"{type(module).__name__} is causal but got no mask; the mask function is not registered")
    graph_break = this_call.graph_break
    if isinstance(graph_break, AttentionBreak) and not graph_break.reached:
        alone = position_bias is None and s_aux is None and not hasattr(module, SPARSE)
        again = functools.partial(_attention, module, scaling, softcap, position_bias, s_aux)
        return graph_break.attended(query, key, value, attention_mask, alone, again), None
    return _attention(module, scaling, softcap, position_bias, s_aux, query, key, value, attention_mask), None


def _attention(
    module: nn.Module, scaling: float | None, softcap: float | None, position_bias: Tensor | None,
    s_aux: Tensor | None, query: SecretTensor, key: SecretTensor, value: SecretTensor, attention_mask: Tensor | None,
) -> SecretTensor:  # fmt: skip
    attention_mask, addend = read_mask(attention_mask)
    layer = key.layer if isinstance(key, HeldKeys) else None
    merged = 1 if layer is None else layer.policy.merged_heads
    if layer is not None and (addend is not None or (layer.evicting is not None and position_bias is not None)):
        raise UnsupportedOp(f"{type(module).__name__}: what is added to scores does not know of evicted entries")
    if layer is not None and attention_mask is not None:
        attention_mask = layer.buffer.columns(attention_mask, query.shape[1])
    tokens = attention_mask
    sparse = getattr(module, SPARSE, None)
    if isinstance(sparse, SparseHeads):
        if s_aux is not None or any(bias is not None and bias.shape[1] != 1 for bias in (position_bias, addend)):
            raise UnsupportedOp(
                f"{type(module).__name__}: its heads have scores of their own (a bias or sinks), which do not lie in "
                "the owner's order; want CometConfig(heads=False)"
            )
        attention_mask = sparse.allowed(attention_mask, query.shape[1], key.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else _secret(s_aux, query)
    call = AttentionQuery(query.value(full=True), attention_mask, tokens, scale, softcap, sinks)
    if layer is not None and layer.evicting is not None:
        out = layer.evicting.attend(call, query.shape[2])
        layer.attended(None)
    elif layer is not None and merged > 1:
        if sinks is not None or position_bias is not None:
            raise UnsupportedOp(f"{type(module).__name__}: heads with sinks or biases of their own cannot be merged")
        out = _merged(module, call, key.to_operand(), value.to_operand(), merged)
        layer.attended(None)
    else:
        counted = 0 if layer is None else layer.policy.mass_queries(query.shape[2])
        bias = _bias(position_bias, addend)
        out, mass = attend_and_weigh(call, key.to_operand(), value.to_operand(), bias, counted)
        if layer is not None:
            layer.attended(mass)
    return SecretTensor(out.view(lambda part: part.transpose(1, 2)))


def _merged(module: nn.Module, call: AttentionQuery, key: Fixed, value: Fixed, merged: int) -> Fixed:
    """Attention by merged heads. Raises UnsupportedOp for heads that are left out, DomainError as `merge_heads`."""
    if call.mask is not None and call.mask.shape[1] != 1:
        raise UnsupportedOp(f"{type(module).__name__}: heads that are predicted cannot be merged; want heads=False")
    shared = call.query.shape[1] // key.shape[1]
    query, key, value, scale = merge_heads(call.query, key, value, merged, call.scale)
    return apart(attend(query, key, value, call.mask, scale, call.softcap), merged, shared)


def _bias(one: Tensor | None, other: Tensor | None) -> Fixed | Tensor | None:
    """A position bias (T5) and what a mask adds as one addend, secret or public; public zeros are none."""
    bias = other if one is None else one if other is None else one + other
    if isinstance(bias, SecretTensor):
        return bias.to_fixed()
    return bias if bias is not None and bool(bias.any()) else None


def _secret(values: Tensor, like: SecretTensor) -> Fixed:
    """Weights of the model as a share, secret or public."""
    if isinstance(values, SecretTensor):
        return values.to_fixed()
    session, where = like.session, like.value(full=True).share.parts[0].device
    elements = session.ring.encode(values, session.frac).to(where)
    return Fixed(session, session.protocol.on(where).public(elements), session.frac)
