"""Compiled form of `intrinsics`: inline PTX through llvmlite. Import `intrinsics`, not this.

Addresses are plain 64-bit integers, made opaque to the compiler's value analysis: otherwise it
turns `base + constant` into `base | constant`, which no load can carry as an immediate offset.
"""

from __future__ import annotations

import importlib
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

# Names that numba-cuda adds to the `numba.cuda` of plain Numba, which type checkers see.
_cuda: Any = cuda
cgutils: Any = importlib.import_module("numba.cuda.cgutils")

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()


@intrinsic
def address(typingctx, array, index):
    """Byte address of element `index` of a flat array, as i64; add byte offsets to it."""

    def codegen(context, builder, signature, args):
        array_type, index_type = signature.args
        data = context.make_array(array_type)(context, builder, args[0]).data
        wide = context.cast(builder, args[1], index_type, types.int64)
        size = ir.Constant(_I64, array_type.dtype.bitwidth // 8)
        value = builder.add(builder.ptrtoint(data, _I64), builder.mul(wide, size))
        opaque = ir.InlineAsm(ir.FunctionType(_I64, [_I64]), "mov.b64 $0, $1;", "=l,l")
        return builder.call(opaque, [value])

    return types.int64(array, index), codegen


def _loader(instruction, count, llvm_type, letter, element, *, clobbers):
    """An intrinsic `(address)` that loads `count` registers by one instruction."""
    result = types.UniTuple(element, count) if count > 1 else element
    registers = ", ".join(f"${i}" for i in range(count))
    left = f"{{{registers}}}" if count > 1 else registers
    text = f"{instruction} {left}, [${count}];"
    constraints = ",".join([f"={letter}"] * count + ["l"])
    if clobbers:
        constraints += ",~{memory}"

    @intrinsic
    def load(typingctx, pointer):
        def codegen(context, builder, signature, args):
            out = ir.LiteralStructType([llvm_type] * count) if count > 1 else llvm_type
            # Volatile: the order written is the order issued, many loads before the first use.
            call = ir.InlineAsm(ir.FunctionType(out, [_I64]), text, constraints, side_effect=True)
            value = builder.call(call, args)
            if count == 1:
                return builder.zext(value, _I32) if llvm_type is _I16 else value
            parts = [builder.extract_value(value, i) for i in range(count)]
            return cgutils.pack_array(builder, parts)

        return result(types.int64), codegen

    return load


# Weights are read once per step: keep them out of L1, where the activations are.
_STREAM = "ld.global.L1::no_allocate"
ld_u32x4_stream = _loader(f"{_STREAM}.v4.u32", 4, _I32, "r", types.uint32, clobbers=False)
ld_u32x2_stream = _loader(f"{_STREAM}.v2.u32", 2, _I32, "r", types.uint32, clobbers=False)
ld_u32_stream = _loader("ld.global.u32", 1, _I32, "r", types.uint32, clobbers=False)
ld_u32x2 = _loader("ld.global.v2.u32", 2, _I32, "r", types.uint32, clobbers=False)
ld_u16_stream = _loader("ld.global.u16", 1, _I16, "h", types.uint32, clobbers=False)
# Activations: written by the kernel before, so coherent loads that stay behind `grid_wait`.
ld_u32x4 = _loader("ld.global.v4.u32", 4, _I32, "r", types.uint32, clobbers=True)
ld_f32x4 = _loader("ld.global.v4.f32", 4, _F32, "f", types.float32, clobbers=True)
ld_f32 = _loader("ld.global.f32", 1, _F32, "f", types.float32, clobbers=True)


def _plain(text, constraints, arguments, result, *, side_effect=False):
    """An intrinsic of scalar operands: (llvm type, numba type) per argument and for the result."""
    llvm_arguments = [a[0] for a in arguments]
    numba_arguments = [a[1] for a in arguments]

    def codegen(context, builder, signature, args):
        call = ir.InlineAsm(
            ir.FunctionType(result[0], llvm_arguments), text, constraints, side_effect=side_effect
        )
        value = builder.call(call, args)
        return context.get_dummy_value() if result[1] is types.none else value

    return numba_arguments, result[1], codegen


_U = (_I32, types.uint32)
_S = (_I32, types.int32)
_F = (_F32, types.float32)
_NOTHING = (ir.VoidType(), types.none)

_DP4A = _plain("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [_U, _U, _S], _S)
_PRMT = _plain("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [_U, _U, _U], _U)
_FMA = _plain("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [_F, _F, _F], _F)
_DIV = _plain("div.rn.f32 $0, $1, $2;", "=f,f,f", [_F, _F], _F)
_BITS = _plain("mov.b32 $0, $1;", "=r,f", [_F], _U)
_HALF = _plain("{ .reg .b16 h, z; mov.b32 {h, z}, $1; cvt.f32.f16 $0, h; }", "=f,r", [_U], _F)
_PACK = _plain("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [_F, _F], _U)
_WAIT = _plain("griddepcontrol.wait;", "~{memory}", [], _NOTHING, side_effect=True)
_RELEASE = _plain("griddepcontrol.launch_dependents;", "", [], _NOTHING, side_effect=True)


@intrinsic
def dp4a(typingctx, a, b, c):
    """Sum of four signed byte products, plus c."""
    arguments, result, codegen = _DP4A
    return result(*arguments), codegen


@intrinsic
def prmt(typingctx, a, b, selector):
    """Four bytes picked from the eight of (a, b) by the low four nibbles of `selector`."""
    arguments, result, codegen = _PRMT
    return result(*arguments), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """Fused a*b + c, one rounding. Explicit so that no compiler choice changes a bit."""
    arguments, result, codegen = _FMA
    return result(*arguments), codegen


@intrinsic
def div(typingctx, a, b):
    """Correctly rounded a / b, without Python's check for zero."""
    arguments, result, codegen = _DIV
    return result(*arguments), codegen


@intrinsic
def f32_bits(typingctx, value):
    """The 32 bits of a float."""
    arguments, result, codegen = _BITS
    return result(*arguments), codegen


@intrinsic
def f16_to_f32(typingctx, bits):
    """Value of the half in the low 16 bits."""
    arguments, result, codegen = _HALF
    return result(*arguments), codegen


@intrinsic
def pack_f16x2(typingctx, low, high):
    """Two floats rounded to halves, `low` in the low 16 bits."""
    arguments, result, codegen = _PACK
    return result(*arguments), codegen


@intrinsic
def grid_wait(typingctx):
    """Wait for the kernels this one depends on; nothing unless launched programmatically."""
    arguments, result, codegen = _WAIT
    return result(*arguments), codegen


@intrinsic
def release_dependents(typingctx):
    """Allow programmatic dependents to start; they still wait in `grid_wait`."""
    arguments, result, codegen = _RELEASE
    return result(*arguments), codegen


@intrinsic
def i8_to_f32(typingctx, word, which):
    """Signed byte `which` (0..3) of a word as float32."""

    def codegen(context, builder, signature, args):
        shift = builder.mul(args[1], ir.Constant(_I32, 8))
        byte = builder.trunc(builder.lshr(args[0], shift), ir.IntType(8))
        return builder.sitofp(byte, _F32)

    return types.float32(types.uint32, types.int32), codegen


@intrinsic
def u32_to_i32(typingctx, word):
    """The same 32 bits as a signed integer."""

    def codegen(context, builder, signature, args):
        return args[0]

    return types.int32(types.uint32), codegen


# Plain 32-bit integer operations: Numba's own widen every operand to 64 bits.
def _binary(build):
    @intrinsic
    def operation(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return build(builder, args[0], args[1])

        return types.uint32(types.uint32, types.uint32), codegen

    return operation


shl = _binary(lambda builder, a, b: builder.shl(a, b))
shr = _binary(lambda builder, a, b: builder.lshr(a, b))
bit_and = _binary(lambda builder, a, b: builder.and_(a, b))


@intrinsic
def merge_bits(typingctx, a, b, mask):
    """The word a | (b & mask)."""

    def codegen(context, builder, signature, args):
        return builder.or_(args[0], builder.and_(args[1], args[2]))

    return types.uint32(types.uint32, types.uint32, types.uint32), codegen


@intrinsic
def shared_address(typingctx, array, index):
    """Byte address of an element of a shared array, in the 32-bit shared window."""

    def codegen(context, builder, signature, args):
        array_type, index_type = signature.args
        data = context.make_array(array_type)(context, builder, args[0]).data
        shared = ir.PointerType(data.type.pointee, 3)
        base = builder.ptrtoint(builder.addrspacecast(data, shared), _I32)
        item = context.cast(builder, args[1], index_type, types.int32)
        size = ir.Constant(_I32, array_type.dtype.bitwidth // 8)
        return builder.add(base, builder.mul(item, size))

    return types.uint32(array, index), codegen


@intrinsic
def shared_offset(typingctx, pointer, n_bytes):
    """A shared address some bytes further."""

    def codegen(context, builder, signature, args):
        return builder.add(args[0], context.cast(builder, args[1], signature.args[1], types.int32))

    return types.uint32(types.uint32, n_bytes), codegen


_TABLE = _plain(
    "{ .reg .b32 a; mad.lo.u32 a, $2, $3, $1; ld.shared.u32 $0, [a]; }", "=r,r,r,r", [_U] * 3, _U
)
_FENCE = _plain("bar.warp.sync -1;", "~{memory}", [], _NOTHING, side_effect=True)


_LDS4 = "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];"
_STS4 = _plain(
    "st.shared.v4.u32 [$0], {$1, $2, $3, $4};",
    "r,r,r,r,r,~{memory}",
    [_U] * 5,
    _NOTHING,
    side_effect=True,
)
_COPY = _plain(
    "cp.async.cg.shared.global [$0], [$1], 16;",
    "r,l,~{memory}",
    [_U, (_I64, types.int64)],
    _NOTHING,
    side_effect=True,
)
_COPY_WAIT = _plain("cp.async.wait_all;", "~{memory}", [], _NOTHING, side_effect=True)
_SUB2 = _plain("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [_U, _U], _U)
_MUL2 = _plain("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [_U, _U], _U)
_FMA2 = _plain("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [_U, _U, _U], _U)


@intrinsic
def ld_shared_u32x4(typingctx, pointer):
    """Four words of shared memory at a 16-byte aligned shared address."""

    def codegen(context, builder, signature, args):
        out = ir.LiteralStructType([_I32] * 4)
        call = ir.InlineAsm(
            ir.FunctionType(out, [_I32]), _LDS4, "=r,=r,=r,=r,r,~{memory}", side_effect=True
        )
        value = builder.call(call, args)
        return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(4)])

    return types.UniTuple(types.uint32, 4)(types.uint32), codegen


@intrinsic
def st_shared_u32x4(typingctx, pointer, a, b, c, d):
    """Store four words at a 16-byte aligned shared address."""
    arguments, result, codegen = _STS4
    return result(*arguments), codegen


@intrinsic
def copy_async16(typingctx, shared, source):
    """Start copying 16 bytes of global memory to a shared address."""
    arguments, result, codegen = _COPY
    return result(*arguments), codegen


@intrinsic
def copy_async_wait(typingctx):
    """Wait for this thread's copies."""
    arguments, result, codegen = _COPY_WAIT
    return result(*arguments), codegen


@intrinsic
def sub_f16x2(typingctx, a, b):
    """Two halves a - b."""
    arguments, result, codegen = _SUB2
    return result(*arguments), codegen


@intrinsic
def mul_f16x2(typingctx, a, b):
    """Two halves a * b."""
    arguments, result, codegen = _MUL2
    return result(*arguments), codegen


@intrinsic
def fma_f16x2(typingctx, a, b, c):
    """Two halves a * b + c, one rounding."""
    arguments, result, codegen = _FMA2
    return result(*arguments), codegen


@intrinsic
def ld_table(typingctx, base, item, stride):
    """Word of constant shared memory at byte address base + item * stride."""
    arguments, result, codegen = _TABLE
    return result(*arguments), codegen


@intrinsic
def warp_fence(typingctx):
    """Warp barrier: loads written before it are issued before it."""
    arguments, result, codegen = _FENCE
    return result(*arguments), codegen


@intrinsic
def mma_f16(typingctx, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """`mma.sync.m16n8k16` of halves with float32 accumulators: four accumulators back.

    Lane 4g+t holds rows g, g+8 of A (a0: row g, k 2t..2t+1; a1: row g+8; a2, a3: k + 8), column g
    of B (b0: k 2t..2t+1; b1: k + 8), and C at (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
    """
    signature = types.UniTuple(types.float32, 4)(*[types.uint32] * 6, *[types.float32] * 4)

    def codegen(context, builder, signature, args):
        call = ir.InlineAsm(
            ir.FunctionType(ir.LiteralStructType([_F32] * 4), [_I32] * 6 + [_F32] * 4),
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            side_effect=False,
        )
        value = builder.call(call, args)
        return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(4)])

    return signature, codegen


# Inlined by force: a local array handed to a real call would live in memory, not in registers.
device_function = _cuda.jit(device=True, forceinline=True)


def bounded_kernel(max_threads: int, min_blocks: int) -> Any:
    """Decorator of a kernel: at most max_threads a block, registers for min_blocks blocks an SM."""
    return _cuda.jit(launch_bounds=(max_threads, min_blocks))


@intrinsic
def shfl_xor(typingctx, value, lane_mask):
    """Value (f32, i32 or u32) of lane `lane ^ lane_mask`; all 32 lanes take part."""
    if value not in (types.float32, types.int32, types.uint32):
        return None

    def codegen(context, builder, signature, args):
        call = ir.InlineAsm(
            ir.FunctionType(_I32, [_I32, _I32]),
            "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;",
            "=r,r,r",
            side_effect=True,
        )
        bits = builder.bitcast(args[0], _I32)
        moved = builder.call(call, [bits, args[1]])
        return builder.bitcast(moved, _F32) if value == types.float32 else moved

    return value(value, types.int32), codegen


@intrinsic
def shfl_from(typingctx, value, lane):
    """Value (f32 or i32) of a lane, the same lane for all 32, which all take part."""
    if value not in (types.float32, types.int32):
        return None

    def codegen(context, builder, signature, args):
        call = ir.InlineAsm(
            ir.FunctionType(_I32, [_I32, _I32]),
            "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
            "=r,r,r",
            side_effect=True,
        )
        moved = builder.call(call, [builder.bitcast(args[0], _I32), args[1]])
        return builder.bitcast(moved, _F32) if value == types.float32 else moved

    return value(value, types.int32), codegen
