"""Layers on secret tensors; importing this completes the table of operations with the non-linear ones."""

from private_llm.nn import activations, ops_norm, ops_pool, ops_softmax, ops_sort

__all__ = ["activations", "ops_norm", "ops_pool", "ops_softmax", "ops_sort"]
