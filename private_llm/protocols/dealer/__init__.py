"""Two parties and a dealer of correlated randomness."""
