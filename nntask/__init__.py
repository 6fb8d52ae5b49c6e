"""Neural networks on tile tensors."""
