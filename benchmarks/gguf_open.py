"""Time to open a model file: ds4's reader against the one of the `gguf` package.

Without a file it writes the header of a full-size one (`tools/make_sparse.py`).

usage: python benchmarks/gguf_open.py [MODEL.gguf] [--repeat N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from ds4.gguf import GGUFFile  # noqa: E402 - the path above comes first
from tools.make_sparse import write  # noqa: E402 - the path above comes first


def seconds(action: Callable[[], object], repeat: int) -> list[float]:
    """Wall time of each repetition, after one that is not counted (page cache, imports)."""
    action()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ds4-open-") as folder:
        path = args.model
        if path is None:
            path = Path(folder) / "full-size.gguf"
            write(path)
        with GGUFFile.open(path) as file:
            tokens = file.metadata.get("tokenizer.ggml.tokens", [])
            n_tokens = len(tokens) if hasattr(tokens, "__len__") else 0
            print(
                f"{path}: {file.file_bytes} bytes, {len(file.tensors)} tensors, {n_tokens} tokens"
            )

        def vocabulary() -> None:
            with GGUFFile.open(path) as opened:
                for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
                    list(opened.metadata[key])  # type: ignore[arg-type]  # arrays of strings

        cases: dict[str, Callable[[], object]] = {
            "ds4 GGUFFile.open": lambda: GGUFFile.open(path).close(),
            "ds4, with all tokens and merges as a list": vocabulary,
            "gguf GGUFReader": lambda: gguf.GGUFReader(path),
        }
        for name, action in cases.items():
            times = seconds(action, args.repeat)
            print(
                f"{name}: median {statistics.median(times):.3f} s, "
                f"{min(times):.3f} to {max(times):.3f} s of {args.repeat}"
            )


if __name__ == "__main__":
    main()
