"""A narrow product says how many of its bits are right; what needs more makes them right first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from private_llm.approx.activations import FromTables, gelu, precise_tanh
from private_llm.approx.normalise import reciprocal
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.exact.comparisons import clamp, coarse_bits, relu
from private_llm.exact.maximum import concatenated, first_maximum, maximum
from private_llm.exact.ragged_rows import Rows
from private_llm.exact.ranks import among_largest
from private_llm.net.ledger import Cost
from private_llm.nn.attention import ROOM, score_width
from private_llm.nn.padded_keys import alike
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.share import BitWidths, Share
from private_llm.ranges import Ranges
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import READ_BITS, SEEN, Fixed, arithmetic, by_keys, module_bits
from private_llm.tensor.ops_pointwise import plus
from private_llm.tensor.secret import SecretTensor
from tests.harness import run_parties

silu = FromTables("SILU")
SESSION = meta_session(PrivateConfig(), 1)
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def held(*shape: int) -> Fixed:
    return Fixed(SESSION, Share(tuple(torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))), 18)


def _appended(x: Fixed, y: Fixed) -> Fixed:
    flat, rows = x.view(lambda part: part.reshape(-1)), Rows((16,))
    return rows.append(y.view(lambda part: part.reshape(-1)), flat.view(lambda part: part[:1]))


WHOLE: dict[str, Callable[[Fixed, Fixed], Fixed]] = {
    "a product": lambda x, y: x.mul(y), "a product from the right": lambda x, y: y.mul(x),
    "a square": lambda x, y: x.mul(x), "a product that drops nothing": lambda x, y: x.mul(y, frac=36, below=5),
    "a matrix product": lambda x, y: x.matmul(y), "its right operand": lambda x, y: y.matmul(x),
    "a product of a size that is too large": lambda x, y: x.mul(y, below=10),
    "a constant": lambda x, y: x.scale(0.3), "a polynomial": lambda x, y: x.poly([1.0, 2.0, 3.0]),
    "a comparison of all bits": lambda x, y: arithmetic(x.session, x.less_than([0.0]), [1.0], 18),
    "a long comparison": lambda x, y: arithmetic(x.session, x.less_than([0.0], bits=47), [1.0], 18),
    "a choice that drops bits": lambda x, y: x.select(y.less_than([0.0]), [1], [0.0], frac=14),
    "a sum with a whole one": lambda x, y: (y + x).mul(y),
    "a row of both": lambda x, y: concatenated([y, x], -1).view(lambda part: part[:, 4:]).mul(y),
    "a tensor of a model": lambda x, y: SecretTensor(x).value(full=True),
}  # fmt: skip
NARROW: dict[str, Callable[[Fixed, Fixed], Fixed]] = {
    "a sum": lambda x, y: x + y, "a difference": lambda x, y: y - x, "a multiple": lambda x, y: x.scale_int(3),
    "more fractional bits": lambda x, y: x.finer(22), "fewer": lambda x, y: x.rescale(12),
    "a product of a known size": lambda x, y: x.mul(y, below=5),
    "a right factor of a known size": lambda x, y: y.mul(x, below=5),
    "a matrix product of a known size": lambda x, y: x.matmul(y, below=5),
    "a narrow product of a known size": lambda x, y: x.mul(y, below=5, width=40),
    "a product that leaves few bits": lambda x, y: x.mul(y, width=28),
    "ReLU": lambda x, y: relu(x), "SiLU": lambda x, y: silu(x), "GELU": lambda x, y: gelu(x),
    "one entry more a row": _appended, "a stack": lambda x, y: y.stack(x),
    "an integer choice": lambda x, y: x.select(y.less_than([0.0]), [2], [1.0]),
    "rows of a model": lambda x, y: SecretTensor(x).view(-1).view(4, 4).transpose(0, 1).value(),
}  # fmt: skip


def _both(
    step: Callable[[Fixed, Fixed], Fixed], protocol: str = "trio"
) -> tuple[torch.Tensor, torch.Tensor, Cost, Cost, int | None]:  # fmt: skip
    """What a step makes of a narrow product and of a whole one, what it costs, and the bits that are right."""
    found, widths = [], []
    for width in (46, None):

        def run(session: Session, x: Fixed, y: Fixed, width: int | None = width) -> Fixed:
            product = x.mul(y, width=width)
            session.protocol.ledger.reset()
            made = step(product, y)
            widths.append(made.width)
            return made.with_share(session.protocol.truncate(made.share, 0)) if made.width is None else _seen(made)

        found.append(run_parties(PrivateConfig(protocol=protocol), run, [X, Y]))  # type: ignore[arg-type]
    return found[0].value, found[1].value, found[0].cost, found[1].cost, widths[0]


def _seen(x: Fixed) -> Fixed:
    """A narrow value for the client, who reads the whole ring; what that costs is not the step's."""
    ledger = x.session.protocol.ledger
    sent, rounds = dict(ledger.sent), dict(ledger.rounds)
    made = x.restore_high_bits()
    for book, before in ((ledger.sent, sent), (ledger.rounds, rounds)):
        book.clear()
        book.update(before)
    return made


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("step", WHOLE)
def test_what_needs_the_whole_ring_makes_it_right_first(step: str, protocol: str) -> None:
    got, want, price, usual, width = _both(WHOLE[step], protocol)
    assert torch.allclose(got, want, atol=2.0**-14)
    assert width is None
    count = 32 if step == "a row of both" else 16
    widened = cost.truncate(Ring(64), 16, 0, BitWidths(46, 64)) if count == 16 else None
    if widened is not None:
        assert price.total - usual.total == widened.total
    assert price.rounds == usual.rounds + 1


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("step", NARROW)
def test_what_needs_its_right_bits_alone_costs_no_more(step: str, protocol: str) -> None:
    got, want, price, usual, width = _both(NARROW[step], protocol)
    assert torch.allclose(got, want, atol=2.0**-12 if step == "fewer" else 2.0**-13)
    if "size" in step:  # a factor of fewer bits makes more of the quotient's bits uncertain, which costs some
        assert price.rounds <= 2
    else:
        assert (price.total, price.rounds) <= (usual.total, usual.rounds)
        assert width is not None


BEYOND: dict[str, Callable[[Fixed], Fixed]] = {
    "ReLU": relu, "a clamp": lambda x: clamp(x, -0.5, 0.5), "a maximum and its place": lambda x: first_maximum(x)[0],
    "a coarse maximum": lambda x: maximum(x, coarse=True), "a rank": lambda x: among_largest(x, 3),
    "a reciprocal": lambda x: reciprocal(x + 6.0, 1.0, 64.0),
}  # fmt: skip
"""Functions that look at more bits than a product of few has."""


@pytest.mark.parametrize("adder", ["prefix", "keys"])
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("function", BEYOND)
def test_what_looks_at_more_bits_makes_them_right_first(function: str, protocol: str, adder: str) -> None:
    """Comparison keys, too, with which nothing was narrow before "auto" chose for each number of elements."""
    config = PrivateConfig.from_dict({"protocol": protocol, "adder": adder})
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def narrow(_: Session, x: Fixed, y: Fixed) -> Fixed:
        return BEYOND[function](x.mul(y, width=27)).restore_high_bits()

    def whole(_: Session, x: Fixed, y: Fixed) -> Fixed:
        return BEYOND[function](x.mul(y)).restore_high_bits()

    got, want = (run_parties(config, run, [x, torch.ones(64, 8)]).value for run in (narrow, whole))
    assert torch.allclose(got, want, atol=0.2 if "coarse" in function else 2.0**-12)


def test_its_width_goes_along_with_what_is_made_of_it() -> None:
    x = held(4, 4).matmul(held(4, 4), width=46)
    assert x.width == 46
    assert (x + 1.0).width == (held(4, 4) - x).width == x.scale_int(3).width == 46
    assert x.view(torch.t).sum(0).width == 46
    assert x.finer(28).width == 56
    assert x.finer(36).width is None, "what is right in its lowest bits is whole once these are the highest"
    assert held(4, 4).matmul(held(4, 4), frac=36, width=46).width is None
    assert coarse_bits(x, [0.0], extra=1).count == 16
    assert x.local_truncate(4, 26).width == 26
    assert (silu(x).width, gelu(x).width, relu(x).width) == (46, 46, 46)
    assert precise_tanh(x).width is None
    for frac, most in ((18, 46), (4, 32)):  # as many bits as are dropped are wrong on top
        assert x.local_truncate(frac, most).width == most
        with pytest.raises(DomainError, match=f"{most} at most"):
            x.local_truncate(frac, most + 1)


@pytest.mark.parametrize("config", [
    PrivateConfig(protocol="quad"), PrivateConfig(truncation="exact"), PrivateConfig(ring=32, frac_bits=10),
])  # fmt: skip
def test_other_protocols_have_no_narrow_values(config: PrivateConfig) -> None:
    session = meta_session(config, 1)
    parts = 3 if config.protocol == "quad" else 2
    dtype = torch.int64 if config.ring == 64 else torch.int32
    x = Fixed(session, Share(tuple(torch.empty(4, 4, dtype=dtype, device="meta") for _ in range(parts))), 10)
    assert x.mul(x, width=20).width is None
    assert x.matmul(x, width=20).width is None


@pytest.mark.parametrize("public", [False, True])
def test_a_narrow_value_plus_a_larger_one_keeps_the_larger_one(public: bool) -> None:
    large = torch.full((4, 4), 2.0**14)

    def run(_: Session, x: Fixed, y: Fixed, z: Fixed) -> Fixed:
        made = SecretTensor(x.mul(y, width=30)) + (large.float() if public else SecretTensor(z))
        return made.value(full=True)  # type: ignore[no-any-return]

    got = run_parties(PrivateConfig(), run, [X, Y, large.double()]).value
    assert torch.allclose(got, X * Y + 2.0**14, atol=2.0**-13)


