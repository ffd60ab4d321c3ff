"""A checkpoint without some of its experts, in the released form: for engines that read that."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import luigi

from pipeline import files
from pipeline.digest import canonical_json, sha256
from pipeline.errors import OutputError, PlanError, VerifyError
from pipeline.experts.keep_json import keep_spec
from pipeline.prune.check import check_pruned
from pipeline.prune.config_json import index_bytes
from pipeline.prune.records import FileRecord
from pipeline.prune.write import write_file
from pipeline.report.pruned_card import pruned_card
from pipeline.report.pruned_report import cut_disk_table, pruned_table
from pipeline.report.tables import render_text
from pipeline.source.checkpoint import CONFIG_NAME, INDEX_NAME
from tasks.cut.checkpoint_job import (
    ACCEPTED,
    CARD,
    KEEP,
    STATE,
    CheckpointCutJob,
    CheckpointCutParameters,
    open_checkpoint_cut,
)
from tasks.naming import MANIFEST, SUMS, sums_text
from tasks.progress import Progress
from tasks.targets import ConditionTarget, PrintedTask, SpecTarget

SCHEMA = 1


class CheckpointCutTask(luigi.Task):
    """A task of one cut."""

    source = luigi.Parameter(description="the checkpoint's folder, or one of its shards")
    keep = luigi.Parameter(description="a keep list: the routed experts that stay")
    out = luigi.Parameter(description="a new folder for what is left")

    @property
    def job(self) -> CheckpointCutJob:
        """This task's job; opened once per process."""
        return open_checkpoint_cut(CheckpointCutParameters(self.source, self.keep, self.out))

    def passed_on(self) -> dict[str, object]:
        """The shared parameters, for a task that this one requires."""
        return {name: getattr(self, name) for name in ("source", "keep", "out")}


def plan_text(job: CheckpointCutJob) -> str:
    """What a cut will make, for a terminal."""
    tables = (pruned_table(job.source, job.plan), cut_disk_table(job.plan, job.disk()))
    left_out = f"Not taken along: {', '.join(job.left_out)}.\n" if job.left_out else ""
    return "\n".join(map(render_text, tables)) + left_out


class PlanCheckpointCut(PrintedTask, CheckpointCutTask):
    """Print what a cut will make; nothing is written."""

    out = luigi.Parameter(default="out", description="where it would go")

    def show(self) -> None:
        """Print."""
        sys.stdout.write(plan_text(self.job))


class AcceptCheckpointCut(CheckpointCutTask):
    """Print the plan, refuse what does not fit on the disk, and leave word of what was accepted."""

    spec = luigi.Parameter()

    def output(self) -> SpecTarget:
        """The accepted plan."""
        return SpecTarget(self.job.folder / STATE / ACCEPTED, lambda: self.spec)

    def run(self) -> None:
        """Print, check folder and disk, write."""
        job = self.job
        sys.stdout.write(plan_text(job))
        sys.stdout.flush()
        job.refuse_standing()
        disk = job.disk()
        if disk.missing > disk.free:
            raise OutputError(
                "the cut checkpoint does not fit on the disk",
                file=job.folder,
                expected=f"{disk.missing:,} bytes free ({disk.missing / 1e9:.3f} GB)",
                found=f"{disk.free:,} bytes ({disk.free / 1e9:.3f} GB)",
                next_step="Free some space or choose another --out; on the source's own drive "
                "the files that do not change take none.",
            )
        files.write_whole(self.output().path, _json({"spec": self.spec, **job.identity}))


class WriteCheckpointFile(CheckpointCutTask):
    """Make one file of the cut checkpoint whole."""

    file = luigi.Parameter()
    spec = luigi.Parameter()

    def requires(self) -> AcceptCheckpointCut:
        """A shown and accepted plan."""
        return AcceptCheckpointCut(spec=self.job.spec, **self.passed_on())

    def output(self) -> ConditionTarget:
        """The file is recorded as whole, and was not touched since."""
        records = self.job.records
        return ConditionTarget(lambda: records.record(self.file, self.spec) is not None)

    def run(self) -> None:
        """Write or share, read back, record."""
        job = self.job
        if job.specs[self.file] != self.spec:
            raise PlanError(
                "the checkpoint or the keep list changed since this file was planned",
                file=self.file,
                next_step="Run the command again.",
            )
        if job.records.revive(self.file, self.spec, job.listed()):
            return
        planned = job.file(self.file)
        with Progress(self.file, planned.nbytes) as progress:
            target = job.folder / self.file
            digest = write_file(planned, job.source, target, told=progress.advance)
        job.records.save(self.file, self.spec, digest)


