"""Several recipes in one pass: the source is read and decoded once for all of their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Self

import luigi

from pipeline import files
from pipeline.blocks import blocks_of_shard
from pipeline.errors import OutputError, RecipeError
from pipeline.fill import FillEvents, Wanted, fill_together, grouped
from pipeline.gguf.part import ShardPart
from pipeline.measure import TensorError
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.header import SourceFile
from pipeline.source.reader import SourceReader
from tasks.fetch import FetchFile
from tasks.grafts import require_used
from tasks.job import Job, open_job
from tasks.output import RunRecipe
from tasks.parameters import HABITS, IDENTITY, JobTask
from tasks.plan import AcceptPlan
from tasks.progress import Progress
from tasks.recipe_file import read_recipe
from tasks.request import one_of_several
from tasks.shard import errors_of, finish, tell_what_was_in_work
from tasks.targets import ConditionTarget


def recipes_of(words: str) -> list[str]:
    """The recipes that a comma-separated list names.

    Raises:
        RecipeError: There are none, or one stands there twice.
    """
    names = [word.strip() for word in words.split(",") if word.strip()]
    if not names or len(set(names)) < len(names):
        raise RecipeError(
            "--recipe must name recipes, each once",
            expected="names or files, separated by commas",
            found=repr(words),
        )
    return names


class RunRecipes(JobTask):
    """`RunRecipe` for several recipes: the same files as one by one, in one pass over the source.

    Tensors that are the same in several files are quantized once; files that are the same lie on
    the disk once.
    """

    recipe = luigi.Parameter(description="recipes, separated by commas")

    def requires(self) -> Iterator[RunRecipe]:
        """The finished output of each recipe.

        Raises:
            RecipeError: Two of them would have one folder, they read different sources, or none
                takes what a graft is given for.
        """
        require_used([read_recipe(name) for name in recipes_of(self.recipe)], self.graft)
        jobs = FillTogether.of(self).jobs
        _require_own_folders(jobs)
        _require_one_source(jobs)
        for name in recipes_of(self.recipe):
            yield RunRecipe(**{**self.passed_on(), "recipe": name, "together": self.recipe})

    def complete(self) -> bool:
        """Whether every output is whole."""
        return all(task.complete() for task in self.requires())


class FillTogether(JobTask):
    """Every shard of every recipe, made whole."""

    together = luigi.Parameter()
    priority = 20

    @classmethod
    def of(cls, task: JobTask) -> Self:
        """The one pass that ``task`` is part of."""
        shared = {name: getattr(task, name) for name in (*IDENTITY, *HABITS)}
        words = task.together or task.recipe
        return cls(**{**shared, "recipe": recipes_of(words)[0], "together": words})

    @property
    def jobs(self) -> list[Job]:
        """The job of each recipe."""
        names = recipes_of(self.together)
        return [open_job(one_of_several(replace(self.said, recipe=name))) for name in names]

    def requires(self) -> Iterator[luigi.Task]:
        """Every plan accepted, and every source file here.

        Raises:
            OutputError: Sources are to be let go, which needs one pass per file.
        """
        fetched: dict[str, FetchFile] = {}
        for job, name in zip(self.jobs, recipes_of(self.together), strict=True):
            passed = {**self.passed_on(), "recipe": name}
            yield AcceptPlan(spec=job.spec, **passed)
            for file in job.sources.fetched():
                fetched.setdefault(file, FetchFile(file=file, **passed))
        if fetched and self.lets_go:
            raise OutputError(
                "several recipes in one pass need the whole source at hand",
                next_step="Leave --keep-source no out, or run the recipes one after another.",
            )
        yield from fetched.values()

    def output(self) -> ConditionTarget:
        """All shards are recorded."""
        return ConditionTarget(lambda: not self._missing())

    def run(self) -> None:
        """Fill all parts from the same source rows, then make each whole."""
        missing = {
            spec: place for spec, place in self._missing().items() if not self.store.revive(spec)
        }
        self._require_disk(missing)
        with SourceReader(self._readable()) as source, ExitStack() as stack:
            parts = [(job, no, stack.enter_context(_part(job, no))) for job, no in missing.values()]
            self._fill(parts, source)
            self._finish(parts, source)

    @property
    def noted(self) -> str:
        """The shard under which it is noted what the workers are at."""
        return next(iter(self._missing()), self.jobs[0].shard_specs[0])

    def _finish(self, parts: Sequence[tuple[Job, int, ShardPart]], source: SourceReader) -> None:
        """Read back and publish all parts, several at a time: hashing a file takes one thread."""
        pool = ThreadPoolExecutor(max(1, self.n_threads // 2), thread_name_prefix="finish")
        futures = [
            pool.submit(
                finish, job, no, part, n_threads=1, errors=partial(_errors, job, no, source)
            )
            for job, no, part in parts
        ]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _missing(self) -> dict[str, tuple[Job, int]]:
        """Shards that are not whole, once each, however many recipes share them."""
        return {
            spec: (job, no)
            for job in self.jobs
            for no, spec in enumerate(job.shard_specs)
            if self.store.record(spec) is None
        }

    def _readable(self) -> Checkpoint:
        """One checkpoint with what any of the jobs reads: recipes without a draft see less."""
        seen = [job.sources.readable() for job in self.jobs]
        files: dict[str, SourceFile] = {}
        weight_map: dict[str, str] = {}
        for one in seen:
            files |= one.files
            weight_map |= one.weight_map
        for job, one in zip(self.jobs, seen, strict=True):
            # Where they lie once they are here, for the files that a job has fetched.
            files |= {name: one.files[name] for name in job.sources.needed}
        return replace(seen[0], files=files, weight_map=weight_map)

    def _require_disk(self, missing: dict[str, tuple[Job, int]]) -> None:
        """Refuse what does not fit: each plan was accepted as if it were alone.

        Raises:
            OutputError: With the bytes needed and free.
        """
        needed = sum(
            job.shards[no].nbytes - files.allocated_nbytes(self.store.part(spec))
            for spec, (job, no) in missing.items()
        )
        free = files.free_nbytes(self.jobs[0].folder)
        if needed > free:
            raise OutputError(
                "the recipes do not fit on the disk together",
                file=self.out,
                expected=f"{needed:,} bytes free ({needed / 1e9:.3f} GB)",
                found=f"{free:,} bytes ({free / 1e9:.3f} GB)",
                next_step="Free some space, choose another --out, or run fewer at a time.",
            )

    def _fill(self, parts: Sequence[tuple[Job, int, ShardPart]], source: SourceReader) -> None:
        wanted = [
            Wanted(part, block, job.weighing.importance)
            for job, no, part in parts
            for block in blocks_of_shard(job.shards[no])
        ]
        quantizer = self.job.quantizer
        quantizer.prepare({w.block.tensor.type for w in wanted if w.block.tensor.is_encoded})
        nbytes = sum(one.block.nbytes for one in wanted)
        noted = self.noted
        self.store.forget_notes(noted)
        with Progress(f"{len(parts)} shards together", nbytes) as progress:

            def started(slot: int, block: str) -> None:
                progress.at(block)
                self.store.note(noted, slot, block)

            events = FillEvents(advanced=progress.advance, started=started)
            groups = grouped(wanted)
            fill_together(groups, source, quantizer, n_threads=self.n_threads, events=events)


def _require_one_source(jobs: Sequence[Job]) -> None:
    """Refuse recipes that mean different files by one name: rows are joined by the names.

    Raises:
        RecipeError: Their sources differ.
    """
    known: dict[str, tuple[SourceFile, Job]] = {}
    for job in jobs:
        for name, file in job.checkpoint.files.items():
            first, other = known.setdefault(name, (file, job))
            if first != file and _place(first) != _place(file):
                raise RecipeError(
                    "recipes of one pass read one source",
                    file=file.path,
                    expected=f"{first.path}, as {other.recipe.name}",
                    found=f"another file of this name for {job.recipe.name}",
                    next_step="Say --source, or run them one by one.",
                )


def _place(file: SourceFile) -> tuple[object, ...]:
    return file.path.resolve(), file.nbytes, file.header_sha256, file.modified_ns


def _require_own_folders(jobs: Sequence[Job]) -> None:
    first: dict[str, Job] = {}
    for job in jobs:
        other = first.setdefault(job.name, job)
        if other is not job:
            raise RecipeError(
                "two recipes have one name, and their files one folder",
                file=job.folder,
                found=f"{other.parameters.recipe} and {job.parameters.recipe}",
                next_step="Give one of them another name (`name` in the recipe).",
            )


def _part(job: Job, no: int) -> ShardPart:
    shard, spec = job.shards[no], job.shard_specs[no]
    return ShardPart(job.store.path(spec), header=shard.header, nbytes=shard.nbytes, spec=spec)


def _errors(job: Job, no: int, source: SourceReader, part: ShardPart) -> tuple[TensorError, ...]:
    return errors_of(job, job.shards[no].tensors, part, source)


@FillTogether.event_handler(luigi.Event.PROCESS_FAILURE)  # type: ignore[untyped-decorator]
def tell_what_they_were_at(task: FillTogether, message: str) -> None:
    """Name the blocks in work when the process of the pass died."""
    tell_what_was_in_work(task.store, task.noted, "the shards together", message)
