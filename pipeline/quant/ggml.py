"""ggml's own quantizers, called through ctypes in the library that libggml-python installs.

The bytes equal those of llama-quantize on x86-64. ``ctypes.CDLL`` releases the GIL, so threads
run in parallel.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import QuantizeError
from pipeline.quant.guard import (
    ABORTS_ON_HUGE,
    check_importance,
    check_magnitude,
    check_width,
    check_writable,
)
from pipeline.quant.types import TYPES, GgmlType

_DISTRIBUTION = "libggml-python"
_INSTALL = f"Install it: pip install {_DISTRIBUTION}."
_LIBRARY = {
    "linux": "lib64/libggml-base.so",
    "darwin": "lib/libggml-base.dylib",
    "win32": "bin/ggml-base.dll",
}
"""``sys.platform`` -> file inside the installed package."""

# ggml_quantize_chunk has no case for these; they would abort the process.
_NOT_WRITTEN = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "F8_E4M3"})
_WRITTEN = frozenset(t.name for t in TYPES.values() if t.family == "mainline") - _NOT_WRITTEN
_ALWAYS_MEASURED = ABORTS_ON_HUGE | {"F16"}
"""Types whose rows are looked at here too: an abort or F16's silent infinity is never right."""


class GgmlQuantizer:
    """Writes every mainline type, F32, F16 and BF16 included; one object serves many threads.

    Raises:
        QuantizeError: The library is missing or cannot be loaded.
    """

    name = "ggml"

    def __init__(self) -> None:
        self._library = _load(_library_path())
        parts = [self._library.ggml_version(), self._library.ggml_commit()]
        ggml, commit = (part.decode() for part in parts)
        # The same sources round differently where the compiler fuses multiply and add (aarch64).
        self.version = (
            f"{_DISTRIBUTION} {importlib.metadata.version(_DISTRIBUTION)}, "
            f"ggml {ggml} ({commit}), {platform.machine()}"
        )

    def can_write(self, ggml_type: GgmlType) -> bool:
        """Whether ggml has an encoder for ``ggml_type``."""
        return ggml_type.name in _WRITTEN

    def prepare(self, types: Iterable[GgmlType]) -> None:
        """Build the grids of the IQ types (seconds for some) and compare the library's row sizes.

        Raises:
            QuantizeError: A type that ggml cannot write, or another block size than ours.
        """
        for ggml_type in types:
            check_writable(self, ggml_type)
            found = self._library.ggml_row_size(ggml_type.type_id, ggml_type.block)
            if found != ggml_type.block_nbytes:
                raise QuantizeError(
                    f"the library stores {ggml_type.name} in another block size",
                    expected=ggml_type.block_nbytes,
                    found=found,
                    next_step=f"Install another version of {_DISTRIBUTION}.",
                )
            self._library.ggml_quantize_init(ggml_type.type_id)

    def quantize(
        self,
        ggml_type: GgmlType,
        rows: NDArray[np.float32],
        out: NDArray[np.uint8],
        importance: NDArray[np.float32] | None,
    ) -> None:
        """Encode ``rows`` [n, n_cols] into ``out`` [n, row_nbytes]; see `Quantizer.quantize`."""
        check_writable(self, ggml_type)
        n_rows, n_cols = rows.shape
        check_width(ggml_type, n_cols)
        check_importance(ggml_type, importance, n_cols)
        if ggml_type.name in _ALWAYS_MEASURED:
            check_magnitude(ggml_type, rows, importance)
        _check_buffer("rows", rows, np.float32, rows.shape)
        _check_buffer("out", out, np.uint8, (n_rows, ggml_type.row_nbytes(n_cols)))
        if importance is not None:
            _check_buffer("importance", importance, np.float32, (n_cols,))
        written = self._library.ggml_quantize_chunk(
            ggml_type.type_id,
            rows.ctypes.data,
            out.ctypes.data,
            0,
            n_rows,
            n_cols,
            None if importance is None else importance.ctypes.data,
        )
        if written != out.nbytes:
            raise QuantizeError(
                f"ggml wrote another number of bytes of {ggml_type.name}",
                expected=out.nbytes,
                found=written,
            )


def _library_path() -> Path:
    spec = importlib.util.find_spec("libggml")
    file = _LIBRARY.get(sys.platform)
    if spec is None or not spec.submodule_search_locations or file is None:
        raise QuantizeError("the ggml library is not installed", next_step=_INSTALL)
    return Path(spec.submodule_search_locations[0]) / file


def _load(path: Path) -> ctypes.CDLL:
    # The library's abort handler starts a debugger on the process unless told not to, which can
    # hang for minutes. It reads only the environment, so there is no other way to tell it.
    os.environ["GGML_NO_BACKTRACE"] = "1"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise QuantizeError(
            "the ggml library cannot be loaded", file=path, found=str(error), next_step=_INSTALL
        ) from error
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, tuple[object, list[object]]] = {
        "ggml_version": (ctypes.c_char_p, []),
        "ggml_commit": (ctypes.c_char_p, []),
        "ggml_row_size": (ctypes.c_size_t, [ctypes.c_int, count]),
        "ggml_quantize_init": (None, [ctypes.c_int]),
        "ggml_quantize_chunk": (
            ctypes.c_size_t,
            [ctypes.c_int, pointer, pointer, count, count, count, pointer],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def _check_buffer(
    name: str,
    array: NDArray[np.float32] | NDArray[np.uint8],
    dtype: type[np.generic],
    shape: tuple[int, ...],
) -> None:
    """Refuse a buffer that C would read or write past."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise QuantizeError(
            f"{name} is not the buffer that ggml expects",
            expected=f"C-contiguous {np.dtype(dtype).name} {shape}",
            found=f"{array.dtype.name} {array.shape}, strides {array.strides}",
        )
