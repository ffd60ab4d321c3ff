"""A quantizer, a reader and a part as a fill uses them, with their calls clocked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmark.meter import Meter
from pipeline import files
from pipeline.gguf.part import ShardDigests, ShardPart, Span
from pipeline.plan import PlannedShard
from pipeline.quant.backend import Quantizer
from pipeline.quant.types import GgmlType
from pipeline.source.reader import SourceReader
from pipeline.source.spec import MatrixRef
from tasks.job import Job

Floats = NDArray[np.float32]


class MeteredQuantizer:
    """A quantizer whose calls are clocked."""

    def __init__(self, quantizer: Quantizer, meter: Meter) -> None:
        self._quantizer = quantizer
        self._meter = meter
        self.name = quantizer.name
        self.version = quantizer.version
        self.can_write = quantizer.can_write
        self.prepare = quantizer.prepare

    def quantize(
        self,
        ggml_type: GgmlType,
        rows: Floats,
        out: NDArray[np.uint8],
        importance: Floats | None,
    ) -> None:
        """Encode ``rows`` into ``out``; see `Quantizer.quantize`."""
        with self._meter.inside("kernel"):
            self._quantizer.quantize(ggml_type, rows, out, importance)


class MeteredReader(SourceReader):
    """A reader whose calls are clocked: reading, decoding, repacking and copying."""

    def __init__(self, job: Job, meter: Meter) -> None:
        super().__init__(job.checkpoint)
        self._meter = meter

    def decode_rows(self, matrix: MatrixRef, row_begin: int, out: Floats) -> float:
        """Fill ``out``; see `SourceReader.decode_rows`."""
        with self._meter.inside("source"):
            return super().decode_rows(matrix, row_begin, out)

    def repack_rows(self, matrix: MatrixRef, row_begin: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out``; see `SourceReader.repack_rows`."""
        with self._meter.inside("source"):
            super().repack_rows(matrix, row_begin, out)

    def copy_rows(self, matrix: MatrixRef, row_begin: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out``; see `SourceReader.copy_rows`."""
        with self._meter.inside("source"):
            super().copy_rows(matrix, row_begin, out)


class MeteredPart(ShardPart):
    """A part that ends the lap of filling, and makes its bytes durable, before it reads back."""

    def __init__(self, path: Path, shard: PlannedShard, spec: str, meter: Meter) -> None:
        super().__init__(path, header=shard.header, nbytes=shard.nbytes, spec=spec)
        self._meter = meter

    def write(self, content: memoryview, offset: int) -> None:
        """Put bytes at an offset; see `ShardPart.write`."""
        with self._meter.inside("write"):
            super().write(content, offset)

    def read_back(self, spans: Sequence[Span], *, n_threads: int) -> ShardDigests:
        """Make all durable, then check it; see `ShardPart.read_back`."""
        self._meter.lap("fill")
        with files.writing(self.part) as fd:
            files.sync(fd, self.part)
        self._meter.lap("sync")
        digests = super().read_back(spans, n_threads=n_threads)
        self._meter.lap("read_back")
        return digests
