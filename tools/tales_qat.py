"""Round-trip quantizers in PyTorch for quantization-aware training.

Each function takes float32 rows and returns the values their packed form decodes to, together
with the codes that `quantize.py` packs, so an exported file holds exactly what was trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 18  # 8-vectors searched at a time; the score matrix has 256 columns


@dataclass
class Iq2Codes:
    """IQ2_XXS codes of N blocks of 256."""

    d: Tensor  # float16 (N,)
    scale: Tensor  # (N, 8), 0..15
    grid: Tensor  # (N, 32), 0..255
    sign: Tensor  # bool (N, 32, 8), an even number set per 8


@dataclass
class Q2kCodes:
    """Q2_K codes of N blocks of 256."""

    d: Tensor  # float16 (N,)
    dmin: Tensor  # float16 (N,)
    scale: Tensor  # (N, 16), 0..15
    minimum: Tensor  # (N, 16), 0..15
    q: Tensor  # (N, 16, 16), 0..3


def _nearest(x: Tensor, grid: Tensor) -> Tensor:
    """Index of the nearest grid row for each 8-vector: x (M, 8), grid (256, 8) -> (M,)."""
    half = grid.square().sum(-1) / 2
    return torch.cat([(p @ grid.T - half).argmax(-1) for p in x.split(_CHUNK)])


def _even_signs(w: Tensor) -> tuple[Tensor, Tensor]:
    """Signs with an even number of minuses per 8, and w times those signs.

    An odd count is mended at the smallest element, which then counts as slightly negative.
    """
    sign = w < 0
    odd = sign.sum(-1, keepdim=True) % 2 == 1
    least = torch.zeros_like(sign).scatter(-1, w.abs().argmin(-1, keepdim=True), True)
    sign = sign ^ (odd & least)
    return sign, torch.where(sign, -w, w)


@torch.no_grad()
def iq2_xxs(
    w: Tensor,
    grid: Tensor,
    trials: tuple[float, ...] = (0.8, 0.9, 1.0, 1.12, 1.25),
) -> tuple[Tensor, Iq2Codes]:
    """Quantize w (..., 256k) to IQ2_XXS with the codebook grid (256, 8) of 8, 25, 43."""
    shape = w.shape
    w = w.reshape(-1, 8, 4, 8).float()  # block, group of 32, vector, element
    n = len(w)
    sign, x = _even_signs(w)
    # Best free scale of each group of 32 first, from a few starting points.
    start = x.square().mean((-1, -2)).sqrt().clamp(min=1e-12) / 19.0
    best_err = torch.full((n, 8), torch.inf, device=w.device)
    best = start.clone()
    for t in trials:
        a = start * t
        g = grid[_nearest((x / a[..., None, None]).reshape(-1, 8), grid)].reshape(x.shape)
        a = (x * g).sum((-1, -2)) / g.square().sum((-1, -2))
        err = (x - a[..., None, None] * g).square().sum((-1, -2))
        better = err < best_err
        best_err, best = torch.where(better, err, best_err), torch.where(better, a, best)
    best = best.clamp(min=0)
    d = (best.amax(-1) * (4 / 15.5)).clamp(max=60000.0)
    scale = index = None
    for last in (False, True):
        d16 = d.half()
        step = d16.float().clamp(min=1e-12)[:, None] / 4
        scale = (best / step - 0.5).round().clamp(0, 15)
        a = (step * (0.5 + scale))[..., None, None]
        index = _nearest((x / a).reshape(-1, 8), grid)
        g = grid[index].reshape(x.shape)
        if not last:  # refit the block scale with the codes held
            unit = g * (0.5 + scale)[..., None, None] / 4
            d = ((x * unit).sum((1, 2, 3)) / unit.square().sum((1, 2, 3))).clamp(min=0, max=60000.0)
    value = g * (d16.float()[:, None] * (0.5 + scale) * 0.25)[..., None, None]
    value = torch.where(sign, -value, value).reshape(shape)
    return value, Iq2Codes(d16, scale, index.reshape(n, 32), sign.reshape(n, 32, 8))


@torch.no_grad()
def q2_k(w: Tensor, trials: tuple[float, ...] = (0.7, 0.8, 0.9, 1.0)) -> tuple[Tensor, Q2kCodes]:
    """Quantize w (..., 256k) to Q2_K: 16 sub-blocks of 16, x = d*scale*q - dmin*minimum."""
    shape = w.shape
    x = w.reshape(-1, 16, 16).float()
    low = (-x.amin(-1)).clamp(min=0)
    high = x.amax(-1)
    best_err = torch.full_like(low, torch.inf)
    best_a, best_b = torch.zeros_like(low), torch.zeros_like(low)
    for t in trials:
        a, b = ((high + low) * t / 3).clamp(min=1e-12), low * t
        for _ in range(3):
            q = ((x + b[..., None]) / a[..., None]).round().clamp(0, 3)
            # least squares for x = a*q - b, b >= 0
            mq, mx = q.mean(-1), x.mean(-1)
            var = (q * q).mean(-1) - mq * mq
            cov = (q * x).mean(-1) - mq * mx
            a_free = cov / var.clamp(min=1e-9)
            b_free = a_free * mq - mx
            a_zero = (q * x).sum(-1) / (q * q).sum(-1).clamp(min=1e-9)
            keep = b_free > 0
            a = torch.where(keep, a_free, a_zero).clamp(min=1e-12)
            b = torch.where(keep, b_free, torch.zeros_like(b_free))
        q = ((x + b[..., None]) / a[..., None]).round().clamp(0, 3)
        err = (x - a[..., None] * q + b[..., None]).square().sum(-1)
        better = err < best_err
        best_err = torch.where(better, err, best_err)
        best_a, best_b = torch.where(better, a, best_a), torch.where(better, b, best_b)
    d = (best_a.amax(-1) / 15).half()
    dmin = (best_b.amax(-1) / 15).half()
    df, mf = d.float()[:, None].clamp(min=1e-12), dmin.float()[:, None].clamp(min=1e-12)
    scale = (best_a / df).round().clamp(0, 15)
    minimum = (best_b / mf).round().clamp(0, 15)
    a = (d.float()[:, None] * scale)[..., None]
    b = (dmin.float()[:, None] * minimum)[..., None]
    q = torch.where(a > 0, (x + b) / a.clamp(min=1e-12), torch.zeros_like(x)).round().clamp(0, 3)
    return (a * q - b).reshape(shape), Q2kCodes(d, dmin, scale, minimum, q)
