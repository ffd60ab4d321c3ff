"""The parameters that every task of a job shares."""

from __future__ import annotations

import os

import luigi

from pipeline.store import ShardStore
from tasks.job import Job, JobParameters, open_job, store_of


class JobTask(luigi.Task):
    """A task of one job. ``threads`` cannot change a byte and is no part of its identity."""

    source = luigi.Parameter(
        default="", description="checkpoint folder, or one of its shards (default: the recipe's)"
    )
    recipe = luigi.Parameter(description="a shipped recipe's name, or a TOML file")
    out = luigi.Parameter(default="out", description="folder for all outputs")
    layout = luigi.Parameter(default="", description="mainline or fork (default: the recipe's)")
    name = luigi.Parameter(default="", description="the model's name in file names and metadata")
    threads = luigi.IntParameter(
        default=0, significant=False, description="quantizer threads (default: one per core)"
    )

    @property
    def job_parameters(self) -> JobParameters:
        """This task's job, as strings."""
        return JobParameters(self.source, self.recipe, self.out, self.layout, self.name)

    @property
    def job(self) -> Job:
        """This task's job; opened once per process."""
        return open_job(self.job_parameters)

    @property
    def store(self) -> ShardStore:
        """Where this task's shards are made."""
        return store_of(self.out)

    @property
    def n_threads(self) -> int:
        """Threads to use."""
        return self.threads or len(os.sched_getaffinity(0))

    def passed_on(self) -> dict[str, object]:
        """The shared parameters, for a task that this one requires."""
        names = ("source", "recipe", "out", "layout", "name", "threads")
        return {name: getattr(self, name) for name in names}
