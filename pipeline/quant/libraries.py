"""All quantizer libraries behind one face: each type goes to the one that writes it."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from pipeline.quant.backend import Quantizer
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.types import GgmlType


class Libraries:
    """A `Quantizer` for every type that can be written; one object serves many threads.

    ik_llama.cpp's library is optional and is opened when a type of its own is first used.

    Raises:
        QuantizeError: ggml's library is missing or cannot be loaded; on first use, ik's.
    """

    def __init__(self) -> None:
        self._ggml = GgmlQuantizer()
        self._ik: IkQuantizer | None = None
        self._opening = Lock()

    @property
    def name(self) -> str:
        """Of the library that writes most types."""
        return self._ggml.name

    @property
    def version(self) -> str:
        """Of that library alone; what a file's bytes depend on says `version_of`."""
        return self._ggml.version

    def version_of(self, types: Iterable[GgmlType]) -> str:
        """Name and version of the libraries that write ``types``; ggml's where there are none.

        Raises:
            QuantizeError: One of ``types`` needs a library that is missing.
        """
        families = {ggml_type.family for ggml_type in types} or {"mainline"}
        used: list[Quantizer] = []
        if "mainline" in families:
            used.append(self._ggml)
        if "ik" in families:
            used.append(self._opened_ik())
        return "; ".join(f"{library.name} {library.version}" for library in used)

    def can_write(self, ggml_type: GgmlType) -> bool:
        """Whether there is an encoder for ``ggml_type``, installed or not."""
        library = IkQuantizer if ggml_type.family == "ik" else GgmlQuantizer
        return ggml_type.name in library.written

    def prepare(self, types: Iterable[GgmlType]) -> None:
        """Build the tables that ``types`` need; see `Quantizer.prepare`.

        Raises:
            QuantizeError: A type without encoder, or one whose library is missing.
        """
        types = list(types)
        for family in ("mainline", "ik"):
            of_family = [t for t in types if t.family == family]
            if of_family:
                self._library_of(of_family[0]).prepare(of_family)

    def quantize(
        self,
        ggml_type: GgmlType,
        rows: NDArray[np.float32],
        out: NDArray[np.uint8],
        importance: NDArray[np.float32] | None,
    ) -> None:
        """Encode ``rows`` into ``out``; see `Quantizer.quantize`."""
        self._library_of(ggml_type).quantize(ggml_type, rows, out, importance)

    def _library_of(self, ggml_type: GgmlType) -> Quantizer:
        return self._opened_ik() if ggml_type.family == "ik" else self._ggml

    def _opened_ik(self) -> IkQuantizer:
        with self._opening:
            if self._ik is None:
                self._ik = IkQuantizer()
            return self._ik
