"""Tensor tables of made-up and of the published model, built from sizes alone (no file)."""

import math

import attrs

from ds4.gguf import QuantType, TensorInfo
from ds4.model.deepseek4.shape import DeepSeek4Shape

F32, F16, I32 = QuantType.F32, QuantType.F16, QuantType.I32
Q8_0, Q2_K, IQ2_XXS = QuantType.Q8_0, QuantType.Q2_K, QuantType.IQ2_XXS


def info_of(name, ne, kind, offset):
    n_bytes = math.prod(ne) // kind.block_elements * kind.block_bytes
    return TensorInfo(name, ne, tuple(reversed(ne)), kind, offset, n_bytes)


@attrs.frozen(kw_only=True)
class Sizes:
    layers: int = 43
    d: int = 4096
    vocab: int = 129280
    heads: int = 64
    head_dim: int = 512
    q_rank: int = 1024
    groups: int = 8
    group_rank: int = 1024
    experts: int = 256
    used: int = 6
    d_expert: int = 2048
    index_heads: int = 64
    index_dim: int = 128
    hash_layers: int = 3
    window: int = 128
    rope: int = 64

    @property
    def ratios(self):
        return tuple(0 if i < 2 else 4 if i % 2 == 0 else 128 for i in range(self.layers))


FULL = Sizes()
SMALL = Sizes(
    layers=6,
    d=256,
    vocab=512,
    heads=8,
    head_dim=128,
    q_rank=128,
    groups=8,
    group_rank=64,
    experts=16,
    used=4,
    d_expert=256,
    index_heads=16,
    window=32,
)


def shape_of(s):
    p = "deepseek4."
    metadata = {
        "general.architecture": "deepseek4",
        p + "block_count": s.layers,
        p + "embedding_length": s.d,
        p + "vocab_size": s.vocab,
        p + "context_length": 1048576,
        p + "attention.head_count": s.heads,
        p + "attention.head_count_kv": 1,
        p + "attention.key_length": s.head_dim,
        p + "attention.value_length": s.head_dim,
        p + "rope.dimension_count": s.rope,
        p + "attention.q_lora_rank": s.q_rank,
        p + "attention.output_group_count": s.groups,
        p + "attention.output_lora_rank": s.group_rank,
        p + "attention.sliding_window": s.window,
        p + "attention.compress_ratios": s.ratios,
        p + "attention.compress_rope_freq_base": 160000.0,
        p + "attention.layer_norm_rms_epsilon": 1e-6,
        p + "attention.indexer.head_count": s.index_heads,
        p + "attention.indexer.key_length": s.index_dim,
        p + "attention.indexer.top_k": 512,
        p + "rope.freq_base": 10000.0,
        p + "rope.scaling.factor": 16.0,
        p + "rope.scaling.original_context_length": 65536,
        p + "rope.scaling.yarn_beta_fast": 32.0,
        p + "rope.scaling.yarn_beta_slow": 1.0,
        p + "hyper_connection.count": 4,
        p + "hyper_connection.sinkhorn_iterations": 20,
        p + "hyper_connection.epsilon": 1e-6,
        p + "expert_count": s.experts,
        p + "expert_used_count": s.used,
        p + "expert_shared_count": 1,
        p + "expert_feed_forward_length": s.d_expert,
        p + "expert_weights_scale": 1.5,
        p + "expert_weights_norm": True,
        p + "hash_layer_count": s.hash_layers,
        p + "swiglu_clamp_exp": [10.0] * s.layers,
    }
    return DeepSeek4Shape.from_metadata("made-up", metadata)


def tensors_of(s, *, dense=Q8_0, gate_up=IQ2_XXS, down=Q2_K, shared=None):
    """Tensor name to `TensorInfo`, 32-byte aligned, in the order of the published table."""
    rows = []
    shared = shared or dense

    def add(name, kind, *ne):
        rows.append((name, kind, ne))

    add("token_embd.weight", F16, s.d, s.vocab)
    add("output_norm.weight", F32, s.d)
    add("output.weight", dense, s.d, s.vocab)
    add("output_hc_fn.weight", F16, 4 * s.d, 4)
    add("output_hc_base.weight", F32, 4)
    add("output_hc_scale.weight", F32, 1)
    for n, ratio in enumerate(s.ratios):
        b = f"blk.{n}."
        for part in ("attn", "ffn"):
            add(f"{b}hc_{part}_fn.weight", F16, 4 * s.d, 24)
            add(f"{b}hc_{part}_base.weight", F32, 24)
            add(f"{b}hc_{part}_scale.weight", F32, 3)
            add(f"{b}{part}_norm.weight", F32, s.d)
        add(b + "attn_q_a.weight", dense, s.d, s.q_rank)
        add(b + "attn_q_a_norm.weight", F32, s.q_rank)
        add(b + "attn_q_b.weight", dense, s.q_rank, s.heads * s.head_dim)
        add(b + "attn_kv.weight", dense, s.d, s.head_dim)
        add(b + "attn_kv_a_norm.weight", F32, s.head_dim)
        add(b + "attn_sinks.weight", F32, s.heads)
        width = s.heads * s.head_dim // s.groups
        add(b + "attn_output_a.weight", dense, width, s.groups * s.group_rank)
        add(b + "attn_output_b.weight", dense, s.groups * s.group_rank, s.d)
        c = 2 if ratio == 4 else 1
        if ratio:
            add(b + "attn_compressor_kv.weight", F16, s.d, s.head_dim * c)
            add(b + "attn_compressor_gate.weight", F16, s.d, s.head_dim * c)
            add(b + "attn_compressor_ape.weight", F16, s.head_dim * c, ratio)
            add(b + "attn_compressor_norm.weight", F32, s.head_dim)
        if ratio == 4:
            add(b + "indexer.attn_q_b.weight", F16, s.q_rank, s.index_heads * s.index_dim)
            add(b + "indexer.proj.weight", F16, s.d, s.index_heads)
            add(b + "indexer_compressor_kv.weight", F16, s.d, 2 * s.index_dim)
            add(b + "indexer_compressor_gate.weight", F16, s.d, 2 * s.index_dim)
            add(b + "indexer_compressor_ape.weight", F16, 2 * s.index_dim, 4)
            add(b + "indexer_compressor_norm.weight", F32, s.index_dim)
        add(b + "ffn_gate_inp.weight", F16, s.d, s.experts)
        if n < s.hash_layers:
            add(b + "ffn_gate_tid2eid.weight", I32, s.used, s.vocab)
        else:
            add(b + "exp_probs_b.bias", F32, s.experts)
        add(b + "ffn_gate_exps.weight", gate_up, s.d, s.d_expert, s.experts)
        add(b + "ffn_up_exps.weight", gate_up, s.d, s.d_expert, s.experts)
        add(b + "ffn_down_exps.weight", down, s.d_expert, s.d, s.experts)
        add(b + "ffn_gate_shexp.weight", shared, s.d, s.d_expert)
        add(b + "ffn_up_shexp.weight", shared, s.d, s.d_expert)
        add(b + "ffn_down_shexp.weight", shared, s.d_expert, s.d)
    out = {}
    offset = 4096
    for name, kind, ne in rows:
        out[name] = info_of(name, ne, kind, offset)
        offset += -(-out[name].n_bytes // 32) * 32
    return out
