"""The CUDA backend. Synchronous code, called from one thread."""
