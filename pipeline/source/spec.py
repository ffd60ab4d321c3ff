"""What a stored tensor is, and how a matrix of weights is stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

DTYPE_NBYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
}
"""Bytes per element of the safetensors dtypes that these checkpoints use."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape (numpy order) of a stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


class Codec(StrEnum):
    """How the values of a matrix are stored."""

    F32 = "f32"
    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3fn bytes, one E8M0 scale per scale block."""
    FP4 = "fp4"
    """e2m1 nibbles, element 2k in the low half of byte k; one E8M0 scale per 32 of a row."""
    I64 = "i64"
    """Integer tables (V4's hash routing)."""
    GGML = "ggml"
    """Rows of a ggml type, as a GGUF holds them."""


@dataclass(frozen=True, slots=True)
class Picks:
    """Entries taken along the first axis of a stored tensor that has ``n_stored`` of them.

    An entry is a matrix of a stack, a row of a matrix or an element of a vector. A ``range`` (of
    step 1) stands for entries one after the other, of which there may be millions.
    """

    entries: tuple[int, ...] | range
    n_stored: int


@dataclass(frozen=True, slots=True)
class MatrixRef:
    """One stored matrix by name: its values and, for FP8 and FP4, its scales.

    ``n_rows`` x ``n_cols`` counts weights, not bytes; a vector is one row. ``block`` is
    the (rows, columns) rectangle that shares a scale, ``(1, 1)`` where there is none. ``picks``:
    not all of what is stored, but these entries (without scales only). A stack of matrices counts
    as one whose rows lie one matrix after the other. ``ggml_type`` names the type of ``GGML`` rows.
    """

    codec: Codec
    weight: str
    scale: str | None
    n_rows: int
    n_cols: int
    block: tuple[int, int] = (1, 1)
    picks: Picks | None = None
    ggml_type: str | None = None

    @property
    def source_names(self) -> tuple[str, ...]:
        """The stored tensors this matrix is read from."""
        return (self.weight,) if self.scale is None else (self.weight, self.scale)
