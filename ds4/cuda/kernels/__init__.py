"""Numba CUDA kernels: one module per family, each checked against the NumPy oracles."""
