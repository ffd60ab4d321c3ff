"""Rows of a table that is far larger than memory, wherever in it they lie."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.decode import F32, decode_bf16, decode_fp8
from pipeline.source.spec import Codec, MatrixRef
from pipeline.source.stored import StoredRows, placed, store_of

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def table_rows(checkpoint: Checkpoint, matrix: MatrixRef, numbers: Ints) -> F32:
    """Rows ``numbers`` of a table, ``[n, n_cols]``; each different one is read once.

    Args:
        checkpoint: Where it is stored.
        matrix: BF16, or FP8 whose scale blocks are of one row (an engram's).
        numbers: In any order, repeated or not.

    Raises:
        SourceError: The stored tensors do not fit ``matrix``, or a read fails.
        DecodeError: A value is NaN or infinite; file, tensor and row are named.
    """
    assert matrix.block[0] == 1
    stored = store_of(checkpoint, matrix)
    different, places = np.unique(numbers, return_inverse=True)
    out = np.empty((len(different), matrix.n_cols), np.float32)
    codes = _read(stored.codes, different)
    with placed(stored, different.tolist()):
        if matrix.codec is Codec.BF16:
            decode_bf16(codes.view(np.uint16), out)
        else:
            assert stored.scales is not None
            decode_fp8(codes, _read(stored.scales, different), 0, matrix.block, out)
    return out[places]


def _read(rows: StoredRows, numbers: Ints) -> Bytes:
    """The stored bytes of rows in ascending order, ``[n, row bytes]``.

    Single rows are a matter of latency. The kernel is told of all of them before the first is read,
    so that it fetches many at a time; threads would spend theirs on taking turns.
    """
    out = np.empty((len(numbers), rows.row_nbytes), np.uint8)
    starts, ends = _runs(numbers)
    offsets = (rows.offset + numbers[starts] * rows.row_nbytes).tolist()
    spans = list(zip(offsets, starts.tolist(), ends.tolist(), strict=True))
    with files.reading(rows.file.path) as fd:
        if hasattr(os, "posix_fadvise"):
            for offset, begin, end in spans:
                nbytes = (end - begin) * rows.row_nbytes
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
        for offset, begin, end in spans:
            files.read_exact(fd, out[begin:end].reshape(-1).data, offset, rows.file.path)
    return out


def _runs(numbers: Ints) -> tuple[Ints, Ints]:
    """Where runs of numbers that follow each other begin and end."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return np.concatenate([[0], breaks]), np.concatenate([breaks, [len(numbers)]])
