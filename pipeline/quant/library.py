"""A shared library of the ggml family behind ctypes: found, loaded, asked to encode rows.

``ctypes.CDLL`` releases the GIL, so threads run in parallel. Every call into C stands behind the
checks of `pipeline.quant.guard`: the libraries end the process where they should refuse.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import QuantizeError
from pipeline.quant.guard import (
    check_importance,
    check_magnitude,
    check_width,
    check_writable,
)
from pipeline.quant.types import GgmlType

_N_BLOCKS = (1, 2, 9, 20)
"""Row widths, in blocks, at which the library's row sizes are compared with ours."""

Signatures = Mapping[str, tuple[object, list[object]]]
"""Function -> (type of the result, types of the arguments)."""


@dataclass(frozen=True, slots=True)
class Package:
    """Where an installed package keeps its library."""

    title: str
    """What messages call the library."""
    module: str
    distribution: str
    files: Mapping[str, str]
    """``sys.platform`` -> file inside the module."""
    install: str
    """What to give to pip."""

    @property
    def version(self) -> str:
        """Of the installed distribution."""
        return importlib.metadata.version(self.distribution)

    @property
    def next_step(self) -> str:
        """How to get it, as a sentence."""
        return f"Install it: pip install {self.install}."

    @property
    def is_installed(self) -> bool:
        """Whether the package is there; its library is not opened."""
        return importlib.util.find_spec(self.module) is not None

    def path(self) -> Path:
        """The library's file.

        Raises:
            QuantizeError: The package is not installed, or has none for this platform.
        """
        spec = importlib.util.find_spec(self.module)
        file = self.files.get(sys.platform)
        if spec is None or not spec.submodule_search_locations or file is None:
            raise QuantizeError(
                f"the {self.title} library is not installed", next_step=self.next_step
            )
        return Path(spec.submodule_search_locations[0]) / file

    def load(self, signatures: Signatures) -> ctypes.CDLL:
        """The opened library with the types of its functions declared.

        Raises:
            QuantizeError: It is missing, cannot be loaded or lacks one of the functions.
        """
        path = self.path()
        # ggml's abort handler starts a debugger on the process unless told not to, which can hang
        # for minutes. It reads only the environment, so there is no other way to tell it; ik's
        # cannot be told.
        os.environ["GGML_NO_BACKTRACE"] = "1"
        try:
            library = ctypes.CDLL(str(path))
            for name, (result, arguments) in signatures.items():
                function = getattr(library, name)
                function.restype = result
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise QuantizeError(
                f"the {self.title} library cannot be loaded",
                file=path,
                found=str(error),
                next_step=self.next_step,
            ) from error
        return library


POINTER, COUNT = ctypes.c_void_p, ctypes.c_int64

_SIGNATURES: Signatures = {
    "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_row_size": (ctypes.c_size_t, [ctypes.c_int, COUNT]),
    "ggml_quantize_init": (None, [ctypes.c_int]),
    "ggml_quantize_chunk": (
        ctypes.c_size_t,
        [ctypes.c_int, POINTER, POINTER, COUNT, COUNT, COUNT, POINTER],
    ),
}


class LibraryQuantizer:
    """What the quantizers over libraries of the ggml family have in common.

    Raises:
        QuantizeError: The library is missing or cannot be loaded.
    """

    name: str
    version: str
    package: Package
    written: frozenset[str]
    """The types that it has an encoder for."""
    always_measured: frozenset[str]
    """Types whose rows are looked at before each call, whatever a caller has checked."""
    signatures: ClassVar[Signatures] = {}
    """Functions beyond those that every library has, or that it declares otherwise."""
    last_arguments: tuple[None, ...] = ()
    """What its ``ggml_quantize_chunk`` takes after the importance."""

    def __init__(self) -> None:
        self._library = self.package.load({**_SIGNATURES, **self.signatures})

    def can_write(self, ggml_type: GgmlType) -> bool:
        """Whether the library has an encoder for ``ggml_type``."""
        return ggml_type.name in self.written

    def prepare(self, types: Iterable[GgmlType]) -> None:
        """Build the tables of ``types`` (seconds for some) and compare names and row sizes.

        Raises:
            QuantizeError: A type that the library cannot write, or has otherwise than we.
        """
        for ggml_type in types:
            check_writable(self, ggml_type)
            self._compare(ggml_type)
            self._library.ggml_quantize_init(ggml_type.type_id)

    def _compare(self, ggml_type: GgmlType) -> None:
        # The name first: the library divides by the block of a number that it does not know.
        name = self._library.ggml_type_name(ggml_type.type_id)
        facts = [("under another name", ggml_type.planner_name, (name or b"none").decode())]
        if name == ggml_type.planner_name.encode():
            for n_cols in (n * ggml_type.block for n in _N_BLOCKS):
                size = self._library.ggml_row_size(ggml_type.type_id, n_cols)
                facts.append(
                    (
                        f"in rows of another size ({n_cols} weights)",
                        f"{ggml_type.row_nbytes(n_cols):,} bytes",
                        f"{size:,} bytes",
                    )
                )
        for how, expected, found in facts:
            if expected != found:
                raise QuantizeError(
                    f"the {self.package.title} library stores {ggml_type.name} {how}",
                    expected=expected,
                    found=found,
                    next_step=f"Install another version of {self.package.distribution}.",
                )

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
        if ggml_type.name in self.always_measured:
            check_magnitude(ggml_type, rows, importance)
        self._check_buffer("rows", rows, np.float32, rows.shape)
        self._check_buffer("out", out, np.uint8, (n_rows, ggml_type.row_nbytes(n_cols)))
        if importance is not None:
            self._check_buffer("importance", importance, np.float32, (n_cols,))
        self._encode(ggml_type, rows, out, importance)

    def _encode(
        self,
        ggml_type: GgmlType,
        rows: NDArray[np.float32],
        out: NDArray[np.uint8],
        importance: NDArray[np.float32] | None,
    ) -> None:
        """`quantize` after its checks."""
        written = self._library.ggml_quantize_chunk(
            ggml_type.type_id,
            rows.ctypes.data,
            out.ctypes.data,
            0,
            *rows.shape,
            None if importance is None else importance.ctypes.data,
            *self.last_arguments,
        )
        if written != out.nbytes:
            raise QuantizeError(
                f"{self.name} wrote another number of bytes of {ggml_type.name}",
                expected=out.nbytes,
                found=written,
            )

    def _check_buffer(
        self,
        name: str,
        array: NDArray[np.float32] | NDArray[np.uint8],
        dtype: type[np.generic],
        shape: tuple[int, ...],
    ) -> None:
        """Refuse a buffer that C would read or write past."""
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise QuantizeError(
                f"{name} is not the buffer that {self.name} expects",
                expected=f"C-contiguous {np.dtype(dtype).name} {shape}",
                found=f"{array.dtype.name} {array.shape}, strides {array.strides}",
            )
