"""Functions of secret values: formula, domain, error, cost.

Bytes are over all links in trio with 18 fractional bits (64-bit ring), for counts that fill words of 64 elements.
"""
