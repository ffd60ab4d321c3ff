"""The finished model that loses experts: its headers, its plans, and what its makers tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from pipeline.cut.file_plan import plan_of_file
from pipeline.digest import sha256
from pipeline.errors import QuantmillError, raise_problems
from pipeline.gguf.as_source import as_checkpoint
from pipeline.gguf.model_file import GgufModel, read_draft, read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import form_of
from pipeline.model.contract.pair import check_pair
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.form import Form
from pipeline.plan import Plan, PlannedShard
from pipeline.source.checkpoint import Checkpoint
from tasks.naming import SUMS, listed_digests


class WholeModel:
    """A target and the draft beside it, read from headers; computed when first asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def model(self) -> GgufModel:
        """The target."""
        return read_model(self._path)

    @cached_property
    def draft(self) -> GgufModel | None:
        """The headers of the draft beside it."""
        return read_draft(self.model.files[0].path)

    @cached_property
    def form(self) -> Form:
        """Which loaders the model is for."""
        return form_of(self.model)

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The model as it is, and its draft.

        Raises:
            Problems: Loaders would refuse the model; one error is raised as itself.
        """
        problems = check_contract(self.model, self.form, union=False)
        raise_problems(str(self.model.files[0].path), problems)
        target = plan_of_file(self.model, self.draft)
        return (target,) if self.draft is None else (target, plan_of_file(self.draft))

    @property
    def shards(self) -> tuple[PlannedShard, ...]:
        """The files as they are; a file is known by its place in this list."""
        return tuple(shard for plan in self.plans for shard in plan.shards)

    @cached_property
    def source(self) -> Checkpoint:
        """The target as what shards are filled from."""
        return as_checkpoint(self.model)

    @cached_property
    def has_union(self) -> bool:
        """Whether the model has the keys that only some loaders read; other makers' may not."""
        return not check_contract(self.model, self.form)

    def require_sound(self) -> None:
        """Refuse a model that runs wrong, or not with its draft: that would be carried on.

        Raises:
            Problems: Something is wrong; one error is raised as itself.
        """
        raise_problems(str(self.model.files[0].path), self.problems_of(self.model, union=False))

    def problems_of(self, model: GgufModel, *, union: bool) -> list[QuantmillError]:
        """What loaders would refuse or misread in ``model``, or in it and the draft together."""
        problems: list[QuantmillError] = [
            *check_contract(model, self.form, union=union),
            *check_gguf_engram(model).problems,
        ]
        if self.draft is not None:
            # It may be of another maker, and is none of ours to complete.
            problems += check_contract(self.draft, form_of(self.draft), union=False)
            problems += check_pair(model, self.draft)
        return problems

    @property
    def identity(self) -> dict[str, object]:
        """What tells this model from another, whatever its files are called."""
        return {"headers_sha256": self.source.config_sha256}

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self.model.files[0].path.parent

    @cached_property
    def listed(self) -> Mapping[str, str]:
        """Digests of the model's files by name, as its own SHA256SUMS lists them, if it has one."""
        return listed_digests(self.folder) if (self.folder / SUMS).exists() else {}

    def stamp(self, shard: PlannedShard) -> list[object]:
        """What identifies the content of a file, as for a local source."""
        file = shard.existing
        assert file is not None
        return [file.path.name, file.nbytes, sha256(shard.header), file.modified_ns]
