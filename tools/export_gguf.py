"""Names and metadata that turn a trained `Tales` model into a `deepseek4` GGUF file, and back.

`write` puts the quantized codes of the routed experts into the file unchanged, so the file holds
the very numbers the last training steps saw. `transformers_state` maps a file's dequantized
tensors to `DeepseekV4ForCausalLM`, the independent implementation that the result is judged by.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import quantize
import torch
from gguf import GGMLQuantizationType as Kind
from tales_model import Shape, Tales
from torch import Tensor

_BLOCK = {
    "attn_hc.fn": "hc_attn_fn", "attn_hc.base": "hc_attn_base", "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn", "ffn_hc.base": "hc_ffn_base", "ffn_hc.scale": "hc_ffn_scale",
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "attn.sinks": "attn_sinks",
    "attn.q_a.weight": "attn_q_a", "attn.q_a_norm": "attn_q_a_norm", "attn.q_b.weight": "attn_q_b",
    "attn.kv.weight": "attn_kv", "attn.kv_norm": "attn_kv_a_norm",
    "attn.o_a": "attn_output_a", "attn.o_b.weight": "attn_output_b",
    "attn.compressor.kv.weight": "attn_compressor_kv",
    "attn.compressor.gate.weight": "attn_compressor_gate",
    "attn.compressor.ape": "attn_compressor_ape", "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.q_b.weight": "indexer.attn_q_b", "attn.indexer.proj.weight": "indexer.proj",
    "attn.indexer.compressor.kv.weight": "indexer_compressor_kv",
    "attn.indexer.compressor.gate.weight": "indexer_compressor_gate",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.norm": "indexer_compressor_norm",
    "ffn.router": "ffn_gate_inp", "ffn.tid2eid": "ffn_gate_tid2eid", "ffn.bias": "exp_probs_b.bias",
    "ffn.shared_gate.weight": "ffn_gate_shexp", "ffn.shared_up.weight": "ffn_up_shexp",
    "ffn.shared_down.weight": "ffn_down_shexp",
    "ffn.gate": "ffn_gate_exps", "ffn.up": "ffn_up_exps", "ffn.down": "ffn_down_exps",
}  # fmt: skip
_TOP = {
    "embed.weight": "token_embd.weight", "norm": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_fn": "output_hc_fn.weight", "hc_base": "output_hc_base.weight",
    "hc_scale": "output_hc_scale.weight",
}  # fmt: skip
# GGUF name -> transformers name, under `model.layers.N.`
_HF_BLOCK = {
    "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
    "attn_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight",
    "attn_sinks": "self_attn.sinks", "attn_q_a": "self_attn.q_a_proj.weight",
    "attn_q_a_norm": "self_attn.q_a_norm.weight", "attn_q_b": "self_attn.q_b_proj.weight",
    "attn_kv": "self_attn.kv_proj.weight", "attn_kv_a_norm": "self_attn.kv_norm.weight",
    "attn_output_a": "self_attn.o_a_proj.weight", "attn_output_b": "self_attn.o_b_proj.weight",
    "attn_compressor_kv": "self_attn.compressor.kv_proj.weight",
    "attn_compressor_gate": "self_attn.compressor.gate_proj.weight",
    "attn_compressor_ape": "self_attn.compressor.position_bias",
    "attn_compressor_norm": "self_attn.compressor.kv_norm.weight",
    "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj.weight",
    "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "indexer_compressor_kv": "self_attn.compressor.indexer.kv_proj.weight",
    "indexer_compressor_gate": "self_attn.compressor.indexer.gate_proj.weight",
    "indexer_compressor_ape": "self_attn.compressor.indexer.position_bias",
    "indexer_compressor_norm": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn_gate_inp": "mlp.gate.weight", "ffn_gate_tid2eid": "mlp.gate.tid2eid",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp": "mlp.shared_experts.down_proj.weight",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_HF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight", "output_hc_fn.weight": "model.hc_head.hc_fn",
    "output_hc_base.weight": "model.hc_head.hc_base",
    "output_hc_scale.weight": "model.hc_head.hc_scale",
}  # fmt: skip

CHAT_TEMPLATE = (
    "{%- set bos = '<｜begin▁of▁sentence｜>' -%}{%- set eos = '<｜end▁of▁sentence｜>' -%}"
    "{%- if thinking is not defined -%}{%- set thinking = true -%}{%- endif -%}"
    "{{- bos -}}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{{- m.content -}}"
    "{%- elif m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}"
    "{%- elif m.role == 'assistant' -%}"
    "{{- '<｜Assistant｜></think>' + m.content + eos -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}"
    "{%- endif -%}"
)


def gguf_name(name: str) -> str:
    """The GGUF name of a parameter or buffer of `Tales`."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    target = _BLOCK[rest]
    return f"blk.{layer}.{target}" + ("" if target.endswith(".bias") else ".weight")


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, tokenizer: dict) -> None:
    """Write the hyperparameters and the tokenizer; `tokenizer` is the parsed tokenizer.json."""
    p = "deepseek4."
    writer.add_type("model")
    writer.add_name("ds4 tiny tales")
    writer.add_description("A toy storyteller that shows the DeepSeek V4 architecture at work")
    writer.add_license("mit")
    counts = {
        "block_count": shape.layers, "context_length": shape.context,
        "embedding_length": shape.dim, "vocab_size": shape.vocab,
        "feed_forward_length": shape.expert_dim,
        "attention.head_count": shape.heads, "attention.head_count_kv": 1,
        "attention.key_length": shape.head_dim, "attention.value_length": shape.head_dim,
        "attention.q_lora_rank": shape.q_rank, "attention.output_lora_rank": shape.o_rank,
        "attention.output_group_count": shape.o_groups,
        "attention.sliding_window": shape.window,
        "attention.indexer.head_count": shape.index_heads,
        "attention.indexer.key_length": shape.index_dim,
        "attention.indexer.top_k": shape.index_top_k,
        "rope.dimension_count": shape.rope_dim,
        "rope.scaling.original_context_length": shape.yarn_context,
        "expert_count": shape.experts, "expert_used_count": shape.experts_used,
        "expert_feed_forward_length": shape.expert_dim, "expert_shared_count": 1,
        "expert_gating_func": 4, "expert_group_count": 0, "expert_group_used_count": 0,
        "hash_layer_count": shape.hash_layers, "nextn_predict_layers": 0,
        "hyper_connection.count": shape.streams,
        "hyper_connection.sinkhorn_iterations": shape.sinkhorn,
    }  # fmt: skip
    numbers = {
        "attention.layer_norm_rms_epsilon": 1e-6, "hyper_connection.epsilon": 1e-6,
        "rope.freq_base": shape.rope_base,
        "attention.compress_rope_freq_base": shape.rope_base_compressed,
        "rope.scaling.factor": shape.yarn_factor, "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0, "expert_weights_scale": shape.expert_scale,
    }  # fmt: skip
    for key, count in counts.items():
        writer.add_uint32(p + key, count)
    for key, number in numbers.items():
        writer.add_float32(p + key, number)
    writer.add_bool(p + "expert_weights_norm", True)
    writer.add_string(p + "rope.scaling.type", "yarn")
    value, array = gguf.GGUFValueType, gguf.GGUFValueType.ARRAY
    writer.add_key_value(p + "attention.compress_ratios", list(shape.ratios), array, value.INT32)
    clamps = [shape.clamp] * shape.layers
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_key_value(p + key, clamps, array, value.FLOAT32)
    vocab = dict(tokenizer["model"]["vocab"])
    control = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    vocab |= control
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(tokens)
    kinds = [3 if t in control else 1 for t in tokens]
    writer.add_key_value("tokenizer.ggml.token_type", kinds, array, value.INT32)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write(path: Path, model: Tales, packed: dict[str, np.ndarray], tokenizer: Path) -> None:
    """Write the model; `packed` holds the bytes (E, rows, row bytes) of each routed tensor."""
    writer = gguf.GGUFWriter(path, "deepseek4")
    add_metadata(writer, model.shape, json.loads(tokenizer.read_text(encoding="utf-8")))
    for name, value in model.state_dict().items():
        target = gguf_name(name)
        kind = quantize.mix_type(target)
        data = value.detach().cpu().numpy()
        if name.endswith("attn.o_a"):
            data = data.reshape(-1, data.shape[-1])
        data = packed[target] if target in packed else quantize.encode(data, kind)
        writer.add_tensor(target, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file, dequantized (integers stay integers), by GGUF name."""
    out = {}
    for t in gguf.GGUFReader(path).tensors:
        plain = t.tensor_type in (Kind.F32, Kind.I32)
        out[t.name] = t.data if plain else gguf.quants.dequantize(t.data, t.tensor_type)
    return out


def transformers_state(tensors: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Rename GGUF tensors for `DeepseekV4ForCausalLM`, joining gate and up by rows."""
    out: dict[str, Tensor] = {}
    for name, data in tensors.items():
        value = torch.from_numpy(np.array(data))
        if name in _HF_TOP:
            out[_HF_TOP[name]] = value
            continue
        _, layer, rest = name.split(".", 2)
        rest = rest.rsplit(".", 1)[0]
        prefix = f"model.layers.{layer}."
        if rest == "ffn_up_exps":
            continue
        if rest == "ffn_gate_exps":
            up = torch.from_numpy(np.array(tensors[f"blk.{layer}.ffn_up_exps.weight"]))
            out[prefix + "mlp.experts.gate_up_proj"] = torch.cat((value, up), 1)
        else:
            long = rest == "ffn_gate_tid2eid"
            out[prefix + _HF_BLOCK[rest]] = value.long() if long else value.float()
    return out


def transformers_model(path: Path):  # noqa: ANN201 - transformers is imported only when asked for
    """`DeepseekV4ForCausalLM` in float32 with eager attention on a file's dequantized weights."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    fields = gguf.GGUFReader(path).fields

    def key(name: str):  # noqa: ANN202
        return fields["deepseek4." + name].contents()

    config = DeepseekV4Config(
        vocab_size=key("vocab_size"), hidden_size=key("embedding_length"),
        num_hidden_layers=key("block_count"), num_attention_heads=key("attention.head_count"),
        num_key_value_heads=1, head_dim=key("attention.key_length"),
        qk_rope_head_dim=key("rope.dimension_count"), q_lora_rank=key("attention.q_lora_rank"),
        o_groups=key("attention.output_group_count"), o_lora_rank=key("attention.output_lora_rank"),
        moe_intermediate_size=key("expert_feed_forward_length"),
        n_routed_experts=key("expert_count"), num_experts_per_tok=key("expert_used_count"),
        n_shared_experts=1, num_hash_layers=key("hash_layer_count"),
        compress_ratios=list(key("attention.compress_ratios")),
        sliding_window=key("attention.sliding_window"),
        index_n_heads=key("attention.indexer.head_count"),
        index_head_dim=key("attention.indexer.key_length"),
        index_topk=key("attention.indexer.top_k"), hc_mult=key("hyper_connection.count"),
        hc_sinkhorn_iters=key("hyper_connection.sinkhorn_iterations"), hc_eps=1e-6,
        rms_norm_eps=1e-6, routed_scaling_factor=key("expert_weights_scale"),
        swiglu_limit=key("swiglu_clamp_exp")[0], rope_theta=key("rope.freq_base"),
        compress_rope_theta=key("attention.compress_rope_freq_base"),
        max_position_embeddings=key("context_length"), num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn", "factor": key("rope.scaling.factor"),
            "original_max_position_embeddings": key("rope.scaling.original_context_length"),
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
        attn_implementation="eager",
    )  # fmt: skip
    model = DeepseekV4ForCausalLM(config).float().eval()
    state = transformers_state(read_tensors(path))
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    return model
