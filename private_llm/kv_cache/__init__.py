"""The KV cache: policies of what stays, the buffer of shares, and what evicts entries and selects among them."""
