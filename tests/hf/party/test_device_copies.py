"""What a party that computes on a GPU copies there from main memory: what a call's mask says, and nothing else.

There need not be a GPU: its tensors are PyTorch's fake ones, which have devices and no values, and Triton's kernels are
not run. What lies in main memory is real.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf.kv_cache import attention_interface
from private_llm_hf.party import placement
from private_llm_hf.party.model import build_party_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from private_llm.config import PrivateConfig
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.registry import PartySetup
from private_llm.protocols.session import Session, _end
from private_llm.protocols.share import Share
from private_llm.protocols.weight_sharing import keys_held
from private_llm.ring.prg import ChaCha, Prg, Seed
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.hf import tiny
from tests.hf.party.parties import description
from tests.hf.token_sharding.test_cascade_devices import GPU, taken

pytest.importorskip("triton")
ATEN = torch.ops.aten


class Copies(TorchDispatchMode):
    """Lists the copies from main memory to the GPU, by the files that make them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        if not any(isinstance(x, FakeTensor) or x == GPU for x in given if isinstance(x, Tensor | torch.device)):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is ATEN._local_scalar_dense.default:
            return 0
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in [*given, *tree_leaves(made)] if isinstance(x, Tensor)]
        moves = func in (ATEN._to_copy.default, ATEN.copy_.default)  # others read single numbers when they are called
        here = any(x.device.type == "cpu" and (x.dim() or moves) for x in tensors)
        if (here or func is ATEN.lift_fresh.default) and any(x.is_cuda for x in tensors):
            lines = [
                f for f in traceback.extract_stack()[:-1] if "private_llm" in f.filename or "masking" in f.filename
            ]
            self.found.append(Path(lines[-1].filename).name)
        return made


class Peers(Transport):
    """Others on the same GPU."""

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        assert payload.device == GPU

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=GPU)

    def wait(self, frm: int) -> None:
        """Nothing to wait for."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    from triton.runtime.jit import KernelInterface

    from private_llm.kernels.matmul import planes

    def get(x: Tensor, index: Any) -> Tensor:
        return taken(x, index if isinstance(index, tuple) else (index,)) if x.is_cuda else Tensor.__getitem__(x, index)

    def put(x: Tensor, index: Any, value: Any) -> None:
        if isinstance(index, Tensor):
            ATEN.index_put_(x, [index], value)
        else:
            ATEN.copy_.default(get(x, index), value)

    def mask(*_: object, q_length: int, kv_length: int, **__: object) -> Tensor:
        with unset_fake_temporarily():  # it has values
            return torch.ones(q_length, kv_length, dtype=torch.bool).tril(kv_length - q_length)[None, None]

    encode = Ring.encode
    for name, method in {  # those of tensors ask for a real device first
        "__getitem__": get, "__setitem__": put, "__invert__": lambda x: torch.bitwise_not(x),
        "contiguous": lambda x: x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format),
        "copy_": lambda x, y: ATEN.copy_.default(x, y),
    }.items():  # fmt: skip
        monkeypatch.setattr(FakeTensor, name, method, raising=False)
    for kind in (Prg, ChaCha):
        draw = lambda self, count, dtype, device: torch.empty(count, dtype=dtype, device=device)  # noqa: E731
        monkeypatch.setattr(kind, "draw", draw)
    monkeypatch.setattr(
        Ring, "encode",
        lambda ring, x, frac: x.to(ring.dtype) if isinstance(x, FakeTensor) else encode(ring, x, frac),
    )  # fmt: skip
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda *given, **named: None)
    monkeypatch.setattr(planes, "do_bench", lambda run, **_: 0.0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(placement, "device_for", lambda name, party: torch.device(name))
    monkeypatch.setattr(attention_interface, "sdpa_mask", mask)
    yield FakeTensorMode(allow_non_fake_inputs=True)
    for each in gc.get_objects():  # constants that are kept would be fake ones for other tests
        if type(each) is functools._lru_cache_wrapper and str(each.__module__).startswith("private_llm"):
            each.cache_clear()


def copies(settings: dict[str, Any], number: int, steps: Sequence[int]) -> list[list[str]]:
    """What each step of a second text copies."""
    config = PrivateConfig.from_dict({"replay": False, **settings})  # programs keep what does not change
    zero, every = Seed(bytes(32)), [*range(config.parties), CLIENT]
    setup = PartySetup(config, number, Peers(number), dict.fromkeys(every, zero), [zero] * keys_held(config, number))
    session = Session(config, _end(setup).on(GPU), str(GPU))
    session.protocol.placed = True

    def secret(*shape: int) -> SecretTensor:
        parts = tuple(torch.empty(shape, dtype=torch.int64, device=GPU) for _ in range(2))
        return SecretTensor(Fixed(session, Share(parts), session.frac))

    model = tiny.build("llama")
    kind = description(model)
    weights = {name: secret(*value.shape) for name, value in model.named_parameters()}
    party, found = build_party_model(*kind, weights, session), list[list[str]]()
    for _ in range(2):
        cache, length, found = party.new_cache(), 0, []
        for fresh in steps:
            length += fresh
            with unset_fake_temporarily():
                seen = torch.ones(1, length, dtype=torch.int64)
            with Copies() as counted:
                party(inputs_embeds=secret(1, fresh, party.config.hidden_size), attention_mask=seen,
                      past_key_values=cache, return_dict=True)  # fmt: skip
            found.append(counted.found)
    return found


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("protocol", "number"), [("trio", 0), ("trio", 1), ("trio", 2), ("dealer", 1)])
def test_a_step_copies_to_the_gpu_only_what_its_mask_says(protocol: str, number: int, gpu: FakeTensorMode) -> None:
    """However many layers and levels there are: which tokens there are, where they look, and how many each row sees."""
    with gpu, torch.no_grad(), Copies():
        prompt, *others = copies({"protocol": protocol}, number, (20, 1))
    assert sorted(prompt) == ["attention.py", "attention.py", "masking_utils.py", "ragged_rows.py"]
    assert others == [["masking_utils.py"]]
