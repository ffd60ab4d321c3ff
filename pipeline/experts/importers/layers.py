"""Numbers of single layers, put together as matrices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.errors import SourceError
from pipeline.experts.saliency import F64

MOST_LAYERS = 1024
MOST_EXPERTS = 1 << 16
"""More is no model; a file that claims more would only cost memory."""


def stack_layers(rows: Mapping[int, F64], what: str, path: Path) -> F64:
    """``what`` of each layer as one matrix; row n is layer n.

    Raises:
        SourceError: A layer is missing, or has another number of experts than the first.
    """
    check_layers(rows, path)
    first = rows[0]
    for layer, row in rows.items():
        if row.ndim != 1 or row.shape != first.shape or row.size > MOST_EXPERTS:
            raise SourceError(
                f"{what} of layer {layer} is not one number for each expert",
                file=path,
                expected=f"{first.size:,} as in layer 0" if first.ndim == 1 else "a list",
                found=f"shape {row.shape}",
            )
    return np.stack([rows[layer] for layer in range(len(rows))]).astype(np.float64)


def check_layers(rows: Mapping[int, object], path: Path) -> None:
    """Whether layers are numbered from 0 without a gap.

    Raises:
        SourceError: They are not; the first layer that is missing is named.
    """
    lacking = next((n for n in range(min(len(rows), MOST_LAYERS) + 1) if n not in rows), 0)
    if not rows or lacking < len(rows):
        raise SourceError(
            f"the file says nothing about layer {lacking}",
            file=path,
            expected="every layer from 0 on",
            found=f"{len(rows):,} layers, up to {max(rows, default=None)}",
            next_step="A layer without numbers is not kept whole: measure it too.",
        )


def all_equal(found: F64, expected: F64, rounding: float) -> bool:
    """Whether two matrices are the same but for rounding."""
    return bool(np.allclose(found, expected, rtol=rounding, atol=rounding * abs(expected).max()))
