"""Checks and times the CUDA matmul kernels at the sizes of DeepSeek V4 Flash, on one GPU.

    python benchmarks/cuda_matmul.py [--out results.json] [--only NAME ...] [--skip-checks]

Every kernel is first compared with the NumPy decoders in float64, on random weights, with poisoned
outputs; then timed as the nodes of one captured graph whose launches rotate over enough copies of
the weights to exceed L2 several times, by events around the median of several replays. Rates count
the bytes of the packed weights only. "floor" is the share of the device's measured copy rate.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cuda_prefill
import numpy as np
from cuda_cases import (
    F16,
    IQ2,
    Q2K,
    Q8,
    ROTATE_BYTES,
    Launch,
    Report,
    activations,
    matrix_bytes,
    measure_copy,
    poisoned,
    random_blocks,
    random_matrix,
    relative_error,
    upload,
)
from numba import cuda

from ds4.cuda.kernels.experts_up import ExpertShape
from ds4.cuda.kernels.moe_matmul import (
    ExpertBuffers,
    Experts,
    ExpertTables,
    ExpertWeights,
    buffer_sizes,
)
from ds4.cuda.kernels.quant_matmul import Projections, Q8Matvec, ShardedQ8Matvec
from ds4.cuda.kernels.quantize import launch_quantize
from ds4.cuda.kernels.reduce import tree_reference
from ds4.cuda.layout import iq2_xxs_selectors, layout_of
from ds4.gguf.constants import QuantType
from ds4.gguf.quants import dequantize

EXACT_TOLERANCE = 1e-5
# One rounding of h to 8 bits per 32 between the halves of an expert.
FAST_EXPERT_TOLERANCE = 1.5e-2


def check_buckets(
    report: Report, name: str, blocks: Any, x: Any, run: Any, buckets: list[int]
) -> None:
    """Buckets, fast and exact, against float64; and equal bits of the shared row."""
    weights = dequantize(blocks, Q8).astype(np.float64)
    for exact in report.modes:
        mode = "exact" if exact else "fast"
        first = None
        for batch in buckets:
            values = np.ascontiguousarray(x[:batch])
            inputs, rounded = activations(values)
            want = (values if exact else rounded).astype(np.float64) @ weights.T
            out = poisoned(batch, len(blocks))
            run(batch, exact)(0, inputs, out)
            got = out.copy_to_host()
            first = got[:1] if first is None else first
            report.check(f"{name} B={batch} {mode}", relative_error(got, want), EXACT_TOLERANCE)
            report.equal(f"{name} B={batch} {mode}", got[:1], first)


def check_dense(
    report: Report, rng: np.random.Generator, buckets: list[int], worlds: list[int]
) -> None:
    x = rng.standard_normal((8, 4096)).astype(np.float32)
    wide = rng.standard_normal((8, 8192)).astype(np.float32)
    device_x, _ = activations(x)
    quants, scales = cuda.to_device(np.zeros(x.size // 4, np.uint32)), poisoned(x.size // 32)
    launch_quantize(0, device_x.values, quants, scales)
    report.equal("quantize", quants.copy_to_host(), device_x.quants.copy_to_host())
    report.equal("quantize scales", scales.copy_to_host(), device_x.scales.copy_to_host())

    for rows, k in ((515, 4096), (521, 1024)):
        blocks = random_blocks(rng, rows, k, Q8)
        weight = upload(blocks, Q8)
        check_buckets(
            report,
            f"q8_0 {rows}x{k}",
            blocks,
            np.ascontiguousarray(x[:, :k]),
            lambda batch, exact, w=weight: Q8Matvec(batch, w, exact=exact),
            buckets,
        )

    blocks = random_blocks(rng, 131, 8192, Q8)
    weight = upload(blocks, Q8)
    check_buckets(
        report,
        "q8_0 sharded 131x8192",
        blocks,
        wide,
        lambda batch, exact: ShardedQ8Matvec(batch, weight, total_k=8192, exact=exact),
        buckets,
    )
    whole = poisoned(1, 131)
    ShardedQ8Matvec(1, weight, total_k=8192)(0, activations(wide[:1])[0], whole)
    for world in worlds:
        parts = []
        for r in range(world):
            low, high = r * 8192 // world, (r + 1) * 8192 // world
            columns = np.ascontiguousarray(blocks[:, low // 32 * 34 : high // 32 * 34])
            inputs, _ = activations(np.ascontiguousarray(wide[:1, low:high]))
            out, size = poisoned(1, 131), 8 // world
            launch = ShardedQ8Matvec(
                1, upload(columns, Q8), total_k=8192, first_shard=size * r, n_shards=size
            )
            launch(0, inputs, out)
            parts.append(out.copy_to_host())
        joined = tree_reference(np.stack(parts, axis=-1))
        report.equal(f"world {world}", joined, whole.copy_to_host())

    grouped = random_blocks(rng, 64, 4096, Q8)
    inputs, seen = activations(np.ascontiguousarray(wide[:1]))
    out = poisoned(1, 64)
    Q8Matvec(1, upload(grouped, Q8), groups=2)(0, inputs, out)
    values = dequantize(grouped, Q8).astype(np.float64)
    want = np.concatenate([values[:32] @ seen[0, :4096], values[32:] @ seen[0, 4096:]])
    report.check("q8_0 groups", relative_error(out.copy_to_host()[0], want), EXACT_TOLERANCE)

    q8_blocks, f16_blocks = random_blocks(rng, 70, 4096, Q8), random_blocks(rng, 133, 4096, F16)
    q8, f16 = upload(q8_blocks, Q8), upload(f16_blocks, F16)
    first = None
    for batch in buckets:
        inputs, seen = activations(np.ascontiguousarray(x[:batch]))
        q8_out, f16_out = poisoned(batch, 70), poisoned(batch, 133)
        Projections(batch, q8=q8, f16=f16)(0, inputs, q8_out, f16_out)
        want = seen.astype(np.float64) @ dequantize(q8_blocks, Q8).astype(np.float64).T
        error = relative_error(q8_out.copy_to_host(), want)
        report.check(f"projections q8 B={batch}", error, EXACT_TOLERANCE)
        want = x[:batch].astype(np.float64) @ dequantize(f16_blocks, F16).astype(np.float64).T
        got = f16_out.copy_to_host()
        report.check(f"projections f16 B={batch}", relative_error(got, want), EXACT_TOLERANCE)
        first = got[:1] if first is None else first
        report.equal(f"projections f16 B={batch}", got[:1], first)


def expert_block(
    shape: ExpertShape, weights: ExpertWeights, n_experts: int, *, exact: bool
) -> tuple[Experts, Any]:
    """The launch object over fresh buffers, and its output."""
    sizes = buffer_sizes(shape, exact=exact)
    buffers = ExpertBuffers(**{n: cuda.to_device(np.full(s, 7, t)) for n, (t, s) in sizes.items()})
    tables = ExpertTables(
        cuda.to_device(np.arange(n_experts, dtype=np.int32)),
        cuda.to_device(np.arange(n_experts, dtype=np.int32) * 8 // n_experts),
        cuda.to_device(iq2_xxs_selectors()),
    )
    out = poisoned(shape.batch, shape.d_model)
    return Experts(shape, weights, tables, buffers, exact=exact), out


def check_experts(report: Report, rng: np.random.Generator) -> None:
    d, f, n_experts, n_used, batch = 4096, 2048, 4, 2, 2
    host = {
        "gate": (random_blocks(rng, n_experts * f, d, IQ2), IQ2),
        "up": (random_blocks(rng, n_experts * f, d, IQ2), IQ2),
        "down": (random_blocks(rng, n_experts * d, f, Q2K), Q2K),
        "shared_gate": (random_blocks(rng, f, d, Q8), Q8),
        "shared_up": (random_blocks(rng, f, d, Q8), Q8),
        "shared_down": (random_blocks(rng, d, f, Q8), Q8),
    }
    matrices = ExpertWeights(**{n: upload(b, kind) for n, (b, kind) in host.items()})
    x = rng.standard_normal((batch, d)).astype(np.float32)
    ids = np.stack([rng.permutation(n_experts)[:n_used] for _ in range(batch)]).astype(np.int32)
    weights = rng.uniform(0.1, 0.6, (batch, n_used)).astype(np.float32)

    def value(name: str, rows: slice) -> Any:
        blocks, kind = host[name]
        return dequantize(blocks[rows], kind)

    def swiglu(gate: Any, up: Any, row: Any) -> Any:
        a = np.minimum((gate @ row).astype(np.float64), 10.0)
        return a / (1 + np.exp(-a)) * np.clip(up @ row, -10.0, 10.0)

    everything = slice(None)
    for exact in report.modes:
        seen = x if exact else activations(x)[1].astype(np.float32)
        want = np.zeros((batch, d))
        for b in range(batch):
            h = swiglu(value("shared_gate", everything), value("shared_up", everything), seen[b])
            want[b] = value("shared_down", everything) @ h.astype(np.float32)
            for expert, weight in zip(ids[b], weights[b], strict=True):
                rows = slice(expert * f, (expert + 1) * f)
                h = swiglu(value("gate", rows), value("up", rows), seen[b]) * weight
                down = value("down", slice(expert * d, (expert + 1) * d))
                want[b] += down @ h.astype(np.float32)
        results = []
        for count in (2, 1):
            shape = ExpertShape(count, n_used, d, f, f, 10.0)
            block, out = expert_block(shape, matrices, n_experts, exact=exact)
            chosen = cuda.to_device(np.ascontiguousarray(ids[:count]).reshape(-1))
            router = cuda.to_device(np.ascontiguousarray(weights[:count]).reshape(-1))
            block(0, activations(x[:count])[0], chosen, router, out)
            results.append(out.copy_to_host())
        mode = "exact" if exact else "fast"
        limit = EXACT_TOLERANCE if exact else FAST_EXPERT_TOLERANCE
        report.check(f"experts {mode}", relative_error(results[0], want), limit)
        report.equal(f"experts {mode} B=1", results[1], results[0][:1])


def time_dense(report: Report, rng: np.random.Generator, buckets: list[int]) -> None:
    def one(
        name: str, batch: int, matrices: Sequence[tuple[int, int, QuantType]], width: int, make: Any
    ) -> None:
        if not report.wanted(name):
            return
        n_bytes = sum(layout_of(kind).n_bytes(rows, k) for rows, k, kind in matrices)
        x = activations(rng.standard_normal((batch, width)).astype(np.float32))[0]
        launches = []
        for _ in range(max(2, min(64, int(ROTATE_BYTES / n_bytes)))):
            weights = [random_matrix(rng, *m) for m in matrices]
            launches.append(make(batch, weights, x))
        report.time(name, batch, n_bytes, launches)

    def q8(**options: Any) -> Any:
        def make(batch: int, weights: Any, x: Any) -> Launch:
            out, launch = poisoned(batch, weights[0].rows), Q8Matvec(batch, weights[0], **options)
            return lambda stream: launch(stream, x, out)

        return make

    def sharded(batch: int, weights: Any, x: Any) -> Launch:
        out = poisoned(batch, weights[0].rows)
        launch = ShardedQ8Matvec(batch, weights[0], total_k=weights[0].k)
        return lambda stream: launch(stream, x, out)

    def stacked(batch: int, weights: Any, x: Any) -> Launch:
        outs = [poisoned(batch, w.rows) for w in weights]
        launch = Projections(batch, q8=weights[0], f16=weights[1])
        return lambda stream: launch(stream, x, *outs)

    def halves(splits: int) -> Any:
        def make(batch: int, weights: Any, x: Any) -> Launch:
            out = poisoned(batch, splits * weights[0].rows)
            launch = Projections(batch, f16=weights[0], splits=splits)
            return lambda stream: launch(stream, x, None, out)

        return make

    mixed = [(1536, 4096, Q8), (2624, 4096, F16)]
    for batch in buckets:
        one("q8_0 129280x4096 (head)", batch, [(129280, 4096, Q8)], 4096, q8())
        one("q8_0 32768x1024 (q_b)", batch, [(32768, 1024, Q8)], 1024, q8())
        one("q8_0 8192x4096, 8 groups (out_a)", batch, [(8192, 4096, Q8)], 32768, q8(groups=8))
        one("q8_0 4096x8192 sharded (out_b)", batch, [(4096, 8192, Q8)], 8192, sharded)
        one("q8_0 1536 + f16 2624 x4096 (CSA inputs)", batch, mixed, 4096, stacked)
        if batch in (1, 8):
            one("q8_0 2048x4096", batch, [(2048, 4096, Q8)], 4096, q8())
            one("q8_0 1024x4096", batch, [(1024, 4096, Q8)], 4096, q8())
            one("f16 256x4096 (router)", batch, [(256, 4096, F16)], 4096, halves(1))
            one("f16 256x4096, 4 splits (router)", batch, [(256, 4096, F16)], 4096, halves(4))
            one("f16 24x16384, 16 splits (mHC)", batch, [(24, 16384, F16)], 16384, halves(16))
            one("f16 8192x1024 (indexer q)", batch, [(8192, 1024, F16)], 1024, halves(1))
            one("q8_0 4096x4096 exact", batch, [(4096, 4096, Q8)], 4096, q8(exact=True))


def time_experts(report: Report, rng: np.random.Generator, buckets: list[int]) -> None:
    d, f, n_experts, n_used, n_sets = 4096, 2048, 96, 6, 16
    if not report.wanted("experts"):
        return
    routed = (
        random_matrix(rng, n_experts * f, d, IQ2),
        random_matrix(rng, n_experts * f, d, IQ2),
        random_matrix(rng, n_experts * d, f, Q2K),
    )
    # Each launch has its own shared expert and other routed ones, so none is read from L2.
    shared = [
        [random_matrix(rng, rows, k, Q8) for rows, k in ((f, d), (f, d), (d, f))]
        for _ in range(n_sets)
    ]
    modes = [(b, False) for b in buckets] + [(1, True) for exact in report.modes if exact]
    for batch, exact in modes:
        shape = ExpertShape(batch, n_used, d, f, f, 10.0)
        x, _ = activations(rng.standard_normal((batch, d)).astype(np.float32))
        ups: list[Launch] = []
        downs: list[Launch] = []
        both: list[Launch] = []
        order = rng.permutation(n_experts)
        for i in range(n_sets):
            weights = ExpertWeights(*routed, *shared[i])
            block, out = expert_block(shape, weights, n_experts, exact=exact)
            chosen = np.resize(np.roll(order, -n_used * batch * i), batch * n_used)
            ids = cuda.to_device(chosen.astype(np.int32))
            router = cuda.to_device(np.full(batch * n_used, 0.25, np.float32))
            ups.append(lambda s, block=block, x=x, i=ids, w=router: block.up(s, x, i, w))
            downs.append(lambda s, block=block, i=ids, out=out: block.down(s, i, out))
            both.append(
                lambda s, block=block, x=x, i=ids, w=router, out=out: block(s, x, i, w, out)
            )
        up_bytes = batch * n_used * 2 * layout_of(IQ2).n_bytes(f, d)
        up_bytes += matrix_bytes(*shared[0][:2])
        down_bytes = batch * n_used * layout_of(Q2K).n_bytes(d, f) + matrix_bytes(shared[0][2])
        mode = " exact" if exact else ""
        report.time(f"experts up{mode}", batch, up_bytes, ups)
        report.time(f"experts down{mode}", batch, down_bytes, downs)
        report.time(f"experts both{mode}", batch, up_bytes + down_bytes, both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON")
    parser.add_argument("--only", nargs="*", default=[], help="parts of kernel names to time")
    parser.add_argument("--buckets", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prefill step")
    parser.add_argument("--worlds", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--modes", nargs="*", choices=["fast", "exact"], default=["fast", "exact"])
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--commit", default="", help="commit of the code, if git cannot tell")
    arguments = parser.parse_args()
    rng = np.random.default_rng(11)
    report = Report(arguments.only, [m == "exact" for m in arguments.modes])
    started = time.perf_counter()
    report.copy_rate = measure_copy()
    try:
        if not arguments.skip_checks:
            if arguments.buckets:
                check_dense(report, rng, arguments.buckets, arguments.worlds)
            print(f"dense checked after {time.perf_counter() - started:.0f} s", flush=True)
            cuda_prefill.check_tiles(report, rng)
            cuda_prefill.check_prefill_experts(report, rng)
            print(f"tiles checked after {time.perf_counter() - started:.0f} s", flush=True)
            if arguments.buckets:
                check_experts(report, rng)
            print(f"experts checked after {time.perf_counter() - started:.0f} s", flush=True)
        time_experts(report, rng, arguments.buckets)
        print(f"experts timed after {time.perf_counter() - started:.0f} s", flush=True)
        cuda_prefill.time_prefill_experts(report, rng, arguments.tokens)
        cuda_prefill.time_tiles(report, rng, arguments.tokens)
        print(f"tiles timed after {time.perf_counter() - started:.0f} s", flush=True)
        time_dense(report, rng, arguments.buckets)
    finally:
        if arguments.out:
            commit = arguments.commit or subprocess.check_output(
                ["git", "rev-parse", "--short", "HEAD"], text=True
            )
            name = cuda.get_current_device().name
            evidence = {
                "command": " ".join(["python", *sys.argv]),
                "commit": commit.strip(),
                "machine": {
                    "gpu": name.decode() if isinstance(name, bytes) else name,
                    "system": platform.platform(),
                    "python": platform.python_version(),
                    "numpy": np.__version__,
                },
                "copy_tb_per_s": report.copy_rate,
                "checks": report.checks,
                "times": report.rows,
            }
            arguments.out.write_text(json.dumps(evidence, indent=1))
        report.print()
        print(f"took {time.perf_counter() - started:.0f} s")
    return 0 if all(c["ok"] for c in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
