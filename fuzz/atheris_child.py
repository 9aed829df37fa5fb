"""One target under Atheris: `python -m fuzz.atheris_child TARGET [libFuzzer arguments]`.

Started by `fuzz.run`, because libFuzzer takes over the process and ends it. `ds4` is imported only
inside the instrumentation, or it would run without coverage.
"""

from __future__ import annotations

import random
import sys

import atheris

from fuzz.targets import load


def main() -> None:
    """Never returns."""
    with atheris.instrument_imports(include=["ds4"]):
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
