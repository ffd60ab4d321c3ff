"""Checks that stand before every call into a C quantizer.

ggml does not raise: it aborts the process, or writes garbage and returns the expected size. What
it does was found by running ggml 0.20.2, and for ik_llama.cpp's types the build of
ik-llama-cpp-python 0.1.5, on rows of one magnitude, on rows with a NaN or an infinity, and with
importance that was zero, negative, not finite, tiny or huge, each in its own process. Of ik's types
those in `ABORTS_ON_HUGE` die of NaN and infinity and the others store them; up to the limits below
all encode as well as at 1; rows of zeros and blocks of zeros stay zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import QuantizeError, TypeRuleError
from pipeline.quant.backend import Quantizer
from pipeline.quant.types import GgmlType

_ABORTS = "its kernel ends the process without one"
_POOR = "llama-quantize refuses it without one: too much is lost"
_IK_POOR = "ik_llama.cpp's llama-quantize refuses it without one: too much is lost"

NEEDS_IMPORTANCE: Mapping[str, str] = MappingProxyType(
    {
        "IQ1_S": _ABORTS,
        "IQ2_XXS": _ABORTS,
        "IQ2_XS": _ABORTS,
        "IQ1_M": _POOR,
        "IQ2_S": _POOR,
        "IQ3_XXS": _POOR,
        "IQ1_KT": _IK_POOR,
        "IQ2_KT": _IK_POOR,
    }
)
"""Types that ask for an importance matrix, and why (llama.cpp ``tools/quantize``, ik's too).

Both tools also refuse Q2_K without one, but only inside their mixture Q2_K_S; alone it is usable.
No kernel of ik's own types needs one."""

ABORTS_WITHOUT_IMPORTANCE = frozenset(k for k, why in NEEDS_IMPORTANCE.items() if why is _ABORTS)
"""Types that may not reach the kernel without an importance matrix, whatever a recipe allows."""

ABORTS_ON_HUGE = frozenset(
    {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}
    | {"IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT", "IQ4_KSS", "IQ2_KL"}
)
"""Types whose grid search ends the process on NaN, infinite or huge (1e18, ik's 1e12) weights."""

_F16_MAX = 65504.0
_SEARCH_MAX = 1e5
"""Most |x| that a scale search takes: its sums of x^3 overflow float32 from 1.7e5 on."""

_SEARCH_WEIGHT_MAX = 1e15
"""The same with importance, where the summands are importance * x^2."""

IMPORTANCE_RANGE = (1e-12, 1e10)
"""Where a row's largest importance may lie; outside, the search's sums leave float32's range."""

_MAX_MAGNITUDE: Mapping[str, float] = MappingProxyType(
    {
        "F32": float(np.finfo(np.float32).max),
        "BF16": float.fromhex("0x1.fep+127"),
        "F16": _F16_MAX,
        # An f16 field holds the smallest weight, which the search moves outwards by up to a step.
        "Q4_1": 5e4,
        "Q5_1": 5e4,
        # An f16 field holds the largest weight itself.
        "Q1_0": _F16_MAX,
        "Q2_0": _F16_MAX,
        "TQ1_0": _F16_MAX,
        "TQ2_0": _F16_MAX,
        # An f16 scale holds a 127th of it, and nothing is searched.
        "Q8_0": _F16_MAX * 127,
        # An 8-bit power of two reaches all of float32.
        "MXFP4": float(np.finfo(np.float32).max),
        # An e4m3 scale (448 at most) times the largest code (6); more is clipped silently.
        "NVFP4": 448.0 * 6,
    }
)
_UNSEARCHED = frozenset(_MAX_MAGNITUDE) - {"Q4_1", "Q5_1"}


def takes_importance(ggml_type: GgmlType) -> bool:
    """Whether the kernel of ``ggml_type`` looks at an importance matrix at all."""
    return ggml_type.name not in _UNSEARCHED


def max_magnitude(ggml_type: GgmlType, importance: NDArray[np.float32] | None = None) -> float:
    """Largest |x| that ``ggml_type`` encodes as well as it encodes 1."""
    limit = _MAX_MAGNITUDE.get(ggml_type.name, _SEARCH_MAX)
    if importance is None or ggml_type.name in _UNSEARCHED:
        return limit
    return min(limit, math.sqrt(_SEARCH_WEIGHT_MAX / float(importance.max())))


def check_rows(
    ggml_type: GgmlType,
    rows: NDArray[np.float32],
    *,
    importance: NDArray[np.float32] | None,
    bound: float,
    tensor: str | None = None,
) -> None:
    """Refuse what the kernel of ``ggml_type`` would die of or spoil.

    Args:
        ggml_type: Target type.
        rows: [n, n_cols] weights.
        importance: [n_cols], or None.
        bound: At least the largest |x| of ``rows``, as the decoder knows it for free; only when
            it is too large are the rows themselves looked at. NaN means unknown.
        tensor: Name for the message.

    Raises:
        TypeRuleError: Row width, importance or magnitude do not suit the type.
    """
    check_width(ggml_type, rows.shape[1], tensor=tensor)
    check_importance(ggml_type, importance, rows.shape[1], tensor=tensor)
    # Written so that a NaN bound takes the slow way.
    if not bound <= max_magnitude(ggml_type, importance):
        check_magnitude(ggml_type, rows, importance, tensor=tensor)


def check_width(ggml_type: GgmlType, n_cols: int, *, tensor: str | None = None) -> None:
    """Refuse rows that the block does not divide (the kernel would cut them silently).

    Raises:
        TypeRuleError: It does not.
    """
    try:
        ggml_type.row_nbytes(n_cols)
    except TypeRuleError as error:
        raise TypeRuleError(
            error.what, tensor=tensor, expected=error.expected, found=error.found
        ) from None


def check_importance(
    ggml_type: GgmlType,
    importance: NDArray[np.float32] | None,
    n_cols: int,
    *,
    tensor: str | None = None,
) -> None:
    """Refuse a missing or unusable importance vector.

    An all-zero one makes ggml write zeros for every weight and call them valid.

    Raises:
        TypeRuleError: Missing where the kernel aborts, of another width, or with a value that is
            not finite and positive, or all of it so small or large that the search overflows.
    """
    if importance is None:
        if ggml_type.name in ABORTS_WITHOUT_IMPORTANCE:
            raise TypeRuleError(
                f"{ggml_type.name} needs an importance matrix: {_ABORTS}",
                tensor=tensor,
                next_step="Give one for this tensor or choose another type.",
            )
        return
    if importance.shape != (n_cols,):
        raise TypeRuleError(
            "the importance vector has another width than the tensor",
            tensor=tensor,
            expected=f"({n_cols},)",
            found=importance.shape,
        )
    low, high = float(importance.min()), float(importance.max())
    # NaN fails both comparisons.
    if not (low > 0 and IMPORTANCE_RANGE[0] <= high <= IMPORTANCE_RANGE[1]):
        raise TypeRuleError(
            "the importance vector holds values that spoil the search",
            tensor=tensor,
            expected="all above 0, the largest from {:g} to {:g}".format(*IMPORTANCE_RANGE),
            found=f"{low:g} to {high:g}",
            next_step="Replace what was never seen by 1; a common factor does not matter.",
        )


def check_magnitude(
    ggml_type: GgmlType,
    rows: NDArray[np.float32],
    importance: NDArray[np.float32] | None = None,
    *,
    tensor: str | None = None,
) -> None:
    """Refuse rows whose largest |x| is above the limit of the type, infinite or NaN.

    Raises:
        TypeRuleError: With the largest |x|.
    """
    largest = float(max(rows.max(), -rows.min())) if rows.size else 0.0
    limit = max_magnitude(ggml_type, importance)
    if not largest <= limit:
        raise TypeRuleError(
            f"a weight is too large for {ggml_type.name}",
            tensor=tensor,
            expected=f"|x| of at most {limit:g}",
            found=f"{largest:g}",
            next_step="Choose BF16 or F32 for this tensor.",
        )


def check_writable(quantizer: Quantizer, ggml_type: GgmlType, *, tensor: str | None = None) -> None:
    """Refuse a type that ``quantizer`` does not know (an unknown id aborts the process).

    Raises:
        QuantizeError: It does not.
    """
    if not quantizer.can_write(ggml_type):
        raise QuantizeError(
            f"{quantizer.name} cannot write {ggml_type.name}",
            tensor=tensor,
            next_step="Choose a type it can write.",
        )
