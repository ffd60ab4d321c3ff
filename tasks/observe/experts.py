"""Measuring saliency on the checkpoint itself, with a model that need not fit into memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import luigi
import psutil

from pipeline import files
from pipeline.errors import OutputError
from pipeline.report.tables import render_text
from pipeline.source.reader import SourceReader
from tasks.observe.job import ObserveJob, ObserveParameters, open_observation
from tasks.parameters import CountParameter
from tasks.progress import Progress
from tasks.targets import ConditionTarget, PrintedTask

if TYPE_CHECKING:
    from tasks.observe.run import Observation

_GB = 10**9


class ObserveTask(luigi.Task):
    """The parameters of an observation."""

    source = luigi.Parameter(
        description="checkpoint folder, one of its shards, or owner/name@commit that was fetched"
    )
    calibration = luigi.Parameter(
        description="text to read: a .txt, .md or .jsonl file, or a folder of such files"
    )
    out = luigi.Parameter(default="observed.safetensors", description="the saliency file")
    tokens = CountParameter(most=10**9, default=262_144, description="tokens of the text to read")
    sequence = CountParameter(
        most=10**9, default=2048, description="tokens of a sequence at most; no document is mixed"
    )
    device = luigi.Parameter(default="cpu", description="cpu, cuda or cuda:N")
    precision = luigi.ChoiceParameter(
        default="float32",
        choices=("float32", "bfloat16", "float64"),
        description="of products with the released 4 and 8 bit matrices; bfloat16 is for GPUs",
    )
    state = luigi.ChoiceParameter(
        default="disk",
        choices=("disk", "memory"),
        significant=False,
        description="what is carried from layer to layer: disk (a killed run goes on) or memory",
    )
    memory = CountParameter(
        most=10**6,
        default=0,
        significant=False,
        description="GB of the host's memory to use (default: three quarters of what is free)",
    )
    threads = CountParameter(
        most=1024, default=0, significant=False, description="threads (default: one per core)"
    )

    @property
    def job(self) -> ObserveJob:
        """This task's job; opened once per process."""
        names = ("source", "calibration", "out", "tokens", "sequence", "device", "precision")
        return open_observation(ObserveParameters(*(getattr(self, name) for name in names)))

    @property
    def host_nbytes(self) -> int:
        """Bytes of the host's memory that may be used."""
        return self.memory * _GB or psutil.virtual_memory().available * 3 // 4

    @property
    def n_threads(self) -> int:
        """Threads to use."""
        return self.threads or len(os.sched_getaffinity(0))

    @contextmanager
    def prepared(self) -> Iterator[Observation]:
        """The observation with its plan, which is printed; the checkpoint is open."""
        # torch takes a second to load, and luigi's own process never needs it.
        from tasks.observe.run import Observation

        self.job.require_sound()
        with SourceReader(self.job.checkpoint) as reader:
            observation = Observation(
                self.job, reader, self.state, self.host_nbytes, n_threads=self.n_threads
            )
            sys.stdout.write("\n".join(map(render_text, observation.tables())))
            sys.stdout.flush()
            yield observation


class PlanObservation(PrintedTask, ObserveTask):
    """Print what an observation will take; nothing is written."""

    def show(self) -> None:
        """Measure this machine for a second or two, and print."""
        with self.prepared():
            pass


class ObserveExperts(ObserveTask):
    """Measure REAP's sums with the released weights: one layer at a time, one expert at a time.

    Gates as the model applies them, outputs before the gate. The file goes to `SelectExperts`.
    """

    def output(self) -> ConditionTarget:
        """The saliency file, of this very observation."""
        return ConditionTarget(lambda: self.job.is_observed)

    def run(self) -> None:
        """Plan, go on where an earlier run stopped, measure, write, remove the state."""
        job = self.job
        if job.out.exists():
            raise OutputError(
                "a file of this name is there already, and it is not of this observation",
                file=job.out,
                next_step="Move it away, or choose another --out.",
            )
        with self.prepared() as observation, alone(job):
            # A twin with other words for the same may have finished meanwhile.
            if not job.is_observed:
                title = f"observe {job.sequences.n_tokens:,} tokens"
                with Progress(title, observation.experts_nbytes) as progress:
                    observation.run(progress.advance)
                files.remove_folder(job.folder)
        sys.stdout.write(f"{job.out}: the sums of {job.config.n_layers} layers\n")
        sys.stdout.flush()


@contextmanager
def alone(job: ObserveJob) -> Iterator[None]:
    """No other process of this machine makes the same observation meanwhile."""
    lock = job.folder.with_suffix(".lock")
    files.make_folder(lock.parent)
    with files.sole_writing(lock):
        try:
            yield
        finally:
            files.remove(lock)


@ObserveExperts.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def say_nothing_to_do(task: ObserveExperts) -> None:
    """A second run says why it does nothing."""
    sys.stdout.write(f"nothing to do: {task.job.out} is of this very observation\n")
    sys.stdout.flush()
