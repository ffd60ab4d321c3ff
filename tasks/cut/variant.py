"""One output of a cut: the model that one keep list leaves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from pipeline.budget import Budget, Item, NotCarried, budget_of, plan_items, written_items
from pipeline.cut.earlier import told_keep
from pipeline.cut.plan import carried_plan, cut_plan
from pipeline.digest import spec_digest
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import keep_digest, keep_spec
from pipeline.experts.notes import count_notes
from pipeline.gguf.model_file import draft_stem
from pipeline.model.config import ModelConfig
from pipeline.plan import Plan, PlannedShard
from pipeline.store import ShardStore, shard_spec
from tasks.cut.whole import WholeModel
from tasks.documents import Told
from tasks.request import store_of

_EARLIER_COUNT = re.compile(r"-\d+E$")
"""How the stem of a model ends that was cut before."""


class Variant:
    """The output for one keep list; see `tasks.described.Described`."""

    def __init__(self, whole: WholeModel, keep: KeepList, out: str) -> None:
        self.whole = whole
        self.keep = keep
        self._out = out

    @property
    def name(self) -> str:
        """Stem of its file names: the model's, with the number of experts in each layer."""
        return f"{_EARLIER_COUNT.sub('', self.whole.plans[0].name)}-{self.keep.n_kept}E"

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of the target, and of the draft, which stays as it is."""
        target, *drafts = self.whole.plans
        cut = cut_plan(target, self.keep, name=self.name)
        carried = (carried_plan(draft, name=draft_stem(self.name)) for draft in drafts)
        return (cut, *carried)

    @property
    def model(self) -> ModelConfig:
        """The model without the experts that go."""
        return self.plans[0].config

    @cached_property
    def shards(self) -> tuple[PlannedShard, ...]:
        """The files of all plans; each is made of the model's file in the same place."""
        return tuple(shard for plan in self.plans for shard in plan.shards)

    @cached_property
    def shard_specs(self) -> tuple[str, ...]:
        """The identity of every shard."""
        wholes = self.whole.shards
        return tuple(
            shard_spec(shard, [self.whole.stamp(whole)], lambda _: "")
            for shard, whole in zip(self.shards, wholes, strict=True)
        )

    @property
    def spec(self) -> str:
        """The identity of the output."""
        return spec_digest({"name": self.name, "shards": self.shard_specs})

    @property
    def store(self) -> ShardStore:
        """Where its shards are made."""
        return store_of(self._out)

    @property
    def folder(self) -> Path:
        """Where the finished files are shown."""
        return Path(self._out) / self.name

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of this number of experts."""
        return tuple(count_notes(self.keep.n_kept))

    def budgets(self) -> tuple[Budget, Budget]:
        """The budgets of the whole model and of the plan."""
        source = [item for plan in self.whole.plans for item in plan_items(plan)]
        return budget_of("source", source), budget_of("plan", self.planned_items())

    def planned_items(self) -> list[Item]:
        """Every tensor of every file as planned."""
        return [item for plan in self.plans for item in plan_items(plan)]

    def written_items(self, whole: Iterable[int]) -> list[Item]:
        """The tensors of those shards that are whole."""
        places = [(plan, shard.no) for plan in self.plans for shard in plan.shards]
        return [
            item
            for plan, no in (places[number] for number in sorted(set(whole)))
            for item in written_items(plan, [no])
        ]

    def left_out(self) -> tuple[NotCarried, ...]:
        """Nothing: experts that go show as a change."""
        return ()

    @property
    def keep_sha256(self) -> str:
        """The keep list's digest, with what was cut of the model before."""
        return keep_digest(told_keep(self.whole.plans[0], self.keep))

    def told(self) -> Told:
        """What the documents say of the cut."""
        target = self.whole.plans[0]
        whole = told_keep(target, self.keep)
        source = {
            "folder": self.whole.folder.resolve().name,
            "name": target.name,
            **self.whole.identity,
            "n_tensors": len(target.tensors),
        }
        experts = {
            "source_experts": self.keep.n_experts,
            "keep_experts": self.keep.n_kept,
            "honesty": str(whole.honesty),
            "keep_sha256": self.keep_sha256,
        }
        return Told(
            source=source,
            request={"name": f"{self.keep.n_kept} of {self.keep.n_experts} experts"},
            manifest={"experts": experts},
            documents={"keep.json": keep_spec(whole)},
        )
