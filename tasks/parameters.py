"""The parameters that every task of a job shares."""

from __future__ import annotations

import os

import luigi

from pipeline.store import ShardStore
from tasks.job import Job, open_job
from tasks.request import JobParameters, one_of_several, store_of


class CountParameter(luigi.IntParameter):
    """A whole number from 0 to ``most``."""

    def __init__(self, *, most: int, **settings: object) -> None:
        super().__init__(**settings)
        self._most = most

    def parse(self, text: str) -> int:
        """The number; a text that is none is named."""
        if not text.isdecimal() or int(text) > self._most:
            raise luigi.parameter.ParameterException(
                f"{text!r} is no whole number from 0 to {self._most:,} ({self.description})"
            )
        return int(text)


IDENTITY = (
    "source",
    "recipe",
    "out",
    "layout",
    "name",
    "supplement",
    "checksums",
    "keep",
    "imatrix",
    "graft",
)
HABITS = ("threads", "keep_source", "connections", "bandwidth", "together")


class JobTask(luigi.Task):
    """A task of one job. ``threads`` cannot change a byte and is no part of its identity."""

    source = luigi.Parameter(
        default="", description="checkpoint folder, one of its shards, owner/name@commit, or a GGUF"
    )
    recipe = luigi.Parameter(description="a shipped recipe's name, or a TOML file")
    out = luigi.Parameter(default="out", description="folder for all outputs")
    layout = luigi.Parameter(default="", description="mainline or fork (default: the recipe's)")
    name = luigi.Parameter(default="", description="the model's name in file names and metadata")
    supplement = luigi.Parameter(
        default="", description="a second source, for shards that the first lacks"
    )
    checksums = luigi.Parameter(
        default="", description="a file of sha256 sums that a hub's files must have as well"
    )
    keep = luigi.Parameter(
        default="", description="a keep list: the routed experts that stay (default: the recipe's)"
    )
    imatrix = luigi.Parameter(
        default="", description="an importance matrix, GGUF or .dat (default: the recipe's)"
    )
    graft = luigi.Parameter(
        default="", description="where the other sources of the recipe are: label=path, with commas"
    )
    keep_source = luigi.ChoiceParameter(
        default="yes",
        choices=("yes", "no"),
        significant=False,
        description="no: delete each fetched file once everything made of it is journaled",
    )
    connections = CountParameter(
        most=64, default=4, significant=False, description="connections per fetched file"
    )
    bandwidth = CountParameter(
        most=10**12,
        default=0,
        significant=False,
        description="bytes per second of all downloads (0: no limit)",
    )
    threads = CountParameter(
        most=1024,
        default=0,
        significant=False,
        description="quantizer threads (default: one per core)",
    )

    together = luigi.Parameter(
        default="", significant=False, description="recipes whose shards are made in one pass"
    )

    @property
    def said(self) -> JobParameters:
        """What the user said, for one recipe or for several."""
        return JobParameters(**{name: getattr(self, name) for name in IDENTITY})

    @property
    def job_parameters(self) -> JobParameters:
        """This task's job, as strings."""
        return one_of_several(self.said) if self.together else self.said

    @property
    def job(self) -> Job:
        """This task's job; opened once per process."""
        return open_job(self.job_parameters)

    @property
    def store(self) -> ShardStore:
        """Where this task's shards are made."""
        return store_of(self.out)

    @property
    def lets_go(self) -> bool:
        """Whether fetched files are deleted once they are used up."""
        return bool(self.keep_source == "no")

    @property
    def n_threads(self) -> int:
        """Threads to use."""
        return self.threads or len(os.sched_getaffinity(0))

    def passed_on(self) -> dict[str, object]:
        """The shared parameters, for a task that this one requires."""
        return {name: getattr(self, name) for name in (*IDENTITY, *HABITS)}
