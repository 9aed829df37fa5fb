"""Numba kernels. Each computes a row from that row alone, in a fixed order."""
