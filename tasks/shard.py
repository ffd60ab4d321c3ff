"""Making one output shard."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence

import luigi

from pipeline.blocks import Block, blocks_from, blocks_of_shard, spans_of
from pipeline.budget import budget_of
from pipeline.errors import OutputError, PlanError, QuantmillError, raise_problems
from pipeline.fill import FillEvents, fill_blocks
from pipeline.gguf.part import ShardPart
from pipeline.measure import TensorError, check_errors, measure_errors, merged_errors
from pipeline.model.roles import ROLE_TITLES
from pipeline.plan import PlannedShard, PlannedTensor
from pipeline.source.reader import SourceReader
from pipeline.store import ShardStore
from tasks.described import Described
from tasks.fetch import FetchFile
from tasks.job import Job
from tasks.parameters import JobTask
from tasks.plan import AcceptPlan
from tasks.progress import Progress
from tasks.targets import ConditionTarget

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


def refuse_errors(part: ShardPart, errors: Sequence[TensorError]) -> None:
    """Refuse a part that differs from its source by more than its types explain, and drop it.

    Raises:
        VerifyError: A tensor does.
    """
    problems = check_errors(errors)
    if problems:
        part.discard()
    raise_problems(f"what was written to {part.part}", problems)


def errors_of(
    job: Job,
    tensors: Sequence[PlannedTensor],
    part: ShardPart,
    source: SourceReader,
    *,
    has: Callable[[str], bool] = lambda _: True,
) -> tuple[TensorError, ...]:
    """What ``tensors`` of a filled part lost, where the source still ``has`` their matrices."""
    return measure_errors(
        tensors,
        part.part,
        source,
        n_rows=SAMPLED_ROWS,
        has=has,
        importance=job.weighing.importance,
        quantizer=job.quantizer,
    )


def finish(
    job: Job,
    no: int,
    part: ShardPart,
    *,
    n_threads: int,
    errors: Callable[[ShardPart], tuple[TensorError, ...]],
) -> None:
    """Make a filled part whole: read all back, measure, record, publish.

    Raises:
        VerifyError: Bytes on disk differ from those written, or from the source by too much.
        OutputError: A block is missing, or the disk failed.
    """
    shard, spec = job.shards[no], job.shard_specs[no]
    digests = part.read_back(spans_of(shard), n_threads=n_threads)
    measured = errors(part)
    refuse_errors(part, measured)
    job.store.save(spec, part.part, digests, measured)
    part.publish()


def written_line(job: Described) -> str:
    """The budget of the shards that are whole so far, in one line."""
    whole = [no for no, spec in enumerate(job.shard_specs) if job.store.record(spec)]
    budget = budget_of("written", job.written_items(whole))
    n_planned = sum(plan.data_nbytes for plan in job.plans)
    roles = "; ".join(f"{ROLE_TITLES[line.role]} {line.nbytes:,}" for line in budget.roles)
    return (
        f"written: {len(whole)} of {len(job.shards)} shards, "
        f"{budget.nbytes:,} of {n_planned:,} bytes ({roles})"
    )


class ShardTask(JobTask):
    """Work on one shard of the plan. Its identity is its spec: equal specs are made once."""

    source = luigi.Parameter(default="", significant=False)
    recipe = luigi.Parameter(significant=False)
    layout = luigi.Parameter(default="", significant=False)
    name = luigi.Parameter(default="", significant=False)
    supplement = luigi.Parameter(default="", significant=False)
    checksums = luigi.Parameter(default="", significant=False)
    keep = luigi.Parameter(default="", significant=False)
    imatrix = luigi.Parameter(default="", significant=False)
    graft = luigi.Parameter(default="", significant=False)
    no = luigi.IntParameter(significant=False)
    spec = luigi.Parameter()

    @property
    def shard(self) -> PlannedShard:
        """The planned shard.

        Raises:
            PlanError: It is no longer the one this task was made for.
        """
        shard: PlannedShard = self.job.shards[self.no]
        if self.job.shard_specs[self.no] != self.spec:
            raise PlanError(
                "the source or the recipe changed since this shard was planned",
                file=shard.file_name,
                expected=self.spec,
                found=self.job.shard_specs[self.no],
                next_step="Run the command again.",
            )
        return shard

    def part(self, *, trusts_journal: bool) -> ShardPart:
        """The unfinished shard."""
        shard = self.shard
        return ShardPart(
            self.store.path(self.spec),
            header=shard.header,
            nbytes=shard.nbytes,
            spec=self.spec,
            trusts_journal=trusts_journal,
        )

    def fill(
        self, part: ShardPart, source: SourceReader, blocks: Sequence[Block], title: str
    ) -> None:
        """Write the missing ones of ``blocks``, telling how it goes."""
        quantizer = self.job.quantizer
        quantizer.prepare({block.tensor.type for block in blocks if block.tensor.is_encoded})
        self.store.forget_notes(self.spec)
        with Progress(title, sum(block.nbytes for block in blocks)) as progress:

            def started(slot: int, block: str) -> None:
                progress.at(block)
                self.store.note(self.spec, slot, block)

            events = FillEvents(advanced=progress.advance, started=started)
            fill_blocks(
                part,
                blocks,
                source,
                quantizer,
                n_threads=self.n_threads,
                importance=self.job.weighing.importance,
                events=events,
            )


class FillFrom(ShardTask):
    """Fill what one source file gives to one shard, as soon as the file is verified."""

    file = luigi.Parameter()
    priority = 10

    def requires(self) -> FetchFile | AcceptPlan:
        """The file."""
        self.shard  # noqa: B018 - raises when the plan is another one by now
        if self.job.sources.origin(self.file).is_remote:
            return FetchFile(file=self.file, **self.passed_on())
        return AcceptPlan(spec=self.job.spec, **self.passed_on())

    def output(self) -> ConditionTarget:
        """Everything that comes from the file is journaled and measured."""
        return ConditionTarget(lambda: self.job.is_filled_from(self.no, self.file))

    def run(self) -> None:
        """Fill, settle, measure."""
        shard, weight_map = self.shard, self.job.checkpoint.weight_map
        blocks = list(blocks_from(shard, weight_map, self.file))
        tensors = list(dict.fromkeys(block.tensor for block in blocks))
        checkpoint = self.job.sources.readable()
        with SourceReader(checkpoint) as source, self.part(trusts_journal=True) as part:
            self.fill(part, source, blocks, f"{shard.file_name} from {self.file}")
            part.settle()
            errors = errors_of(
                self.job, tensors, part, source, has=lambda name: weight_map[name] == self.file
            )
            refuse_errors(part, errors)
        self.store.save_errors(self.spec, self.file, errors)


class WriteShard(ShardTask):
    """Make one shard whole: fill what is missing, read all back, record, publish."""

    priority = 15

    def requires(self) -> Iterator[luigi.Task]:
        """A shown and accepted plan; with fetched sources, what each file gives to the shard."""
        self.shard  # noqa: B018 - raises when the plan is another one by now
        yield AcceptPlan(spec=self.job.spec, **self.passed_on())
        if self.together:
            # Imported here: shards are made together, and one by one where nothing is shared.
            from tasks.together import FillTogether

            yield FillTogether.of(self)
        for file in self._fetched() if not self.together else ():
            yield FillFrom(no=self.no, spec=self.spec, file=file, **self.passed_on())

    def output(self) -> ShardTarget:
        """The whole shard in the store."""
        return ShardTarget(self.store, self.spec)

    def run(self) -> None:
        """Fill what is missing, read all back, measure its errors, record, publish."""
        shard = self.shard
        if not self._is_whole():
            try:
                self._make(shard)
            except QuantmillError:
                # Another worker may have finished the same shard meanwhile; its file is as good.
                if not self._is_whole():
                    raise
            self._is_whole()  # a late twin may have written equal bytes once more
        sys.stdout.write(written_line(self.job) + "\n")
        sys.stdout.flush()

    def _is_whole(self) -> bool:
        """Whether the shard is there, hashed again if somebody touched it."""
        return self.store.record(self.spec) is not None or self.store.revive(self.spec)

    def _make(self, shard: PlannedShard) -> None:
        blocks = blocks_of_shard(shard)
        checkpoint = self.job.sources.readable()
        with SourceReader(checkpoint) as source, self.part(trusts_journal=False) as part:
            self._require_sources(part, blocks)
            self.fill(part, source, blocks, shard.file_name)
            finish(self.job, self.no, part, n_threads=self.n_threads, errors=self._errors(source))

    def _require_sources(self, part: ShardPart, blocks: Sequence[Block]) -> None:
        """Refuse to mend a block whose source was let go since.

        Raises:
            OutputError: There is such a block; its file is then fetched by the next run.
        """
        weight_map, sources = self.job.checkpoint.weight_map, self.job.sources
        lacking = (block for block in blocks if block.offset not in part.done)
        for file in {weight_map[block.matrices[0].weight] for block in lacking}:
            if not sources.has(file):
                raise OutputError(
                    "a finished block was damaged after its source file was let go",
                    file=part.part,
                    found=f"blocks made of {file}",
                    next_step="Run the same command again: that file is fetched anew.",
                )

    def _fetched(self) -> list[str]:
        sources = self.job.sources
        return [f for f in self.job.files_of_shards[self.no] if sources.origin(f).is_remote]

    def _errors(self, source: SourceReader) -> Callable[[ShardPart], tuple[TensorError, ...]]:
        """Measured now, and for what came from fetched files when that was filled."""
        fetched, weight_map = set(self._fetched()), self.job.checkpoint.weight_map

        def measured(part: ShardPart) -> tuple[TensorError, ...]:
            here = errors_of(
                self.job,
                self.shard.tensors,
                part,
                source,
                has=lambda name: weight_map[name] not in fetched,
            )
            earlier = (e for file in sorted(fetched) for e in self.store.errors(self.spec, file))
            return merged_errors((*here, *earlier))

        return measured


@ShardTask.event_handler(luigi.Event.PROCESS_FAILURE)  # type: ignore[untyped-decorator]
def tell_what_it_was_at(task: ShardTask, message: str) -> None:
    """Name the blocks in work when a task process died: a C library that aborts says nothing."""
    tell_what_was_in_work(task.store, task.spec, f"shard {task.no + 1}", message)


def tell_what_was_in_work(store: ShardStore, spec: str, what: str, message: str) -> None:
    """Tell that the process that filled ``what`` died, and what is noted under ``spec``."""
    error = OutputError(
        f"the process that filled {what} died ({message})",
        file=store.path(spec),
        found="at work on " + ("; ".join(store.notes(spec)) or "nothing yet"),
        next_step="Finished blocks are kept; the same command goes on from there.",
    )
    logging.getLogger("luigi-interface").error("%s", error)
