"""Benchmarks: named works, measured with all parties on this machine, one JSON row each."""
