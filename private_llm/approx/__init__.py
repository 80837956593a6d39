"""Functions of secret values: formula, domain, error, cost (bytes over all links in trio, 18 fractional bits)."""
