"""Which engines read a file, as far as its types tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pipeline.quant.fitness import LOOKUP_TYPES
from pipeline.quant.types import Family, GgmlType

ENGINES: Mapping[Family, str] = MappingProxyType({"mainline": "llama.cpp", "ik": "ik_llama.cpp"})
"""What the two families of engines are called."""

_OWN = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})
"""Types that both know without looking up rows of them: index tables, what kernels compute with."""


def reads(family: Family, ggml_type: GgmlType) -> bool:
    """Whether the engines of ``family`` read tensors of ``ggml_type``."""
    return ggml_type.name in LOOKUP_TYPES[family] | _OWN


def readers_of(types: Iterable[GgmlType]) -> str:
    """The engines that read all of ``types``, and the types that shut the others out.

    ``llama.cpp and ik_llama.cpp``, ``ik_llama.cpp only (IQ3_KS)``, or ``no engine (...)``. Other
    programs for GGUF files follow llama.cpp and may know fewer types.
    """
    asked = {t.name: t for t in types}.values()
    strange = {family: [t.name for t in asked if not reads(family, t)] for family in ENGINES}
    able = [ENGINES[family] for family, names in strange.items() if not names]
    if len(able) == len(ENGINES):
        return " and ".join(able)
    why = "; ".join(
        f"{', '.join(names)} not read by {ENGINES[family]}"
        for family, names in strange.items()
        if names
    )
    return f"{able[0]} only ({why})" if able else f"no engine ({why})"
