"""A finished model without some of its experts, in one or several selections."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import luigi

from pipeline.cut.check import check_cut
from pipeline.cut.share import share_shard
from pipeline.cut.write import Cut, write_cuts
from pipeline.errors import PlanError, QuantmillError, raise_problems
from pipeline.experts.criterion import Criterion
from pipeline.fill import FillEvents
from pipeline.gguf.model_file import GgufModel, read_shards
from pipeline.gguf.part import ShardPart
from pipeline.gguf.reader import GgufFile, read_gguf
from pipeline.plan import PlannedShard
from pipeline.report.tables import render_text
from pipeline.verify import verify_files
from tasks.cut.plan import AcceptCut
from tasks.cut.task import CutTask, target_of
from tasks.cut.variant import Variant
from tasks.documents import Finished, FinishedFile, write_documents
from tasks.naming import MANIFEST, name_shards
from tasks.output import record_of
from tasks.progress import Progress
from tasks.shard import ShardTarget, written_line
from tasks.targets import SpecTarget


class CutShard(CutTask):
    """Make one file of every output whole; the model's bytes pass by once for all of them."""

    path = luigi.Parameter(significant=False)
    keep = luigi.Parameter(default="", significant=False)
    saliency = luigi.Parameter(default="", significant=False)
    experts = luigi.Parameter(default="", significant=False)
    criterion = luigi.Parameter(default=str(Criterion.REAP), significant=False)
    out = luigi.Parameter(default="out", significant=False)
    no = luigi.IntParameter(significant=False)
    spec = luigi.Parameter()

    def requires(self) -> AcceptCut:
        """A shown and accepted plan."""
        return AcceptCut(spec=self.job.spec, **self.passed_on())

    def output(self) -> list[ShardTarget]:
        """The whole files in the store."""
        return [ShardTarget(self.job.store, spec) for spec in self._shards()]

    def run(self) -> None:
        """Share or write, read back, record, publish."""
        missing = self._missing()
        if missing:
            try:
                self._make(missing)
            except QuantmillError:
                # Another worker may have finished the same files meanwhile; they are as good.
                if self._missing():
                    raise
        for variant in self.job.variants:
            sys.stdout.write(f"{variant.name}: {written_line(variant)}\n")
        sys.stdout.flush()

    def _shards(self) -> dict[str, PlannedShard]:
        """What this file becomes in every output, by identity.

        Raises:
            PlanError: It is no longer what this task was made for.
        """
        if self.job.shard_spec(self.no) != self.spec:
            raise PlanError(
                "the model or a keep list changed since this file was planned",
                file=self.job.whole.shards[self.no].file_name,
                next_step="Run the command again.",
            )
        return {v.shard_specs[self.no]: v.shards[self.no] for v in self.job.variants}

    def _missing(self) -> dict[str, PlannedShard]:
        store = self.job.store
        return {
            spec: shard
            for spec, shard in self._shards().items()
            if store.record(spec) is None and not store.revive(spec)
        }

    def _make(self, missing: Mapping[str, PlannedShard]) -> None:
        for spec, shard in missing.items():
            if shard.existing is not None:
                self._share(spec, shard.existing)
        written = {spec: shard for spec, shard in missing.items() if shard.existing is None}
        if written:
            self._write(written)

    def _share(self, spec: str, file: GgufFile) -> None:
        listed = self.job.whole.listed.get(file.path.name)
        with Progress(file.path.name, file.nbytes) as progress:
            share_shard(self.job.store, spec, file, listed=listed, progress=progress.advance)

    def _write(self, shards: Mapping[str, PlannedShard]) -> None:
        job, whole = self.job, self.job.whole.shards[self.no]
        nbytes = sum(shard.data_nbytes for shard in shards.values())
        title = whole.file_name + (f", {len(shards)} cuts" if len(shards) > 1 else "")
        with ExitStack() as stack:
            cuts = [
                Cut(shard, stack.enter_context(self._part(spec, shard)))
                for spec, shard in shards.items()
            ]
            progress = stack.enter_context(Progress(title, nbytes))
            digests = write_cuts(
                whole,
                cuts,
                job.whole.source,
                n_threads=self.n_threads,
                listed=job.whole.listed.get(whole.file_name),
                events=FillEvents(progress.advance, lambda _, block: progress.at(block)),
            )
            for spec, cut, one in zip(shards, cuts, digests, strict=True):
                job.store.save(spec, cut.part.part, one)
                cut.part.publish()

    def _part(self, spec: str, shard: PlannedShard) -> ShardPart:
        path = self.job.store.path(spec)
        return ShardPart(path, header=shard.header, nbytes=shard.nbytes, spec=spec)


class CutExperts(CutTask):
    """Cut experts out of a finished model: verified files, reports and a manifest for each list.

    Bytes are copied, nothing is quantized again. Files of which no byte changes are shared.
    """

    def requires(self) -> Iterator[luigi.Task]:
        """One task per file of the model."""
        self.job.whole.require_sound()
        for no in range(len(self.job.whole.shards)):
            yield CutShard(no=no, spec=self.job.shard_spec(no), **self.passed_on())

    def output(self) -> list[SpecTarget]:
        """The manifests: where one stands with its spec, that output is whole."""
        return [target_of(variant, MANIFEST) for variant in self.job.variants]

    def run(self) -> None:
        """Verify each output, give its files their names, write its reports and its manifest."""
        for variant in self.job.variants:
            if not target_of(variant, MANIFEST).exists():
                self._finish(variant)

    def _finish(self, variant: Variant) -> None:
        store = self.job.store
        finished = self._verified(variant)
        paths = map(store.path, variant.shard_specs)
        named = zip(variant.shards, paths, strict=True)
        name_shards(variant.folder, {shard.file_name: path for shard, path in named})
        for spec in variant.shard_specs:
            store.tidy(spec)
        for table in write_documents(finished):
            sys.stdout.write(render_text(table) + "\n")
        sys.stdout.write(f"{variant.folder}: {len(variant.shards)} files, whole and verified\n")
        sys.stdout.flush()

    def _verified(self, variant: Variant) -> Finished:
        """Every file with its records, once each is sound and holds the experts of the list."""
        specs = iter(variant.shard_specs)
        made = []
        for plan in variant.plans:
            own = [next(specs) for _ in plan.shards]
            records = tuple(record_of(self.job.store, spec) for spec in own)
            paths = [self.job.store.path(spec) for spec in own]
            raise_problems(f"files of {plan.name}", verify_files(plan, paths))
            made.append(FinishedFile(plan, records, opened(paths)))
        model, whole = made[0].model, self.job.whole
        problems = [
            *whole.problems_of(model, union=whole.has_union),
            *check_cut(whole.model, model, variant.keep),
        ]
        raise_problems(f"verification of {variant.name}", problems)
        return Finished(variant, variant.told(), tuple(made))


def opened(paths: Sequence[Path]) -> GgufModel:
    """The model in stored files, which have other names than its shards."""
    # A single file need not say that it is the only one.
    return read_shards(paths) if len(paths) > 1 else GgufModel((read_gguf(paths[0]),))


@CutExperts.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def say_nothing_to_do(task: CutExperts) -> None:
    """A second run says why it does nothing."""
    for variant in task.job.variants:
        sys.stdout.write(
            f"nothing to do: {variant.folder} is whole ({len(variant.shards)} files, by spec and "
            "length; VerifyOutput hashes them)\n"
        )
    sys.stdout.flush()
