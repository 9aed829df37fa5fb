"""GGUF block quantizers in NumPy: Q8_0, Q2_K and IQ2_XXS, and a requantizer for whole files.

    python tools/quantize.py model-f32.gguf model-q2.gguf

writes the 2-bit mix of the DeepSeek V4 files: routed gate and up experts IQ2_XXS, routed down
experts Q2_K, attention projections, shared experts and the output head Q8_0, the other matrices
F16, vectors F32. `encode_*` search for codes, `pack_*` lay codes out in bytes.
"""

from __future__ import annotations

import argparse
import re

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

BLOCK = 256

_MIX = (
    (r"ffn_(gate|up)_exps\.weight$", Kind.IQ2_XXS),
    (r"ffn_down_exps\.weight$", Kind.Q2_K),
    (r"(attn_(q_a|q_b|kv|output_a|output_b)|ffn_(gate|up|down)_shexp)\.weight$", Kind.Q8_0),
    (r"^output\.weight$", Kind.Q8_0),
    (r"tid2eid", Kind.I32),
    (r"(norm|sinks|hc_\w*(base|scale))\.weight$|\.bias$", Kind.F32),
    (r"", Kind.F16),
)


def mix_type(name: str) -> Kind:
    """The type of a tensor in the 2-bit mix, by its GGUF name."""
    if re.search(r"indexer\.attn_q_b", name):
        return Kind.F16
    return next(kind for pattern, kind in _MIX if re.search(pattern, name))


def iq2_grid() -> np.ndarray:
    """The IQ2_XXS codebook, float32 (256, 8), of 8, 25 and 43."""
    gguf.quants.IQ2_XXS.init_grid()
    return np.asarray(gguf.quants.IQ2_XXS.grid, np.float32).reshape(256, 8)


def pack_q8_0(x: np.ndarray) -> np.ndarray:
    """Quantize rows (..., 32k) to Q8_0 bytes (..., 34k): f16 scale, 32 signed bytes."""
    v = np.asarray(x, np.float32).reshape(-1, 32)
    d = np.abs(v).max(-1, keepdims=True) / 127
    inv = np.divide(1, d, out=np.zeros_like(d), where=d > 0)
    q = np.rint(v * inv).astype(np.int8)
    out = np.concatenate([d.astype(np.float16).view(np.uint8), q.view(np.uint8)], 1)
    return out.reshape(*x.shape[:-1], -1)


def pack_iq2_xxs(
    d: np.ndarray, scale: np.ndarray, grid: np.ndarray, sign: np.ndarray
) -> np.ndarray:
    """Lay out IQ2_XXS blocks.

    Args:
        d: float16 (N,).
        scale: (N, 8), 0..15.
        grid: (N, 32), codebook rows.
        sign: bool (N, 32, 8), true for minus, an even number per 8.

    Returns:
        uint8 (N, 66): f16 d, then for each 32 elements 4 grid bytes and a u32 of four 7-bit
        sign fields with the scale in the top 4 bits.
    """
    n = len(d)
    if (sign.sum(-1) & 1).any():
        raise ValueError("a group of 8 has an odd number of minus signs")
    seven = (sign[..., :7].astype(np.uint32) << np.arange(7, dtype=np.uint32)).sum(-1)
    word = (seven.reshape(n, 8, 4).astype(np.uint32) << np.array([0, 7, 14, 21], np.uint32)).sum(-1)
    word = word.astype(np.uint32) | (scale.astype(np.uint32) << np.uint32(28))
    body = np.empty((n, 8, 8), np.uint8)
    body[..., :4] = grid.reshape(n, 8, 4)
    body[..., 4:] = word.astype("<u4").reshape(n, 8, 1).view(np.uint8)
    return np.concatenate([_f16(d), body.reshape(n, 64)], 1)


