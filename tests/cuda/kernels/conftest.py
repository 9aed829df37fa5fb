"""Kernel tests run under the CUDA simulator (see `../test_simulated.py`) or on a GPU."""

import importlib
import sys
import time

import pytest
from numba import cuda
from numba.core import config

if config.ENABLE_CUDASIM:
    # The simulator's threads wait on each other all the time; the default slice of 5 ms is what
    # they would mostly wait for.
    sys.setswitchinterval(1e-3)
    # A block's manager asks its threads without pause whether they are alive, and so takes most of
    # the time that they need. Asking the first of a warp now takes a moment off.
    block_thread = importlib.import_module("numba.cuda.simulator.kernel").BlockThread
    is_alive = block_thread.is_alive

    def unhurried(thread):
        if thread.thread_id % 32 == 0:
            time.sleep(2e-4)
        return is_alive(thread)

    block_thread.is_alive = unhurried


def pytest_collection_modifyitems(items):
    usable = bool(config.ENABLE_CUDASIM) or cuda.is_available()
    for item in items:
        if "tests/cuda/kernels" in item.path.as_posix() and not usable:
            item.add_marker(pytest.mark.skip(reason="no CUDA device, and not under the simulator"))
