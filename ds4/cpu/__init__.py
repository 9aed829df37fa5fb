"""The CPU backend: Numba kernels on packed weights, and the executor that drives them.

Importing it makes OpenMP threads sleep, not spin, while they wait, unless `OMP_WAIT_POLICY` says
otherwise. A kernel's threads meet some twenty times a layer, and a spinning one burns the core that
another process or rank needs: on two cores shared with other work, a step of eight sessions took
1.3 s spinning and 11 ms sleeping. On an idle machine the difference is small.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