@pytest.mark.parametrize("width", [23, 25, 27])
@pytest.mark.parametrize("function", [silu, gelu], ids=["silu", "gelu"])
def test_waves_of_few_bits(function: Callable[[Fixed], Fixed], width: int) -> None:
    """An angle reads more bits than small values may have."""

    def run(_: Session, x: Fixed, y: Fixed) -> Fixed:
        return function(x.mul(y, width=width)).restore_high_bits()

    x = X / 16
    want = torch.nn.functional.silu(x) if function is silu else torch.nn.functional.gelu(x)
    assert torch.allclose(run_parties(PrivateConfig(), run, [x, torch.ones(4, 4)]).value, want, atol=1.7e-4)


def test_a_product_that_is_nearly_zero_is_divided() -> None:
    def run(_: Session, x: Fixed, y: Fixed) -> Fixed:
        return x.mul(y, width=28).mul(y.finer(30), below=-25)

    x = X * 2.0**-10
    got = run_parties(PrivateConfig(), run, [x, torch.full((4, 4), 2.0**-8)]).value
    assert torch.allclose(got, x * 2.0**-16, atol=2.0**-16)


def test_what_attention_gives_has_the_same_bits_in_all_layers_of_a_decode_step() -> None:
    """One program serves the attention of all layers at a length."""
    session = meta_session(PrivateConfig(), 1)
    session.numerics.ranges = Ranges({"a": {"read": 20, "value": 4}, "b": {"read": 31, "value": 9}})
    with session.module("a"):
        assert module_bits(session).width(18, values=True) == 20 + 18 + SEEN
        with alike(session):
            assert module_bits(session).width(18, values=True) == 31 + 18 + SEEN


def test_where_keys_may_be_chosen_results_are_narrow_if_circuits_are() -> None:
    """The more elements, and the nearer the parties, the sooner a circuit."""
    near, far = (
        meta_session(PrivateConfig(adder="auto", bandwidth_mbit=1000, latency_ms=latency), 1) for latency in (1, 20)
    )
    for session in (near, far):
        session.numerics.ranges = Ranges({"a": {"read": 20, "output": 4, "score": 8}})
        with session.module("a"):
            assert module_bits(session, 16).width(18) is None
            assert module_bits(session, 1 << 20).width(18) == 20 + 18 + SEEN
            assert module_bits(session, 16).read_frac == 18
            assert module_bits(session, 1 << 20).read_frac == READ_BITS
            assert score_width(session, 16, alone=True) is None
            assert score_width(session, 1 << 20, alone=True) == 18 + ROOM + 9
    assert not by_keys(near, 4096)
    assert by_keys(far, 2048)
    assert not by_keys(meta_session(PrivateConfig(), 1), 1)
    assert by_keys(meta_session(PrivateConfig(adder="keys"), 1), 1 << 20)


@pytest.mark.parametrize(("config", "bits"), [
    (PrivateConfig(), READ_BITS), (PrivateConfig(protocol="dealer"), READ_BITS), (PrivateConfig(frac_bits=14), 14),
    (PrivateConfig(protocol="quad"), 18), (PrivateConfig(adder="keys"), 18), (PrivateConfig(truncation="exact"), 18),
    (PrivateConfig(approximations="puma", plugins=("rivals",)), 18),
])  # fmt: skip
def test_results_that_products_alone_read_have_fewer_fractional_bits(config: PrivateConfig, bits: int) -> None:
    session = meta_session(config, 1)
    session.numerics.ranges = Ranges({"a": {"read": 20, "output": 4}, "b": {"output": 4}})
    with session.module("a"):
        assert module_bits(session).read_frac == bits
    with session.module("b"):
        assert module_bits(session).read_frac == config.frac_bits


@pytest.mark.parametrize("narrow", [False, True])
def test_a_bias_is_cut_to_the_bits_of_a_narrow_result(narrow: bool) -> None:
    """Locally; beside a whole one the result is made whole and finer."""
    made: list[Fixed] = []

    def run(session: Session, x: Fixed, y: Fixed) -> Fixed:
        product = SecretTensor(x.mul(y, READ_BITS, width=40))
        session.protocol.ledger.reset()
        made.append(plus(product, SecretTensor(y.view(lambda part: part[0])), narrow).value())
        return _seen(made[-1])

    got = run_parties(PrivateConfig(), run, [X, Y])
    assert torch.allclose(got.value, X * Y + Y[0], atol=2.0**-14)
    assert (made[0].frac, made[0].width) == ((16, 40) if narrow else (18, None))
    assert got.cost.rounds == (0 if narrow else 1)


def test_activations_take_what_has_fewer_bits_for_products_but_no_coarser_values() -> None:
    fractions = {frac: SecretTensor(held(4, 4).with_share(held(4, 4).share, frac)) for frac in (12, 16, 17, 18, 20)}
    assert {frac: x.to_operand(narrow=True, least=READ_BITS).frac for frac, x in fractions.items()} == {
        12: 18, 16: 16, 17: 17, 18: 18, 20: 18
    }  # fmt: skip
