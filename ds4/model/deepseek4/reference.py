"""NumPy forward pass of DeepSeek V4 in float64: the definition of correct.

Written to be read beside the model's formulas, not to be fast: weights are expanded to float64 when
they are first used, and attention runs row by row. Every faster executor is tested against it. It
shares no arithmetic with them.

Letters: R rows, D width, H heads, S streams, V vocabulary, E experts, K chosen, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ContextOverflow, InvalidRequest
from ds4.gguf import GGUFFile, dequantize
from ds4.model.deepseek4.rounding import Rounding, round_fp4_hadamard, round_fp8
from ds4.model.deepseek4.shape import DeepSeek4Shape
from ds4.model.deepseek4.tensors import load_shape

__all__ = ["ReferenceModel", "ReferenceState"]

Array = NDArray[np.float64]
_ROUTER_FLOOR = 6.103515625e-5


@attrs.define
class _LayerState:
    """Attention state of one layer; every list grows by one entry per token or per pooled row."""

    raw: list[Array] = attrs.Factory(list)
    rows: list[Array] = attrs.Factory(list)
    index_rows: list[Array] = attrs.Factory(list)
    k: list[Array] = attrs.Factory(list)
    s: list[Array] = attrs.Factory(list)
    index_k: list[Array] = attrs.Factory(list)
    index_s: list[Array] = attrs.Factory(list)


@attrs.define
class ReferenceState:
    """One timeline. Keeps everything, so a copy is a snapshot and truncation a rewind."""

    tokens: list[int]
    layers: list[_LayerState]

    def copy(self) -> ReferenceState:
        """An independent state that continues equally."""
        layers = [
            _LayerState(*(list(part) for part in attrs.astuple(layer, recurse=False)))
            for layer in self.layers
        ]
        return ReferenceState(list(self.tokens), layers)


def _rms(x: Array, eps: float) -> Array:
    out: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return out


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    out: Array = e / e.sum(axis=axis, keepdims=True)
    return out


class ReferenceModel:
    """A model that answers slowly and rightly.

    Args:
      file: an opened file; kept open by the caller.
      rounding: whether to apply the vendor's activation rounding.

    Raises:
      ModelFileError: the file is not a usable model.
    """

    def __init__(self, file: GGUFFile, rounding: Rounding = Rounding.NONE) -> None:
        self.file = file
        self.shape: DeepSeek4Shape = load_shape(file)
        self.rounding = rounding
        self._weights: dict[str, Array] = {}

    def new_state(self) -> ReferenceState:
        """An empty timeline."""
        return ReferenceState([], [_LayerState() for _ in range(self.shape.n_layers)])

    def forward(self, state: ReferenceState, tokens: Sequence[int]) -> Array:
        """Append tokens to a timeline.

        Args:
          state: changed in place.
          tokens: ids, at least one.

        Returns:
          Logits f64[R, V] after each token.

        Raises:
          InvalidRequest: no token, or an id outside the vocabulary.
          ContextOverflow: more tokens than the model has positions.
        """
        s = self.shape
        if not len(tokens) or min(tokens) < 0 or max(tokens) >= s.n_vocab:
            raise InvalidRequest(f"token ids must be 0 to {s.n_vocab - 1}, and at least one")
        if len(state.tokens) + len(tokens) > s.n_ctx_train:
            raise ContextOverflow(len(state.tokens) + len(tokens), s.n_ctx_train)
        ids = np.asarray(tokens, np.int64)
        position = len(state.tokens)
        embedded = self._matrix("token_embd.weight")[ids]
        x = np.repeat(embedded[:, None, :], s.n_streams, axis=1)
        for layer in range(s.n_layers):
            part = state.layers[layer]
            u, post, comb = self._hc_pre(x, f"blk.{layer}.hc_attn")
            u = _rms(u, s.rms_eps) * self._matrix(f"blk.{layer}.attn_norm.weight")
            x = _hc_post(self._attention(layer, part, u, position), x, post, comb)
            u, post, comb = self._hc_pre(x, f"blk.{layer}.hc_ffn")
            u = _rms(u, s.rms_eps) * self._matrix(f"blk.{layer}.ffn_norm.weight")
            x = _hc_post(self._moe(layer, u, ids), x, post, comb)
        state.tokens.extend(int(t) for t in ids)
        return self._head(x)

    def _matrix(self, name: str) -> Array:
        """A whole tensor as float64, expanded once."""
        if name not in self._weights:
            info = self.file.tensors[name]
            values = dequantize(self.file.rows(name), info.type)
            self._weights[name] = values.reshape(info.shape).astype(np.float64)
        return self._weights[name]

    def _hc_pre(self, x: Array, name: str) -> tuple[Array, Array, Array]:
        """Streams f64[R, S, D] -> input f64[R, D], post f64[R, S], comb f64[R, S, S]."""
        s = self.shape
        n = s.n_streams
        flat = _rms(x.reshape(len(x), -1), s.rms_eps)
        m = flat @ self._matrix(f"{name}_fn.weight").T
        scale, base = self._matrix(f"{name}_scale.weight"), self._matrix(f"{name}_base.weight")
        pre = _sigmoid(m[:, :n] * scale[0] + base[:n]) + s.hc_eps
        post = 2.0 * _sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        c = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        c = _softmax(c, axis=2) + s.hc_eps
        c = c / (c.sum(axis=1, keepdims=True) + s.hc_eps)
        for _ in range(s.sinkhorn_iterations - 1):
            c = c / (c.sum(axis=2, keepdims=True) + s.hc_eps)
            c = c / (c.sum(axis=1, keepdims=True) + s.hc_eps)
        return np.einsum("rs,rsd->rd", pre, x), post, c

    def _rope(self, x: Array, layer: int, positions: Array, *, inverse: bool = False) -> Array:
        """Rotate the tail of x f64[R, ..., W] by each row's position."""
        rope = self.shape.rope(layer)
        angle = positions[:, None] * rope.frequencies()
        if inverse:
            angle = -angle
        angle = angle.reshape(len(x), *[1] * (x.ndim - 2), -1)
        tail = x[..., x.shape[-1] - rope.n_dims :]
        a, b = tail[..., 0::2], tail[..., 1::2]
        turned = np.empty_like(tail)
        turned[..., 0::2] = a * np.cos(angle) - b * np.sin(angle)
        turned[..., 1::2] = a * np.sin(angle) + b * np.cos(angle)
        return np.concatenate((x[..., : x.shape[-1] - rope.n_dims], turned), axis=-1)

    def _attention(self, layer: int, state: _LayerState, x: Array, position: int) -> Array:
        s = self.shape
        ratio = s.ratios[layer]
        name = f"blk.{layer}"
        positions = position + np.arange(len(x), dtype=np.float64)
        latent = _rms(x @ self._matrix(f"{name}.attn_q_a.weight").T, s.rms_eps)
        latent = latent * self._matrix(f"{name}.attn_q_a_norm.weight")
        q = (latent @ self._matrix(f"{name}.attn_q_b.weight").T).reshape(
            len(x), s.n_heads, s.head_dim
        )
        q = self._rope(_rms(q, s.rms_eps), layer, positions)
        kv = _rms(x @ self._matrix(f"{name}.attn_kv.weight").T, s.rms_eps)
        kv = self._rope(kv * self._matrix(f"{name}.attn_kv_a_norm.weight"), layer, positions)
        if self.rounding is Rounding.VENDOR:
            kv = round_fp8(kv, s.rope_dim)
        state.raw.extend(kv)
        choice = [np.arange(0)] * len(x)
        if ratio:
            self._compress(layer, x, state.k, state.s, state.rows, "attn_compressor", s.head_dim)
            visible = [(position + r + 1) // ratio for r in range(len(x))]
            choice = [np.arange(n) for n in visible]
        if ratio == 4:
            index = (state.index_k, state.index_s, state.index_rows)
            self._compress(layer, x, *index, "indexer_compressor", s.index_dim)
            choice = self._index(layer, state.index_rows, x, latent, positions)
        out = np.empty((len(x), s.n_heads, s.head_dim))
        sinks = self._matrix(f"{name}.attn_sinks.weight")[:, None]
        for r in range(len(x)):
            t = position + r
            keys = np.array(
                state.raw[max(0, t - s.window + 1) : t + 1] + [state.rows[j] for j in choice[r]]
            )
            scores = q[r] @ keys.T / np.sqrt(s.head_dim)
            p = _softmax(np.concatenate((sinks, scores), axis=1), axis=1)[:, 1:]
            out[r] = p @ keys
        out = self._rope(out, layer, positions, inverse=True)
        groups = out.reshape(len(x), s.n_groups, s.group_width)
        a = self._matrix(f"{name}.attn_output_a.weight")
        low = np.einsum("rgi,goi->rgo", groups, a.reshape(s.n_groups, s.group_rank, -1))
        out_b = self._matrix(f"{name}.attn_output_b.weight")
        y: Array = low.reshape(len(x), -1) @ out_b.T
        return y

    def _compress(
        self,
        layer: int,
        x: Array,
        all_k: list[Array],
        all_s: list[Array],
        rows: list[Array],
        part: str,
        width: int,
    ) -> None:
        """Append every finished compressed row of width `width` to `rows`."""
        s = self.shape
        ratio = s.ratios[layer]
        name = f"blk.{layer}.{part}"
        start = len(all_k)
        ape = self._matrix(f"{name}_ape.weight")
        all_k.extend(x @ self._matrix(f"{name}_kv.weight").T)
        gate = x @ self._matrix(f"{name}_gate.weight").T
        all_s.extend(gate + ape[(start + np.arange(len(x))) % ratio])
        for j in range(len(rows), len(all_k) // ratio):
            current = slice(ratio * j, ratio * (j + 1))
            k, gates = np.array(all_k[current]), np.array(all_s[current])
            if ratio == 4:
                k, gates = k[:, width:], gates[:, width:]
                if j > 0:
                    before = slice(ratio * (j - 1), ratio * j)
                    k = np.concatenate((np.array(all_k[before])[:, :width], k))
                    gates = np.concatenate((np.array(all_s[before])[:, :width], gates))
            pooled = (_softmax(gates, axis=0) * k).sum(axis=0, keepdims=True)
            row = _rms(pooled, s.rms_eps) * self._matrix(f"{name}_norm.weight")
            row = self._rope(row, layer, np.array([float(ratio * j)]))
            if self.rounding is Rounding.VENDOR:
                is_index = part == "indexer_compressor"
                row = round_fp4_hadamard(row) if is_index else round_fp8(row, s.rope_dim)
            rows.append(row[0])

    def _index(
        self, layer: int, rows: list[Array], x: Array, latent: Array, positions: Array
    ) -> list[NDArray[np.int64]]:
        """The compressed rows each query attends to, ascending."""
        s = self.shape
        name = f"blk.{layer}.indexer"
        q = (latent @ self._matrix(f"{name}.attn_q_b.weight").T).reshape(
            len(x), s.n_index_heads, s.index_dim
        )
        q = self._rope(q, layer, positions)
        if self.rounding is Rounding.VENDOR:
            q = round_fp4_hadamard(q)
        weights = x @ self._matrix(f"{name}.proj.weight").T / np.sqrt(s.index_dim * s.n_index_heads)
        choice = []
        for r in range(len(x)):
            visible = (int(positions[r]) + 1) // 4
            if visible <= s.index_top_k:
                choice.append(np.arange(visible))
                continue
            scores = weights[r] @ np.maximum(q[r] @ np.array(rows[:visible]).T, 0.0)
            best = np.argsort(-scores, kind="stable")[: s.index_top_k]
            choice.append(np.sort(best))
        return choice

    def _moe(self, layer: int, x: Array, ids: NDArray[np.int64]) -> Array:
        s = self.shape
        name = f"blk.{layer}"
        logits = x @ self._matrix(f"{name}.ffn_gate_inp.weight").T
        p = np.sqrt(np.logaddexp(0.0, logits))
        if layer < s.n_hash_layers:
            table = self.file.rows(f"{name}.ffn_gate_tid2eid.weight").view("<i4")
            chosen = table.reshape(s.n_vocab, s.n_used)[ids].astype(np.int64)
        else:
            score = p
            if f"{name}.exp_probs_b.bias" in self.file.tensors:
                score = p + self._matrix(f"{name}.exp_probs_b.bias")
            chosen = np.argsort(-score, axis=1, kind="stable")[:, : s.n_used]
        weight = np.take_along_axis(p, chosen, axis=1)
        total = np.maximum(weight.sum(axis=1, keepdims=True), _ROUTER_FLOOR)
        weight = s.expert_scale * weight / total
        gate, up, down = (
            self._matrix(f"{name}.ffn_{part}_exps.weight") for part in ("gate", "up", "down")
        )
        clamp = s.clamp[layer]
        out = self._shared(name, x, clamp)
        for r in range(len(x)):
            for e, w in zip(chosen[r], weight[r], strict=True):
                out[r] += down[e] @ (w * _clamped_swiglu(gate[e] @ x[r], up[e] @ x[r], clamp))
        return out

    def _shared(self, name: str, x: Array, clamp: float) -> Array:
        gate, up, down = (
            self._matrix(f"{name}.ffn_{part}_shexp.weight") for part in ("gate", "up", "down")
        )
        return _clamped_swiglu(x @ gate.T, x @ up.T, clamp) @ down.T

    def _head(self, x: Array) -> Array:
        s = self.shape
        flat = _rms(x.reshape(len(x), -1), s.rms_eps)
        m = flat @ self._matrix("output_hc_fn.weight").T
        scale, base = self._matrix("output_hc_scale.weight"), self._matrix("output_hc_base.weight")
        c = _sigmoid(m * scale[0] + base) + s.hc_eps
        u = _rms(np.einsum("rs,rsd->rd", c, x), s.rms_eps) * self._matrix("output_norm.weight")
        return u @ self._matrix("output.weight").T


def _clamped_swiglu(a: Array, b: Array, clamp: float) -> Array:
    a = np.minimum(a, clamp)
    return a * _sigmoid(a) * np.clip(b, -clamp, clamp)


def _hc_post(y: Array, x: Array, post: Array, comb: Array) -> Array:
    """X'[c] = post[c] * y + sum_r comb[r, c] * X[r]."""
    mixed: Array = np.einsum("nrc,nrd->ncd", comb, x)
    return post[:, :, None] * y[:, None, :] + mixed
