"""The CUDA backend: layouts, kernels and the executor. Imports no Trio and no protocol."""
