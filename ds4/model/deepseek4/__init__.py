"""The DeepSeek V4 family: shape, tensors, reference forward pass."""
