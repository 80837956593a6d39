"""Exact functions of secrets: comparisons, maxima, arg max, the k largest, ReLU, pools."""
