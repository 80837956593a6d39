"""The pointwise functions under one name; each is documented in its own file."""

from private_llm.approx.gelu import gelu
from private_llm.approx.sigmoid import sigmoid
from private_llm.approx.silu import silu
from private_llm.approx.softplus import softplus
from private_llm.approx.tanh import tanh
from private_llm.exact.comparisons import absolute, clamp, hardtanh, relu

__all__ = ["absolute", "clamp", "gelu", "hardtanh", "relu", "sigmoid", "silu", "softplus", "tanh"]