def pack_q2_k(
    d: np.ndarray, dmin: np.ndarray, scale: np.ndarray, minimum: np.ndarray, q: np.ndarray
) -> np.ndarray:
    """Lay out Q2_K blocks: d, dmin float16 (N,), scale, minimum (N, 16), q (N, 16, 16) -> (N, 84).

    Bytes: 16 of scale | minimum << 4, then 64 of quants, then d and dmin. Byte 32h+l holds the
    elements 128h+32j+l for j = 0..3, two bits each.
    """
    n = len(d)
    q = q.astype(np.uint8).reshape(n, 2, 4, 32)
    quants = (q << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(2, dtype=np.uint8)
    scales = scale.astype(np.uint8) | (minimum.astype(np.uint8) << 4)
    return np.concatenate([scales, quants.reshape(n, 64), _f16(d), _f16(dmin)], 1)


def _f16(d: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(d.astype("<f2")).reshape(-1, 1).view(np.uint8)


def _nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Codebook row nearest to each 8-vector: x (M, 8) -> (M,)."""
    half = (grid * grid).sum(-1) / 2
    return np.concatenate(
        [(p @ grid.T - half).argmax(-1) for p in np.array_split(x, len(x) // 65536 + 1)]
    )


def encode_iq2_xxs(x: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """Quantize rows (..., 256k) to IQ2_XXS bytes (..., 66k).

    Each group of 32 gets the best of several scales, the block scale follows from the largest,
    and the codes are searched again with the scales as stored. `weight` (the last axis of x)
    says how much an element's error counts in the choice of scale.
    """
    grid = iq2_grid()
    w = np.asarray(x, np.float32).reshape(-1, 8, 4, 8)
    n = len(w)
    imp = np.ones(x.shape[-1], np.float32) if weight is None else np.asarray(weight, np.float32)
    imp = np.broadcast_to(imp, x.shape).reshape(w.shape)
    sign = w < 0
    odd = sign.sum(-1) % 2 == 1
    least = (imp * w * w).argmin(-1)
    b, g, v = np.nonzero(odd)
    sign[b, g, v, least[b, g, v]] ^= True
    a = np.where(sign, -w, w)
    start = np.maximum(np.sqrt((a * a).mean((-1, -2))), 1e-12) / 19
    best = start.copy()
    best_err = np.full((n, 8), np.inf, np.float32)
    for t in np.linspace(0.75, 1.35, 9, dtype=np.float32):
        c = grid[_nearest((a / (start * t)[..., None, None]).reshape(-1, 8), grid)].reshape(a.shape)
        s = (imp * a * c).sum((-1, -2)) / (imp * c * c).sum((-1, -2))
        err = (imp * (a - s[..., None, None] * c) ** 2).sum((-1, -2))
        best = np.where(err < best_err, s, best)
        best_err = np.minimum(err, best_err)
    best = np.maximum(best, 0)
    d = best.max(-1) * (4 / 15.5)
    for step in range(3):
        d16 = np.minimum(d, 60000).astype(np.float16)
        unit = np.maximum(d16.astype(np.float32), 1e-12)[:, None] / 4
        scale = np.clip(np.rint(best / unit - 0.5), 0, 15)
        real = (unit * (0.5 + scale))[..., None, None]
        index = _nearest((a / real).reshape(-1, 8), grid)
        c = grid[index].reshape(a.shape) * ((0.5 + scale) / 4)[..., None, None]
        if step < 2:
            d = np.maximum((imp * a * c).sum((1, 2, 3)) / (imp * c * c).sum((1, 2, 3)), 0)
    packed = pack_iq2_xxs(d16, scale, index.reshape(n, 32), sign.reshape(n, 32, 8))
    return packed.reshape(*x.shape[:-1], -1)


def encode_q2_k(x: np.ndarray) -> np.ndarray:
    """Quantize rows (..., 256k) to Q2_K bytes (..., 84k), by least squares per sub-block of 16."""
    v = np.asarray(x, np.float32).reshape(-1, 16, 16)
    low, high = np.maximum(-v.min(-1), 0), v.max(-1)
    best_err = np.full(low.shape, np.inf, np.float32)
    best_a, best_b = np.zeros_like(low), np.zeros_like(low)
    for t in (0.7, 0.8, 0.9, 1.0):
        a, b = np.maximum((high + low) * t / 3, 1e-12), low * t
        for _ in range(4):
            q = np.clip(np.rint((v + b[..., None]) / a[..., None]), 0, 3)
            err = ((v - a[..., None] * q + b[..., None]) ** 2).sum(-1)
            better = err < best_err
            best_err = np.where(better, err, best_err)
            best_a, best_b = np.where(better, a, best_a), np.where(better, b, best_b)
            mq, mv = q.mean(-1), v.mean(-1)
            var = np.maximum((q * q).mean(-1) - mq * mq, 1e-9)
            a = ((q * v).mean(-1) - mq * mv) / var
            b = a * mq - mv
            zero = (q * v).sum(-1) / np.maximum((q * q).sum(-1), 1e-9)
            a, b = np.maximum(np.where(b > 0, a, zero), 1e-12), np.maximum(b, 0)
    d, dmin = (best_a.max(-1) / 15).astype(np.float16), (best_b.max(-1) / 15).astype(np.float16)
    df, mf = d.astype(np.float32)[:, None], dmin.astype(np.float32)[:, None]
    scale = np.clip(np.rint(best_a / np.maximum(df, 1e-12)), 0, 15)
    minimum = np.clip(np.rint(best_b / np.maximum(mf, 1e-12)), 0, 15)
    a, b = (df * scale)[..., None], (mf * minimum)[..., None]
    q = np.clip(np.rint(np.where(a > 0, (v + b) / np.maximum(a, 1e-12), 0)), 0, 3)
    return pack_q2_k(d, dmin, scale, minimum, q).reshape(*x.shape[:-1], -1)


def encode(x: np.ndarray, kind: Kind) -> np.ndarray:
    """Encode a float array for GGUF: packed bytes for block types, plain numbers otherwise."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if x.shape[-1] % block:
        raise ValueError(f"rows of {x.shape[-1]} do not fill {kind.name} blocks of {block}")
    if kind == Kind.IQ2_XXS:
        return encode_iq2_xxs(x)
    if kind == Kind.Q2_K:
        return encode_q2_k(x)
    if kind == Kind.Q8_0:
        return pack_q8_0(x)
    plain = {Kind.F16: np.float16, Kind.F32: np.float32, Kind.I32: np.int32}
    return np.ascontiguousarray(x, plain[kind])


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """Copy every key of a file; the writer adds the architecture and the counts itself."""
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], sub)


def main() -> None:
    """Requantize an F32 (or F16) GGUF file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source")
    parser.add_argument("target")
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.source)
    writer = gguf.GGUFWriter(args.target, reader.fields["general.architecture"].contents())
    copy_metadata(reader, writer)
    for tensor in reader.tensors:
        kind = mix_type(tensor.name)
        data = tensor.data
        if tensor.tensor_type not in (Kind.F32, Kind.I32):
            data = gguf.quants.dequantize(data, tensor.tensor_type)
        writer.add_tensor(tensor.name, encode(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
