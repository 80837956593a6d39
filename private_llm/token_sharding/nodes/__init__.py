"""Cascade: token-sharded inference. Statistical protection, declared so everywhere; no part of the secret sharing."""
