"""What anything that turns float rows into a ggml type has to offer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.quant.types import GgmlType


class Quantizer(Protocol):
    """A library that encodes rows; one object serves many threads."""

    @property
    def name(self) -> str:
        """Short name for reports."""
        ...

    @property
    def version(self) -> str:
        """Everything its bytes depend on: library, version, commit, machine. Goes into digests."""
        ...

    def can_write(self, ggml_type: GgmlType) -> bool:
        """Whether `quantize` accepts ``ggml_type``."""
        ...

    def prepare(self, types: Iterable[GgmlType]) -> None:
        """Build the tables that ``types`` need; call once, before any thread calls `quantize`.

        Raises:
            QuantizeError: A type that this quantizer cannot write.
        """
        ...

    def quantize(
        self,
        ggml_type: GgmlType,
        rows: NDArray[np.float32],
        out: NDArray[np.uint8],
        importance: NDArray[np.float32] | None,
    ) -> None:
        """Encode ``rows`` into ``out``.

        Args:
            ggml_type: Target type.
            rows: [n, n_cols], C-contiguous, checked by `pipeline.quant.guard.check_rows`.
            out: [n, row_nbytes], C-contiguous; every byte is written.
            importance: [n_cols] weights of the columns for all of ``rows``, or None. Rows of
                different experts go into different calls.

        Raises:
            TypeRuleError: The rows do not suit the type.
            QuantizeError: The type cannot be written, or the library returned a wrong size.
        """
        ...
