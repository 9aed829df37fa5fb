"""Every CUDA kernel compiles to PTX, with its arrays in registers, where the compiler is installed.

Runs without a device, in a process of its own, since `numba.cuda` may be simulated in this one.
"""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "compile_kernels.py"


def compiler_is_missing():
    try:
        importlib.metadata.version("numba-cuda")
        importlib.metadata.version("nvidia-cuda-nvrtc")
    except importlib.metadata.PackageNotFoundError as missing:
        return str(missing)
    return ""


@pytest.mark.slow
@pytest.mark.skipif(bool(compiler_is_missing()), reason="needs numba-cuda and nvidia-cuda-nvrtc")
@pytest.mark.parametrize("capability", ["9.0", "12.0"])
def test_kernels_compile_with_their_arrays_in_registers(capability):
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), capability],
        env={**environment, "PYTHONPATH": str(SCRIPT.parents[2])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "compiled" in done.stdout
