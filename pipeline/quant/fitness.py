"""What a type is fit for: tables that are looked up by row, and choices that never pay.

What is refused is refused by `pipeline.quant.guard` and by the recipe; here stand the facts and the
reasons that a message gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.types import TYPES, Family, GgmlType

_NEVER_STORED = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})
_UNKNOWN_TO_IK = frozenset({"TQ1_0", "TQ2_0", "NVFP4", "Q2_0", "F8_E4M3"})
_MAINLINE = frozenset(t.name for t in TYPES.values() if t.family == "mainline") - _NEVER_STORED
_IK = frozenset(t.name for t in TYPES.values() if t.family == "ik")

LOOKUP_TYPES: Mapping[Family, frozenset[str]] = MappingProxyType(
    {"mainline": _MAINLINE, "ik": (_MAINLINE | _IK) - _UNKNOWN_TO_IK}
)
"""Types whose single rows an engine reads (``ggml_get_rows`` on the CPU, where tables lie).

Found by running that operation and a matrix product in ggml 0.20.2 and in the ik_llama.cpp build of
ik-llama-cpp-python 0.1.5, each type in its own process: both take the same types, and ik's ends the
process on TQ1_0, TQ2_0, NVFP4 and Q2_0. F8_E4M3 is read by the mainline builds that know engrams.
"""


def why_not_lookup(ggml_type: GgmlType) -> str | None:
    """Why ``ggml_type`` is no type for a table read by row (engram, token embedding), or None.

    A clause for the end of a sentence: "... asks for IQ2_XXS, but <clause>".
    """
    need = NEEDS_IMPORTANCE.get(ggml_type.name)
    if need is not None:
        return f"a table that is looked up by row gets no importance matrix, and {need}"
    if not any(ggml_type.name in names for names in LOOKUP_TYPES.values()):
        return "no engine looks up rows of this type"
    return None


class Better(NamedTuple):
    """A type that is preferable to another one, and why."""

    name: str
    reason: str


BETTER_WITHOUT_IMPORTANCE: Mapping[str, Better] = MappingProxyType(
    {
        "IQ3_S": Better("Q3_K", "same size, less error, a twentieth of the time"),
        "IQ4_NL": Better("Q4_K", "same size, less error, a third of the time"),
    }
)
"""Types that without an importance matrix lose to another of their size (measured on FP4 weights
and, for Q3_K and Q4_K, on normal ones)."""

TRAINED_FOR: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
        "made for models trained with weights of so few values; others lose most of theirs",
    )
)
"""Types that only suit weights that were trained for them."""


def advice(ggml_type: GgmlType, *, weighted: bool) -> str | None:
    """What speaks against ``ggml_type`` wherever it is used, as a sentence, or None.

    Args:
        ggml_type: A type that may be written.
        weighted: Whether the tensor has an importance matrix.
    """
    trained = TRAINED_FOR.get(ggml_type.name)
    if trained is not None:
        return f"{ggml_type.name} is {trained}."
    better = None if weighted else BETTER_WITHOUT_IMPORTANCE.get(ggml_type.name)
    if better is None:
        return None
    return f"{ggml_type.name} without an importance matrix loses to {better.name}: {better.reason}."
