"""Planning a cut: what it will make, told before it is made."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import luigi

from pipeline import files
from pipeline.errors import OutputError
from pipeline.plan import PlannedShard
from pipeline.report.budget_page import all_tables
from pipeline.report.plan_report import DiskNeed, disk_table, shard_table
from pipeline.report.tables import render_text
from tasks.cut.job import CutJob
from tasks.cut.task import CutTask, target_of
from tasks.cut.variant import Variant
from tasks.naming import refuse_other_experts, refuse_other_source
from tasks.targets import PrintedTask, SpecTarget


def plan_text(task: CutTask) -> str:
    """What a task's job will make, for a terminal: budgets, files, disk, memory."""
    job = task.job
    parts = [part for variant in job.variants for part in _variant_text(variant)]
    need = disk_need(job)
    nbytes = sum(shard.nbytes for shard in _shards_of(job).values())
    parts.append(render_text(disk_table(nbytes, need, n_threads=task.n_threads)))
    return "\n".join(parts)


def _variant_text(variant: Variant) -> Iterator[str]:
    items = variant.planned_items()
    for table in all_tables(variant.budgets(), variant.model, items=items):
        yield render_text(table)
    for plan in variant.plans:
        yield render_text(shard_table(plan))
    shared = [shard for shard in variant.shards if shard.existing is not None]
    yield (
        f"{variant.name}: {len(shared)} of {len(variant.shards)} files stay as they are and are "
        f"shared with the model ({sum(shard.nbytes for shard in shared):,} bytes)."
    )
    yield from variant.notes


def disk_need(job: CutJob) -> DiskNeed:
    """Disk that a cut still takes, and what is free."""
    missing = 0
    for spec, shard in _shards_of(job).items():
        if job.store.record(spec) is not None:
            continue
        if shard.existing is None:
            missing += shard.nbytes - files.allocated_nbytes(job.store.part(spec))
        elif not files.is_same_disk(shard.existing.path, job.store.root):
            missing += shard.nbytes
    return DiskNeed(missing, files.free_nbytes(job.store.root), fetched=0, window=0)


def _shards_of(job: CutJob) -> dict[str, PlannedShard]:
    """All files of all outputs by identity: what outputs share is there once."""
    return {
        spec: shard
        for variant in job.variants
        for spec, shard in zip(variant.shard_specs, variant.shards, strict=True)
    }


class PlanCut(PrintedTask, CutTask):
    """Print what a cut will make; nothing is written."""

    def show(self) -> None:
        """Print."""
        self.job.whole.require_sound()
        sys.stdout.write(plan_text(self) + "\n")


class AcceptCut(CutTask):
    """Print the plan, refuse what does not fit on the disk, and leave word of what was accepted."""

    spec = luigi.Parameter()

    def output(self) -> list[SpecTarget]:
        """The accepted plan in every output folder."""
        return [target_of(variant, "plan.json") for variant in self.job.variants]

    def run(self) -> None:
        """Print, check the disk, write."""
        job = self.job
        sys.stdout.write(plan_text(self) + "\n")
        sys.stdout.flush()
        for variant in job.variants:
            refuse_other_source(variant.folder, job.whole.identity)
            refuse_other_experts(variant.folder, variant.keep_sha256)
        need = disk_need(job)
        if need.missing > need.free:
            raise OutputError(
                "the cut does not fit on the disk",
                file=job.parameters.out,
                expected=f"{need.missing:,} bytes free ({need.missing / 1e9:.3f} GB)",
                found=f"{need.free:,} bytes ({need.free / 1e9:.3f} GB)",
                next_step="Free some space, choose another --out, or cut fewer lists at a time.",
            )
        for variant in job.variants:
            document = {
                "schema": 1,
                "spec": variant.spec,
                "name": variant.name,
                "shards": [
                    {"file": s.file_name, "nbytes": s.nbytes, "spec": spec}
                    for s, spec in zip(variant.shards, variant.shard_specs, strict=True)
                ],
            }
            content = json.dumps(document, indent=1).encode() + b"\n"
            files.write_whole(variant.folder / "plan.json", content)
