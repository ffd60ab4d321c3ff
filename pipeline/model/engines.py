"""The engines that load each form of file, as far as they are known.

Sources: llama.cpp pull requests 25173 and 25784 (``draft-dspark``) and its ``--lazy-mode`` for the
engram table, ik_llama.cpp pull request 2455, and the serving notes of midagedev/rig-log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE, Form
from pipeline.quant.readers import reads
from pipeline.quant.types import Family, GgmlType

_LAZY = ("--lazy-mode", "auto")
"""Rows of the engram table are read when they are asked for, not with the file."""

_EXPERTS_IN_RAM = ("-ot", "exps=CPU")


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that loads a file: which family's types it reads, and the words that help it."""

    name: str
    family: Family
    words: tuple[str, ...] = ()
    takes_draft: bool = True


ENGINES: Mapping[Form, tuple[Engine, ...]] = {
    V41_MAINLINE: (Engine("llama.cpp b11870 and newer", "mainline", (*_LAZY, *_EXPERTS_IN_RAM)),),
    V41_FORK: (
        Engine("the V4.1 branches of llama.cpp", "mainline", (*_LAZY, *_EXPERTS_IN_RAM)),
        Engine("ik_llama.cpp since pull request 2455", "ik", _EXPERTS_IN_RAM, takes_draft=False),
    ),
    V4_TARGET: (Engine("llama.cpp since pull request 25784", "mainline", _EXPERTS_IN_RAM),),
    V41_DRAFT: (Engine("llama.cpp since pull request 25784 and its V4.1 branches", "mainline"),),
    V4_DRAFT: (Engine("llama.cpp since pull request 25784", "mainline"),),
}
"""Form of a file -> the engines that load it, a draft beside its target."""


def engines_of(form: Form, types: Iterable[GgmlType]) -> tuple[Engine, ...]:
    """The engines that load a file of ``form`` whose tensors are of ``types``."""
    types = set(types)
    return tuple(
        engine
        for engine in ENGINES[form]
        if all(reads(engine.family, ggml_type) for ggml_type in types)
    )


def engines_sentence(form: Form, types: Iterable[GgmlType]) -> str:
    """Who reads a file, in words that follow "is"."""
    if form.is_draft:
        return "a draft, loaded beside the target"
    types = set(types)
    able = engines_of(form, types)
    if able:
        return "read by " + " and ".join(engine.name for engine in able)
    strange = sorted({t.name for e in ENGINES[form] for t in types if not reads(e.family, t)})
    return f"read by no engine that is known: not in this form with {', '.join(strange)}"
