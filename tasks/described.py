"""What the documents and the progress of an output are told from, however it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from pipeline.budget import Budget, Item, NotCarried
from pipeline.model.config import ModelConfig
from pipeline.plan import Plan, PlannedShard
from pipeline.store import ShardStore


class Described(Protocol):
    """An output: the plans of its files, target and draft, and where it is made and shown."""

    @property
    def name(self) -> str:
        """Stem of its file names."""

    @property
    def spec(self) -> str:
        """Its identity."""

    @property
    def model(self) -> ModelConfig:
        """The model of the target file."""

    @property
    def plans(self) -> Sequence[Plan]:
        """The plan of each file."""

    @property
    def shards(self) -> Sequence[PlannedShard]:
        """The files of all plans."""

    @property
    def shard_specs(self) -> Sequence[str]:
        """The identity of every shard."""

    @property
    def store(self) -> ShardStore:
        """Where its shards are made."""

    @property
    def folder(self) -> Path:
        """Where the finished files are shown."""

    def budgets(self) -> tuple[Budget, Budget]:
        """The budgets of the source and of the plan."""

    def written_items(self, whole: Iterable[int]) -> list[Item]:
        """The tensors of those shards that are whole."""

    def left_out(self) -> tuple[NotCarried, ...]:
        """What no file carries of the source."""
