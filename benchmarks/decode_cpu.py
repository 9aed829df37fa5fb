"""Decode rate of a model on this machine's CPU: ds4, the NumPy reference, and llama.cpp if it can.

usage: python benchmarks/decode_cpu.py [-m FILE] [--threads N] [--llama-python PYTHON] [--json OUT]

All run in one call, one after the other, over the same prompt, greedy. llama.cpp runs through
llama-cpp-python, in this interpreter or in the one named (it has to be built, so it is no
dependency); where it cannot load the file the row says why. Rates are medians over single tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from statistics import median

import ds4
from ds4.gguf import GGUFFile
from ds4.model.deepseek4.reference import ReferenceModel

PROMPT = "Once upon a time there was a little old woman who lived in a wood with her cat"

LLAMA = """
import json, sys, time
import llama_cpp
path, threads, n, ids = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
model = llama_cpp.Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
times, tokens = [], []
model.eval(ids)
token = model.sample(temp=0.0)
for _ in range(n):
    tokens.append(token)
    begin = time.perf_counter()
    model.eval([token])
    token = model.sample(temp=0.0)
    times.append(time.perf_counter() - begin)
print(json.dumps({"times": times, "tokens": tokens, "version": llama_cpp.__version__}))
"""


def measure_ds4(model: ds4.Model, ids: list[int], n: int) -> tuple[list[float], list[int]]:
    """Seconds of each decode step, and the tokens fed."""
    greedy = ds4.SamplingParams(temperature=0.0)
    times, tokens = [], []
    for timed in (False, True):  # the first round compiles or loads the kernels
        with model.session(1024) as session:
            row = session.feed(ids, sampling=greedy)
            for _ in range(n if timed else 2):
                assert row is not None
                assert row.token is not None
                begin = time.perf_counter()
                token = row.token
                row = session.feed([token], sampling=greedy)
                if timed:
                    times.append(time.perf_counter() - begin)
                    tokens.append(int(token))
    return times, tokens


def measure_reference(path: str, ids: list[int], n: int) -> tuple[list[float], list[int]]:
    """The same by the float64 NumPy reference."""
    with GGUFFile.open(path) as file:
        model = ReferenceModel(file)
        state = model.new_state()
        token = int(model.forward(state, ids)[-1].argmax())
        times, tokens = [], []
        for _ in range(n):
            begin = time.perf_counter()
            tokens.append(token)
            token = int(model.forward(state, [token])[-1].argmax())
            times.append(time.perf_counter() - begin)
        return times, tokens


def measure_llama(
    python: str, path: str, ids: list[int], n: int, threads: int
) -> tuple[list[float], list[int]] | str:
    """The same by llama-cpp-python, or why not."""
    command = [python, "-c", LLAMA, path, str(threads), str(n), json.dumps(ids)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return lines[-1]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["times"], result["tokens"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default=str(ds4.bundled_model()))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    with ds4.open_model(args.model, threads=args.threads) as model:
        ids = [model.tokenizer.special.bos, *model.tokenizer.encode(PROMPT, special=False)]
        ours = measure_ds4(model, ids, args.tokens)
    results = {
        "ds4 cpu": ours,
        "llama.cpp": measure_llama(args.llama_python, args.model, ids, args.tokens, args.threads),
        "numpy reference": measure_reference(args.model, ids, max(10, args.tokens // 10)),
    }
    base = 1.0 / median(ours[0])
    for name, result in results.items():
        if isinstance(result, str):
            print(f"{name:16} not measured: {result}")
            rows[name] = {"error": result}
            continue
        rate = 1.0 / median(result[0])
        same = next(
            (i for i, (a, b) in enumerate(zip(result[1], ours[1], strict=False)) if a != b),
            min(len(result[1]), len(ours[1])),
        )
        print(f"{name:16} {rate:8.1f} tokens/s   ds4 is {base / rate:.2f} times as fast"
              f"   first {same} greedy tokens equal")  # fmt: skip
        rows[name] = {"tokens_per_s": rate, "equal_greedy_tokens": same}
    if args.json:
        record = {
            "command": " ".join(sys.argv),
            "machine": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": args.threads,
            "model": os.path.basename(args.model),
            "rows": rows,
        }
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump(record, out, indent=1)


if __name__ == "__main__":
    main()
