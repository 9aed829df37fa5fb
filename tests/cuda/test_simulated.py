"""Runs the kernel tests under Numba's CUDA simulator, in a process of its own.

The simulator is chosen when `numba.cuda` is imported, so it cannot share a process with the rest.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent / "kernels"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda p: p.stem)
def test_kernels_agree_with_their_oracles_under_the_simulator(path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(path), "-p", "no:cacheprovider", "-x"],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout
