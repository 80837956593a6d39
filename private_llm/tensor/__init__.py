"""Secret tensors: fixed point on shares, the tensor class, its closed table of linear and local operations."""

from private_llm.tensor import ops_conv, ops_index, ops_matmul, ops_meta, ops_pointwise, ops_view
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretIndex, SecretTensor

__all__ = [
    "Fixed",
    "SecretIndex",
    "SecretTensor",
    "ops_conv",
    "ops_index",
    "ops_matmul",
    "ops_meta",
    "ops_pointwise",
    "ops_view",
]
