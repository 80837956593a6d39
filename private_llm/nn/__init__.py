"""Neural network layers on secret tensors."""
