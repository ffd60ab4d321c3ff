"""Which engines read a file, by its form and by its types.

Sources: llama.cpp since b11870 (mainline layout), pull requests 24162 (V4) and 25784 (drafts);
ik_llama.cpp pull request 2455; the V4.1 branches of vcruz305 and smalinin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE, Form
from pipeline.quant.readers import reads
from pipeline.quant.types import Family, GgmlType


@dataclass(frozen=True, slots=True)
class _Engine:
    name: str
    family: Family = "mainline"


_ENGINES: Mapping[Form, tuple[_Engine, ...]] = {
    V41_MAINLINE: (_Engine("llama.cpp b11870 and newer"),),
    V41_FORK: (
        _Engine("ik_llama.cpp since pull request 2455", "ik"),
        _Engine("the V4.1 branches of llama.cpp (vcruz305, smalinin, pull request 28696)"),
    ),
    V4_TARGET: (_Engine("llama.cpp since pull request 24162"),),
    V41_DRAFT: (_Engine("llama.cpp since pull request 25784 and its V4.1 branches, as a draft"),),
    V4_DRAFT: (_Engine("llama.cpp since pull request 25784, as a draft"),),
}


def engines_of(form: Form, types: Collection[GgmlType]) -> tuple[str, ...]:
    """The engines that read files of ``form`` and know all of ``types``."""
    return tuple(
        engine.name for engine in _ENGINES[form] if all(reads(engine.family, one) for one in types)
    )
