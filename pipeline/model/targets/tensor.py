"""One tensor of an output file before it is given a type, and how its matrices are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pipeline.model.config import ModelConfig
from pipeline.model.roles import ReadMode, Role, SubRole, read_mode_of, role_of, sub_role_of
from pipeline.source.decode import FP4_GROUP
from pipeline.source.spec import Codec, MatrixRef, Picks, TensorSpec


class Combine(StrEnum):
    """How several stored matrices become one tensor."""

    ROWS = "rows"
    """One after another: a stack of experts, or two tables in one."""
    PRODUCT = "product"
    """Elementwise product in float32: mainline's engram gate is q times k."""


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """One tensor of an output file, before it is given a type.

    ``shape`` is in numpy order. ``only_type``: the one type that loaders or their graphs accept,
    where there is just one. ``is_draft``: it belongs to the draft file, whose names are those of
    a small target.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    only_type: str | None
    matrices: tuple[MatrixRef, ...]
    combine: Combine = Combine.ROWS
    id_limit: int | None = None
    """Of a table of ids: all are below this, and no row has one twice."""
    is_draft: bool = False

    @property
    def role(self) -> Role:
        """Recipe role."""
        return Role.DRAFT if self.is_draft else role_of(self.name)

    @property
    def sub_role(self) -> SubRole:
        """Recipe sub-role."""
        return sub_role_of(self.name)

    @property
    def read_mode(self) -> ReadMode:
        """How one token reads it."""
        return read_mode_of(self.name)

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def n_cols(self) -> int:
        """Weights per row."""
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        """Number of rows, over all experts of a stack."""
        return self.n_params // self.n_cols

    @property
    def is_table(self) -> bool:
        """Whether this is an engram table, which lies alone in its shard."""
        return self.sub_role is SubRole.ENGRAM_TABLE

    @property
    def source_names(self) -> tuple[str, ...]:
        """Every stored tensor it is made of."""
        return tuple(name for matrix in self.matrices for name in matrix.source_names)


_CODECS = {
    "F32": Codec.F32,
    "BF16": Codec.BF16,
    "F8_E4M3": Codec.FP8,
    "I8": Codec.FP4,
    "I64": Codec.I64,
}


def matrix_ref(spec: TensorSpec, config: ModelConfig, picks: Picks | None = None) -> MatrixRef:
    """How the matrix whose values are stored as ``spec`` is read, whole or in part.

    FP8 weights share a scale per ``weight_block_size`` rectangle, engram table rows and FP4 rows
    per 32 columns (DeepSeek-V4.1 ``inference/model.py`` and ``engram.py``).
    """
    codec = _CODECS[spec.dtype]
    n_cols = spec.shape[-1] * (2 if codec is Codec.FP4 else 1)
    n_rows = math.prod(spec.shape[:-1])
    blocks = {
        Codec.FP8: (1, FP4_GROUP) if ".engram.embed." in spec.name else config.scale_block,
        Codec.FP4: (1, FP4_GROUP),
    }
    block = blocks.get(codec, (1, 1))
    scale = spec.name.removesuffix(".weight") + ".scale" if codec in blocks else None
    if picks is not None:
        n = len(picks.entries)
        n_rows, n_cols = (n, n_cols) if len(spec.shape) > 1 else (1, n)
    return MatrixRef(codec, spec.name, scale, n_rows, n_cols, block, picks)


def carried_names(targets: Iterable[TargetTensor]) -> frozenset[str]:
    """Names of the stored tensors that output files carry."""
    return frozenset(name for target in targets for name in target.source_names)
