"""Kernel tests run under the CUDA simulator (see `../test_simulated.py`) or on a GPU."""

import sys

import pytest
from numba import cuda
from numba.core import config

if config.ENABLE_CUDASIM:
    # The simulator's threads wait on each other all the time; the default slice of 5 ms is what
    # they would mostly wait for.
    sys.setswitchinterval(1e-5)


def pytest_collection_modifyitems(items):
    usable = bool(config.ENABLE_CUDASIM) or cuda.is_available()
    for item in items:
        if "tests/cuda/kernels" in item.path.as_posix() and not usable:
            item.add_marker(pytest.mark.skip(reason="no CUDA device, and not under the simulator"))
