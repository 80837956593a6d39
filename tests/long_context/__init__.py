"""Cache policies on plaintext models, and windows of text."""
