"""Compiles the kernels of `ds4.cuda.kernels` for one compute capability and prints what it did.

python compile_kernels.py 9.0
"""

import re
import sys
import types

from numba import cuda, float32, int32, int64, uint16, uint32
from numba.cuda import dispatcher

from ds4.cuda.kernels import gemm, gemm_experts, quant_matmul
from ds4.cuda.kernels.expert_lists import _lists_kernel
from ds4.cuda.kernels.experts_down import experts_down_kernel
from ds4.cuda.kernels.experts_up import ExpertShape, experts_up_kernel
from ds4.cuda.kernels.quantize import quantize_kernel
from ds4.gguf.constants import QuantType

U, H, F, M, S, N = (
    uint32[::1], uint16[::1], float32[::1], float32[:, ::1], int32[::1], int64,
)  # fmt: skip


def kernels():
    """(name, kernel, argument types) of every kernel in every form that full models use."""
    yield "quantize", quantize_kernel(), (M, U, F, N)
    for exact in (False, True):
        x = (M, M) if exact else (U, F)
        mode = "exact" if exact else "fast"
        for batch in (1, 8):
            plans = [quant_matmul._q8_plan(batch, k, exact=exact) for k in (1024, 4096)]
            halves = quant_matmul._f16_plan(batch, 4096)
            for q8, f16 in ((plans[0], None), (plans[1], halves), (None, halves)):
                kernel = quant_matmul._projection_kernel(q8, f16, 4, exact=exact)
                signature = (U, H, N, N, U, N, N, *x, M, N, N, M, M)
                yield f"projections {mode} {batch}", kernel, signature
            _, kernel = quant_matmul._sharded_kernel(batch, 8192, 8192, 0, 8, 4, exact=exact)
            yield f"sharded {mode} {batch}", kernel, (U, H, N, *x, N, M)
        shape = ExpertShape(1, 6, 4096, 2048, 2048, 10.0)
        h = (M, F, F, M, F) if exact else (U, F, F, U, F)
        iq2 = (U, U, H, H)
        up = (S, F, S, *iq2, *iq2, U, H, U, H, U, *x, *h)
        yield f"experts up {mode}", experts_up_kernel(shape, 8, exact=exact), up
        down = (S, S, S, U, U, U, U, H, *h, M)
        yield f"experts down {mode}", experts_down_kernel(shape, 4, exact=exact), down


def prefill_kernels():
    """As `kernels`, for prefill."""
    planes = {
        QuantType.F16: (U, U, U, U),
        QuantType.Q8_0: (U, H, U, U),
        QuantType.IQ2_XXS: (U, U, H, H),
        QuantType.Q2_K: (U, U, U, U),
    }
    for kind, types_ in planes.items():
        plan = gemm.GemmPlan(kind, 4096, 4096)
        yield f"tiles {kind.name}", gemm._dense_kernel(plan), (*types_, N, U, N, N, N, U, F, N)
    plan = gemm.GemmPlan(QuantType.Q8_0, 4096, 8192, 4, 4)
    signature = (*planes[QuantType.Q8_0], N, U, N, N, N, U, F, N)
    yield "tiles sharded", gemm._dense_kernel(plan), signature
    yield "to half", gemm._half_kernel(), (M, U, N)
    yield "tree", gemm._tree_kernel(8), (F, F, N)
    shape = gemm_experts.TiledExpertShape(4096, 2048, 6, 10.0)
    iq2, q2 = planes[QuantType.IQ2_XXS], planes[QuantType.Q2_K]
    yield "expert tiles up", gemm_experts._up_kernel(shape), (*iq2, *iq2, S, S, U, F, U, U)
    yield "expert tiles down", gemm_experts._down_kernel(shape), (*q2, S, S, U, F)
    yield "expert join", gemm_experts._join_kernel(6, 0, 8), (S, S, S, F, F, F, N, N)
    yield "expert lists", _lists_kernel(256), (S, N, S, S, S, N)


def main(capability):
    cc = tuple(int(part) for part in capability.split("."))
    # Compiling a device function asks the current device for its capability; there is none.
    dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=cc)
    count = 0
    for name, kernel, signature in (*kernels(), *prefill_kernels()):
        ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=cc)
        assert f".target sm_{cc[0]}{cc[1]}" in ptx, name
        # A local array that survives to PTX as loads by register offset is in memory.
        indexed = re.findall(r"ld\.local\S*\s+\S+ \[%rd\d+\]", ptx)
        assert len(indexed) <= 8, f"{name}: {len(indexed)} indexed loads of local memory"
        count += 1
    sys.stdout.write(f"compiled {count} kernels for sm_{cc[0]}{cc[1]}\n")


main(sys.argv[1])
