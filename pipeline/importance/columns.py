"""What a fill and a measurement ask of an importance matrix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipeline.model.targets.tensor import TargetTensor

Importance = Callable[[TargetTensor], NDArray[np.float32] | None]
"""A tensor -> how much each column counts, ``[n_matrices, n_cols]``; nothing where all do alike."""


def no_importance(target: TargetTensor) -> None:
    """The `Importance` of a job without a matrix."""
    del target
