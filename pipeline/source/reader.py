"""Row ranges of stored matrices: positioned reads into small buffers, decoded tile by tile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from pipeline.errors import SourceError
from pipeline.files import forget_cached, read_exact, reading
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.decode import (
    F32,
    U8,
    bf16_bound,
    decode_bf16,
    decode_fp4,
    decode_fp8,
    f32_bound,
    float_ids,
    narrow_ids,
)
from pipeline.source.ggml_rows import decode_ggml
from pipeline.source.header import SourceFile
from pipeline.source.repack import repack_mxfp4
from pipeline.source.spec import Codec, MatrixRef
from pipeline.source.stored import StoredMatrix, StoredRows, placed, store_of

_STEP_NBYTES = 1 << 20
"""Codes read at a time; scratch stays near this size whatever tile is asked for."""


class SourceReader:
    """Reads and decodes row ranges of a checkpoint's matrices; any number of threads may share it.

    Files are opened when first needed and closed on leaving the context. Nothing is read whole.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open_files = ExitStack()
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._is_open = False
        self._nbytes_read = 0

    def __enter__(self) -> Self:
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._is_open = False
            self._fds.clear()
            self._open_files.close()

    @property
    def nbytes_read(self) -> int:
        """Bytes read from shards so far."""
        return self._nbytes_read

    def decode_rows(self, matrix: MatrixRef, row_begin: int, out: F32) -> float:
        """Fill ``out`` [n, n_cols] with the values of rows from ``row_begin`` on.

        Returns an upper bound of their absolute values.

        Raises:
            SourceError: The stored tensors do not fit ``matrix``, or a read fails.
            DecodeError: A value is NaN or infinite; file, tensor, row and column are named.
            TypeRuleError: Rows of a ggml type that cannot be decoded here.
        """
        assert out.shape[1:] == (matrix.n_cols,)
        stored = self._stored(matrix, row_begin, out.shape[0])
        bound = 0.0
        for rows in _steps(out.shape[0], stored.codes.row_nbytes):
            with placed(stored, range(row_begin + rows.start, matrix.n_rows)):
                bound = max(bound, self._decode(matrix, stored, row_begin + rows.start, out[rows]))
        return bound

    def repack_rows(self, matrix: MatrixRef, row_begin: int, out: U8) -> None:
        """Fill ``out`` [n, n_cols / 32 * 17] with rows of an FP4 matrix as ggml MXFP4 blocks.

        Raises:
            SourceError: The stored tensors do not fit ``matrix``, or a read fails.
            DecodeError: A scale byte is 255; file, tensor, row and column are named.
        """
        assert matrix.codec is Codec.FP4
        stored = self._stored(matrix, row_begin, out.shape[0])
        assert stored.scales is not None
        for rows in _steps(out.shape[0], stored.codes.row_nbytes):
            begin, n_rows = row_begin + rows.start, out[rows].shape[0]
            codes = self._read(stored.codes, begin, n_rows)
            scales = self._read(stored.scales, begin, n_rows, slot="scales")
            with placed(stored, range(begin, matrix.n_rows)):
                repack_mxfp4(codes, scales, out[rows])

    def narrow_rows(self, matrix: MatrixRef, row_begin: int, out: U8, *, limit: int) -> None:
        """Fill ``out`` [n, n_cols * 4] with rows of an I64 matrix of ids as 32-bit integers.

        Raises:
            SourceError: The stored tensor does not fit ``matrix``, or a read fails.
            DecodeError: An id is not below ``limit``, or stands twice in its row.
        """
        assert matrix.codec is Codec.I64
        stored = self._stored(matrix, row_begin, out.shape[0])
        for rows in _steps(out.shape[0], stored.codes.row_nbytes):
            begin, n_rows = row_begin + rows.start, out[rows].shape[0]
            ids = self._read(stored.codes, begin, n_rows).view(np.int64)
            with placed(stored, range(begin, matrix.n_rows)):
                narrow_ids(ids, limit, out[rows].view(np.int32))

    def copy_rows(self, matrix: MatrixRef, row_begin: int, out: U8) -> None:
        """Fill ``out`` [n, row bytes] with rows of a matrix without scales as they are stored.

        Raises:
            SourceError: The stored tensor does not fit ``matrix``, or a read fails.
            DecodeError: An F32 or BF16 value is NaN or infinite.
        """
        stored = self._stored(matrix, row_begin, out.shape[0])
        assert stored.scales is None
        assert out.shape[1:] == (stored.codes.row_nbytes,)
        self._fill(stored.codes, row_begin, out)
        with placed(stored, range(row_begin, matrix.n_rows)):
            if matrix.codec is Codec.F32:
                f32_bound(out.view(np.uint32))
            elif matrix.codec is Codec.BF16:
                bf16_bound(out.view(np.uint16))

    def ranges(self, matrix: MatrixRef, row_begin: int, n_rows: int) -> list[tuple[int, int, int]]:
        """Where rows of a matrix without scales lie: open file, offset, bytes, in their order.

        Raises:
            SourceError: The stored tensor does not fit ``matrix``, or a file cannot be opened.
        """
        codes = self._stored(matrix, row_begin, n_rows).codes
        fd = self._fd(codes.file)
        return [(fd, offset, nbytes) for offset, nbytes in codes.spans(row_begin, n_rows)]

    def check_unchanged(self, matrix: MatrixRef) -> None:
        """Whether the files of ``matrix`` are still those whose headers were read.

        To be asked after reading and before what was read is kept.

        Raises:
            SourceError: A file was written to meanwhile.
        """
        stored = self._stored(matrix, 0, 0)
        for rows in (stored.codes, stored.scales):
            if rows is not None:
                check_unchanged(rows.file, os.fstat(self._fd(rows.file)))

    def forget(self, matrix: MatrixRef, row_begin: int, n_rows: int) -> None:
        """Let the kernel drop these rows from its page cache: they will not be read again."""
        stored = self._stored(matrix, row_begin, n_rows)
        for part, begin, n in _touched(matrix, stored, row_begin, n_rows):
            fd = self._fd(part.file)
            for offset, nbytes in part.spans(begin, n):
                forget_cached(fd, offset, nbytes)

    def _decode(self, matrix: MatrixRef, stored: StoredMatrix, row_begin: int, out: F32) -> float:
        n_rows = out.shape[0]
        if matrix.codec is Codec.F32:
            self._fill(stored.codes, row_begin, out.view(np.uint8))
            return f32_bound(out.view(np.uint32))
        codes = self._read(stored.codes, row_begin, n_rows)
        if matrix.codec is Codec.BF16:
            return decode_bf16(codes.view(np.uint16), out)
        if matrix.codec is Codec.I64:
            return float_ids(codes.view(np.int64), out)
        if matrix.codec is Codec.GGML:
            assert matrix.ggml_type is not None
            return decode_ggml(matrix.ggml_type, codes, out)
        assert stored.scales is not None
        begin, n_scale_rows = _scale_rows(matrix, row_begin, n_rows)
        scales = self._read(stored.scales, begin, n_scale_rows, slot="scales")
        if matrix.codec is Codec.FP4:
            return decode_fp4(codes, scales, out)
        return decode_fp8(codes, scales, row_begin, matrix.block, out)

    def _stored(self, matrix: MatrixRef, row_begin: int, n_rows: int) -> StoredMatrix:
        assert 0 <= row_begin <= row_begin + n_rows <= matrix.n_rows, (matrix, row_begin, n_rows)
        last: tuple[MatrixRef, StoredMatrix] | None = getattr(self._local, "last", None)
        if last is None or last[0] != matrix:
            last = self._local.last = (matrix, store_of(self._checkpoint, matrix))
        return last[1]

    def _read(self, part: StoredRows, begin: int, n_rows: int, slot: str = "codes") -> U8:
        """Rows in this thread's scratch buffer ``slot``: good until its next read."""
        nbytes = n_rows * part.row_nbytes
        scratch: U8 | None = getattr(self._local, slot, None)
        if scratch is None or scratch.nbytes < nbytes:
            scratch = np.empty(nbytes, dtype=np.uint8)
            setattr(self._local, slot, scratch)
        rows = scratch[:nbytes].reshape(n_rows, part.row_nbytes)
        self._fill(part, begin, rows)
        return rows

    def _fill(self, part: StoredRows, begin: int, out: U8) -> None:
        assert out.flags.c_contiguous
        fd = self._fd(part.file)
        flat, at = out.reshape(-1), 0
        for offset, nbytes in part.spans(begin, out.shape[0]):
            read_exact(fd, flat[at : at + nbytes].data, offset, part.file.path)
            at += nbytes
        with self._lock:
            self._nbytes_read += out.nbytes

    def _fd(self, file: SourceFile) -> int:
        fd = self._fds.get(file.path)
        if fd is not None:
            return fd
        with self._lock:
            assert self._is_open, "a SourceReader reads only inside its context"
            if file.path not in self._fds:
                fd = self._open_files.enter_context(reading(file.path))
                check_unchanged(file, os.fstat(fd))
                self._fds[file.path] = fd
            return self._fds[file.path]


