"""ggml's own quantizers, called through ctypes in the library that libggml-python installs.

The bytes equal those of llama-quantize on x86-64.
"""

from __future__ import annotations

import ctypes
import platform
from typing import ClassVar

from pipeline.quant.guard import ABORTS_ON_HUGE
from pipeline.quant.library import LibraryQuantizer, Package, Signatures
from pipeline.quant.types import TYPES

_DISTRIBUTION = "libggml-python"

# ggml_quantize_chunk has no case for these; they would abort the process.
_NOT_WRITTEN = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "F8_E4M3"})


class GgmlQuantizer(LibraryQuantizer):
    """Writes every mainline type, F32, F16 and BF16 included; one object serves many threads.

    Raises:
        QuantizeError: The library is missing or cannot be loaded.
    """

    name = "ggml"
    package = Package(
        title="ggml",
        module="libggml",
        distribution=_DISTRIBUTION,
        files={
            "linux": "lib64/libggml-base.so",
            "darwin": "lib/libggml-base.dylib",
            "win32": "bin/ggml-base.dll",
        },
        install=_DISTRIBUTION,
    )
    written = frozenset(t.name for t in TYPES.values() if t.family == "mainline") - _NOT_WRITTEN
    # An abort or F16's silent infinity is never right.
    always_measured = ABORTS_ON_HUGE | {"F16"}
    signatures: ClassVar[Signatures] = {
        "ggml_version": (ctypes.c_char_p, []),
        "ggml_commit": (ctypes.c_char_p, []),
    }

    def __init__(self) -> None:
        super().__init__()
        parts = [self._library.ggml_version(), self._library.ggml_commit()]
        ggml, commit = (part.decode() for part in parts)
        # The same sources round differently where the compiler fuses multiply and add (aarch64).
        self.version = (
            f"{_DISTRIBUTION} {self.package.version}, ggml {ggml} ({commit}), {platform.machine()}"
        )
