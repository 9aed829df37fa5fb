"""Tags and sizes of the GGUF container.

Pure data: what a number in a file means and how many bytes it takes. The bytes of the blocks
themselves are explained in `quants.py`.

Source: the GGUF specification and the type list of ggml. The `gguf` package holds the same tables;
it is the oracle of the tests and is not imported at run time, because importing it is slow.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import attrs

__all__ = [
    "BLOCKS",
    "DEFAULT_ALIGNMENT",
    "GGML_TYPE_NAMES",
    "MAGIC",
    "MAX_DIMS",
    "VERSIONS",
    "BlockLayout",
    "QuantType",
    "ValueType",
    "type_name",
]

MAGIC: Final = b"GGUF"
# Version 2 differs from 3 only in that 3 also allows big-endian files.
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4


class ValueType(IntEnum):
    """Type tag of a metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class QuantType(IntEnum):
    """Tensor types that ds4 computes with; the numbers are ggml's."""

    F32 = 0
    F16 = 1
    Q8_0 = 8
    Q2_K = 10
    Q4_K = 12
    IQ2_XXS = 16
    I32 = 26
    BF16 = 30
    MXFP4 = 39

    @property
    def block_elements(self) -> int:
        """Weights in one block."""
        return BLOCKS[self].n_elements

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return BLOCKS[self].n_bytes


@attrs.frozen
class BlockLayout:
    """Size of one quant block; plain types have blocks of one element."""

    n_elements: int
    n_bytes: int


BLOCKS: Final[dict[QuantType, BlockLayout]] = {
    QuantType.F32: BlockLayout(1, 4),
    QuantType.F16: BlockLayout(1, 2),
    QuantType.Q8_0: BlockLayout(32, 34),
    QuantType.Q2_K: BlockLayout(256, 84),
    QuantType.Q4_K: BlockLayout(256, 144),
    QuantType.IQ2_XXS: BlockLayout(256, 66),
    QuantType.I32: BlockLayout(1, 4),
    QuantType.BF16: BlockLayout(1, 2),
    QuantType.MXFP4: BlockLayout(32, 17),
}

# Every assigned ggml id, so that an error can say what a refused tensor is. Forks have used 40 and
# 41 for private formats; such a file is refused like any other that carries an id not in `BLOCKS`.
GGML_TYPE_NAMES: Final[dict[int, str]] = {
    **{int(t): t.name for t in QuantType},
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    11: "Q3_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}


def type_name(type_id: int) -> str:
    """Name and number of a ggml type, for error texts."""
    name = GGML_TYPE_NAMES.get(type_id)
    return f"unknown type {type_id}" if name is None else f"{name} (type {type_id})"
