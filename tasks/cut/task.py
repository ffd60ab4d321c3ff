"""The parameters that every task of a cut shares."""

from __future__ import annotations

import os

import luigi

from pipeline.experts.criterion import Criterion
from tasks.cut.job import CutJob, CutParameters, open_cut
from tasks.cut.variant import Variant
from tasks.parameters import CountParameter
from tasks.targets import SpecTarget

IDENTITY = ("path", "keep", "out", "saliency", "experts", "criterion")


class CutTask(luigi.Task):
    """A task of one cut."""

    path = luigi.Parameter(description="a finished GGUF, one of its shards, or their folder")
    keep = luigi.Parameter(
        default="",
        description="a keep list: the experts that stay; several with commas between them",
    )
    saliency = luigi.Parameter(
        default="", description="instead of a list: saliency files to choose by, with commas"
    )
    experts = luigi.Parameter(
        default="", description="with saliency: how many stay in each layer, such as 256,320"
    )
    criterion = luigi.Parameter(
        default=str(Criterion.REAP),
        description=f"with saliency: what experts are ranked by: {', '.join(Criterion)}",
    )
    out = luigi.Parameter(default="out", description="folder for all outputs")
    threads = CountParameter(
        most=1024,
        default=0,
        significant=False,
        description="threads that copy and hash (default: one per core)",
    )

    @property
    def job(self) -> CutJob:
        """This task's job; opened once per process."""
        return open_cut(CutParameters(**{name: getattr(self, name) for name in IDENTITY}))

    @property
    def n_threads(self) -> int:
        """Threads to use."""
        return self.threads or len(os.sched_getaffinity(0))

    def passed_on(self) -> dict[str, object]:
        """The shared parameters, for a task that this one requires."""
        return {name: getattr(self, name) for name in (*IDENTITY, "threads")}


def target_of(variant: Variant, name: str) -> SpecTarget:
    """A document in an output folder that stands for this very output."""
    return SpecTarget(variant.folder / name, lambda: variant.spec)
