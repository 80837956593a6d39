"""Every way out of a secret tensor that is known to exist stays shut (and says so)."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from private_llm.errors import ConfigError, DomainError, PlaintextLeak, UnsupportedOp
from private_llm.tensor.dispatch import _RULES, implements
from private_llm.tensor.secret import SecretTensor
from tests.tensor.secrets import opened, plain_session, secret

S = plain_session()
X = secret(S, torch.arange(12.0).view(3, 4))
ONE = secret(S, torch.tensor(1.0))
PLAIN = torch.zeros(3, 4)

VALUES = {
    "bool": lambda: bool(ONE),
    "max_is_zero": lambda: bool(X.sum() == 0),
    "item": lambda: ONE.item(),
    "tolist": lambda: X.tolist(),
    "float": lambda: float(ONE),
    "int": lambda: int(ONE),
    "index": lambda: [1, 2][ONE],
    "in": lambda: 1.0 in X,
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "np.array": lambda: np.array(X),
    "dlpack": lambda: torch.from_dlpack(X),
    "np.dlpack": lambda: np.from_dlpack(X),
    "storage": lambda: X.storage(),
    "untyped_storage": lambda: X.untyped_storage(),
    "share_memory": lambda: X.share_memory_(),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "nonzero": lambda: X.nonzero(),
    "pickle": lambda: pickle.dumps(X),
    "torch.save": lambda: torch.save({"w": nn.Parameter(X, requires_grad=False)}, io.BytesIO()),
    "bytes": lambda: bytes(X),
}

BELOW_THE_TABLE = {
    "torch.tensor": lambda: torch.tensor(X),
    "torch.full": lambda: torch.full((2,), ONE),
    "torch.arange": lambda: torch.arange(ONE),
    "torch.Tensor": lambda: torch.Tensor(X),
    "vmap": lambda: torch.vmap(lambda t: t * 2)(X),
    "vmap_sin": lambda: torch.func.vmap(torch.sin)(X),
    "as_subclass": lambda: X.as_subclass(torch.Tensor),
    "make_subclass": lambda: torch.Tensor._make_subclass(torch.Tensor, X),
    "nested": lambda: torch.nested.nested_tensor([X]),
    "jit_trace": lambda: torch.jit.trace(lambda t: t + 1, (X,)),
}

PLAIN_DESTINATIONS = {
    "copy_": lambda: PLAIN.copy_(X),
    "setitem": lambda: PLAIN.__setitem__(0, X[0]),
    "add_": lambda: PLAIN.add_(X),
    "iadd": lambda: PLAIN.__iadd__(X),
    "mul_": lambda: PLAIN.mul_(X),
    "out": lambda: torch.add(X, X, out=PLAIN),
    "cat_out": lambda: torch.cat([X, X], out=PLAIN),
    "index_copy_": lambda: PLAIN.index_copy_(0, torch.tensor([0]), X[:1]),
    "index_put_": lambda: PLAIN.index_put_((torch.tensor([0]),), X[0]),
    "scatter_": lambda: PLAIN.scatter_(0, torch.zeros(1, 4, dtype=torch.long), X),
    "fill_": lambda: PLAIN.fill_(ONE),
    "masked_fill_": lambda: PLAIN.masked_fill_(PLAIN > 0, ONE),
}

UNSUPPORTED = {
    "cumprod": lambda: X.cumprod(0),
    "kthvalue": lambda: X.kthvalue(2),
    "multinomial": lambda: torch.multinomial(X, 1),
    "__eq__": lambda: X == X,
    "lt": lambda: X < 0,
    "argmin": lambda: X.argmin(-1),
    "cumsum": lambda: X.cumsum(-1),
    "log": lambda: torch.log(X),
    "einsum": lambda: torch.einsum("ij,kj->ik", X, X),
    "linalg.svd": lambda: torch.linalg.svd(X),
    "long": lambda: X.long(),
    "zero_": lambda: X.zero_(),
    "new_zeros": lambda: X.new_zeros(2),
    "backward": lambda: X.sum().backward(),
}


@pytest.mark.parametrize("attempt", VALUES)
def test_values_stay_inside(attempt: str) -> None:
    with pytest.raises((PlaintextLeak, UnsupportedOp)):
        VALUES[attempt]()


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:`torch.jit.trace`")
@pytest.mark.parametrize("attempt", BELOW_THE_TABLE)
def test_what_bypasses_the_table_is_refused(attempt: str) -> None:
    with pytest.raises(PlaintextLeak, match="below the table"):
        BELOW_THE_TABLE[attempt]()


def test_with_torch_function_disabled_everything_is_refused() -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for attempt in (
            lambda: X + 1,
            lambda: ONE.item(),
            lambda: X.view(12),
            lambda: torch.Tensor.__repr__(X),
        ):
            with pytest.raises(PlaintextLeak):
                attempt()
        with pytest.raises(RuntimeError):
            X.tolist()


@pytest.mark.parametrize("attempt", PLAIN_DESTINATIONS)
def test_no_secret_into_a_plain_destination(attempt: str) -> None:
    before = PLAIN.clone()
    with pytest.raises(PlaintextLeak, match="plain tensor"):
        PLAIN_DESTINATIONS[attempt]()
    assert torch.equal(PLAIN, before)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unknown_operations_are_named_with_the_place_to_add_them(name: str) -> None:
    with pytest.raises(UnsupportedOp, match=rf"{name}.* has no private rule.*private_llm/tensor/ops_"):
        UNSUPPORTED[name]()


def test_loading_secrets_into_a_plain_module_fails_and_changes_nothing() -> None:
    linear = nn.Linear(4, 3)
    before = linear.weight.clone()
    with pytest.raises(RuntimeError, match="plain tensor"):
        linear.load_state_dict({"weight": X, "bias": secret(S, torch.zeros(3))})
    assert torch.equal(linear.weight, before)


def test_a_secret_index_is_refused_even_inside_a_slice() -> None:
    for attempt in (lambda: X[ONE], lambda: X[:ONE], lambda: PLAIN[ONE], lambda: X[0, ONE:]):
        with pytest.raises(UnsupportedOp, match="secret index"):
            attempt()
    with pytest.raises(PlaintextLeak):
        PLAIN[:ONE]


def test_text_shows_shape_and_session_only() -> None:
    wanted = repr(X)
    assert wanted == "SecretTensor(shape=(3, 4), frac=18, Session(plain, party 0, ring 64, f=18))"
    assert f"{X}" == str(X) == format(ONE, ".3f").replace("()", "(3, 4)") == wanted


def test_outside_it_is_a_float_tensor_with_unique_addresses() -> None:
    assert (X.dtype, X.device.type, X.ndim, tuple(X.size()), len(X)) == (torch.float32, "cpu", 2, (3, 4), 3)
    assert X.half().dtype is X.to(torch.bfloat16).dtype is torch.float32
    assert torch.finfo(X.dtype).min < -1e38
    assert X.data_ptr() != secret(S, torch.zeros(3, 4)).data_ptr() != 0
    assert X.element_size() == 8  # what this party holds: one int64 part in `plain`
    assert not X.requires_grad
    with pytest.raises(UnsupportedOp, match="gradient"):
        X.requires_grad = True


def test_it_is_a_parameter_whose_state_lies_in_slots() -> None:
    parameter = nn.Parameter(X, requires_grad=False)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, SecretTensor)
    assert set(parameter.__dict__) == {"_is_param"}
    module = nn.Linear(4, 3)
    module.weight = parameter
    module.to(torch.float16)
    assert isinstance(module.weight, SecretTensor)
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter)
    assert torch.equal(opened(twin.weight), opened(X))
    assert isinstance(copy.copy(X), SecretTensor)


def test_in_place_rebinds_and_refuses_shared_memory() -> None:
    x = secret(S, torch.ones(2))
    same = x
    x += 1
    x *= 2
    x /= 4
    assert same is x
    assert torch.equal(opened(x), torch.ones(2).double())
    view = x.view(2, 1)
    with pytest.raises(UnsupportedOp, match="view"):
        view.add_(1)
    with pytest.raises(UnsupportedOp, match="view"):
        x.add_(1)


def test_secret_into_secret_only() -> None:
    x = secret(S, torch.zeros(2, 3))
    x[0] = secret(S, torch.ones(3))
    assert torch.equal(opened(x), torch.tensor([[1.0] * 3, [0.0] * 3]).double())
    x.copy_(secret(S, torch.ones(2, 3)))
    assert torch.equal(opened(x), torch.ones(2, 3).double())
    with pytest.raises(PlaintextLeak, match="share it first"):
        x.copy_(torch.zeros(2, 3))
    with pytest.raises(UnsupportedOp):
        x[0] = torch.zeros(3)


def test_two_sessions_do_not_mix() -> None:
    other = secret(plain_session(), torch.ones(3, 4))
    for attempt in (lambda: X + other, lambda: X * other, lambda: X @ other.T, lambda: torch.cat([X, other])):
        with pytest.raises(DomainError, match="different sessions"):
            attempt()


def test_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="eval"):
        nn.Dropout(0.5)(X)
    assert nn.Dropout(0.5).eval()(X) is X


def test_masked_entries_reach_softmax_only() -> None:
    hidden = X.masked_fill(torch.eye(3, 4, dtype=torch.bool), float("-inf"))
    assert torch.equal(hidden.view(12).hidden.view(3, 4), torch.eye(3, 4, dtype=torch.bool))
    assert torch.equal((hidden / 2).hidden, hidden.hidden)  # a positive factor leaves minus infinity what it is
    assert bool((hidden + torch.zeros(4).index_fill(0, torch.tensor(2), float("-inf"))).hidden[:, 2].all())
    for attempt in (lambda: hidden + 1, lambda: hidden * -2, lambda: hidden @ X.T, lambda: hidden.sum()):
        with pytest.raises(UnsupportedOp, match="minus infinity"):
            attempt()


def test_the_table_is_closed_and_has_no_duplicates() -> None:
    assert torch.nn.functional.linear in _RULES
    with pytest.raises(ConfigError, match="already has a private rule"):
        implements(torch.add)(lambda x: x)


def test_a_mask_of_booleans_is_no_addend() -> None:
    """Attention that adds the mask it is given would otherwise add 1 where it meant to hide nothing."""
    x = secret(plain_session(), torch.ones(2, 3))
    with pytest.raises(UnsupportedOp, match="a mask of booleans added to a secret"):
        x + torch.ones(2, 3, dtype=torch.bool)
