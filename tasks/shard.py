"""Making one output shard."""

from __future__ import annotations

import logging
import sys

import luigi

from pipeline.budget import budget_of, written_items
from pipeline.errors import OutputError, PlanError, raise_problems
from pipeline.fill import FillEvents, fill_shard
from pipeline.gguf.part import ShardPart
from pipeline.model.roles import ROLE_TITLES
from pipeline.source.reader import SourceReader
from pipeline.store import ShardStore
from pipeline.verify import check_errors, measure_errors
from tasks.job import Job
from tasks.parameters import JobTask
from tasks.plan import AcceptPlan
from tasks.progress import Progress

SAMPLED_ROWS = 64
"""Rows per tensor whose error is measured against the source."""


class ShardTarget(luigi.Target):
    """A shard that is whole: recorded, and of the recorded length."""

    def __init__(self, store: ShardStore, spec: str) -> None:
        self._store = store
        self._spec = spec

    def exists(self) -> bool:
        """Whether the shard is whole, by its record and length (`VerifyOutput` hashes)."""
        return self._store.record(self._spec) is not None


def written_line(job: Job) -> str:
    """The budget of the shards that are whole so far, in one line."""
    whole = [no for no, spec in enumerate(job.shard_specs) if job.store.record(spec)]
    budget = budget_of("written", written_items(job.plan, whole))
    roles = "; ".join(f"{ROLE_TITLES[line.role]} {line.nbytes:,}" for line in budget.roles)
    return (
        f"written: {len(whole)} of {len(job.plan.shards)} shards, "
        f"{budget.nbytes:,} of {job.plan.data_nbytes:,} bytes ({roles})"
    )


class WriteShard(JobTask):
    """Fill one shard of the plan. Its identity is its spec: equal specs are made once."""

    source = luigi.Parameter(default="", significant=False)
    recipe = luigi.Parameter(significant=False)
    layout = luigi.Parameter(default="", significant=False)
    name = luigi.Parameter(default="", significant=False)
    no = luigi.IntParameter(significant=False)
    spec = luigi.Parameter()

    def requires(self) -> AcceptPlan:
        """Nothing is written before the plan was shown and found to fit."""
        return AcceptPlan(spec=self.job.spec, **self.passed_on())

    def output(self) -> ShardTarget:
        """The whole shard in the store."""
        return ShardTarget(self.store, self.spec)

    def run(self) -> None:
        """Fill what is missing, read all back, measure its errors, record, publish."""
        shard = self.job.plan.shards[self.no]
        if self.job.shard_specs[self.no] != self.spec:
            raise PlanError(
                "the source or the recipe changed since this shard was planned",
                file=shard.file_name,
                expected=self.spec,
                found=self.job.shard_specs[self.no],
                next_step="Run the command again.",
            )
        with (
            SourceReader(self.job.checkpoint) as source,
            ShardPart(
                self.store.path(self.spec),
                header=shard.header,
                nbytes=shard.nbytes,
                spec=self.spec,
            ) as part,
            Progress(shard) as progress,
        ):

            def started(slot: int, block: str) -> None:
                progress.at(block)
                self.store.note(self.spec, slot, block)

            digests = fill_shard(
                part,
                shard,
                source,
                self.job.quantizer,
                n_threads=self.n_threads,
                events=FillEvents(advanced=progress.advance, started=started),
            )
            errors = measure_errors(shard.tensors, part.part, source, n_rows=SAMPLED_ROWS)
            raise_problems(f"what was written to {shard.file_name}", check_errors(errors))
            self.store.save(self.spec, shard.nbytes, digests, errors)
            part.publish()
        self.store.forget_notes(self.spec)
        sys.stdout.write(written_line(self.job) + "\n")
        sys.stdout.flush()


@WriteShard.event_handler(luigi.Event.PROCESS_FAILURE)  # type: ignore[untyped-decorator]
def tell_what_it_was_at(task: WriteShard, message: str) -> None:
    """Name the blocks in work when a task process died: a C library that aborts says nothing."""
    error = OutputError(
        f"the process that filled shard {task.no + 1} died ({message})",
        file=task.store.path(task.spec),
        found="at work on " + ("; ".join(task.store.notes(task.spec)) or "nothing yet"),
        next_step="Finished blocks are kept; the same command goes on from there.",
    )
    logging.getLogger("luigi-interface").error("%s", error)
