"""Which entry of a recipe speaks for a tensor, and which type it gives."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.model.roles import SubRole
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import TYPES, GgmlType, find_type
from pipeline.recipe.schema import Recipe
from pipeline.recipe.selection import Override, Selection
from pipeline.recipe.values import AS_IN_SOURCE
from pipeline.source.spec import Codec, MatrixRef

_SAME_IN_GGML = {Codec.F32: "F32", Codec.BF16: "BF16", Codec.FP4: "MXFP4"}
"""Codecs of a checkpoint -> the type that holds the same values in as many bits."""

_OFTEN_FIXED = (SubRole.NORM, SubRole.BIAS)
"""Sub-roles of which every tensor has one type; who names them means just those."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The type of one tensor and the recipe entry that chose it.

    No type: it is to be as in the source, and ggml has none that is the same.
    """

    type: GgmlType | None
    reason: str


def choose(recipe: Recipe, target: TargetTensor) -> Choice:
    """What ``recipe`` gives to ``target``, whether or not that may be."""
    return _of_draft(recipe, target) if target.is_draft else _of_target(recipe, target)


def source_type(target: TargetTensor) -> GgmlType | None:
    """The type in which ``target`` is stored already, if there is one for all of it."""
    found = {_stored(matrix) for matrix in target.matrices}
    name = found.pop() if len(found) == 1 else None
    return None if name is None else TYPES[name]


def is_copy(target: TargetTensor, ggml_type: GgmlType) -> bool:
    """Whether ``target`` comes out of a GGUF in the type it has there."""
    return all(
        matrix.codec is Codec.GGML and matrix.ggml_type == ggml_type.name
        for matrix in target.matrices
    )


def applies(override: Override, target: TargetTensor) -> bool:
    """Whether ``override`` speaks of ``target``.

    One that is by name means what it names. One by role or layer is like the tables of roles and
    sub-roles: what may have one type only is passed over unless its sub-role has nothing else.
    """
    if not override.selects(target):
        return False
    named = override.sub_roles or ()
    return (
        target.only_type is None
        or override.is_by_name
        or (target.sub_role in _OFTEN_FIXED and target.sub_role in named)
    )


def title_of(kind: str, number: int, entry: Selection) -> str:
    """How messages call the entry ``number`` (from 1) of a list: ``override 2 (shexp)``."""
    return f"{kind} {number} ({entry.title})"


def first_graft(recipe: Recipe, target: TargetTensor) -> int | None:
    """The place (from 0) of the graft that ``target`` is taken by."""
    if target.is_draft:
        return None
    return next((no for no, graft in enumerate(recipe.graft) if graft.selects(target)), None)


def graft_of(recipe: Recipe, target: TargetTensor) -> str | None:
    """From where else ``target`` is taken: the path or label of the first graft that selects it."""
    number = first_graft(recipe, target)
    return None if number is None else recipe.graft[number].origin


def _stored(matrix: MatrixRef) -> str | None:
    return matrix.ggml_type if matrix.codec is Codec.GGML else _SAME_IN_GGML.get(matrix.codec)


def _of_draft(recipe: Recipe, target: TargetTensor) -> Choice:
    if target.only_type is not None:
        return _unasked(target.only_type)
    key, name = recipe.draft.type_of(target.sub_role)
    return Choice(find_type(name), f"draft.{key}")


def _of_target(recipe: Recipe, target: TargetTensor) -> Choice:
    for number, override in enumerate(recipe.override, 1):
        if applies(override, target):
            return _given(override.type, target, title_of("override", number, override))
    named = recipe.sub_roles.type_of(target.sub_role)
    if named is not None:
        # hc base/scale, sinks and the hash routing share a sub-role with matrices but stay so.
        mixed = target.only_type and target.sub_role not in _OFTEN_FIXED
        if not mixed:
            return _given(named, target, f"sub_roles.{target.sub_role}")
    if target.only_type is not None:
        return _unasked(target.only_type)
    return _given(getattr(recipe.roles, target.role), target, f"roles.{target.role}")


def _given(word: str, target: TargetTensor, reason: str) -> Choice:
    if word != AS_IN_SOURCE:
        return Choice(find_type(word), reason)
    only = target.only_type
    return Choice(source_type(target) if only is None else TYPES[only], reason)


def _unasked(only_type: str) -> Choice:
    return Choice(TYPES[only_type], f"stays {only_type}")
