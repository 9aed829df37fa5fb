"""Shape of a DeepSeek V4 model, read from GGUF metadata and checked.

Any consistent shape is accepted, not only the published one: the fixtures and the bundled model
are small members of the same family. What the arithmetic of ds4 cannot represent is refused here,
with the key, what was expected and what was found. Tensors are checked in `tensors.py`.

Source: `deepseek4.*` keys as written by llama.cpp's converter and by antirez/ds4's files.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from ds4.errors import ModelFileError, UnsupportedModelError

__all__ = ["ARCHITECTURE", "DeepSeek4Shape", "Rope"]

ARCHITECTURE = "deepseek4"
_SQRT_SOFTPLUS = 4


@attrs.frozen(kw_only=True)
class Rope:
    """Rotary embedding of one kind of layer.

    Attributes:
      base: frequency base.
      factor: YaRN stretch; 1 means no scaling.
      original_context: context the unscaled frequencies were trained for.
      beta_fast: rotations above which a frequency is kept.
      beta_slow: rotations below which a frequency is divided by `factor`.
      n_dims: rotated dimensions (the tail of a head), even.
    """

    base: float
    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    n_dims: int

    def frequencies(self) -> NDArray[np.float64]:
        """Radians per position of each adjacent pair, f64[n_dims / 2].

        Source: YaRN (Peng et al., 2023), without its magnitude factor, which this family omits.
        """
        pair = np.arange(self.n_dims // 2, dtype=np.float64)
        plain = self.base ** (-2.0 * pair / self.n_dims)
        if self.factor == 1.0:
            return plain

        def dimension_of(rotations: float) -> float:
            wavelength = self.original_context / (rotations * 2.0 * math.pi)
            return self.n_dims * math.log(wavelength) / (2.0 * math.log(self.base))

        low = max(math.floor(dimension_of(self.beta_fast)), 0)
        high = min(math.ceil(dimension_of(self.beta_slow)), self.n_dims - 1)
        ramp = np.clip((pair - low) / max(high - low, 0.001), 0.0, 1.0)
        return plain * (1.0 - ramp) + plain / self.factor * ramp


@attrs.frozen(kw_only=True)
class DeepSeek4Shape:
    """All sizes and constants of one model. See `docs/ARCHITECTURE.md` for the letters.

    Attributes:
      n_layers: transformer layers L.
      d_model: width D.
      n_vocab: vocabulary V.
      n_ctx_train: positions the model was trained for.
      n_heads: query heads H; there is one KV head.
      head_dim: width of a head; key and value are the same vector.
      q_rank: rank of the query's low-rank projection.
      n_groups: output groups; each projects H / n_groups heads.
      group_rank: rank of each output group.
      window: tokens of the sliding window, the current one included.
      ratios: per layer 0 (window only), 4 (compressed, with indexer) or 128 (heavily compressed).
      n_index_heads: indexer heads.
      index_dim: indexer head width.
      index_top_k: compressed rows an indexer keeps.
      n_streams: hyper-connection streams S.
      sinkhorn_iterations: row and column normalisations of the stream mixing matrix.
      hc_eps: epsilon of the hyper-connections.
      rms_eps: epsilon of every RMS norm.
      n_experts: routed experts E.
      n_used: routed experts per token K.
      d_expert: hidden width F of routed and shared experts.
      n_hash_layers: leading layers routed by token id.
      expert_scale: factor on the normalised router weights.
      clamp: per-layer clamp of routed and shared SwiGLU.
      rope_window: rotary embedding of ratio-0 layers.
      rope_compressed: rotary embedding of all other layers.
    """

    n_layers: int
    d_model: int
    n_vocab: int
    n_ctx_train: int
    n_heads: int
    head_dim: int
    q_rank: int
    n_groups: int
    group_rank: int
    window: int
    ratios: tuple[int, ...]
    n_index_heads: int
    index_dim: int
    index_top_k: int
    n_streams: int
    sinkhorn_iterations: int
    hc_eps: float
    rms_eps: float
    n_experts: int
    n_used: int
    d_expert: int
    n_hash_layers: int
    expert_scale: float
    clamp: tuple[float, ...]
    rope_window: Rope
    rope_compressed: Rope

    @property
    def rope_dim(self) -> int:
        """Rotated tail of each head."""
        return self.rope_window.n_dims

    @property
    def group_width(self) -> int:
        """Concatenated head outputs of one output group."""
        return self.n_heads * self.head_dim // self.n_groups

    def rope(self, layer: int) -> Rope:
        """Rotary embedding of a layer: queries, raw and compressed rows, indexer alike."""
        return self.rope_compressed if self.ratios[layer] else self.rope_window

    @classmethod
    def from_metadata(
        cls, path: str, metadata: Mapping[str, object], tensor_names: Container[str] = ()
    ) -> DeepSeek4Shape:
        """Read and check a model's shape.

        Args:
          path: for error texts.
          metadata: GGUF key to value; arrays as sequences or NumPy arrays.
          tensor_names: names in the file; they tell whether the last block is a draft (MTP) block.

        Raises:
          UnsupportedModelError: another architecture, or a feature ds4 does not run.
          ModelFileError: a key is missing, has the wrong type, or contradicts another.
        """
        return _Reader(path, metadata, tensor_names).shape()


class _Reader:
    """Typed access to metadata with errors that name the key."""

    def __init__(
        self, path: str, metadata: Mapping[str, object], tensor_names: Container[str]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensor_names = tensor_names

    def error(self, key: str, expected: object, found: object) -> ModelFileError:
        return ModelFileError(self.path, f"key {key}", expected=expected, found=found)

    def unsupported(self, key: str, expected: object, found: object) -> UnsupportedModelError:
        return UnsupportedModelError(self.path, f"key {key}", expected=expected, found=found)

    def get(self, name: str, *, alias: str | None = None) -> tuple[str, object]:
        key = f"{ARCHITECTURE}.{name}"
        if key not in self.metadata and alias and f"{ARCHITECTURE}.{alias}" in self.metadata:
            key = f"{ARCHITECTURE}.{alias}"
        if key not in self.metadata:
            raise self.error(key, "a value", "no such key")
        return key, self.metadata[key]

    def scalar(self, key: str, default: object) -> object:
        """One value that is no array, so that it can be compared; `default` without the key."""
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise self.error(key, "a single value", f"an array ({type(value).__name__})")
        return value

    def integer(self, name: str, low: int = 1, high: int = 2**31 - 1, **kw: str) -> int:
        key, value = self.get(name, **kw)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or value != int(value)
        ):
            raise self.error(key, "a whole number", repr(value))
        if not low <= value <= high:
            raise self.error(key, f"{low} to {high}", int(value))
        return int(value)

    def number(self, name: str, low: float = 0.0, high: float = 1e12) -> float:
        key, value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "a number", repr(value))
        if not (math.isfinite(value) and low <= value <= high):
            raise self.error(key, f"{low:g} to {high:g}", value)
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        key, value = self.get(name)
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise self.error(key, f"an array of at least {count} numbers", type(value).__name__)
        if len(value) < count:
            raise self.error(key, f"at least {count} entries", len(value))
        # Cut before it becomes a list: a hostile array can have millions of entries.
        items = value[:count]  # type: ignore[index]  # has __len__, so it is a sequence
        out: list[float] = []
        for item in items:
            if isinstance(item, (bool, np.bool_, str)) or not math.isfinite(float(item)):
                raise self.error(key, "finite numbers", repr(item))
            out.append(float(item))
        return out

    def shape(self) -> DeepSeek4Shape:
        architecture = self.scalar("general.architecture", None)
        if architecture != ARCHITECTURE:
            raise self.unsupported("general.architecture", repr(ARCHITECTURE), repr(architecture))
        self._refuse_variants()
        n_layers = self.integer("block_count", high=4096)
        if f"blk.{n_layers - 1}.nextn.eh_proj.weight" in self.tensor_names:
            n_layers -= self.integer("nextn_predict_layers", high=n_layers - 1)
        ratios = tuple(int(r) for r in self.numbers("attention.compress_ratios", n_layers))
        for layer, ratio in enumerate(ratios):
            if ratio not in (0, 4, 128):
                key = f"{ARCHITECTURE}.attention.compress_ratios"
                raise self.unsupported(f"{key}[{layer}]", "0, 4 or 128", ratio)
        head_dim = self.integer("attention.key_length")
        n_heads = self.integer("attention.head_count")
        d_model = self.integer("embedding_length")
        rope_dim = self.integer("rope.dimension_count")
        self._equal("attention.value_length", head_dim)
        self._equal("attention.head_count_kv", 1)
        self._equal("expert_shared_count", 1)
        n_groups = self.integer("attention.output_group_count")
        if n_heads % n_groups:
            key = f"{ARCHITECTURE}.attention.output_group_count"
            raise self.error(key, f"a divisor of {n_heads} heads", n_groups)
        if rope_dim % 2 or rope_dim > head_dim:
            key = f"{ARCHITECTURE}.rope.dimension_count"
            raise self.error(key, f"an even number up to {head_dim}", rope_dim)
        index_dim = self.integer("attention.indexer.key_length", alias="indexer.key_length")
        if any(r == 4 for r in ratios) and rope_dim > index_dim:
            key = f"{ARCHITECTURE}.attention.indexer.key_length"
            raise self.error(key, f"at least {rope_dim}, the rotated dimensions", index_dim)
        n_experts = self.integer("expert_count", high=65536)
        n_used = self.integer("expert_used_count", high=64)
        if n_used > n_experts:
            key = f"{ARCHITECTURE}.expert_used_count"
            raise self.error(key, f"at most {n_experts} experts", n_used)
        window_rope = Rope(
            base=self.number("rope.freq_base", 1.001),
            factor=1.0,
            original_context=1,
            beta_fast=32.0,
            beta_slow=1.0,
            n_dims=rope_dim,
        )
        compressed_rope = Rope(
            base=self.number("attention.compress_rope_freq_base", 1.001),
            factor=self.number("rope.scaling.factor", 1.0),
            original_context=self.integer("rope.scaling.original_context_length"),
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 1e-3),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1e-3),
            n_dims=rope_dim,
        )
        return DeepSeek4Shape(
            n_layers=n_layers,
            d_model=d_model,
            n_vocab=self.integer("vocab_size", high=2**24),
            n_ctx_train=self.integer("context_length")
            if f"{ARCHITECTURE}.context_length" in self.metadata
            else 1048576,
            n_heads=n_heads,
            head_dim=head_dim,
            q_rank=self.integer("attention.q_lora_rank"),
            n_groups=n_groups,
            group_rank=self.integer("attention.output_lora_rank"),
            window=self.integer("attention.sliding_window", high=65536),
            ratios=ratios,
            n_index_heads=self.integer("attention.indexer.head_count", alias="indexer.head_count"),
            index_dim=index_dim,
            index_top_k=self.integer("attention.indexer.top_k", alias="indexer.top_k"),
            n_streams=self.integer("hyper_connection.count", high=64),
            sinkhorn_iterations=self.integer("hyper_connection.sinkhorn_iterations", high=1000),
            hc_eps=self.number("hyper_connection.epsilon", high=1.0),
            rms_eps=self.number("attention.layer_norm_rms_epsilon", high=1.0),
            n_experts=n_experts,
            n_used=n_used,
            d_expert=self.integer("expert_feed_forward_length"),
            n_hash_layers=self.integer("hash_layer_count", low=0, high=n_layers),
            expert_scale=self.number("expert_weights_scale"),
            clamp=self.clamp(n_layers),
            rope_window=window_rope,
            rope_compressed=compressed_rope,
        )

    def _equal(self, name: str, expected: int) -> None:
        value = self.integer(name)
        if value != expected:
            raise self.unsupported(f"{ARCHITECTURE}.{name}", expected, value)

    def _refuse_variants(self) -> None:
        """Refuse what looks like this family but is computed differently."""
        if self.scalar("reap.enabled", False):
            raise self.unsupported("reap.enabled", "an unpruned model", "a pruned (REAP) file")
        for name in ("expert_group_count", "expert_group_used_count"):
            key = f"{ARCHITECTURE}.{name}"
            if self.scalar(key, 0) not in (0, None):
                raise self.unsupported(key, "0 or absent", self.metadata[key])
        gating = self.scalar(f"{ARCHITECTURE}.expert_gating_func", _SQRT_SOFTPLUS)
        if gating != _SQRT_SOFTPLUS:
            raise self.unsupported(
                f"{ARCHITECTURE}.expert_gating_func", "4 (sqrt-softplus)", gating
            )
        key, norm = self.get("expert_weights_norm")
        if norm is not True:
            raise self.unsupported(key, True, norm)
        scaling = self.scalar(f"{ARCHITECTURE}.rope.scaling.type", "yarn")
        if scaling != "yarn":
            raise self.unsupported(f"{ARCHITECTURE}.rope.scaling.type", "'yarn'", repr(scaling))

    def clamp(self, n_layers: int) -> tuple[float, ...]:
        """Per-layer clamp. Other writers repeat it for the shared expert; it must be the same."""
        clamp = tuple(self.numbers("swiglu_clamp_exp", n_layers))
        key = f"{ARCHITECTURE}.swiglu_clamp_shexp"
        if key in self.metadata and tuple(self.numbers("swiglu_clamp_shexp", n_layers)) != clamp:
            raise self.unsupported(key, "the same as swiglu_clamp_exp", "other values")
        return clamp
