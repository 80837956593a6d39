"""Functions of secret values: formula, domain, error, cost."""
