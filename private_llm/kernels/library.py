"""The kernels as `torch.ops.private_llm.*`: schema, shape function and one implementation for all devices.

Importing this module registers them. Meant for torch.compile, export and profilers; the package itself calls
`ops` directly. CUDA is registered where triton is installed; triton itself is imported at the first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from private_llm.kernels import ops, shapes

SCHEMAS = (
    "ring_matmul(Tensor x, Tensor y) -> Tensor",
    "ring_matmul_pair(Tensor x0, Tensor y0, Tensor x1, Tensor y1) -> Tensor",
    "ring_matmul_rows(Tensor x, Tensor y, Tensor rows) -> Tensor",
    "ring_matmul_rows_pair(Tensor x0, Tensor y0, Tensor x1, Tensor y1, Tensor rows) -> Tensor",
    "ring_matmul_lines(Tensor x, Tensor y, Tensor lines) -> Tensor",
    "ring_matmul_lines_pair(Tensor x0, Tensor y0, Tensor x1, Tensor y1, Tensor lines) -> Tensor",
    "ring_conv2d(Tensor x, Tensor w, int[2] stride, int[2] padding, int[2] dilation, int groups) -> Tensor",
    "ring_conv2d_pair(Tensor x0, Tensor w0, Tensor x1, Tensor w1, int[2] stride, int[2] padding,"
    " int[2] dilation, int groups) -> Tensor",
    "gather_rows(Tensor table, Tensor index) -> Tensor",
    "transpose_bits(Tensor x, int rows) -> Tensor",
    "block_monomials(Tensor s, int low, int[] blocks, Tensor(a!) out) -> ()",
    "block_carries(Tensor m, int low, int[] blocks, Tensor mono, bool first, Tensor(a!) out) -> ()",
    "join_products(Tensor lam, int[] groups, int count, Tensor(a!) out) -> ()",
    "join_carries(Tensor b, Tensor lam, Tensor prod, int[] groups, int count, bool first, Tensor(a!) out) -> ()",
    "inject_products(Tensor bits, Tensor lam, bool[] weighted, Tensor(a!) out) -> ()",
    "inject_terms(Tensor bits, Tensor m, Tensor mine, Tensor shares, bool[] weighted, Tensor w, Tensor c,"
    " bool first, Tensor(a!) out) -> ()",
    "pack_fields(Tensor values, int f) -> Tensor",
    "unpack_fields(Tensor words, int count, int f) -> Tensor",
    "trunc_helper(Tensor error, Tensor g1, Tensor g2, Tensor z1, Tensor rho1, Tensor zeta1, Tensor zeta2, int f,"
    " int width) -> (Tensor, Tensor, Tensor, Tensor)",
    "trunc_open(Tensor mine, Tensor theirs, Tensor rho, Tensor zeta, int f, int width) -> (Tensor, Tensor)",
    "trunc_close(Tensor w, Tensor mine, Tensor theirs, Tensor z, Tensor zeta, int f, int width) -> (Tensor, Tensor)",
    "chacha20(Tensor key, Tensor nonce, int counter, int words) -> Tensor",
)


def _with_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with plans as the arrays that Numba kernels take."""

    def call(*arguments: Any) -> Any:  # noqa: ANN401
        return function(*(np.array(a) if isinstance(a, list | tuple) else a for a in arguments))

    return call


def _register(schema: str) -> None:
    name, signature = schema.split("(", 1)
    changes = "Tensor(a!) out" in signature
    op = torch.library.custom_op(
        f"private_llm::{name}",
        _with_arrays(getattr(ops, name)),
        mutates_args=("out",) if changes else (),
        device_types=("cpu", "cuda") if importlib.util.find_spec("triton") else "cpu",
        schema="(" + signature,
    )
    op.register_fake(shapes.nothing if changes else getattr(shapes, name))


for _schema in SCHEMAS:
    _register(_schema)
