"""Rings, fixed point and pseudorandom streams."""
