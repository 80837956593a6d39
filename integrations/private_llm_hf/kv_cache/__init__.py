"""The KV cache under transformers' interface, the attention that asks it, and which models follow which policy."""
