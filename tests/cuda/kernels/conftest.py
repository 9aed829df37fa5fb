"""Kernel tests run on a GPU, or under the CUDA simulator through `../test_simulated.py`."""

import importlib
import importlib.util
import sys
import time

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


def kernels_can_run():
    if config.ENABLE_CUDASIM:
        return True
    # Plain Numba has a `numba.cuda` too, without what the kernels are written with.
    return importlib.util.find_spec("numba_cuda") is not None and cuda.is_available()


if not kernels_can_run():
    # `../test_simulated.py` runs these files under the simulator.
    collect_ignore_glob = ["test_*.py"]
