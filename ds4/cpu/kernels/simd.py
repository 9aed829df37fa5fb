"""Vector building blocks as LLVM IR: dot products and block decoders with a defined order.

Two rules hold for everything here.

*The order of a sum is part of the result.* A dot product has 32 lanes: element i goes to lane
i % 32 by a fused multiply-add, in order of i, and the lanes are summed as a halving tree
(32 -> 16 -> ... -> 1). Nothing is reassociated, so a dot product has the same bits on every
machine, alone or among others. NumPy cannot say "fused multiply-add" and Numba's loops cannot say
"32 lanes" without permission to reassociate; that is why this file writes vector IR. LLVM maps a
vector of 32 floats to whatever the machine has.

*A decoded weight has the bits of the oracle.* Decoders multiply in the order of
`ds4.gguf.quants` and never contract a multiply and an add.

Arrays are passed as (flat C-contiguous array, element offset).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 32

_F32 = ir.FloatType()
_F16 = ir.HalfType()
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


def _vec(element, n):
    return ir.VectorType(element, n)


def _splat(builder, value, n):
    undef = ir.Constant(_vec(value.type, n), ir.Undefined)
    one = builder.insert_element(undef, value, ir.Constant(_I32, 0))
    mask = ir.Constant(_vec(_I32, n), [0] * n)
    return builder.shuffle_vector(one, undef, mask)


def _const_vec(element, values):
    return ir.Constant(_vec(element, len(values)), list(values))


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _element_ptr(context, builder, array_type, array, offset, pointee):
    base = _data(context, builder, array_type, array)
    return builder.bitcast(builder.gep(base, [offset]), ir.PointerType(pointee))


def _load(builder, ptr, pointee, align=1):
    value = builder.load(builder.bitcast(ptr, ir.PointerType(pointee)))
    value.align = align
    return value


def _store(builder, value, ptr, align=4):
    op = builder.store(value, builder.bitcast(ptr, ir.PointerType(value.type)))
    op.align = align


def _fma(builder, a, b, c):
    name = f"llvm.fma.v{a.type.count}f32"
    fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(fn, [a, b, c])


def _lane_sum(builder, vector):
    """Halving tree over the lanes: v[l] + v[l + n/2], until one is left."""
    n = vector.type.count
    while n > 1:
        n //= 2
        low = builder.shuffle_vector(vector, vector, _const_vec(_I32, range(n)))
        high = builder.shuffle_vector(vector, vector, _const_vec(_I32, range(n, 2 * n)))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _dot_codegen(n_rows):
    """Code of `n_rows` dot products that share one operand."""

    def codegen(context, builder, signature, args):
        w_type, x_type = signature.args[0], signature.args[2]
        w_ptr = _element_ptr(context, builder, w_type, args[0], args[1], _F32)
        x_array = args[2]
        x_ptrs = [
            _element_ptr(context, builder, x_type, x_array, args[3 + r], _F32)
            for r in range(n_rows)
        ]
        length = args[3 + n_rows]
        vec = _vec(_F32, LANES)
        zero = ir.Constant(vec, [0.0] * LANES)
        accumulators = [cgutils.alloca_once_value(builder, zero) for _ in range(n_rows)]
        whole = builder.udiv(length, ir.Constant(_I64, LANES))
        with cgutils.for_range(builder, whole, intp=_I64) as loop:
            start = builder.mul(loop.index, ir.Constant(_I64, LANES))
            w = _load(builder, builder.gep(w_ptr, [start]), vec, 4)
            for x_ptr, acc in zip(x_ptrs, accumulators, strict=True):
                x = _load(builder, builder.gep(x_ptr, [start]), vec, 4)
                builder.store(_fma(builder, w, x, builder.load(acc)), acc)
        # The tail, zero-padded to a whole vector: 0 * 0 changes no lane.
        done = builder.mul(whole, ir.Constant(_I64, LANES))
        rest = builder.sub(length, done)
        has_tail = builder.icmp_unsigned(">", rest, ir.Constant(_I64, 0))
        buffers = [cgutils.alloca_once(builder, vec) for _ in range(n_rows + 1)]
        with builder.if_then(has_tail, likely=False):
            sources = [w_ptr, *x_ptrs]
            for source, buffer in zip(sources, buffers, strict=True):
                builder.store(zero, buffer)
                flat = builder.bitcast(buffer, ir.PointerType(_F32))
                with cgutils.for_range(builder, rest, intp=_I64) as loop:
                    at = builder.add(done, loop.index)
                    value = builder.load(builder.gep(source, [at]))
                    builder.store(value, builder.gep(flat, [loop.index]))
            w = builder.load(buffers[0])
            for buffer, acc in zip(buffers[1:], accumulators, strict=True):
                builder.store(_fma(builder, w, builder.load(buffer), builder.load(acc)), acc)
        sums = [_lane_sum(builder, builder.load(acc)) for acc in accumulators]
        if n_rows == 1:
            return sums[0]
        return context.make_tuple(builder, signature.return_type, sums)

    return codegen


@intrinsic
def dot(typingctx, w, w_offset, x, x_offset, length):
    """Sum of w[i] * x[i] over `length` elements, in the order this module defines; f32."""
    signature = types.float32(w, types.int64, x, types.int64, types.int64)
    return signature, _dot_codegen(1)


@intrinsic
def dot4(typingctx, w, w_offset, x, x0, x1, x2, x3, length):
    """Four `dot`s of one w with x at four offsets; each has the bits of `dot`."""
    returns = types.UniTuple(types.float32, 4)
    signature = returns(w, types.int64, x, *[types.int64] * 4, types.int64)
    return signature, _dot_codegen(4)


@intrinsic
def axpy(typingctx, a, x, x_offset, y, y_offset, length):
    """y[i] = fma(a, x[i], y[i]) for `length` elements."""

    def codegen(context, builder, signature, args):
        x_ptr = _element_ptr(context, builder, signature.args[1], args[1], args[2], _F32)
        y_ptr = _element_ptr(context, builder, signature.args[3], args[3], args[4], _F32)
        vec = _vec(_F32, 8)
        scalar = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_F32, [_F32] * 3), "llvm.fma.f32"
        )
        a = _splat(builder, args[0], 8)
        eight = ir.Constant(_I64, 8)
        count = builder.udiv(args[5], eight)
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            start = builder.mul(loop.index, eight)
            xv = _load(builder, builder.gep(x_ptr, [start]), vec, 4)
            y_at = builder.gep(y_ptr, [start])
            _store(builder, _fma(builder, a, xv, _load(builder, y_at, vec, 4)), y_at)
        done = builder.mul(count, eight)
        with cgutils.for_range(builder, builder.sub(args[5], done), intp=_I64) as loop:
            at = builder.add(done, loop.index)
            y_at = builder.gep(y_ptr, [at])
            xs = builder.load(builder.gep(x_ptr, [at]))
            builder.store(builder.call(scalar, [args[0], xs, builder.load(y_at)]), y_at)
        return context.get_dummy_value()

    signature = types.void(types.float32, x, types.int64, y, types.int64, types.int64)
    return signature, codegen


@intrinsic
def bits_to_f32(typingctx, bits):
    """Reinterpret a 32-bit integer as float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], _I32), _F32)

    return types.float32(types.int64), codegen


