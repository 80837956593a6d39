"""Secret-shared tensors."""
