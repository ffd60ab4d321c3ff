"""The disk that a job takes, downloads and outputs together."""

from __future__ import annotations

from pipeline import files
from pipeline.errors import OutputError
from pipeline.report.plan_report import DiskNeed
from tasks.described import Described
from tasks.job import Job


def missing_nbytes(job: Described) -> int:
    """Bytes of output still to be written: shards that are neither whole nor preallocated."""
    missing = 0
    for shard, spec in zip(job.shards, job.shard_specs, strict=True):
        if job.store.record(spec) is None:
            missing += shard.nbytes - files.allocated_nbytes(job.store.part(spec))
    return missing


def disk_need(job: Job) -> DiskNeed:
    """Disk that ``job`` takes and has."""
    return DiskNeed(
        missing=missing_nbytes(job),
        free=files.free_nbytes(job.folder),
        fetched=sum(map(job.sources.nbytes, job.sources.fetched())),
        window=job.sources.window_nbytes(),
    )


def require_disk(job: Job, *, lets_go: bool) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        OutputError: With the bytes needed and free.
    """
    need, sources = disk_need(job), job.sources
    here = sum(sources.nbytes(name) for name in sources.fetched() if sources.has(name))
    coming = min(need.window, need.fetched - here) if lets_go else need.fetched - here
    wanted = need.missing + coming
    if wanted > need.free:
        let_go = ", or let sources go (--keep-source no)" if coming and not lets_go else ""
        raise OutputError(
            "the job does not fit on the disk",
            file=job.folder.parent,
            expected=f"{wanted:,} bytes free ({wanted / 1e9:.3f} GB)",
            found=f"{need.free:,} bytes ({need.free / 1e9:.3f} GB)",
            next_step=f"Free some space, choose another --out{let_go}.",
        )
