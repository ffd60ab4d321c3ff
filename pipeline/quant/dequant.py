"""Stored rows back to float32, to measure what a type lost.

Most types are decoded by ``gguf.quants``; the rest, which it lacks, after ggml's
``ggml-quants.c`` (``dequantize_row_q1_0``, ``_q2_0``) and the OCP 8-bit float format. The types of
ik_llama.cpp are decoded by its own library, where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import version

import gguf
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TypeRuleError
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.types import TYPES, GgmlType

Rows = NDArray[np.uint8]
Floats = NDArray[np.float32]


def can_decode(ggml_type: GgmlType) -> bool:
    """Whether `dequantize` takes ``ggml_type``: an ik type only where its library is installed."""
    return ggml_type.family == "mainline" or IkQuantizer.package.is_installed


def dequantize(ggml_type: GgmlType, rows: NDArray[np.uint8], n_cols: int) -> NDArray[np.float32]:
    """``rows`` [n, row_nbytes] of ``ggml_type`` as weights [n, n_cols].

    Raises:
        TypeRuleError: Rows of another length.
        QuantizeError: An ik type, and the library that decodes it is missing.
    """
    if rows.shape[1] != ggml_type.row_nbytes(n_cols):
        raise TypeRuleError(
            f"these rows are not {n_cols:,} weights of {ggml_type.name}",
            expected=f"{ggml_type.row_nbytes(n_cols):,} bytes a row",
            found=f"{rows.shape[1]:,}",
        )
    if ggml_type.family == "ik":
        return _ik().dequantize(ggml_type, rows, n_cols)
    rows = np.ascontiguousarray(rows)
    decode = _OWN.get(ggml_type.name)
    if decode is None:
        number = gguf.GGMLQuantizationType(ggml_type.type_id)
        return np.asarray(gguf.quants.dequantize(rows, number), dtype=np.float32)
    return decode(rows).reshape(len(rows), n_cols)


def decoders_of(types: Iterable[GgmlType]) -> str:
    """What decodes ``types``, for digests of what is made of their values.

    Raises:
        QuantizeError: An ik type, and its library is missing.
    """
    families = {ggml_type.family for ggml_type in types}
    names = [f"gguf {version('gguf')}"] if "mainline" in families else []
    return "; ".join([*names, *([_ik().version] if "ik" in families else [])])


@cache
def _ik() -> IkQuantizer:
    return IkQuantizer()


def _plain(dtype: str) -> Callable[[Rows], Floats]:
    return lambda rows: rows.view(dtype).astype(np.float32)


def _blocks(rows: Rows, name: str) -> Rows:
    return rows.reshape(-1, TYPES[name].block_nbytes)


def _q1_0(rows: Rows) -> Floats:
    """f16 scale, then one bit a weight, lowest first: 1 is +scale, 0 is -scale."""
    blocks = _blocks(rows, "Q1_0")
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
    return scale * (2 * bits - 1)


def _q2_0(rows: Rows) -> Floats:
    """f16 scale, then two bits a weight, lowest first: code - 1."""
    blocks = _blocks(rows, "Q2_0")
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    codes = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return scale * (codes.reshape(len(blocks), -1).astype(np.float32) - 1)


def _q8_1(rows: Rows) -> Floats:
    """f16 scale, an f16 sum that only dot products use, 32 signed bytes."""
    blocks = _blocks(rows, "Q8_1")
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return scale * blocks[:, 4:].view(np.int8).astype(np.float32)


def _q8_k(rows: Rows) -> Floats:
    """f32 scale, 256 signed bytes, sixteen i16 sums that only dot products use."""
    blocks = _blocks(rows, "Q8_K")
    scale: Floats = blocks[:, :4].copy().view("<f4")
    return scale * blocks[:, 4:260].view(np.int8).astype(np.float32)


def _e4m3_table() -> Floats:
    """All 256 codes of e4m3fn: bias 7, subnormals, no infinity, NaN at 0x7F and 0xFF."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    fraction = np.where(exponent == 0, mantissa / 8, 1 + mantissa / 8)
    value = np.ldexp(fraction, np.maximum(exponent, 1) - 7)
    value[code & 0x7F == 0x7F] = np.nan
    signed: Floats = np.where(code & 0x80, -value, value).astype(np.float32)
    return signed


_E4M3 = _e4m3_table()

_OWN: Mapping[str, Callable[[Rows], Floats]] = {
    "I8": _plain("i1"),
    "I16": _plain("<i2"),
    "I32": _plain("<i4"),
    "I64": _plain("<i8"),
    "F64": _plain("<f8"),
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "Q8_1": _q8_1,
    "Q8_K": _q8_k,
    "F8_E4M3": lambda rows: _E4M3[rows],
}
