"""Static buffers of a step: every array that a launch reads or writes besides weights and state.

All buckets share them: bucket B uses the first B rows. They are reserved before the arena is made
and set to zero once, so that rows which a step leaves idle hold finite numbers.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from ds4.cuda.kernels.attention import SPLIT_KEYS
from ds4.cuda.kernels.experts_up import ExpertShape
from ds4.cuda.kernels.hyper import MIX_COLUMNS
from ds4.cuda.kernels.inputs import N_ANGLES
from ds4.cuda.kernels.latent import N_PARTS
from ds4.cuda.kernels.moe_matmul import ExpertBuffers
from ds4.cuda.kernels.outputs import ARGMAX_BLOCKS
from ds4.cuda.memory import Arena, MemoryLayout
from ds4.cuda.weights import DeviceWeights, Stack
from ds4.gguf import QuantType
from ds4.model.deepseek4.shape import DeepSeek4Shape

__all__ = ["META_FIELDS", "StepLimits", "Workspace"]

META_FIELDS = ("tokens", "positions", "slots", "firsts", "lasts", "wanted", "every")
"""Rows of the step's meta array: what each row of the bucket is (token, position, slot or -1, first
and last row of its session's segment), which rows want logits, and 0, 1, 2, ..."""


@attrs.frozen(kw_only=True)
class StepLimits:
    """What the static buffers are sized for.

    Attributes:
      max_rows: rows of the largest bucket.
      max_context: tokens of the longest session.
      max_sessions: sessions open at once.
      checkpoints: earlier states kept for every session.
    """

    max_rows: int
    max_context: int
    max_sessions: int
    checkpoints: int = 4

    def splits(self, shape: DeepSeek4Shape) -> int:
        """Splits of the longest row of attention keys."""
        keys = shape.window
        more = 0
        for ratio in set(shape.ratios):
            if ratio:
                rows = self.max_context // ratio
                more = max(more, min(rows, shape.index_top_k) if ratio == 4 else rows)
        return -(-(keys + more) // SPLIT_KEYS)


class Workspace:
    """The buffers; every attribute is a device array (None when only planned).

    Args:
      weights: for the widths of the stacks.
      limits: sizes.
      layout: gets every reservation.
      arena: made from an equal layout, or None.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        limits: StepLimits,
        layout: MemoryLayout,
        arena: Arena | None = None,
    ) -> None:
        s, rows = weights.shape, limits.max_rows
        self.limits = limits
        self._layout, self._arena = layout, arena
        n_heads = weights.heads[1] - weights.heads[0]
        lanes = max(layer.experts.shared_down.k for layer in weights.layers)
        low = max(layer.output_a.rows for layer in weights.layers)
        splits = limits.splits(s)
        half = s.rope_dim // 2
        f32, i32 = np.float32, np.int32
        make = self._make
        self.meta = make("meta", (len(META_FIELDS), rows), i32)
        self.table = make("state table", (limits.max_sessions, s.n_layers, N_PARTS), np.int64)
        self.frequencies = make("frequencies", (2, half), np.float64)
        self.cosines = make("cosines", (rows, N_ANGLES, half), f32)
        self.sines = make("sines", (rows, N_ANGLES, half), f32)
        n_mix = 2 * s.n_streams + s.n_streams**2
        n_parts = -(-s.d_model // MIX_COLUMNS)
        self.x = make("streams", (rows, s.n_streams * s.d_model), f32)
        self.parts = make("mix parts", (rows, n_parts, n_mix + 1), f32)
        self.post = make("post", (rows, s.n_streams), f32)
        self.comb = make("comb", (rows, s.n_streams**2), f32)
        self.u = make("sublayer input", (rows, s.d_model), f32)
        self.y = make("sublayer output", (rows, s.d_model), f32)
        self.into = self._outputs("into", [layer.into for layer in weights.layers])
        self.up = self._outputs("up", [layer.up for layer in weights.layers])
        self.ffn_in = self._outputs("ffn in", [layer.ffn_in for layer in weights.layers])
        self.latent = make("latent", (rows, s.q_rank), f32)
        self.kv = make("kv", (rows, s.head_dim), f32)
        has_index = 4 in s.ratios
        self.scores = make(
            "index scores", (rows, max(1, limits.max_context // 4) if has_index else 1), f32
        )
        self.chosen = make("chosen", (rows, s.index_top_k if has_index else 1), i32)
        self.split_sums = make("split sums", (rows, splits, n_heads, s.head_dim), f32)
        self.split_stats = make("split stats", (rows, splits, n_heads, 2), f32)
        self.heads = make("heads", (rows, n_heads * s.head_dim), f32)
        self.low = make("low", (rows, low), f32)
        self.ids = make("experts", (rows, s.n_used), i32)
        self.expert_weights = make("expert weights", (rows, s.n_used), f32)
        self.shared = make("shared hidden", (rows, max(1, lanes)), f32)
        self.hidden = make("hidden", (rows * s.n_used, s.d_expert), f32)
        # Byte forms of the experts' hidden rows; only fast arithmetic has them.
        n_hidden = rows * s.n_used * s.d_expert
        self.hidden_scales = make("hidden scales", (max(1, n_hidden // 32),), f32)
        self.hidden_sums = make("hidden sums", (max(1, n_hidden // 16),), f32)
        self.shared_scales = make("shared scales", (max(1, rows * lanes // 32),), f32)
        self.head_x = make("head streams", (rows, s.n_streams * s.d_model), f32)
        self.head_u = make("head input", (rows, s.d_model), f32)
        self.logits = self._outputs("logits", [weights.output])
        self.best = make("best", (rows, ARGMAX_BLOCKS), f32)
        self.best_at = make("best at", (rows, ARGMAX_BLOCKS), i32)
        self.next_tokens = make("next tokens", (rows,), i32)
        widest = max(s.d_model, n_heads * s.head_dim, low, s.q_rank, s.d_expert, lanes)
        # Byte forms of the activations that fast arithmetic multiplies; one input at a time.
        self.quants = make("quants", (rows * -(-widest // 32) * 8,), np.uint32)
        self.quant_scales = make("quant scales", (rows * -(-widest // 32),), f32)

    def expert_scratch(self, shape: ExpertShape, *, exact: bool) -> ExpertBuffers:
        """Buffers between the two halves of an expert block, for one bucket."""
        pairs, f, lanes = shape.batch * shape.n_used, shape.d_expert, shape.d_shared
        if exact:
            return ExpertBuffers(
                self.hidden[:pairs], self.hidden_scales[:1], self.hidden_sums[:1],
                self.shared[: shape.batch], self.shared_scales[:1],
            )  # fmt: skip
        words = self.hidden.reshape(self.hidden.shape[0] * f).view(np.uint32)
        shared = self.shared.reshape(self.shared.shape[0] * self.shared.shape[1]).view(np.uint32)
        return ExpertBuffers(
            words[: pairs * f // 4], self.hidden_scales[: pairs * f // 32],
            self.hidden_sums[: pairs * f // 16], shared[: shape.batch * lanes // 4],
            self.shared_scales[: shape.batch * lanes // 32],
        )  # fmt: skip

    def _make(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        place = self._layout.reserve("workspace", name, shape, dtype)
        return None if self._arena is None else self._arena.view(place)

    def _outputs(self, name: str, stacks: list[Stack]) -> dict[QuantType, Any]:
        """One output buffer per storage type, wide enough for every one of the stacks."""
        widths: dict[QuantType, int] = {}
        for stack in stacks:
            for storage, matrix in stack.matrices.items():
                widths[storage] = max(widths.get(storage, 0), matrix.rows)
        rows = self.limits.max_rows
        return {
            storage: self._make(f"{name} {storage.name}", (rows, width), np.float32)
            for storage, width in sorted(widths.items())
        }
