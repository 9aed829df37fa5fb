"""GGUF model files: a checked header, mapped tensors, and the definition of a weight's value."""

from ds4.gguf.constants import QuantType
from ds4.gguf.quants import IQ2_XXS_GRID, IQ2_XXS_SIGNS, MXFP4_VALUES, dequantize, read_i32
from ds4.gguf.reader import GGUFFile, TensorInfo, Value
from ds4.gguf.strings import StringArray

__all__ = [
    "IQ2_XXS_GRID",
    "IQ2_XXS_SIGNS",
    "MXFP4_VALUES",
    "GGUFFile",
    "QuantType",
    "StringArray",
    "TensorInfo",
    "Value",
    "dequantize",
    "read_i32",
]
