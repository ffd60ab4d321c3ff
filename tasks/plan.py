"""Planning: what a job will make, told before it is made."""

from __future__ import annotations

import json
import sys

import luigi

from pipeline import files
from pipeline.report.budget_page import all_tables
from pipeline.report.importance_table import importance_tables
from pipeline.report.plan_report import disk_table, shard_table
from pipeline.report.requant_report import requant_tables
from pipeline.report.tables import render_text
from pipeline.report.time_table import time_table, type_times
from tasks.disk import disk_need, require_disk
from tasks.naming import refuse_other_source
from tasks.parameters import JobTask
from tasks.targets import PrintedTask, SpecTarget


def plan_text(task: JobTask) -> str:
    """The plans of a task's job for a terminal: budgets, shards, disk, memory."""
    job = task.job
    tables = [
        *all_tables(job.budgets(), job.model, job.left_out(), items=job.planned_items()),
        *map(shard_table, job.plans),
        *job.origin_tables(),
        *requant_tables(job.plans),
        *(importance_tables(job.coverage) if job.coverage else ()),
        time_table(type_times(job.plans, job.weighing.knows), n_threads=task.n_threads),
        disk_table(job.nbytes, disk_need(job), n_threads=task.n_threads),
    ]
    return "\n".join(render_text(table) for table in tables)


class PlanRecipe(PrintedTask, JobTask):
    """Print the plan of a job; nothing is written."""

    def requires(self) -> tuple[()]:
        """No task; luigi's own process opens the source here, and tells of a moved branch."""
        self.job.checkpoint  # noqa: B018 - opens it
        return ()

    def show(self) -> None:
        """Print."""
        sys.stdout.write(plan_text(self))


class AcceptPlan(JobTask):
    """Print the plan, refuse what does not fit on the disk, and leave word of what was accepted."""

    spec = luigi.Parameter()

    def output(self) -> SpecTarget:
        """The accepted plan in the output folder."""
        return SpecTarget(self.job.folder / "plan.json", lambda: self.spec)

    def run(self) -> None:
        """Print, check the disk, write."""
        sys.stdout.write(plan_text(self))
        sys.stdout.flush()
        refuse_other_source(self.job.folder, self.job.source.identity)
        require_disk(self.job, lets_go=self.lets_go)
        document = {
            "schema": 1,
            "spec": self.spec,
            "name": self.job.name,
            "shards": [
                {"file": s.file_name, "nbytes": s.nbytes, "spec": spec}
                for s, spec in zip(self.job.shards, self.job.shard_specs, strict=True)
            ],
        }
        files.write_whole(self.output().path, json.dumps(document, indent=1).encode() + b"\n")
