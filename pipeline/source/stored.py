"""Where the rows of a matrix lie, once its stored tensors are checked against its `MatrixRef`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.errors import DecodeError, SourceError
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.decode import FP4_GROUP, BadCodeError
from pipeline.source.header import SourceFile, SourceTensor
from pipeline.source.scale_block import implied_block, scale_shape
from pipeline.source.spec import Codec, MatrixRef

_DTYPES = {
    Codec.F32: "F32",
    Codec.BF16: "BF16",
    Codec.FP8: "F8_E4M3",
    Codec.FP4: "I8",
    Codec.I64: "I64",
}
_SCALE_DTYPE = "F8_E8M0"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of equal size in ``file``: one after the other from ``offset`` on, or picked.

    Picked rows are made of ``entries`` of the stored tensor, ``entry_nbytes`` each: an entry has
    many rows in a stack of matrices, one in a matrix, and a part of the one row in a vector.
    """

    file: SourceFile
    tensor: str
    offset: int
    row_nbytes: int
    entries: Sequence[int] | None = None
    entry_nbytes: int = 0

    def spans(self, begin: int, n_rows: int) -> Iterator[tuple[int, int]]:
        """Where rows ``begin`` to ``begin + n_rows`` lie: offset in the file, bytes."""
        at, end = begin * self.row_nbytes, (begin + n_rows) * self.row_nbytes
        if isinstance(self.entries, range):
            yield self.offset + self.entries.start * self.entry_nbytes + at, end - at
        elif self.entries is None:
            yield self.offset + at, end - at
        else:
            yield from self._picked(self.entries, at, end)

    def _picked(self, entries: Sequence[int], at: int, end: int) -> Iterator[tuple[int, int]]:
        """Where bytes ``at`` to ``end`` of the picked entries lie."""
        while at < end:
            no, inside = divmod(at, self.entry_nbytes)
            nbytes = min(end - at, self.entry_nbytes - inside)
            yield self.offset + entries[no] * self.entry_nbytes + inside, nbytes
            at += nbytes


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The codes of a matrix and, for FP8 and FP4, its scales."""

    codes: StoredRows
    scales: StoredRows | None


def store_of(checkpoint: Checkpoint, matrix: MatrixRef) -> StoredMatrix:
    """Where ``matrix`` is stored.

    Raises:
        SourceError: A tensor is absent, or has another dtype or shape than ``matrix`` says.
    """
    scaled = matrix.codec in (Codec.FP8, Codec.FP4)
    if scaled != (matrix.scale is not None):
        raise SourceError(
            "a matrix of FP8 or FP4 codes needs a scale, and no other has one",
            tensor=matrix.weight,
            expected="a scale" if scaled else "no scale",
            found=str(matrix.scale),
        )
    codes = _codes(checkpoint, matrix)
    scales = None if matrix.scale is None else _scales(checkpoint, matrix, matrix.scale)
    return StoredMatrix(codes, scales)


def _codes(checkpoint: Checkpoint, matrix: MatrixRef) -> StoredRows:
    file, tensor = checkpoint.locate(matrix.weight)
    dtype = _DTYPES.get(matrix.codec, matrix.ggml_type)
    assert dtype is not None
    _check_dtype(file, tensor, dtype)
    if matrix.codec is Codec.FP4 and (matrix.n_cols % FP4_GROUP or matrix.block != (1, FP4_GROUP)):
        raise SourceError(
            f"FP4 weights have one scale per {FP4_GROUP} of a row, and whole groups only",
            file=file.path,
            tensor=tensor.name,
            expected=f"scale block 1x{FP4_GROUP}, a multiple of {FP4_GROUP} columns",
            found=f"scale block {matrix.block[0]}x{matrix.block[1]}, {matrix.n_cols} columns",
        )
    n_stored = matrix.n_cols // 2 if matrix.codec is Codec.FP4 else matrix.n_cols
    if not _fits(tensor.shape, matrix, n_stored):
        raise SourceError(
            "a stored matrix has another shape than the model needs",
            file=file.path,
            tensor=tensor.name,
            expected=(matrix.n_rows, n_stored),
            found=tensor.shape,
            next_step="Check that config.json and the shards belong to the same release.",
        )
    picks = matrix.picks
    if picks is None:
        return StoredRows(file, tensor.name, tensor.offset, tensor.nbytes // matrix.n_rows)
    entry_nbytes = tensor.nbytes // picks.n_stored
    row_nbytes = entry_nbytes * len(picks.entries) // matrix.n_rows
    return StoredRows(file, tensor.name, tensor.offset, row_nbytes, picks.entries, entry_nbytes)


def _fits(shape: tuple[int, ...], matrix: MatrixRef, n_stored: int) -> bool:
    """Whether ``matrix``, whose rows are ``n_stored`` wide, can be read from this shape.

    Only scales depend on the true shape; elsewhere a vector may be read as one row, and a stack as
    one matrix.
    """
    wanted, picks = matrix.n_rows * n_stored, matrix.picks
    if matrix.scale is not None:
        return shape == (matrix.n_rows, n_stored)
    if picks is None:
        return math.prod(shape) == wanted
    return shape[:1] == (picks.n_stored,) and math.prod(shape[1:]) * len(picks.entries) == wanted


def _scales(checkpoint: Checkpoint, matrix: MatrixRef, name: str) -> StoredRows:
    file, tensor = checkpoint.locate(name)
    _check_dtype(file, tensor, _SCALE_DTYPE)
    wanted = scale_shape(matrix.n_rows, matrix.n_cols, matrix.block)
    if tensor.shape != wanted:
        block = implied_block(matrix.n_rows, matrix.n_cols, tensor.shape)
        implied = f" (block {block[0]}x{block[1]})" if block else ""
        raise SourceError(
            "the scales of a matrix have another shape than its scale block gives",
            file=file.path,
            tensor=name,
            expected=f"{wanted} (block {matrix.block[0]}x{matrix.block[1]})",
            found=f"{tensor.shape}{implied}",
            next_step="Use the config.json of this release: weight_block_size differs.",
        )
    return StoredRows(file, tensor.name, tensor.offset, wanted[1])


def _check_dtype(file: SourceFile, tensor: SourceTensor, dtype: str) -> None:
    if tensor.dtype != dtype:
        raise SourceError(
            "a stored matrix has another dtype than the model needs",
            file=file.path,
            tensor=tensor.name,
            expected=dtype,
            found=tensor.dtype,
            next_step="Use the released shards; converted copies are not read.",
        )


@contextmanager
def placed(stored: StoredMatrix, numbers: Sequence[int]) -> Iterator[None]:
    """Give an undecodable code its file, its tensor and its row in the whole matrix.

    ``numbers`` are the rows of the matrix that the rows being decoded are.
    """
    try:
        yield
    except BadCodeError as error:
        bad = stored.scales if error.is_scale and stored.scales else stored.codes
        raise DecodeError(
            error.what,
            file=bad.file.path,
            tensor=bad.tensor,
            found=f"{error.code} at row {numbers[error.row]:,}, column {error.column:,}",
            next_step="Compare the shard's sha256 with the release; fetch it again if it differs.",
        ) from error
