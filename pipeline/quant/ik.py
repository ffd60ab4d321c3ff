"""ik_llama.cpp's own types, written and read by the library that ik-llama-cpp-python installs.

The package is optional; nothing else needs it. Its ``ggml_quantize_chunk`` had seven arguments and
has eight since ikawrakow/ik_llama.cpp pull request 1677: a last null pointer suits both.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TypeRuleError
from pipeline.files import sha256_of
from pipeline.quant.guard import ABORTS_ON_HUGE
from pipeline.quant.library import COUNT, POINTER, LibraryQuantizer, Package, Signatures
from pipeline.quant.types import TYPES, GgmlType

_DISTRIBUTION = "ik-llama-cpp-python"

IMPORTANCE_TOP = 15
"""The largest importance of a call is brought to just below this power of two. The kernels search
blocks whose importance sums to next to nothing (1e-6 for some) as if there were none; apart from
that a common factor changes nothing, and a power of two no rounding. With so much of it
`max_magnitude` stays that of rows without importance."""

_RAISED = frozenset({"IQ3_KT"})
"""Types whose search ends the process on blocks whose weights are below about 1e-3 and differ
widely in size: it squares sums that have become zero. Rows are raised by a power of two and their
f32 scales, which stand first in the stored row, lowered by it: the same bytes, where both
succeed."""

_RAISED_TOP = 13
"""Below this power of two the largest weight of a raised row comes to lie."""

_RAISED_LEAST = 2.0**-9
"""Raised blocks below this are zeros: against the row's scale they are too small to be stored."""


class _InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", POINTER),
        ("no_alloc", ctypes.c_bool),
    )


class IkQuantizer(LibraryQuantizer):
    """Writes and reads ik_llama.cpp's own types; one object serves many threads.

    Raises:
        QuantizeError: The library is missing or cannot be loaded.
    """

    name = "ik"
    package = Package(
        title="ik_llama.cpp",
        module="ik_llama_cpp",
        distribution=_DISTRIBUTION,
        files={
            "linux": "lib/libggml.so",
            "darwin": "lib/libggml.dylib",
            "win32": "lib/ggml.dll",
        },
        install=_DISTRIBUTION,
    )
    written = frozenset(t.name for t in TYPES.values() if t.family == "ik")
    always_measured = ABORTS_ON_HUGE
    signatures: ClassVar[Signatures] = {
        "ggml_init": (POINTER, [_InitParams]),
        "ggml_free": (None, [POINTER]),
        "ggml_quantize_chunk": (
            ctypes.c_size_t,
            [ctypes.c_int, POINTER, POINTER, COUNT, COUNT, COUNT, POINTER, POINTER],
        ),
    }
    last_arguments = (None,)

    def __init__(self) -> None:
        super().__init__()
        # Fills the table of f16 numbers, without which every f16 scale is read as zero.
        self._library.ggml_free(self._library.ggml_init(_InitParams(1 << 10, None, True)))
        # The library tells no commit, and what is built elsewhere has the same version.
        digest = sha256_of(self.package.path())
        self.version = (
            f"{_DISTRIBUTION} {self.package.version}, library {digest[:12]}, {platform.machine()}"
        )

    def prepare(self, types: Iterable[GgmlType]) -> None:
        """Build the tables of ``types``; see `LibraryQuantizer.prepare`.

        Those of the trellis types are built by the first row, here one that is thrown away.
        """
        types = list(types)
        super().prepare(types)
        with _stdout_on_stderr():
            for ggml_type in types:
                row = np.linspace(-1, 1, ggml_type.block, dtype=np.float32)[None]
                out = np.empty((1, ggml_type.row_nbytes(row.size)), np.uint8)
                self.quantize(ggml_type, row, out, np.ones(row.size, np.float32))

    def _encode(
        self,
        ggml_type: GgmlType,
        rows: NDArray[np.float32],
        out: NDArray[np.uint8],
        importance: NDArray[np.float32] | None,
    ) -> None:
        if importance is not None:
            exponent = IMPORTANCE_TOP - math.frexp(float(importance.max()))[1]
            importance = np.ldexp(importance, exponent)
        if ggml_type.name not in _RAISED:
            super()._encode(ggml_type, rows, out, importance)
            return
        exponents, raised = _raise(rows, ggml_type.block)
        super()._encode(ggml_type, raised, out, importance)
        heads = out[:, :4].copy().view("<f4")
        out[:, :4] = np.ldexp(heads, -exponents).view(np.uint8)

    def dequantize(
        self, ggml_type: GgmlType, rows: NDArray[np.uint8], n_cols: int
    ) -> NDArray[np.float32]:
        """``rows`` [n, row_nbytes] as weights [n, n_cols].

        Raises:
            TypeRuleError: A type that the library cannot read, or rows of another length.
        """
        decode = getattr(self._library, f"dequantize_row_{ggml_type.planner_name}", None)
        if decode is None:
            raise TypeRuleError(f"{self.name} cannot read {ggml_type.name}")
        rows = np.ascontiguousarray(rows)
        self._check_buffer("rows", rows, np.uint8, (len(rows), ggml_type.row_nbytes(n_cols)))
        decode.restype, decode.argtypes = None, [POINTER, POINTER, COUNT]
        out = np.empty((len(rows), n_cols), np.float32)
        # One by one: the function knows of a single row's meta bytes.
        for stored, row in zip(rows, out, strict=True):
            decode(stored.ctypes.data, row.ctypes.data, n_cols)
        return out


def _raise(rows: NDArray[np.float32], block: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The power of two for each row as [n, 1], and the rows raised by it; see `_RAISED`."""
    top = np.abs(rows).max(axis=1, keepdims=True)
    exponents = np.where(top > 0, _RAISED_TOP - np.frexp(top)[1], 0).astype(np.int32)
    raised = np.ldexp(rows, exponents)
    blocks = raised.reshape(len(rows), -1, block)
    blocks[np.abs(blocks).max(axis=2) < _RAISED_LEAST] = 0
    return exponents, raised


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Keep what the library says while it builds tables out of what others read from our stdout."""
    # A stream that was closed from the start has given its number to another file.
    if os.name != "posix" or None in (sys.stdout, sys.stderr):
        yield
        return
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
