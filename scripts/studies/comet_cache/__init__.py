"""Comet's KV cache manager (section 6): which keys and values of inactive heads to make later, and a cache of them."""
