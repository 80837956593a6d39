"""What a round costs in Python calls does not creep up: rounds are many, and Python is most of their time.

Parties are threads. A prompt is read and a token decoded with a cache (what is computed once is computed then), and the
next tokens are counted: every entry into a Python function, generator or comprehension while a party computes its part
of a forward. Calls that stay in C (tensor operations, kernels) are not seen. The figure depends on the versions of
Python and the libraries, hardly on the machine, and not on its speed.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import torch
from private_llm_hf import patch
from private_llm_hf.party.party import Party
from transformers import LlamaConfig, LlamaForCausalLM

from private_llm.config import PrivateConfig
from private_llm.tensor.ops_matmul import linear

STEPS = 2
MODEL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
PROMPT = 6
"""Tokens."""
KERNELS = re.compile(r"/kernels/\w+/(\w+_)?(cpu|aes|amx)\.py$")
THIRD = 2
"""The linear layer of a step that is looked at: gate and up, as one product."""


class Calls:
    """Entries into a function and what it calls, in Python, by the name of the thread: a list for each run of it."""

    def __init__(self, within: Callable[..., object]) -> None:
        self.runs: dict[str, list[list[CodeType]]] = {}
        self._within: CodeType = within.__code__

    def clear(self) -> None:
        """Begin anew."""
        for runs in self.runs.values():
            runs.clear()

    def enter(self, frame: FrameType, event: str, arg: object) -> None:
        """What `threading.setprofile` calls in a thread: from now on this thread has lists of its own."""
        runs: list[list[CodeType]] = []
        self.runs[threading.current_thread().name] = runs
        within, running = self._within, False

        def note(frame: FrameType, event: str, arg: object) -> None:
            nonlocal running
            if event == "call":
                if frame.f_code is within:
                    running = True
                    runs.append([within])
                elif running:
                    runs[-1].append(frame.f_code)
            elif event == "return" and frame.f_code is within:
                running = False

        sys.setprofile(note)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count in the threads that are started inside."""
        threading.setprofile(self.enter)
        try:
            yield
        finally:
            threading.setprofile(None)


def count_calls(config: PrivateConfig, steps: int, before: int = 1) -> dict[str, int]:
    """Calls of each party, by its thread's name, in `steps` decode steps after `before` ones."""
    found = calls_within(Party.forward, config, steps, before)
    return {name: sum(map(len, runs)) for name, runs in found.items()}


def calls_of_linear(config: PrivateConfig) -> dict[str, list[CodeType]]:
    """Calls of each party, in order, in the third linear layer of a decode step, from its rule to the kernels.

    These are machine code, which Numba shows as calls in Python; they are left out.
    """
    found = {name: runs[THIRD] for name, runs in calls_within(linear, config).items()}
    return {name: [code for code in codes if not KERNELS.search(code.co_filename)] for name, codes in found.items()}


def calls_within(
    function: Callable[..., object], config: PrivateConfig, steps: int = 1, before: int = 1
) -> dict[str, list[list[CodeType]]]:
    """Calls of each party, by its thread's name, in each run of a function in `steps` decode steps after others."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**MODEL)).eval()
    calls = Calls(function)
    with calls.watching():
        model = patch(plain, config)
    with model, torch.no_grad():
        ids = torch.arange(PROMPT)[None]
        cache = model(input_ids=ids, use_cache=True).past_key_values
        for step in range(steps + before):
            if step == before:
                model.cost()  # every party has answered, so none is still at the last forward
                calls.clear()
            cache = model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
        model.cost()
        return {name: list(runs) for name, runs in calls.runs.items() if runs}


def place(code: CodeType) -> str:
    """Where a function is: the last parts of its path, and its name."""
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{code.co_firstlineno} {code.co_qualname}"


def test_calls_of_two_decode_steps() -> None:
    """One layer of a Llama and its head: 12 000 calls at an evaluator and 11 200 at the helper, and some head room.

    Before plans and public constants were computed once they were 27 200 and 19 300, and 14 400 and 12 200 before a
    layer's bits were. The sum over both evaluators is
    compared: whichever of them is first makes what the threads of a process share. Alone this test counts more than
    behind others, which have made some of that.
    """
    totals = count_calls(PrivateConfig(protocol="trio", party_mode="threads", replay=False), STEPS)
    assert sorted(totals) == ["party 0", "party 1", "party 2"]
    assert 6_000 < totals["party 0"] < 11_500
    assert 2 * 7_000 < totals["party 1"] + totals["party 2"] < 2 * 12_400


def test_calls_of_a_linear_layer() -> None:
    """From the rule of `F.linear` to the kernels; with Python 3.12, where a comprehension is no call, fewer.

    They were 187 to 201 in 28 files when each number of bits was asked for anew, and a message took a lock in Python.
    """
    found = calls_of_linear(PrivateConfig(protocol="trio", party_mode="threads", replay=False))
    most = {"party 0": 88, "party 1": 93, "party 2": 95}
    assert sorted(found) == sorted(most)
    for party, codes in found.items():
        files = {code.co_filename for code in codes if Path(code.co_filename).is_file()}
        assert 60 < len(codes) <= most[party], [place(code) for code in codes]
        assert len(files) <= 15, sorted(files)


def test_calls_of_decode_steps_that_are_repeated() -> None:
    """Layers run as programs from the fourth step on; attention meets every length once here, and stays in Python.

    18 300 calls of all parties, and some head room; 23 000 when a layer was several programs.
    """
    totals = count_calls(PrivateConfig(protocol="trio", party_mode="threads"), STEPS, before=4)
    assert len(totals) == 3
    assert 0 < sum(totals.values()) < 20_000
