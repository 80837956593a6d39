"""What a budget of the KV cache costs a plaintext model: policies in plaintext, next tokens that stay.

`budget.smallest_budget` is what `kv_budget.py` runs; `plain_attention.policy_attention` and
`plain_cache.PolicyCache` run `generate` of a plaintext model under any policy.
"""
