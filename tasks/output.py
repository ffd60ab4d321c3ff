"""The finished output: shards under their names, verified, reported, the manifest last."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import luigi

from pipeline import files
from pipeline.errors import VerifyError, raise_problems
from pipeline.gguf.digests import check_digests
from pipeline.gguf.model_file import read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.engram.check import check_gguf_engram
from pipeline.report.tables import render_text
from pipeline.store import ShardRecord
from pipeline.verify import verify_files
from tasks.documents import MANIFEST, Finished, listed_digests, write_documents
from tasks.fetch import ReleaseFile
from tasks.parameters import JobTask
from tasks.shard import WriteShard
from tasks.targets import PrintedTarget, SpecTarget


class RunRecipe(JobTask):
    """The main job: a checkpoint becomes verified GGUF shards with reports and a manifest."""

    def requires(self) -> Iterator[luigi.Task]:
        """One task per shard; the end of each source file that is to be let go."""
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
        records = [self._record(spec) for spec in job.shard_specs]
        staged = self.store.root / f"naming-{job.spec[:16]}"
        self._link_shards(staged)
        self._verify(staged)
        (job.folder / MANIFEST).unlink(missing_ok=True)
        self._link_shards(job.folder)
        files.remove_folder(staged)
        model = read_model(job.folder / job.plan.shards[0].file_name)
        for table in write_documents(Finished(job, tuple(records), model)):
            sys.stdout.write(render_text(table) + "\n")
        sys.stdout.write(f"{job.folder}: {len(records)} shards, whole and verified\n")
        sys.stdout.flush()

    def _verify(self, folder: Path) -> None:
        """Hold the files in ``folder`` against plan, loader contract and hash buckets."""
        job = self.job
        raise_problems(f"files of {job.name}", verify_files(job.plan, folder))
        model = read_model(folder / job.plan.shards[0].file_name)
        problems = [*check_contract(model, job.layout), *check_gguf_engram(model).problems]
        raise_problems(f"verification of {job.name}", problems)

    def _record(self, spec: str) -> ShardRecord:
        record = self.store.record(spec)
        if record is None:
            raise VerifyError(
                "a shard vanished before the output was finished",
                file=self.store.path(spec),
                next_step="Run the same command again; only that shard is made anew.",
            )
        return record

    def _link_shards(self, folder: Path) -> None:
        """Show every shard in ``folder`` under its name, and drop names this plan does not have."""
        plan = self.job.plan
        wanted = {shard.file_name for shard in plan.shards}
        for path in folder.glob(f"{plan.name}-*-of-*.gguf"):
            if path.name not in wanted:
                path.unlink()
        for shard, spec in zip(plan.shards, self.job.shard_specs, strict=True):
            files.link_or_copy(self.store.path(spec), folder / shard.file_name)


@RunRecipe.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def say_nothing_to_do(task: RunRecipe) -> None:
    """A second run says why it does nothing."""
    n_shards = len(task.job.plan.shards)
    sys.stdout.write(
        f"nothing to do: {task.job.folder} is whole ({n_shards} shards, by spec and length; "
        "VerifyOutput hashes them)\n"
    )
    sys.stdout.flush()


class VerifyOutput(luigi.Task):
    """Hash every file of a finished output again and compare it with its SHA256SUMS."""

    path = luigi.Parameter(description="an output folder")

    def output(self) -> PrintedTarget:
        """Done once it ran."""
        if not hasattr(self, "_ran"):
            self._ran = PrintedTarget()
        return self._ran

    def run(self) -> None:
        """Compare; raise every difference."""
        folder = Path(self.path)
        wanted = listed_digests(folder)
        raise_problems(f"verification of {folder}", check_digests(folder, wanted))
        sys.stdout.write(f"{folder}: {len(wanted)} files, all as written\n")
        sys.stdout.flush()
        self.output().done = True
