"""Kernels of GPUs (Triton)."""
