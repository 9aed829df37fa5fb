"""Single PTX instructions that Numba has no name for, each with a Python twin.

The invariant: under the CUDA simulator every function here computes what the instruction computes,
so a kernel tested there is the kernel that runs. What this module does not know: any layout.
All are inline PTX of `sm_80` or older except the two grid-dependency ones (`sm_90`).

Source: PTX ISA 9.0, sections 9.7.1 (`dp4a`), 9.7.9 (`ld`, `prmt`, `shfl`, `cvt`), 9.7.13
(`griddepcontrol`) and 9.7.14 (`mma`, `ldmatrix`).
"""

from __future__ import annotations

from numba.core import config

SIMULATED = bool(config.ENABLE_CUDASIM)

if SIMULATED:
    from ds4.cuda.kernels._intrinsics_sim import (
        address,
        device_function,
        div,
        dp4a,
        f16_to_f32,
        f32_bits,
        fma,
        grid_wait,
        i8_to_f32,
        ld_f32,
        ld_f32x4,
        ld_u16_stream,
        ld_u32_stream,
        ld_u32x2_stream,
        ld_u32x4,
        ld_u32x4_stream,
        mma_f16,
        pack_f16x2,
        prmt,
        release_dependents,
        shfl_xor,
    )
else:
    from ds4.cuda.kernels._intrinsics_ptx import (
        address,
        device_function,
        div,
        dp4a,
        f16_to_f32,
        f32_bits,
        fma,
        grid_wait,
        i8_to_f32,
        ld_f32,
        ld_f32x4,
        ld_u16_stream,
        ld_u32_stream,
        ld_u32x2_stream,
        ld_u32x4,
        ld_u32x4_stream,
        mma_f16,
        pack_f16x2,
        prmt,
        release_dependents,
        shfl_xor,
    )

__all__ = [
    "SIMULATED",
    "address",
    "device_function",
    "div",
    "dp4a",
    "f16_to_f32",
    "f32_bits",
    "fma",
    "grid_wait",
    "i8_to_f32",
    "ld_f32",
    "ld_f32x4",
    "ld_u16_stream",
    "ld_u32_stream",
    "ld_u32x2_stream",
    "ld_u32x4",
    "ld_u32x4_stream",
    "mma_f16",
    "pack_f16x2",
    "prmt",
    "release_dependents",
    "shfl_xor",
]