@intrinsic
def load_f16(typingctx, w, offset):
    """The float16 at byte `offset` of u8 array w, as float32."""

    def codegen(context, builder, signature, args):
        ptr = _element_ptr(context, builder, signature.args[0], args[0], args[1], _I8)
        return builder.fpext(_load(builder, ptr, _F16), _F32)

    return types.float32(w, types.int64), codegen


@intrinsic
def load_u32(typingctx, w, offset):
    """The little-endian u32 at byte `offset` of u8 array w, as int64."""

    def codegen(context, builder, signature, args):
        ptr = _element_ptr(context, builder, signature.args[0], args[0], args[1], _I8)
        return builder.zext(_load(builder, ptr, _I32), _I64)

    return types.int64(w, types.int64), codegen


def _widen_scale_store(builder, bytes_vec, scale, out_ptr, *, signed=True):
    """Out = float(bytes) * scale."""
    n = bytes_vec.type.count
    extend = builder.sext if signed else builder.zext
    ints = extend(bytes_vec, _vec(_I32, n))
    floats = builder.sitofp(ints, _vec(_F32, n))
    _store(builder, builder.fmul(floats, _splat(builder, scale, n)), out_ptr)


@intrinsic
def decode_i8x32(typingctx, w, offset, scale, out, out_offset):
    """out[0:32] = scale * int8 w[offset : offset + 32]: the body of a Q8_0 block."""

    def codegen(context, builder, signature, args):
        src = _element_ptr(context, builder, signature.args[0], args[0], args[1], _I8)
        dst = _element_ptr(context, builder, signature.args[3], args[3], args[4], _F32)
        _widen_scale_store(builder, _load(builder, src, _vec(_I8, 32)), args[2], dst)
        return context.get_dummy_value()

    return types.void(w, types.int64, types.float32, out, types.int64), codegen


