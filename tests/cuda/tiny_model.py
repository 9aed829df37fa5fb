"""Writes very small DeepSeek V4 files for executors that are slow or need odd shapes."""

import attrs
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

F32, F16, Q8_0 = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.Q8_0,
)


@attrs.frozen(kw_only=True)
class TinyShape:
    ratios: tuple = (0, 4, 128)
    d: int = 32
    vocab: int = 40
    heads: int = 2
    hd: int = 16
    rope: int = 8
    q_rank: int = 16
    groups: int = 2
    group_rank: int = 8
    window: int = 4
    index_heads: int = 4
    index_dim: int = 16
    top_k: int = 2
    experts: int = 4
    used: int = 2
    f: int = 16
    hashed: int = 1


def write(path, shape=None, *, seed=0, packed=False):
    """Random weights; packed: Q8_0 where the published files have it and F16 elsewhere."""
    s = shape or TinyShape()
    rng = np.random.default_rng(seed)
    w = GGUFWriter(str(path), "deepseek4")
    p = "deepseek4."
    n = len(s.ratios)
    for key, value in {
        "block_count": n, "embedding_length": s.d, "vocab_size": s.vocab, "context_length": 1024,
        "attention.head_count": s.heads, "attention.head_count_kv": 1,
        "attention.key_length": s.hd, "attention.value_length": s.hd,
        "rope.dimension_count": s.rope, "attention.q_lora_rank": s.q_rank,
        "attention.output_lora_rank": s.group_rank, "attention.output_group_count": s.groups,
        "expert_count": s.experts, "expert_used_count": s.used,
        "expert_feed_forward_length": s.f, "expert_shared_count": 1,
        "hash_layer_count": s.hashed, "attention.sliding_window": s.window,
        "attention.indexer.head_count": s.index_heads,
        "attention.indexer.key_length": s.index_dim, "attention.indexer.top_k": s.top_k,
        "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 3,
        "rope.scaling.original_context_length": 64,
    }.items():  # fmt: skip
        w.add_uint32(p + key, value)
    for key, value in {
        "rope.freq_base": 100.0, "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 8.0,
        "rope.scaling.yarn_beta_slow": 1.0, "attention.compress_rope_freq_base": 1000.0,
        "expert_weights_scale": 1.5, "attention.layer_norm_rms_epsilon": 1e-6,
        "hyper_connection.epsilon": 1e-6,
    }.items():  # fmt: skip
        w.add_float32(p + key, value)
    w.add_bool(p + "expert_weights_norm", True)
    w.add_array(p + "attention.compress_ratios", list(s.ratios))
    w.add_array(p + "swiglu_clamp_exp", [2.0] * n)

    def matrix(name, *dims, kind=F32, gain=1.0):
        values = rng.standard_normal(dims).astype(np.float32) * np.float32(gain * dims[-1] ** -0.5)
        if not packed or dims[-1] % 32:
            kind = F32
        w.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)

    def vector(name, n, mean=1.0, spread=0.1):
        w.add_tensor(name, (mean + spread * rng.standard_normal(n)).astype(np.float32))

    matrix("token_embd.weight", s.vocab, s.d, kind=F16, gain=4.0)
    for i, ratio in enumerate(s.ratios):
        b = f"blk.{i}."
        for part in ("attn", "ffn"):
            matrix(f"{b}hc_{part}_fn.weight", 24, 4 * s.d, kind=F16)
            vector(f"{b}hc_{part}_base.weight", 24, 0.0, 0.5)
            vector(f"{b}hc_{part}_scale.weight", 3, 0.5, 0.1)
            vector(f"{b}{part}_norm.weight", s.d)
        matrix(f"{b}attn_q_a.weight", s.q_rank, s.d, kind=Q8_0)
        vector(f"{b}attn_q_a_norm.weight", s.q_rank)
        matrix(f"{b}attn_q_b.weight", s.heads * s.hd, s.q_rank, kind=Q8_0)
        matrix(f"{b}attn_kv.weight", s.hd, s.d, kind=Q8_0)
        vector(f"{b}attn_kv_a_norm.weight", s.hd)
        vector(f"{b}attn_sinks.weight", s.heads, 0.0, 1.0)
        width = s.heads * s.hd // s.groups
        matrix(f"{b}attn_output_a.weight", s.groups * s.group_rank, width, kind=Q8_0)
        matrix(f"{b}attn_output_b.weight", s.d, s.groups * s.group_rank, kind=Q8_0)
        c = 2 if ratio == 4 else 1
        pools = [("attn_compressor", s.hd)] if ratio else []
        if ratio == 4:
            pools.append(("indexer_compressor", s.index_dim))
            matrix(f"{b}indexer.attn_q_b.weight", s.index_heads * s.index_dim, s.q_rank, kind=F16)
            matrix(f"{b}indexer.proj.weight", s.index_heads, s.d, kind=F16)
        for name, wide in pools:
            matrix(f"{b}{name}_kv.weight", c * wide, s.d, kind=F16)
            matrix(f"{b}{name}_gate.weight", c * wide, s.d, kind=F16)
            matrix(f"{b}{name}_ape.weight", ratio, c * wide, gain=2.0)
            vector(f"{b}{name}_norm.weight", wide)
        matrix(f"{b}ffn_gate_inp.weight", s.experts, s.d, kind=F16)
        if i < s.hashed:
            table = np.stack([rng.permutation(s.experts)[: s.used] for _ in range(s.vocab)])
            w.add_tensor(f"{b}ffn_gate_tid2eid.weight", table.astype(np.int32))
        else:
            vector(f"{b}exp_probs_b.bias", s.experts, 0.0, 0.1)
        for part in ("gate", "up"):
            matrix(f"{b}ffn_{part}_exps.weight", s.experts, s.f, s.d)
            matrix(f"{b}ffn_{part}_shexp.weight", s.f, s.d, kind=Q8_0)
        matrix(f"{b}ffn_down_exps.weight", s.experts, s.d, s.f)
        matrix(f"{b}ffn_down_shexp.weight", s.d, s.f, kind=Q8_0)
    matrix("output_hc_fn.weight", 4, 4 * s.d, kind=F16)
    vector("output_hc_base.weight", 4, 0.0, 0.5)
    vector("output_hc_scale.weight", 1, 0.5, 0.1)
    vector("output_norm.weight", s.d)
    matrix("output.weight", s.vocab, s.d, kind=Q8_0, gain=3.0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
