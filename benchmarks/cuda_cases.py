"""What the CUDA matmul benchmarks share: random weights, graphs, timing and the report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from numba import cuda

from ds4.cuda.kernels.programmatic import check, relax_kernel_edges
from ds4.cuda.kernels.quant_matmul import Activations, DeviceMatrix
from ds4.cuda.kernels.quantize import quantize_reference
from ds4.cuda.layout import layout_of, repack
from ds4.gguf.constants import QuantType

F16, Q8, IQ2, Q2K = QuantType.F16, QuantType.Q8_0, QuantType.IQ2_XXS, QuantType.Q2_K
ROTATE_BYTES = 600e6

Launch = Callable[[Any], None]


def random_blocks(rng: np.random.Generator, rows: int, k: int, kind: QuantType) -> Any:
    """u8[rows, n] of legal file blocks with values of a trained model's size."""
    n = k // kind.block_elements
    if kind is F16:
        return (rng.standard_normal((rows, k)) * 0.02).astype("<f2").view(np.uint8)
    blocks = rng.integers(0, 256, (rows, n, kind.block_bytes), np.uint8)

    def halves(low: float, high: float) -> Any:
        return rng.uniform(low, high, (rows, n)).astype("<f2")[..., None].view(np.uint8)

    if kind is Q2K:
        blocks[..., 80:82], blocks[..., 82:84] = halves(0.002, 0.01), halves(0.002, 0.01)
    else:
        scale = 2e-4 if kind is Q8 else 4e-4
        blocks[..., :2] = halves(scale / 2, scale)
    return blocks.reshape(rows, -1)


def upload(blocks: Any, kind: QuantType) -> DeviceMatrix:
    k = blocks.shape[1] // kind.block_bytes * kind.block_elements
    planes = tuple(cuda.to_device(p) for p in repack(blocks, kind))
    return DeviceMatrix(kind, len(blocks), k, planes)


def random_matrix(rng: np.random.Generator, rows: int, k: int, kind: QuantType) -> DeviceMatrix:
    """A matrix for timing: some random rows, repeated by device copies."""
    part = min(rows, max(8, int(1e6) // k))
    while rows % part:
        part -= 1
    small = repack(random_blocks(rng, part, k, kind), kind)
    planes = []
    for plane, host in zip(layout_of(kind).planes, small, strict=True):
        whole = cuda.device_array(rows * plane.row_items(k), plane.dtype)
        whole[: host.size].copy_to_device(np.ascontiguousarray(host))
        done = host.size
        while done < whole.size:
            more = min(done, whole.size - done)
            whole[done : done + more].copy_to_device(whole[:more])
            done += more
        planes.append(whole)
    return DeviceMatrix(kind, rows, k, tuple(planes))


def matrix_bytes(*matrices: DeviceMatrix) -> int:
    return sum(layout_of(m.kind).n_bytes(m.rows, m.k) for m in matrices)


def activations(x: Any) -> tuple[Activations, Any]:
    """Device activations of x, and the values that fast kernels see."""
    quants, scales = quantize_reference(x)
    seen = (quants.reshape(len(x), -1, 32) * scales[..., None]).reshape(x.shape)
    device = Activations(
        cuda.to_device(x),
        cuda.to_device(np.ascontiguousarray(quants).view(np.uint32).reshape(-1)),
        cuda.to_device(scales.reshape(-1)),
    )
    return device, seen


def poisoned(*shape: int) -> Any:
    return cuda.to_device(np.full(shape, np.nan, np.float32))


def relative_error(got: Any, want: Any) -> float:
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def time_launches(launches: Sequence[Launch], *, relax: bool) -> float:
    """Microseconds of one launch inside a replayed graph of all launches."""
    stream = cuda.stream()
    handle = cu.CUstream(int(stream))
    for launch in launches:
        launch(stream)
    stream.synchronize()
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(cu.cuStreamBeginCapture(handle, mode), "begin capture")
    for launch in launches:
        launch(stream)
    graph = check(cu.cuStreamEndCapture(handle), "end capture")
    if relax:
        relax_kernel_edges(graph)
    executable = check(cu.cuGraphInstantiate(graph, 0), "instantiate graph")
    times = []
    for _ in range(9):
        before, after = cuda.event(), cuda.event()
        before.record(stream)
        check(cu.cuGraphLaunch(executable, handle), "launch graph")
        after.record(stream)
        after.synchronize()
        times.append(cuda.event_elapsed_time(before, after) * 1e3 / len(launches))
    return statistics.median(times[2:])


def measure_copy() -> float:
    """Bytes read plus written per second of a large device copy, in TB/s."""
    n = 1 << 30
    a, b = cuda.device_array(n, np.uint8), cuda.device_array(n, np.uint8)
    stream = cuda.stream()
    best = float("inf")
    for _ in range(5):
        before, after = cuda.event(), cuda.event()
        before.record(stream)
        b.copy_to_device(a, stream=stream)
        after.record(stream)
        after.synchronize()
        best = min(best, cuda.event_elapsed_time(before, after))
    return 2 * n / best / 1e9


class Report:
    """Checks and times of a run."""

    def __init__(self, names: list[str], modes: list[bool]) -> None:
        self.names = names
        self.modes = modes
        self.checks: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.copy_rate = 0.0

    def wanted(self, name: str) -> bool:
        return not self.names or any(n in name for n in self.names)

    def check(self, name: str, error: float, limit: float) -> None:
        self.checks.append({"name": name, "error": error, "ok": bool(error <= limit)})

    def equal(self, name: str, a: Any, b: Any) -> None:
        self.check(f"{name} (bits)", 0.0 if np.array_equal(a, b) else 1.0, 0.0)

    def time(
        self, name: str, batch: int, n_bytes: int, launches: Sequence[Launch], flop: float = 0.0
    ) -> None:
        row: dict[str, Any] = {"name": name, "batch": batch, "bytes": n_bytes, "flop": flop}
        row["us"] = time_launches(launches, relax=False)
        try:
            row["us_relaxed"] = time_launches(launches, relax=True)
        except Exception as problem:  # noqa: BLE001 - an old driver may refuse; keep the numbers
            row["relaxed_failed"] = repr(problem)
        self.rows.append(row)

    def print(self) -> None:
        bad = [c for c in self.checks if not c["ok"]]
        worst = max((c["error"] for c in self.checks), default=0.0)
        print(f"checks: {len(self.checks)}, failed: {len(bad)}, largest error {worst:.2e}")
        for c in bad:
            print(f"  FAILED {c['name']}: {c['error']:.3e}")
        print(f"copy rate {self.copy_rate:.2f} TB/s")
        print(f"{'kernel':42} {'B':>4} {'MB':>7} {'us':>8} {'relaxed':>8} {'TB/s':>6} {'floor':>6}")
        for r in self.rows:
            relaxed = r.get("us_relaxed", float("nan"))
            best = np.nanmin([r["us"], relaxed])
            rate = r["bytes"] / best / 1e6
            floor = f"{rate / self.copy_rate:6.1%}"
            if r["flop"]:
                floor = f"{r['flop'] / best / 1e6:6.1f} TFLOP/s"
            print(
                f"{r['name']:42} {r['batch']:4} {r['bytes'] / 1e6:7.2f} {r['us']:8.2f} "
                f"{relaxed:8.2f} {rate:6.2f} {floor}"
                + (f" {r['relaxed_failed'][:60]}" if "relaxed_failed" in r else "")
            )


def halves_of(x: Any) -> Any:
    return cuda.to_device(np.ascontiguousarray(x).view(np.uint32).reshape(-1))
