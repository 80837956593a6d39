"""Layers on secret tensors; importing this completes the table of operations with the non-linear ones."""

from private_llm.nn import ops_activation, ops_norm, ops_pool, ops_softmax, ops_sort

__all__ = ["ops_activation", "ops_norm", "ops_pool", "ops_softmax", "ops_sort"]
