"""What loses twice: values that a type rounded already, rounded again to another.

The measured error of such a tensor is against the file it is made of, which has its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.model.roles import Role
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.source.ggml_rows import LOSSLESS
from pipeline.source.spec import Codec

_HOLDS_ALL = "F32"
"""The type that holds the values of any other."""


Typed = tuple[TargetTensor, GgmlType]
"""A tensor to be made, and its type."""


@dataclass(frozen=True, slots=True)
class Requantized:
    """Tensors of one role that go from one lossy type to another; ``nbytes`` are the new bytes."""

    role: Role
    source_type: str
    type: str
    n_tensors: int
    nbytes: int


def requantized(tensors: Iterable[Typed]) -> tuple[Requantized, ...]:
    """Those of ``tensors`` that lose twice, by role and pair of types.

    Rows that are copied lose nothing more; what comes of F32, BF16 or MXFP4 has lost nothing yet.
    """
    groups: dict[tuple[Role, str, str], list[Typed]] = {}
    for target, ggml_type in tensors:
        source = lossy_source(target, ggml_type)
        if source is not None:
            group = groups.setdefault((target.role, source, ggml_type.name), [])
            group.append((target, ggml_type))
    return tuple(
        Requantized(role, source, made, len(members), sum(map(_nbytes, members)))
        for (role, source, made), members in sorted(groups.items(), key=_order)
    )


def lossy_source(target: TargetTensor, ggml_type: GgmlType) -> str | None:
    """The lossy type, or types, that ``target`` is quantized from once more; nothing if it is not.

    A tensor of several types counts where one of them is lossy.
    """
    lossy = stored_types(target) - LOSSLESS
    if ggml_type.name == _HOLDS_ALL or stored_types(target) == {ggml_type.name}:
        return None
    return " and ".join(sorted(lossy)) or None


def stored_types(target: TargetTensor) -> set[str]:
    """The ggml types of the rows that ``target`` is made of; none of a checkpoint's."""
    found = (m.ggml_type for m in target.matrices if m.codec is Codec.GGML)
    return {name for name in found if name is not None}


def _nbytes(typed: Typed) -> int:
    target, ggml_type = typed
    return target.n_rows * ggml_type.row_nbytes(target.n_cols)


def _order(group: tuple[tuple[Role, str, str], object]) -> tuple[int, str, str]:
    (role, source, made), _ = group
    return list(Role).index(role), source, made
