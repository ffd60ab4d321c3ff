"""Measured fills, and plain copies of as many bytes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmark.meter import Meter, Numbers
from benchmark.metered import MeteredPart, MeteredQuantizer, MeteredReader
from pipeline import files
from pipeline.blocks import blocks_of_shard, spans_of
from pipeline.fill import fill_blocks
from pipeline.plan import PlannedShard
from tasks.job import Job
from tasks.model_source import ModelSource

CHUNK_NBYTES = 1 << 20


def measure_fill(job: Job, shards: Sequence[PlannedShard], n_threads: int) -> Numbers:
    """Fill the shards as a run does, each into its part; laps fill, sync and read_back."""
    _warm(job)
    meter = Meter()
    quantizer = MeteredQuantizer(job.quantizer, meter)
    n_read = 0
    for shard in shards:
        spec = job.shard_specs[shard.no]
        meter.start()
        with (
            MeteredReader(job, meter) as source,
            MeteredPart(job.store.path(spec), shard, spec, meter) as part,
        ):
            quantizer.prepare({tensor.type for tensor in shard.tensors if tensor.is_encoded})
            fill_blocks(part, blocks_of_shard(shard), source, quantizer, n_threads=n_threads)
            part.read_back(spans_of(shard), n_threads=n_threads)
            n_read += source.nbytes_read
    return dict(meter.sums) | _sizes(job, shards) | {"nbytes_read": n_read}


def measure_copy(job: Job, shards: Sequence[PlannedShard], n_threads: int) -> Numbers:
    """Read as many bytes of the same files, and write as many, as filling ``shards`` does."""
    _warm(job)
    sizes = _sizes(job, shards)
    target = Path(job.parameters.out) / "copy"
    files.make_folder(target.parent)
    meter = Meter()
    with ExitStack() as stack:
        fd_out = stack.enter_context(files.writing(target, create=True))
        chunks = list(_source_chunks(job, stack, int(sizes["source_nbytes"])))
        step = int(sizes["output_nbytes"]) / len(chunks)
        ends = [round(step * number) for number in range(len(chunks) + 1)]

        def copy(slot: int) -> None:
            buffer = memoryview(bytearray(max(CHUNK_NBYTES, math.ceil(step) + 1)))
            for number in range(slot, len(chunks), n_threads):
                fd, offset, nbytes = chunks[number]
                files.read_exact(fd, buffer[:nbytes], offset, job.checkpoint.folder)
                begin, end = ends[number], ends[number + 1]
                files.write_exact(fd_out, buffer[: end - begin], begin, target)

        meter.start()
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(copy, range(n_threads)))
        files.sync(fd_out, target)
        meter.lap("copy")
    return dict(meter.sums) | sizes


def _source_names(shards: Sequence[PlannedShard]) -> list[str]:
    return sorted({n for shard in shards for t in shard.tensors for n in t.target.source_names})


def _sizes(job: Job, shards: Sequence[PlannedShard]) -> Numbers:
    assert isinstance(job.source, ModelSource), "only checkpoints are generated"
    nbytes = {spec.name: spec.nbytes for spec in job.source.specs}
    return {
        "n_weights": sum(t.target.n_params for shard in shards for t in shard.tensors),
        "source_nbytes": sum(nbytes[name] for name in _source_names(shards)),
        "output_nbytes": sum(len(shard.header) + shard.data_nbytes for shard in shards),
    }


def _source_chunks(job: Job, stack: ExitStack, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """The first ``nbytes`` of the checkpoint's shards as (open file, offset, bytes)."""
    left = nbytes
    for file in job.checkpoint.files.values():
        fd = stack.enter_context(files.reading(file.path))
        for offset in range(0, file.nbytes, CHUNK_NBYTES):
            n = min(CHUNK_NBYTES, file.nbytes - offset, left)
            if n == 0:
                return
            yield fd, offset, n
            left -= n


def _warm(job: Job) -> None:
    """Bring the source into the page cache, so that every run meets the same state."""
    buffer = memoryview(bytearray(CHUNK_NBYTES))
    with ExitStack() as stack:
        for fd, offset, nbytes in _source_chunks(job, stack, sys.maxsize):
            files.read_exact(fd, buffer[:nbytes], offset, job.checkpoint.folder)
