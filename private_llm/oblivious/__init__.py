"""Work on secret positions: products that skip what is known to be zero, indexing in a secret order."""
