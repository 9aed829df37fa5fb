"""Single PTX instructions that Numba has no name for, each with a Python twin.

The invariant: under the CUDA simulator every function here computes what the instruction computes,
so a kernel tested there is the kernel that runs. What this module does not know: any layout.
All are inline PTX of `sm_80` or older except the two grid-dependency ones (`sm_90`).

Source: PTX ISA 9.0, sections 9.7.1 (`dp4a`), 9.7.9 (`ld`, `prmt`, `shfl`, `cvt`), 9.7.13
(`griddepcontrol`) and 9.7.14 (`mma`, `ldmatrix`).
"""

from __future__ import annotations

import importlib
from typing import Any

from numba.core import config as _config

config: Any = _config
SIMULATED = bool(config.ENABLE_CUDASIM)
_FORM = "_intrinsics_sim" if SIMULATED else "_intrinsics_ptx"
_chosen: Any = importlib.import_module(f"ds4.cuda.kernels.{_FORM}")

address = _chosen.address
bounded_kernel = _chosen.bounded_kernel
cuda = _chosen.cuda
device_function = _chosen.device_function
div = _chosen.div
dp4a = _chosen.dp4a
f16_to_f32 = _chosen.f16_to_f32
f32_bits = _chosen.f32_bits
fma = _chosen.fma
grid_wait = _chosen.grid_wait
i8_to_f32 = _chosen.i8_to_f32
ld_f32 = _chosen.ld_f32
ld_f32x4 = _chosen.ld_f32x4
ld_u16_stream = _chosen.ld_u16_stream
ld_u32_stream = _chosen.ld_u32_stream
ld_u32x2_stream = _chosen.ld_u32x2_stream
ld_u32x4 = _chosen.ld_u32x4
ld_u32x4_stream = _chosen.ld_u32x4_stream
mma_f16 = _chosen.mma_f16
pack_f16x2 = _chosen.pack_f16x2
prmt = _chosen.prmt
release_dependents = _chosen.release_dependents
shfl_from = _chosen.shfl_from
shfl_xor = _chosen.shfl_xor
u32_to_i32 = _chosen.u32_to_i32
ld_u32x2 = _chosen.ld_u32x2
fma_f16x2 = _chosen.fma_f16x2
mul_f16x2 = _chosen.mul_f16x2
sub_f16x2 = _chosen.sub_f16x2
copy_async_wait = _chosen.copy_async_wait
copy_async16 = _chosen.copy_async16
st_shared_u32x4 = _chosen.st_shared_u32x4
ld_shared_u32x4 = _chosen.ld_shared_u32x4
warp_fence = _chosen.warp_fence
ld_table = _chosen.ld_table
shared_address = _chosen.shared_address
shared_offset = _chosen.shared_offset
merge_bits = _chosen.merge_bits
bit_and = _chosen.bit_and
shr = _chosen.shr
shl = _chosen.shl

__all__ = [
    "SIMULATED",
    "address",
    "bit_and",
    "bounded_kernel",
    "copy_async16",
    "copy_async_wait",
    "cuda",
    "device_function",
    "div",
    "dp4a",
    "f16_to_f32",
    "f32_bits",
    "fma",
    "fma_f16x2",
    "grid_wait",
    "i8_to_f32",
    "ld_f32",
    "ld_f32x4",
    "ld_shared_u32x4",
    "ld_table",
    "ld_u16_stream",
    "ld_u32_stream",
    "ld_u32x2",
    "ld_u32x2_stream",
    "ld_u32x4",
    "ld_u32x4_stream",
    "merge_bits",
    "mma_f16",
    "mul_f16x2",
    "pack_f16x2",
    "prmt",
    "release_dependents",
    "shared_address",
    "shared_offset",
    "shfl_from",
    "shfl_xor",
    "shl",
    "shr",
    "st_shared_u32x4",
    "sub_f16x2",
    "u32_to_i32",
    "warp_fence",
]
