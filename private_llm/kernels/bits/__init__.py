"""Steps on rows of bits: comparisons by blocks, joins, and bit injection."""