def check_unchanged(file: SourceFile, state: os.stat_result) -> None:
    """Refuse a source that was written to since its header was read; ``state`` is its own now.

    Raises:
        SourceError: Its length or its time of change is another.
    """
    modified = state.st_mtime_ns if file.modified_ns is not None else None
    if (state.st_size, modified) != (file.nbytes, file.modified_ns):
        raise SourceError(
            "the file changed after its header was read",
            file=file.path,
            expected=f"{file.nbytes:,} bytes, last changed at {file.modified_ns} ns",
            found=f"{state.st_size:,} bytes, last changed at {modified} ns",
            next_step="Leave the checkpoint alone while it is being read, and start again.",
        )


def _steps(n_rows: int, row_nbytes: int) -> Iterator[slice]:
    step = max(1, _STEP_NBYTES // max(1, row_nbytes))
    return (slice(begin, begin + step) for begin in range(0, n_rows, step))


def _scale_rows(matrix: MatrixRef, row_begin: int, n_rows: int) -> tuple[int, int]:
    """First and number of the scale rows that a row range touches."""
    begin = row_begin // matrix.block[0]
    return begin, -(-(row_begin + n_rows) // matrix.block[0]) - begin


def _touched(
    matrix: MatrixRef, stored: StoredMatrix, row_begin: int, n_rows: int
) -> Iterator[tuple[StoredRows, int, int]]:
    yield stored.codes, row_begin, n_rows
    if stored.scales is not None:
        yield stored.scales, *_scale_rows(matrix, row_begin, n_rows)
