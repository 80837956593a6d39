"""Neighbouring heads that attend as one, by a softmax of the mean of their scores (arXiv 2408.03561)."""

from private_llm.errors import DomainError
from private_llm.tensor.fixed import Fixed

Merged = tuple[Fixed, Fixed, Fixed, float]


def can_merge(heads: int, groups: int, merged: int) -> bool:
    """Whether `merged` neighbouring ones of `heads` query heads on `groups` key heads can attend as one."""
    shared = heads // groups
    return heads % merged == 0 and (merged % shared == 0 or shared % merged == 0)


def merge_heads(query: Fixed, key: Fixed, value: Fixed, merged: int, scale: float) -> Merged:
    """q [B, H, q, D], k and v [B, G, n, D] as heads of the mean scores, with their scale; `apart` undoes it. Local.

    Where all merged heads have keys of their own, they lie side by side: [B, H / merged, q, merged D]. Query heads of
    one key head are added up. Raises DomainError unless heads divide into such groups.
    """
    heads, groups = query.shape[1], key.shape[1]
    shared = heads // groups
    if not can_merge(heads, groups, merged):
        raise DomainError(
            f"head merging: got {merged} heads for {heads} query heads and {groups} key heads; want a number that "
            "divides the query heads of a key head, or is a multiple of them and divides all"
        )
    inner = min(merged, shared)
    outer = merged // inner
    query = query.view(lambda part: part.unflatten(1, (-1, inner)).sum(2, dtype=part.dtype))
    return (
        _side_by_side(query, outer, shared // inner), _side_by_side(key, outer, 1), _side_by_side(value, outer, 1),
        scale / merged,
    )  # fmt: skip


def apart(out: Fixed, merged: int, shared: int) -> Fixed:
    """Outputs [B, H / merged, q, Dv of all] of merged heads for each head: [B, H, q, Dv]. shared: H / G. Local."""
    inner = min(merged, shared)
    outer = merged // inner
    return out.view(
        lambda part: part.unflatten(3, (outer, -1)).transpose(2, 3).flatten(1, 2).repeat_interleave(inner, 1)
    )


def _side_by_side(x: Fixed, outer: int, among: int) -> Fixed:
    """Heads [B, N, n, D] of `outer` key heads as one: [B, N / outer, n, outer D]; among: query heads of each."""
    if outer == 1:
        return x
    if among != 1:
        raise DomainError("head merging: several query heads of several key heads cannot be one")
    return x.view(lambda part: part.unflatten(1, (-1, outer)).transpose(2, 3).flatten(3))
