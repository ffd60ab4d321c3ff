"""Several recipes in one pass against the same recipes one by one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmark.meter import Meter, Numbers
from pipeline.blocks import blocks_of_shard
from pipeline.fill import Wanted, fill_together, grouped
from pipeline.gguf.part import ShardPart
from pipeline.report.tables import Column, Row, Table
from pipeline.source.reader import SourceReader
from tasks.job import Job
from tasks.request import JobParameters

_COUNTED = ("wall", "cpu", "rchar", "wchar")


def measure_together(
    source: Path, out: Path, recipes: Sequence[str], *, n_rounds: int, n_threads: int
) -> list[Numbers]:
    """For each round: what one by one takes, what one pass takes, all shards of all recipes."""
    rounds = []
    for _ in range(n_rounds):
        numbers: Numbers = {}
        for title, groups in (("alone", [[r] for r in recipes]), ("together", [list(recipes)])):
            sums: Numbers = dict.fromkeys(_COUNTED, 0.0)
            for group in groups:
                for key, value in _filled(source, out, group, n_threads).items():
                    sums[key] += value
            numbers |= {f"{title}_{key}": value for key, value in sums.items()}
        rounds.append(numbers)
    return rounds


def together_table(rounds: Sequence[Numbers], recipes: Sequence[str]) -> Table:
    """One pass as a part of one by one, median of the rounds."""
    titles = {"wall": "wall time", "cpu": "CPU time", "rchar": "bytes read", "wchar": "written"}
    rows = [
        Row(
            (titles[key], f"{median(n[f'together_{key}'] / n[f'alone_{key}'] for n in rounds):.3f}")
        )
        for key in _COUNTED
    ]
    title = f"{', '.join(recipes)}: one pass / one by one"
    return Table(title, (Column("what"), Column("ratio")), tuple(rows))


def _filled(source: Path, out: Path, recipes: Sequence[str], n_threads: int) -> Numbers:
    shutil.rmtree(out, ignore_errors=True)
    jobs = [Job(JobParameters(str(source), recipe, str(out))) for recipe in recipes]
    places = {spec: (job, no) for job in jobs for no, spec in enumerate(job.shard_specs)}
    quantizer = jobs[0].quantizer
    quantizer.prepare(
        {t.type for job in jobs for p in job.plans for t in p.tensors if t.is_encoded}
    )
    meter = Meter()
    meter.start()
    widest = max((job.checkpoint for job in jobs), key=lambda one: len(one.weight_map))
    with SourceReader(widest) as reader, ExitStack() as stack:
        parts = [
            (job, no, stack.enter_context(_part(job, no, spec)))
            for spec, (job, no) in places.items()
        ]
        wanted = (
            Wanted(part, block)
            for job, no, part in parts
            for block in blocks_of_shard(job.shards[no])
        )
        fill_together(grouped(wanted), reader, quantizer, n_threads=n_threads)
        for *_, part in parts:
            part.settle()
    meter.lap("fill")
    shutil.rmtree(out, ignore_errors=True)
    return {key: meter.sums[f"fill_{key}"] for key in _COUNTED}


def _part(job: Job, no: int, spec: str) -> ShardPart:
    shard = job.shards[no]
    return ShardPart(job.store.path(spec), header=shard.header, nbytes=shard.nbytes, spec=spec)
