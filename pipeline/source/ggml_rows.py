"""Rows of ggml types as values: what a finished GGUF stores, decoded like a checkpoint's codes."""

from __future__ import annotations

import numpy as np

from pipeline.quant.dequant import dequantize
from pipeline.quant.types import TYPES
from pipeline.source.decode import F32, U8, f32_bound

LOSSLESS = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "MXFP4"})
"""Types that hold what a checkpoint of these models stores, or all but the tiniest of it: whoever
quantizes such rows loses something for the first time. FP4 experts are MXFP4 bit for bit."""


def decode_ggml(type_name: str, rows: U8, out: F32) -> float:
    """Fill ``out`` [n, n_cols] with the weights of ``rows`` [n, row bytes] of a ggml type.

    Returns their largest absolute value.

    Raises:
        BadCodeError: A weight is NaN or infinite, as a damaged scale makes it.
        TypeRuleError: The type cannot be decoded here.
    """
    # A scale of any bits may be multiplied by anything: the bound tells, not numpy.
    with np.errstate(all="ignore"):
        out[...] = dequantize(TYPES[type_name], rows, out.shape[1])
    return f32_bound(out.view(np.uint32))
