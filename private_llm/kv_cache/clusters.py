"""What stands for the keys of a cluster: one vector for neighbouring entries, which a query is compared with.

MPCache's representative (arXiv 2501.06807, equation 6) is alpha r_max + (1 - alpha) r_min, with the elementwise largest
and smallest of the cluster's keys; its product with a query bounds the largest score in the cluster, roughly and
linearly. A tournament finds both at once: the first comparison of a pair says which is larger and which is smaller.
"""

from private_llm.approx.normalise import rsqrt
from private_llm.exact.comparisons import coarse_bits
from private_llm.exact.maximum import concatenated
from private_llm.kv_cache.policies.policy import Selection
from private_llm.oblivious.topk import largest
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.range_check import watch_flat

RESOLUTION_BITS = 10  # an extreme may be an entry up to 2^-10 short of it
_LEAST = 2.0**-6  # added to squared norms: keys of padding may be zero

_MOST = 24  # squared norms are below 2^24: the root of a larger one is garbage, so the check of ranges watches for it


def representatives(keys: Fixed, selection: Selection, mass: Fixed | None) -> list[Fixed]:
    """For keys [B, G, n, D] of whole clusters: one for each level, [B, G, n / size, D], the session's fractional bits.

    mass: the attention of the entries, [B, G, n], for "heavy". Costs, in trio with 18 fractional bits, for each element
    of a key: "extremes" 1.5 comparisons less 2 / s of 46 bytes, 4 or 5 rounds for each halving of s, and a truncation
    for each element of a cluster; "mean" that truncation alone; "unit" a square and a product, and for each cluster a
    reciprocal root; "heavy" a top-k for each cluster and a product. |keys| < 2^20; for "unit" the sum of a cluster has
    a norm below 2^11, which the check of ranges watches. Raises DomainError as these.
    """
    sizes = [level.size for level in selection.levels]
    if selection.represent == "extremes":
        return _extremes(keys, sizes, selection.alpha)
    if selection.represent == "mean":
        return [_sums(keys, size).scale(1 / size) for size in sizes]
    if selection.represent == "unit":
        return [_unit(_sums(keys, size)) for size in sizes]
    return [_heavy(keys, mass, size, selection.heavy) for size in sizes]


def _grouped(x: Fixed, size: int) -> Fixed:
    """[B, G, n, ..] to [B, G, n / size, size, ..]."""
    return x.view(lambda part: part.unflatten(2, (-1, size)))


def _sums(keys: Fixed, size: int) -> Fixed:
    return _grouped(keys, size).sum(3)


def _extremes(keys: Fixed, sizes: list[int], alpha: float) -> list[Fixed]:
    """Largest and smallest of clusters of the last size, from these those of the larger ones before it."""
    top, bottom, made, reached = keys, keys, [], 1
    for size in reversed(sizes):
        top, bottom = _tournament(top, bottom, size // reached, first=reached == 1)
        reached = size
        made.append(bottom + (top - bottom).scale(alpha) if size > 1 and 0 < alpha < 1 else top if alpha else bottom)
    return made[::-1]


def _tournament(top: Fixed, bottom: Fixed, size: int, first: bool) -> tuple[Fixed, Fixed]:
    """Largest of `size` neighbours of top and smallest of bottom; first: both are the same entries."""
    if size == 1:
        return top, bottom
    top, bottom = _grouped(top, size), _grouped(bottom, size)
    while size > 1:
        half = size // 2
        rest = [x[:, :, :, 2 * half :] for x in (top, bottom)]
        if first:
            pair = _both(top[:, :, :, :half], top[:, :, :, half : 2 * half])
        else:
            halves = [x[:, :, :, start : start + half] for start in (0, half) for x in (top, bottom)]
            # the smallest is the largest of the negatives: one comparison for both
            won = _larger(halves[0].stack(-halves[1]), halves[2].stack(-halves[3]))
            pair = won[0], -won[1]
        odd = size % 2
        top = concatenated([pair[0], rest[0]], 3) if odd else pair[0]
        bottom = concatenated([pair[1], rest[1]], 3) if odd else pair[1]
        first, size = False, half + odd
    return tuple(x.view(lambda part: part.squeeze(3)) for x in (top, bottom))  # type: ignore[return-value]


def _larger(a: Fixed, b: Fixed) -> Fixed:
    gap = a - b
    return a + gap.select(coarse_bits(gap, [0.0], extra=1, resolution=RESOLUTION_BITS), [-1], [0.0])


def _both(a: Fixed, b: Fixed) -> tuple[Fixed, Fixed]:
    """(larger, smaller) of equal shapes by one comparison."""
    gap = a - b
    less = gap.select(coarse_bits(gap, [0.0], extra=1, resolution=RESOLUTION_BITS), [-1], [0.0])  # b - a if a < b
    return a + less, b - less


def _unit(keys: Fixed) -> Fixed:
    """Rows over their norms: only the direction matters to a ranking by cosine."""
    squares = keys.mul(keys).sum(-1, keepdim=True) + _LEAST
    watch_flat(squares, _MOST - 1 + squares.frac)
    return keys.mul(rsqrt(squares, _LEAST, 2.0**_MOST))


def _heavy(keys: Fixed, mass: Fixed | None, size: int, count: int) -> Fixed:
    """Sums of the keys of most attention; without any attention, of the first ones."""
    grouped = _grouped(keys, size)
    if mass is None or count >= size:
        return grouped[:, :, :, :count].sum(3)
    marks = largest(_grouped(mass, size), count)
    chosen = marks.view(lambda part: part.unsqueeze(-2)).matmul(grouped, frac=keys.frac)
    return chosen.view(lambda part: part.squeeze(-2))
