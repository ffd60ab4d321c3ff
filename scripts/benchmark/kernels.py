"""Measured kernels without a fill around them: encoding, decoding, repacking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import numpy as np

from benchmark.meter import Meter, Numbers
from benchmark.metered import Floats
from pipeline.fill import TILE_WEIGHTS
from pipeline.plan import PlannedShard, Transform
from pipeline.quant.backend import Quantizer
from pipeline.quant.guard import ABORTS_WITHOUT_IMPORTANCE
from pipeline.quant.libraries import Libraries
from pipeline.quant.types import GgmlType
from pipeline.source.decode import FP4_GROUP, decode_fp4, decode_fp8
from pipeline.source.reader import SourceReader
from pipeline.source.repack import MXFP4_BLOCK_NBYTES, repack_mxfp4
from tasks.job import Job

KERNEL_WEIGHTS = 64 << 20
"""Weights kept decoded in memory for the bare kernel: 256 MiB."""

KERNEL_CALL_WEIGHTS = 1 << 20
TYPE_WEIGHTS = 4 << 20
LEAST_SECONDS = 1.0
"""CPU time for which a rate is measured at least."""


def measure_kernel(job: Job, shards: Sequence[PlannedShard], n_threads: int) -> Numbers:
    """The bare kernel on rows of ``shards``, spread over all of their matrices."""
    ggml_type = shards[0].tensors[0].type
    tiles = _decoded(job, shards, KERNEL_WEIGHTS, KERNEL_CALL_WEIGHTS)
    outs = [np.full((len(t), ggml_type.row_nbytes(t.shape[1])), 1, np.uint8) for t in tiles]
    job.quantizer.prepare([ggml_type])

    def quantize(number: int) -> None:
        job.quantizer.quantize(ggml_type, tiles[number], outs[number], None)

    meter = Meter()
    meter.start()
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(quantize, range(len(tiles))))
    meter.lap("kernel")
    return dict(meter.sums) | {"n_weights": sum(tile.size for tile in tiles)}


def measure_type(job: Job, shards: Sequence[PlannedShard], ggml_type: GgmlType) -> Numbers:
    """Weights per CPU second of one thread in the kernel of ``ggml_type``."""
    tiles = _decoded(job, shards, TYPE_WEIGHTS, TILE_WEIGHTS[Transform.ENCODE])
    libraries = Libraries()
    begin = time.thread_time()
    libraries.prepare([ggml_type])
    numbers: Numbers = {"bpw": ggml_type.bpw, "prepare_cpu": time.thread_time() - begin}
    n_cols = max(tile.shape[1] for tile in tiles)
    importance = np.random.default_rng(0).lognormal(0.0, 1.2, n_cols).astype(np.float32)
    if ggml_type.name not in ABORTS_WITHOUT_IMPORTANCE:
        numbers["rate"] = _rate(_quantized(libraries, ggml_type, tiles, None))
    numbers["rate_importance"] = _rate(_quantized(libraries, ggml_type, tiles, importance))
    return numbers


def measure_rates() -> Numbers:
    """Decoding and repacking of tiles already in memory: weights per CPU second of one thread."""
    n_rows, n_cols = 24, 5120
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (n_rows, n_cols // 2), np.uint8)
    scales = random.integers(117, 124, (n_rows, n_cols // FP4_GROUP), np.uint8)
    fp8 = random.integers(0, 0x7F, (n_rows, n_cols), np.uint8)
    fp8_scales = random.integers(117, 124, (1, n_cols // 32), np.uint8)
    out = np.empty((n_rows, n_cols), np.float32)
    packed = np.empty((n_rows, n_cols // FP4_GROUP * MXFP4_BLOCK_NBYTES), np.uint8)
    calls: dict[str, Callable[[], object]] = {
        "decode_fp4": lambda: decode_fp4(codes, scales, out),
        "decode_fp8": lambda: decode_fp8(fp8, fp8_scales, 0, (32, 32), out),
        "repack": lambda: repack_mxfp4(codes, scales, packed),
    }
    return {name: _rate(_repeated(call, out.size)) for name, call in calls.items()}


def _rate(work: Iterator[int]) -> float:
    """Weights per CPU second of ``work``, which yields how many each of its steps did."""
    begin, n_weights = time.thread_time(), 0
    while (spent := time.thread_time() - begin) < LEAST_SECONDS:
        n_weights += next(work)
    return n_weights / spent


def _repeated(call: Callable[[], object], n_weights: int) -> Iterator[int]:
    while True:
        call()
        yield n_weights


def _quantized(
    quantizer: Quantizer, ggml_type: GgmlType, tiles: Sequence[Floats], importance: Floats | None
) -> Iterator[int]:
    for tile in cycle(tiles):
        out = np.empty((len(tile), ggml_type.row_nbytes(tile.shape[1])), np.uint8)
        weights = None if importance is None else importance[: tile.shape[1]]
        quantizer.quantize(ggml_type, tile, out, weights)
        yield tile.size


def _decoded(job: Job, shards: Sequence[PlannedShard], n_weights: int, n_tile: int) -> list[Floats]:
    """About ``n_weights`` weights of matrices spread over ``shards``, in tiles of ``n_tile``."""
    matrices = [m for shard in shards for t in shard.tensors for m in t.target.matrices]
    step = max(1, sum(m.n_rows * m.n_cols for m in matrices) // n_weights)
    tiles: list[Floats] = []
    with SourceReader(job.checkpoint) as source:
        for matrix in matrices[::step]:
            rows = np.empty((matrix.n_rows, matrix.n_cols), np.float32)
            source.decode_rows(matrix, 0, rows)
            n_rows = max(1, n_tile // matrix.n_cols)
            tiles += [rows[begin : begin + n_rows] for begin in range(0, len(rows), n_rows)]
    return tiles
