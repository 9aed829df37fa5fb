"""Along what each tensor of a DeepSeek V4 file may be cut.

A cut follows the arithmetic of `shards.py`, so it always falls on shard boundaries:

* routed experts and the lanes of the shared expert are cut in both modes, because shard v of the
  feed-forward sum is `routed_v + shared_v` and a rank computes its own shards only;
* output groups (query heads with them) and vocabulary rows are cut in tensor-parallel mode only;
  in expert-parallel mode every rank computes attention and logits in full;
* everything else decides what is selected (norms, router, compressor, indexer, streams, the one KV
  head), is needed by every rank, and is kept whole.

Names, shapes and classes are those of `ds4.model.deepseek4.tensors`; byte ranges are in
`tensor_parallel.py`.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["Cut", "Mode", "cut_of"]


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

    @property
    def is_columns(self) -> bool:
        """Whether the contiguous axis is cut, so that a slice is one piece per row."""
        return self in (Cut.LANE_COLUMNS, Cut.GROUP_COLUMNS)


_LAYER_CUTS: Final[dict[str, Cut]] = {
    "attn_q_b.weight": Cut.GROUP_ROWS,
    "attn_sinks.weight": Cut.GROUP_ROWS,
    "attn_output_a.weight": Cut.GROUP_ROWS,
    "attn_output_b.weight": Cut.GROUP_COLUMNS,
    "ffn_gate_exps.weight": Cut.EXPERTS,
    "ffn_up_exps.weight": Cut.EXPERTS,
    "ffn_down_exps.weight": Cut.EXPERTS,
    "ffn_gate_shexp.weight": Cut.LANE_ROWS,
    "ffn_up_shexp.weight": Cut.LANE_ROWS,
    "ffn_down_shexp.weight": Cut.LANE_COLUMNS,
}


def cut_of(name: str) -> Cut:
    """Cut of a tensor by its full name in the file. Names that are in no table are not cut."""
    if name == "output.weight":
        return Cut.VOCABULARY
    if name.startswith("blk."):
        # Not just the end of the name: `indexer.attn_q_b.weight` is another tensor than
        # `attn_q_b.weight` and is kept whole.
        return _LAYER_CUTS.get(name.split(".", 2)[-1], Cut.NONE)
    return Cut.NONE
