"""How many Python functions each party calls to decode a token: rounds are many, and Python is most of their time.

python scripts/studies/count_calls.py                     a one-layer Llama of grouped heads, two decode steps
python scripts/studies/count_calls.py --top 40            more functions
python scripts/studies/count_calls.py --protocol quad     under another protocol
python scripts/studies/count_calls.py --json              one JSON object per party
python scripts/studies/count_calls.py --tiny              one decode step, ten functions

python scripts/studies/count_calls.py --linear            the third linear layer of a step alone, in order
python scripts/studies/count_calls.py --repeated          when steps run as recorded programs

Parties are threads. A prompt is read and one token decoded with a cache (what is computed once is computed then; with
`--repeated` four tokens), and the next tokens are counted: every entry into a Python function, generator or
comprehension while a party computes its part of a forward. Calls that stay in C (tensor operations, kernels) are not
seen. The figure depends on the versions of Python and the libraries, hardly on the machine, and not on its speed.
"""

import argparse
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType

import torch
from private_llm_cli.commands.output import emit_json, emit_table
from private_llm_hf import patch
from private_llm_hf.party.party import Party
from transformers import LlamaConfig, LlamaForCausalLM

from private_llm.config import PrivateConfig
from private_llm.tensor.ops_matmul import linear

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


def count_calls(config: PrivateConfig, steps: int, before: int = 1) -> dict[str, Counter[CodeType]]:
    """Calls of each party, by its thread's name, in `steps` decode steps after `before` ones."""
    found = calls_within(Party.forward, config, steps, before)
    return {name: Counter(chain.from_iterable(runs)) for name, runs in found.items()}


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


def main() -> None:
    """Print a table, or one JSON object per party."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", default="trio", help="trio, quad, dealer or plain")
    parser.add_argument("--steps", type=int, default=2, help="decode steps to count")
    parser.add_argument("--top", type=int, default=25, help="functions to list for each party")
    parser.add_argument("--json", action="store_true", help="one JSON object per party")
    parser.add_argument("--linear", action="store_true", help="list the calls of one linear layer in order")
    parser.add_argument("--repeated", action="store_true", help="count steps that run as recorded programs")
    parser.add_argument("--tiny", action="store_true", help="one step, ten functions")
    given = parser.parse_args()
    steps, top = (1, 10) if given.tiny else (given.steps, given.top)
    config = PrivateConfig(protocol=given.protocol, party_mode="threads", replay=given.repeated)
    if given.linear:
        for party, codes in calls_of_linear(config).items():
            files = {code.co_filename for code in codes if Path(code.co_filename).is_file()}
            rows = [(place(code),) for code in codes]
            emit_table(f"{party}: {len(codes)} calls in {len(files)} files", ("function",), rows)
        return
    for party, counts in count_calls(config, steps, 4 if given.repeated else 1).items():
        total = sum(counts.values())
        listed = [(place(code), calls) for code, calls in counts.most_common(top)]
        if given.json:
            row = {"name": "calls", "protocol": given.protocol, "party": party, "steps": steps, "calls": total}
            emit_json({**row, "top": dict(listed)})
            continue
        rows = [(name, str(calls), f"{calls / total:.1%}") for name, calls in listed]
        emit_table(f"{party}: {total} calls in {steps} decode steps", ("function", "calls", "share"), rows)


if __name__ == "__main__":
    main()
