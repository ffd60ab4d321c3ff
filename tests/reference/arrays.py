"""Names for the arrays that the forward pass works on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
