"""Checks and times of the prefill kernels; run through `cuda_matmul.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda_cases import (
    F16,
    IQ2,
    Q2K,
    Q8,
    Launch,
    Report,
    halves_of,
    matrix_bytes,
    poisoned,
    random_blocks,
    random_matrix,
    relative_error,
    upload,
)
from numba import cuda

from ds4.cuda.kernels.expert_lists import launch_lists, max_tiles
from ds4.cuda.kernels.gemm import ShardedMatmul, TiledMatmul, launch_to_half
from ds4.cuda.kernels.gemm_experts import TiledExperts, TiledExpertShape, launch_join
from ds4.cuda.kernels.quant_matmul import DeviceMatrix
from ds4.cuda.layout import iq2_xxs_selectors, layout_of
from ds4.gguf.quants import dequantize

# Weights rounded to half precision once or twice; activations are halves already.
TILE_TOLERANCE = 1e-3


def check_tiles(report: Report, rng: np.random.Generator) -> None:
    selectors = cuda.to_device(iq2_xxs_selectors())
    for kind in (Q8, F16, IQ2, Q2K):
        rows, k, tokens = 515, 2048, 200
        blocks = random_blocks(rng, rows, k, kind)
        x = rng.standard_normal((tokens, k)).astype(np.float16)
        want = x.astype(np.float64) @ dequantize(blocks, kind).astype(np.float64).T
        matmul = TiledMatmul(upload(blocks, kind), selectors)
        results = []
        for part in (x, x[137:139]):
            out = poisoned(len(part) * rows)
            matmul(0, halves_of(part), k, len(part), out)
            results.append(out.copy_to_host().reshape(-1, rows))
        report.check(f"tiles {kind.name}", relative_error(results[0], want), TILE_TOLERANCE)
        report.equal(f"tiles {kind.name} tokens", results[1], results[0][137:139])
    blocks = random_blocks(rng, 131, 8192, Q8)
    x = rng.standard_normal((130, 8192)).astype(np.float16)
    want = x.astype(np.float64) @ dequantize(blocks, Q8).astype(np.float64).T
    matmul = ShardedMatmul(upload(blocks, Q8), selectors, total_k=8192)
    out, parts = poisoned(130 * 131), poisoned(matmul.parts_size(130))
    matmul(0, halves_of(x), 8192, 130, parts, out)
    error = relative_error(out.copy_to_host().reshape(130, 131), want)
    report.check("tiles sharded", error, TILE_TOLERANCE)


def time_tiles(report: Report, rng: np.random.Generator, tokens: int) -> None:
    selectors = cuda.to_device(iq2_xxs_selectors())
    shapes = (
        ("tiles q8_0 32768x1024 (q_b)", 32768, 1024, Q8, 1, False),
        ("tiles q8_0 8192x4096, 8 groups (out_a)", 8192, 4096, Q8, 8, False),
        ("tiles q8_0 4096x8192 sharded (out_b)", 4096, 8192, Q8, 1, True),
        ("tiles q8_0 2048x4096", 2048, 4096, Q8, 1, False),
        ("tiles f16 2624x4096", 2624, 4096, F16, 1, False),
        ("tiles iq2_xxs 8192x4096", 8192, 4096, IQ2, 1, False),
        ("tiles q2_k 4096x2048", 4096, 2048, Q2K, 1, False),
    )
    for name, rows, k, kind, groups, sharded in shapes:
        if not report.wanted(name):
            continue
        x = halves_of(rng.standard_normal((tokens, k * groups)).astype(np.float16))
        out = poisoned(tokens * rows)
        launches: list[Launch] = []
        for _ in range(3):
            weight = random_matrix(rng, rows, k, kind)
            if sharded:
                cut = ShardedMatmul(weight, selectors, total_k=k)
                parts = poisoned(cut.parts_size(tokens))
                launches.append(lambda s, m=cut, x=x, k=k, p=parts, o=out: m(s, x, k, tokens, p, o))
            else:
                whole = TiledMatmul(weight, selectors, groups=groups)
                launches.append(lambda s, m=whole, x=x, k=k * groups, o=out: m(s, x, k, tokens, o))
        n_bytes = layout_of(kind).n_bytes(rows, k)
        report.time(name, tokens, n_bytes, launches, flop=2.0 * tokens * rows * k)
    if report.wanted("to_half"):
        x = cuda.to_device(rng.standard_normal((tokens, 4096)).astype(np.float32))
        halves = cuda.to_device(np.zeros(tokens * 2048, np.uint32))
        report.time(
            "to_half 4096", tokens, tokens * 4096 * 6, [lambda s: launch_to_half(s, x, halves)] * 4
        )


class PrefillExperts:
    """Buffers and launches of the routed experts of one prefill step, and the join."""

    def __init__(
        self, shape: TiledExpertShape, matrices: Sequence[DeviceMatrix], ids: Any, n_experts: int
    ) -> None:
        n = ids.size
        self.shape, self.n_tokens, self.n = shape, len(ids), n
        self.ids = cuda.to_device(ids.reshape(-1).astype(np.int32))
        self.slots = cuda.to_device(np.arange(n_experts, dtype=np.int32))
        self.shard_of = cuda.to_device(np.arange(n_experts, dtype=np.int32) * 8 // n_experts)
        self.n_tiles = max_tiles(n, n_experts)
        self.order = cuda.to_device(np.zeros(n, np.int32))
        self.tiles = cuda.to_device(np.zeros(3 * self.n_tiles, np.int32))
        self.weights = cuda.to_device(np.full(n, 0.25, np.float32))
        self.h = cuda.to_device(np.zeros(n * shape.d_expert // 2, np.uint32))
        self.y = poisoned(n * shape.d_model)
        self.shared = cuda.to_device(np.zeros(8 * len(ids) * shape.d_model, np.float32))
        self.out = poisoned(len(ids) * shape.d_model)
        self.experts = TiledExperts(shape, *matrices, cuda.to_device(iq2_xxs_selectors()))

    def lists(self, stream: Any) -> None:
        launch_lists(stream, self.ids, self.n, self.slots, self.order, self.tiles, self.n_tiles)

    def products(self, stream: Any, x: Any) -> None:
        lists = (self.tiles, self.order, self.n_tiles)
        self.experts(stream, x, lists, self.weights, self.h, self.y)

    def join(self, stream: Any) -> None:
        tables = (self.ids, self.slots, self.shard_of)
        parts = (self.y, self.shared)
        launch_join(stream, self.shape, tables, parts, self.out, self.n_tokens)


def check_prefill_experts(report: Report, rng: np.random.Generator) -> None:
    d, f, n_experts, n_used, tokens = 4096, 2048, 3, 2, 70
    host = [
        (random_blocks(rng, n_experts * rows, k, kind), kind)
        for rows, k, kind in ((f, d, IQ2), (f, d, IQ2), (d, f, Q2K))
    ]
    ids = np.stack([rng.permutation(n_experts)[:n_used] for _ in range(tokens)])
    x = rng.standard_normal((tokens, d)).astype(np.float16)
    run = PrefillExperts(
        TiledExpertShape(d, f, n_used, 10.0), [upload(*m) for m in host], ids, n_experts
    )
    run.lists(0)
    run.products(0, halves_of(x))
    run.join(0)
    want = np.zeros((tokens, d), np.float32)
    for expert in range(n_experts):
        rows, columns = slice(expert * f, (expert + 1) * f), slice(expert * d, (expert + 1) * d)
        mine = (ids == expert).any(axis=1)
        a, b = (x[mine].astype(np.float32) @ dequantize(m[rows], IQ2).T for m, _ in host[:2])
        a = np.minimum(a, 10.0)
        h = 0.25 * a / (1 + np.exp(-a)) * np.clip(b, -10.0, 10.0)
        want[mine] += h @ dequantize(host[2][0][columns], Q2K).T
    got = run.out.copy_to_host().reshape(tokens, d)
    report.check("prefill experts", relative_error(got, want), 2 * TILE_TOLERANCE)


def time_prefill_experts(report: Report, rng: np.random.Generator, tokens: int) -> None:
    d, f, n_experts, n_used = 4096, 2048, 256, 6
    if not report.wanted("prefill experts"):
        return
    matrices = [
        random_matrix(rng, n_experts * rows, k, kind)
        for rows, k, kind in ((f, d, IQ2), (f, d, IQ2), (d, f, Q2K))
    ]
    ids = np.stack([rng.permutation(n_experts)[:n_used] for _ in range(tokens)])
    run = PrefillExperts(TiledExpertShape(d, f, n_used, 10.0), matrices, ids, n_experts)
    x = halves_of(rng.standard_normal((tokens, d)).astype(np.float16))
    report.time("prefill experts lists", tokens, ids.size * 4, [run.lists] * 4)
    flop = 2.0 * tokens * n_used * 3 * d * f
    products = [lambda s: run.products(s, x)] * 3
    report.time("prefill experts up, down", tokens, matrix_bytes(*matrices), products, flop=flop)
    report.time("prefill experts join", tokens, (n_used + 9) * tokens * d * 4, [run.join] * 3)
