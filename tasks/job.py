"""A job: which checkpoint becomes which files by which recipe, and the plans that follow.

Every task holds the same few strings and gets the same `Job` from them, so that a task can be
rebuilt in another process or on another host from its parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import cached_property, lru_cache

from pipeline.blocks import blocks_from
from pipeline.budget import (
    Budget,
    Item,
    NotCarried,
    budget_of,
    plan_items,
    written_items,
)
from pipeline.digest import spec_digest
from pipeline.model.targets.tensor import TargetTensor
from pipeline.plan import PlannedShard
from pipeline.quant.libraries import Libraries
from pipeline.recipe.values import DraftMode
from pipeline.report.requant_report import origin_table
from pipeline.report.tables import Table
from pipeline.store import shard_spec
from tasks.grafts import Taken
from tasks.request import JobParameters, Request
from tasks.sources import Sources


class Job(Request):
    """A request at work: its shards and their identities, where they are read and written."""

    @cached_property
    def shards(self) -> tuple[PlannedShard, ...]:
        """The files of all plans; a shard of the job is known by its place in this list."""
        return tuple(shard for plan in self.plans for shard in plan.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(plan.nbytes for plan in self.plans)

    @cached_property
    def tensors(self) -> tuple[TargetTensor, ...]:
        """Every tensor of every file."""
        return tuple(tensor.target for plan in self.plans for tensor in plan.tensors)

    @cached_property
    def files_of_shards(self) -> tuple[tuple[str, ...], ...]:
        """For every shard, the source files that it reads."""
        weight_map = self.checkpoint.weight_map
        names = (
            {weight_map[name] for tensor in shard.tensors for name in tensor.target.source_names}
            for shard in self.shards
        )
        return tuple(tuple(sorted(files)) for files in names)

    @cached_property
    def sources(self) -> Sources:
        """The source files that the plans read, and where each comes from."""
        needed = sorted({name for names in self.files_of_shards for name in names})
        origins = {**self.source.origins, **self.grafts.origins}
        return Sources(self.checkpoint, origins, needed)

    def shards_of(self, file: str) -> tuple[int, ...]:
        """The shards that read a source file."""
        return tuple(no for no, files in enumerate(self.files_of_shards) if file in files)

    def is_filled_from(self, no: int, file: str) -> bool:
        """Whether everything that a shard takes from a source file is journaled and measured."""
        spec, shard = self.shard_specs[no], self.shards[no]
        if self.store.record(spec) is not None:
            return True
        if not self.store.has_errors(spec, file):
            return False
        done = self.store.journaled(spec)
        blocks = blocks_from(shard, self.checkpoint.weight_map, file)
        return all(block.offset in done for block in blocks)

    def is_used_up(self, file: str) -> bool:
        """Whether no shard needs a source file any more."""
        return all(self.is_filled_from(no, file) for no in self.shards_of(file))

    @cached_property
    def quantizer(self) -> Libraries:
        """The libraries that write block types."""
        return Libraries()

    @cached_property
    def shard_specs(self) -> tuple[str, ...]:
        """The identity of every shard."""
        return tuple(
            shard_spec(
                shard,
                [self.sources.stamp(name) for name in names],
                self.quantizer.version_of,
                importance=self.weighing.identity(shard),
            )
            for shard, names in zip(self.shards, self.files_of_shards, strict=True)
        )

    @property
    def spec(self) -> str:
        """The identity of the whole output."""
        return spec_digest({"name": self.name, "shards": self.shard_specs})

    def budgets(self) -> tuple[Budget, Budget]:
        """The budgets of the source and of the plan."""
        source = budget_of("source", self.source.items(self._carried))
        return source, budget_of("plan", self.planned_items())

    def planned_items(self) -> list[Item]:
        """Every tensor of every file as planned."""
        return [item for plan in self.plans for item in plan_items(plan)]

    def written_items(self, whole: Iterable[int]) -> list[Item]:
        """The tensors of those shards of the job that are whole."""
        numbers, first = set(whole), 0
        items: list[Item] = []
        for plan in self.plans:
            inside = (no - first for no in numbers if 0 <= no - first < len(plan.shards))
            items += written_items(plan, inside)
            first += len(plan.shards)
        return items

    def left_out(self) -> tuple[NotCarried, ...]:
        """What no file carries."""
        return self.source.left_out(self._carried)

    @property
    def _carried(self) -> tuple[TargetTensor, ...]:
        """What files carry of the source's own, a grafted tensor's counterpart among it."""
        target = () if self._is_draft_only else self._frame
        drops = self.recipe.draft.mode is DraftMode.DROP
        return target if drops else (*target, *self.source.draft_frame())

    def notes(self) -> tuple[str, ...]:
        """What a person should know of the sources."""
        return (*self.source.notes, *self.grafts.notes(self.source))

    def origin_tables(self) -> tuple[Table, ...]:
        """What comes from where, if there is anything to say of it."""
        notes = self.notes()
        if not self.taken and not notes:
            return ()
        tensors = [tensor for plan in self.plans for tensor in plan.tensors]
        taken = [(g.word, g.n_tensors, g.nbytes) for g in self.taken]
        n_tensors = len(tensors) - sum(n for _, n, _ in taken)
        nbytes = sum(t.nbytes for t in tensors) - sum(n for *_, n in taken)
        return (origin_table([("--source", n_tensors, nbytes), *taken], notes),)

    def told_grafts(self) -> list[dict[str, object]]:
        """For documents: each other source, what tells it, and how much is taken from it."""
        return [{**self.grafts.told(g.word), **asdict(g)} for g in self.taken]

    @cached_property
    def taken(self) -> tuple[Taken, ...]:
        """How much of the target comes from each other source."""
        return self.grafts.taken(() if self._is_draft_only else self.plans[0].tensors)


@lru_cache(maxsize=16)
def open_job(parameters: JobParameters) -> Job:
    """The job of these parameters; one per process, since a plan costs seconds at full size."""
    return Job(parameters)