@intrinsic
def decode_2bit_x16(typingctx, w, offset, shift, scale, minimum, out, out_offset):
    """out[0:16] = ((w[offset + l] >> shift) & 3) * scale - minimum: 16 elements of Q2_K."""

    def codegen(context, builder, signature, args):
        src = _element_ptr(context, builder, signature.args[0], args[0], args[1], _I8)
        dst = _element_ptr(context, builder, signature.args[5], args[5], args[6], _F32)
        raw = _load(builder, src, _vec(_I8, 16))
        shift = _splat(builder, builder.trunc(args[2], _I8), 16)
        bits = builder.and_(builder.lshr(raw, shift), _const_vec(_I8, [3] * 16))
        q = builder.sitofp(builder.zext(bits, _vec(_I32, 16)), _vec(_F32, 16))
        scaled = builder.fmul(q, _splat(builder, args[3], 16))
        _store(builder, builder.fsub(scaled, _splat(builder, args[4], 16)), dst)
        return context.get_dummy_value()

    signature = types.void(
        w, types.int64, types.int64, types.float32, types.float32, out, types.int64
    )
    return signature, codegen


@intrinsic
def decode_grid_x8(typingctx, grid, index, signs, sign_index, scale, out, out_offset):
    """out[0:8] = scale * grid[index] * sign: 8 elements of IQ2_XXS.

    `grid` is i8[256 * 8], `signs` i8[128 * 8] of +1 and -1. scale * (grid * sign) has the bits of
    (scale * grid) * sign: a sign flip is exact.
    """

    def codegen(context, builder, signature, args):
        eight = ir.Constant(_I64, 8)
        g_at = builder.mul(args[1], eight)
        s_at = builder.mul(args[3], eight)
        g_ptr = _element_ptr(context, builder, signature.args[0], args[0], g_at, _I8)
        s_ptr = _element_ptr(context, builder, signature.args[2], args[2], s_at, _I8)
        dst = _element_ptr(context, builder, signature.args[5], args[5], args[6], _F32)
        product = builder.mul(
            _load(builder, g_ptr, _vec(_I8, 8)), _load(builder, s_ptr, _vec(_I8, 8))
        )
        _widen_scale_store(builder, product, args[4], dst)
        return context.get_dummy_value()

    signature = types.void(grid, types.int64, signs, types.int64, types.float32, out, types.int64)
    return signature, codegen


@intrinsic
def decode_f16_x16(typingctx, w, offset, out, out_offset):
    """out[0:16] = float16 at byte `offset`, widened."""

    def codegen(context, builder, signature, args):
        src = _element_ptr(context, builder, signature.args[0], args[0], args[1], _I8)
        dst = _element_ptr(context, builder, signature.args[2], args[2], args[3], _F32)
        halves = _load(builder, src, _vec(_F16, 16))
        _store(builder, builder.fpext(halves, _vec(_F32, 16)), dst)
        return context.get_dummy_value()

    return types.void(w, types.int64, out, types.int64), codegen


@intrinsic
def decode_f32_x16(typingctx, w, offset, out, out_offset):
    """out[0:16] = float32 at byte `offset`."""

    def codegen(context, builder, signature, args):
        src = _element_ptr(context, builder, signature.args[0], args[0], args[1], _I8)
        dst = _element_ptr(context, builder, signature.args[2], args[2], args[3], _F32)
        _store(builder, _load(builder, src, _vec(_F32, 16)), dst)
        return context.get_dummy_value()

    return types.void(w, types.int64, out, types.int64), codegen


@intrinsic
def decode_bf16_x16(typingctx, w, offset, out, out_offset):
    """out[0:16] = bfloat16 at byte `offset`, widened: its bits are the top half of a float32."""

    def codegen(context, builder, signature, args):
        src = _element_ptr(context, builder, signature.args[0], args[0], args[1], _I8)
        dst = _element_ptr(context, builder, signature.args[2], args[2], args[3], _F32)
        raw = builder.zext(_load(builder, src, _vec(_I16, 16)), _vec(_I32, 16))
        bits = builder.shl(raw, _const_vec(_I32, [16] * 16))
        _store(builder, builder.bitcast(bits, _vec(_F32, 16)), dst)
        return context.get_dummy_value()

    return types.void(w, types.int64, out, types.int64), codegen
