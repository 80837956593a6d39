"""Policies of the KV cache: what stays after a call, and what a query attends to."""
