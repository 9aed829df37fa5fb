"""Which tensor of a DeepSeek V4 file belongs to which class, and along what it may be cut.

One row per tensor name. A cut follows the arithmetic of `shards.py`, so it always falls on shard
boundaries:

* routed experts and the lanes of the shared expert are cut in both modes, because shard v of the
  feed-forward sum is `routed_v + shared_v` and a rank computes its own shards only;
* output groups (query heads with them) and vocabulary rows are cut in tensor-parallel mode only;
  in expert-parallel mode every rank computes attention and logits in full;
* everything else decides what is selected (norms, router, compressor, indexer, streams, the one KV
  head), is needed by every rank, and is kept whole.

Knows nothing of files; byte ranges are in `tensor_parallel.py`.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

import attrs

from ds4.errors import ConfigError

__all__ = ["Cut", "Mode", "Rule", "TensorClass", "rule_for"]


class Mode(Enum):
    """How a world divides the model. A world of one is the same in both."""

    EXPERT_PARALLEL = "ep"
    TENSOR_PARALLEL = "tp"


class Cut(Enum):
    """Along what a tensor is cut."""

    NONE = "replicated"
    EXPERTS = "experts"
    LANE_ROWS = "shared-expert lanes, rows"
    LANE_COLUMNS = "shared-expert lanes, columns"
    GROUP_ROWS = "output groups, rows"
    GROUP_COLUMNS = "output groups, columns"
    VOCABULARY = "vocabulary rows"

    def applies(self, mode: Mode) -> bool:
        """Whether a world of this mode makes this cut."""
        if self is Cut.NONE:
            return False
        return mode is Mode.TENSOR_PARALLEL or self in (
            Cut.EXPERTS,
            Cut.LANE_ROWS,
            Cut.LANE_COLUMNS,
        )


class TensorClass(Enum):
    """Classes in which bytes are accounted."""

    EMBEDDING = "token_embd"
    OUTPUT = "output"
    ATTENTION = "attention"
    COMPRESSOR = "compressor"
    INDEXER = "indexer"
    STREAMS = "hyper_connections"
    ROUTER = "router"
    HASH_TABLE = "tid2eid"
    ROUTED_GATE_UP = "routed_gate_up"
    ROUTED_DOWN = "routed_down"
    SHARED = "shared_expert"
    NORMS = "norms"


@attrs.frozen
class Rule:
    """Class and cut of one tensor.

    Attributes:
      tensor_class: for accounting.
      cut: along what.
      layer: layer number, or None for tensors of the whole model.
    """

    tensor_class: TensorClass
    cut: Cut
    layer: int | None = None


_C = TensorClass

_MODEL: Final[dict[str, tuple[TensorClass, Cut]]] = {
    "token_embd.weight": (_C.EMBEDDING, Cut.NONE),
    "output.weight": (_C.OUTPUT, Cut.VOCABULARY),
    "output_norm.weight": (_C.NORMS, Cut.NONE),
    "output_hc_fn.weight": (_C.STREAMS, Cut.NONE),
    "output_hc_base.weight": (_C.STREAMS, Cut.NONE),
    "output_hc_scale.weight": (_C.STREAMS, Cut.NONE),
}

_LAYER: Final[dict[str, tuple[TensorClass, Cut]]] = {
    "attn_norm.weight": (_C.NORMS, Cut.NONE),
    "attn_q_a.weight": (_C.ATTENTION, Cut.NONE),
    "attn_q_a_norm.weight": (_C.NORMS, Cut.NONE),
    "attn_q_b.weight": (_C.ATTENTION, Cut.GROUP_ROWS),
    "attn_kv.weight": (_C.ATTENTION, Cut.NONE),
    "attn_kv_a_norm.weight": (_C.NORMS, Cut.NONE),
    "attn_sinks.weight": (_C.NORMS, Cut.GROUP_ROWS),
    "attn_output_a.weight": (_C.ATTENTION, Cut.GROUP_ROWS),
    "attn_output_b.weight": (_C.ATTENTION, Cut.GROUP_COLUMNS),
    "attn_compressor_kv.weight": (_C.COMPRESSOR, Cut.NONE),
    "attn_compressor_gate.weight": (_C.COMPRESSOR, Cut.NONE),
    "attn_compressor_ape.weight": (_C.COMPRESSOR, Cut.NONE),
    "attn_compressor_norm.weight": (_C.NORMS, Cut.NONE),
    "indexer.attn_q_b.weight": (_C.INDEXER, Cut.NONE),
    "indexer.proj.weight": (_C.INDEXER, Cut.NONE),
    "indexer_compressor_kv.weight": (_C.INDEXER, Cut.NONE),
    "indexer_compressor_gate.weight": (_C.INDEXER, Cut.NONE),
    "indexer_compressor_ape.weight": (_C.INDEXER, Cut.NONE),
    "indexer_compressor_norm.weight": (_C.NORMS, Cut.NONE),
    "ffn_norm.weight": (_C.NORMS, Cut.NONE),
    "ffn_gate_inp.weight": (_C.ROUTER, Cut.NONE),
    "exp_probs_b.bias": (_C.ROUTER, Cut.NONE),
    "ffn_gate_tid2eid.weight": (_C.HASH_TABLE, Cut.NONE),
    "ffn_gate_exps.weight": (_C.ROUTED_GATE_UP, Cut.EXPERTS),
    "ffn_up_exps.weight": (_C.ROUTED_GATE_UP, Cut.EXPERTS),
    "ffn_down_exps.weight": (_C.ROUTED_DOWN, Cut.EXPERTS),
    "ffn_gate_shexp.weight": (_C.SHARED, Cut.LANE_ROWS),
    "ffn_up_shexp.weight": (_C.SHARED, Cut.LANE_ROWS),
    "ffn_down_shexp.weight": (_C.SHARED, Cut.LANE_COLUMNS),
    **{
        f"hc_{part}_{piece}.weight": (_C.STREAMS, Cut.NONE)
        for part in ("attn", "ffn")
        for piece in ("fn", "base", "scale")
    },
}

_BLOCK_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)")


def rule_for(name: str, n_layers: int) -> Rule | None:
    """Return the rule of a tensor, or None when it belongs to a draft block behind the last layer.

    Raises:
      ConfigError: no tensor of this family has that name.
    """
    if name in _MODEL:
        return Rule(*_MODEL[name])
    if match := _BLOCK_NAME.fullmatch(name):
        layer = int(match[1])
        if layer >= n_layers:
            return None
        if match[2] in _LAYER:
            return Rule(*_LAYER[match[2]], layer)
    raise ConfigError(f"tensor {name!r:.120}: no rule says which rank keeps it")
