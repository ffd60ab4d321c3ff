"""The finished output: shards under their names, verified, reported, the manifest last."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import luigi

from pipeline.errors import VerifyError, raise_problems
from pipeline.gguf.digests import check_digests
from pipeline.gguf.model_file import GgufModel, read_shards
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.pair import check_pair
from pipeline.model.engram.check import check_gguf_engram
from pipeline.plan import Plan
from pipeline.report.tables import render_text
from pipeline.store import ShardRecord, ShardStore
from pipeline.verify import verify_files
from tasks.documents import Finished, FinishedFile, told_of, write_documents
from tasks.fetch import ReleaseFile
from tasks.naming import MANIFEST, listed_digests, name_shards
from tasks.parameters import JobTask
from tasks.plan import AcceptPlan
from tasks.shard import WriteShard
from tasks.targets import PrintedTask, SpecTarget


class RunRecipe(JobTask):
    """The main job: a checkpoint becomes verified GGUF shards with reports and a manifest."""

    def requires(self) -> Iterator[luigi.Task]:
        """The accepted plan, a task per shard, the end of each source file that is let go."""
        yield AcceptPlan(spec=self.job.spec, **self.passed_on())
        for no, spec in enumerate(self.job.shard_specs):
            yield WriteShard(no=no, spec=spec, **self.passed_on())
        for file in self.job.sources.fetched() if self.lets_go else ():
            yield ReleaseFile(file=file, **self.passed_on())

    def output(self) -> SpecTarget:
        """The manifest: where it stands with this spec, the output is whole."""
        return SpecTarget(self.job.folder / MANIFEST, lambda: self.job.spec)

    def run(self) -> None:
        """Verify the shards, give them their names, write every report, then the manifest."""
        job = self.job
        finished = self._verified()
        paths = map(self.store.path, job.shard_specs)
        name_shards(
            job.folder, {s.file_name: path for s, path in zip(job.shards, paths, strict=True)}
        )
        for spec in job.shard_specs:
            self.store.tidy(spec)
        for table in write_documents(finished):
            sys.stdout.write(render_text(table) + "\n")
        sys.stdout.write(f"{job.folder}: {len(job.shards)} shards, whole and verified\n")
        sys.stdout.flush()

    def _verified(self) -> Finished:
        """Every file with its records, once each is sound and they belong together."""
        specs = iter(self.job.shard_specs)
        made = []
        for plan in self.job.plans:
            own = [next(specs) for _ in plan.shards]
            records = tuple(record_of(self.store, spec) for spec in own)
            model = verified(plan, list(map(self.store.path, own)))
            made.append(FinishedFile(plan, records, model))
        if len(made) > 1:
            target, draft = (file.model for file in made)
            raise_problems(f"draft of {self.job.name}", check_pair(target, draft))
        return Finished(self.job, told_of(self.job), tuple(made))


def record_of(store: ShardStore, spec: str) -> ShardRecord:
    """The record of a shard that was made.

    Raises:
        VerifyError: It vanished since, or its bytes changed.
    """
    if store.record(spec) is None:
        store.revive(spec)  # a late twin may have written equal bytes once more
    record = store.record(spec)
    if record is None:
        raise VerifyError(
            "a shard vanished or was touched before the output was finished",
            file=store.path(spec),
            next_step="Run the same command again; only that shard is looked at anew.",
        )
    return record


def verified(plan: Plan, paths: Sequence[Path]) -> GgufModel:
    """The model under ``paths`` once it fits plan, loader contract and hash buckets.

    Raises:
        Problems: It does not.
    """
    raise_problems(f"files of {plan.name}", verify_files(plan, paths))
    model = read_shards(paths)
    problems = [*check_contract(model, plan.form), *check_gguf_engram(model).problems]
    raise_problems(f"verification of {plan.name}", problems)
    return model


@RunRecipe.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def say_nothing_to_do(task: RunRecipe) -> None:
    """A second run says why it does nothing."""
    n_shards = len(task.job.shards)
    sys.stdout.write(
        f"nothing to do: {task.job.folder} is whole ({n_shards} shards, by spec and length; "
        "VerifyOutput hashes them)\n"
    )
    sys.stdout.flush()


class VerifyOutput(PrintedTask):
    """Hash every file of a finished output again and compare it with its digests."""

    path = luigi.Parameter(description="an output folder")

    def show(self) -> None:
        """Compare; raise every difference."""
        folder = Path(self.path)
        wanted = listed_digests(folder)
        raise_problems(f"verification of {folder}", check_digests(folder, wanted))
        sys.stdout.write(f"{folder}: {len(wanted)} files, all as written\n")