class CutCheckpoint(CheckpointCutTask):
    """Cut experts out of a checkpoint, which stays one: the released layout with fewer experts.

    Bytes are copied; files of which none changes are shared by link.
    """

    def requires(self) -> Iterator[luigi.Task]:
        """One task per file."""
        self.job.refuse_standing()
        for name, spec in self.job.specs.items():
            yield WriteCheckpointFile(file=name, spec=spec, **self.passed_on())

    def output(self) -> SpecTarget:
        """The manifest: where it stands with this spec, the output is whole."""
        return SpecTarget(self.job.folder / MANIFEST, lambda: self.job.spec)

    def run(self) -> None:
        """Check what was written, describe it, list it; the manifest last."""
        job = self.job
        whole = {name: whole_record(job, name) for name in job.specs}
        check_pruned(job.source, job.plan, job.entries, job.folder)
        described = documents(job)
        for name, content in described.items():
            files.write_whole(job.folder / name, content)
        listed = [*map(_shard_entry, whole.items()), *map(_document_entry, described.items())]
        sums = {str(entry["file"]): str(entry["sha256"]) for entry in listed}
        files.write_whole(job.folder / SUMS, sums_text(sums))
        files.write_whole(job.folder / MANIFEST, _json(_manifest(job, listed)))
        files.remove_folder(job.folder / STATE)
        sys.stdout.write(f"{job.folder}: {len(whole)} shards, whole and checked\n")
        sys.stdout.flush()


def whole_record(job: CheckpointCutJob, name: str) -> FileRecord:
    """The record of a file that was made.

    Raises:
        VerifyError: It vanished since, or was touched.
    """
    record = job.records.record(name, job.specs[name])
    if record is None:
        raise VerifyError(
            "a file vanished or was touched before the checkpoint was finished",
            file=job.folder / name,
            next_step="Run the same command again; only that file is looked at anew.",
        )
    return record


def documents(job: CheckpointCutJob) -> dict[str, bytes]:
    """All files beside the shards; config.json last, without which nobody opens the folder."""
    keep = job.told_keep
    card = pruned_card(keep, job.first_name, pruned_table(job.source, job.plan), job.left_out)
    return {
        **{name: files.read_bytes(path) for name, path in job.carried.items()},
        KEEP: canonical_json(keep_spec(keep)) + b"\n",
        CARD: card.encode(),
        INDEX_NAME: index_bytes(job.plan),
        CONFIG_NAME: job.config_text,
    }


def _shard_entry(made: tuple[str, FileRecord]) -> dict[str, object]:
    name, record = made
    return {"file": name, "nbytes": record.nbytes, "sha256": record.sha256, "spec": record.spec}


def _document_entry(made: tuple[str, bytes]) -> dict[str, object]:
    name, content = made
    return {"file": name, "nbytes": len(content), "sha256": sha256(content)}


def _manifest(job: CheckpointCutJob, listed: Sequence[object]) -> dict[str, object]:
    keep = job.told_keep
    return {
        "schema": SCHEMA,
        "spec": job.spec,
        "source": {"folder": job.first_name, "n_tensors": len(job.source.weight_map)},
        **job.identity,
        "experts": {
            "source_experts": keep.n_experts,
            "keep_experts": keep.n_kept,
            "honesty": str(keep.honesty),
        },
        "tensor_nbytes": job.plan.tensor_nbytes,
        "files": listed,
    }


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"


@CutCheckpoint.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def say_nothing_to_do(task: CutCheckpoint) -> None:
    """A second run says why it does nothing."""
    sys.stdout.write(
        f"nothing to do: {task.job.folder} is whole ({len(task.job.specs)} shards, by spec and "
        "length; VerifyOutput hashes them)\n"
    )
    sys.stdout.flush()
