"""Kernels of CPUs (Numba), GIL-free."""
