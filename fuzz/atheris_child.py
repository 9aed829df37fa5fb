"""One target under Atheris: `python -m fuzz.atheris_child TARGET [libFuzzer arguments]`.

Started by `fuzz.run`, because libFuzzer takes over the process and ends it. A module of `ds4` that
is imported outside the instrumentation runs without coverage and without a warning, so nothing here
may import one earlier, not even through `fuzz.targets`.
"""

from __future__ import annotations

import random
import sys

import atheris

# Numba compiles these from their bytecode, which must stay as it was written.
KERNELS = ["ds4.cpu.kernels", "ds4.cuda"]


def main() -> None:
    """Never returns."""
    if "ds4" in sys.modules:
        raise RuntimeError("ds4 was imported before the instrumentation; coverage would be blind")
    with atheris.instrument_imports(include=["ds4"], exclude=KERNELS):
        from fuzz.targets import load

        target = load(sys.argv[1])
    arguments = [sys.argv[0], *sys.argv[2:]]
    own = target.mutate
    if own is None:
        atheris.Setup(arguments, target.test_one_input)
    else:

        def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
            rng = random.Random(seed)
            if rng.random() < 0.3:
                return bytes(atheris.Mutate(data, max_size))
            return own(data, rng)[:max_size]

        atheris.Setup(arguments, target.test_one_input, custom_mutator=custom_mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
