"""Plaintext side of activation sparsity: sites, recordings, predictors, ReLU models."""
