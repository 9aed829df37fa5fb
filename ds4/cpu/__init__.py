"""The CPU backend: Numba kernels on packed weights, and the executor that drives them."""
