"""A job: which checkpoint becomes which files by which recipe, and the plans that follow.

Every task holds the same few strings and gets the same `Job` from them, so that a task can be
rebuilt in another process or on another host from its parameters alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pipeline.blocks import blocks_from
from pipeline.budget import (
    Budget,
    Item,
    NotCarried,
    budget_of,
    not_carried,
    plan_items,
    source_items,
    written_items,
)
from pipeline.digest import spec_digest
from pipeline.errors import OutputError, PlanError, RecipeError, raise_problems
from pipeline.experts.importers.open import read_keep
from pipeline.experts.keep import KeepList, compose
from pipeline.experts.keep_json import read_keep_json
from pipeline.experts.keys import keep_keys
from pipeline.experts.routing import routing_of
from pipeline.gguf.keys import KeyValue, text
from pipeline.gguf.model_file import draft_stem
from pipeline.model.config import ModelConfig
from pipeline.model.layout import Layout
from pipeline.model.metadata.draft import draft_metadata
from pipeline.model.metadata.file_type import file_type_id
from pipeline.model.metadata.target import target_metadata
from pipeline.model.targets.draft import draft_form, draft_model, draft_tensors
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import cut_model, target_form, target_tensors
from pipeline.plan import Plan, PlannedShard, make_plan
from pipeline.quant.backend import Quantizer
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, load_recipe
from pipeline.recipe.values import DraftMode
from pipeline.source.checkpoint import Checkpoint
from pipeline.store import ShardStore, shard_spec
from pipeline.verify import check_plan
from tasks.model_source import ModelSource, SourceParameters
from tasks.recipe_file import recipe_path
from tasks.sources import Sources

MODEL_NAMES = {"v4.1": "DeepSeek-V4.1-Flash", "v4": "DeepSeek-V4-Flash-0731"}
"""Names of outputs where the user gives none."""


_FIRST_STACK = "blk.0.ffn_gate_exps.weight"
"""The tensor whose type names the file's."""

KEEP_NAME = "keep.json"
"""A keep list beside a checkpoint or an output: what it lost."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class JobParameters:
    """What a user says: strings as luigi carries them; empty means the default."""

    source: str
    recipe: str
    out: str
    layout: str = ""
    name: str = ""
    supplement: str = ""
    checksums: str = ""
    keep: str = ""


class Job:
    """Everything that follows from `JobParameters`; computed when first asked for."""

    def __init__(self, parameters: JobParameters) -> None:
        self.parameters = parameters

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, by shipped name or by file."""
        return load_recipe(recipe_path(self.parameters.recipe))

    @cached_property
    def keep(self) -> KeepList | None:
        """The routed experts that stay, where not all do.

        Raises:
            RecipeError: The recipe is made for fewer experts and no list says which.
            PlanError: The list does not fit the model or the recipe, or the model cannot be cut.
            SourceError: The file holds no keep list.
        """
        table = self.recipe.experts
        path = self.parameters.keep or self._beside_recipe(table.keep)
        if not path:
            if table.n_keep is not None:
                routing_of(self.config)  # which says where no list would do
                raise RecipeError(
                    f"recipe {self.recipe.name} keeps {table.n_keep} experts of each layer, and "
                    "nothing says which",
                    expected="a keep list (--keep, or experts.keep in the recipe)",
                    next_step="SelectExperts makes one of a saliency file, RecoverExperts of a "
                    "published pruned checkpoint. Experts are never chosen by their number.",
                )
            return None
        keep = read_keep(Path(path), routing_of(self.config))
        if table.n_keep not in (None, keep.n_kept):
            raise PlanError(
                "the keep list has another number of experts than the recipe is made for",
                file=path,
                expected=table.n_keep,
                found=keep.n_kept,
            )
        return keep

    def _beside_recipe(self, name: str | None) -> str:
        """A file that the recipe names: from its own folder on."""
        return str(recipe_path(self.parameters.recipe).parent / name) if name else ""

    @property
    def model(self) -> ModelConfig:
        """The model of the target file: the checkpoint's, less the experts that were cut."""
        return cut_model(self.config, self.keep.layers if self.keep else None)

    @cached_property
    def layout(self) -> Layout:
        """The layout asked for on the command line, else the recipe's."""
        asked = self.parameters.layout
        if asked and asked not in list(Layout):
            raise OutputError("unknown layout", expected=" or ".join(Layout), found=asked)
        return Layout(asked) if asked else self.recipe.output.layout

    @cached_property
    def source(self) -> ModelSource:
        """What is read."""
        return ModelSource(
            SourceParameters(
                source=self.parameters.source or self.recipe.source.path or "",
                root=self.store.root / "sources",
                supplement=self.parameters.supplement,
                checksums=self.parameters.checksums,
                draft=self.recipe.draft.mode,
            )
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """Headers of every source file."""
        return self.source.checkpoint

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.source.config

    @cached_property
    def name(self) -> str:
        """Stem of the output's file names; the layout is in it where there is a choice."""
        stem = f"{self.model_name}-{self.recipe.name}"
        if self.keep is not None and self.recipe.experts.n_keep is None:
            stem += f"-{self.keep.n_kept}E"
        if self._is_draft_only:
            return stem if stem.endswith(draft_stem("")) else draft_stem(stem)
        layout = target_form(self.config, self.layout).layout
        return f"{stem}-{layout}" if layout else stem

    @property
    def model_name(self) -> str:
        """The model's name, as the user gives it or as it is known.

        Raises:
            OutputError: It cannot be part of a file name.
        """
        name = self.parameters.name or MODEL_NAMES[self.config.family]
        if not _PLAIN_NAME.fullmatch(name):
            raise OutputError(
                "--name must do as part of a file name",
                expected="up to 100 letters, digits, dots, dashes or underscores; no mark first",
                found=repr(name),
            )
        return name

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each file to make: the target, the draft, or both, as the recipe says."""
        target = () if self._is_draft_only else (self._target_plan(),)
        drops = self.recipe.draft.mode is DraftMode.DROP
        plans = target if drops else (*target, self._draft_plan())
        for plan in plans:
            raise_problems(f"the plan of {plan.name} would not load", check_plan(plan))
        return plans

    @property
    def _is_draft_only(self) -> bool:
        return self.recipe.draft.mode is DraftMode.ONLY

    def _target_plan(self) -> Plan:
        form = target_form(self.config, self.layout)
        kept = self.keep.layers if self.keep else None
        targets = target_tensors(self.config, self.layout, kept)
        types = resolve_types(self.recipe, targets)
        self.source.require_sound()
        key_values = target_metadata(
            self.model,
            self.source.tokenizer,
            self.source.token_map if form.layout else None,
            form=form,
            file_type=file_type_id(types[_FIRST_STACK].name),
            name=self.model_name,
            extra=(
                text("quantmill.recipe", self.recipe.name),
                self._source_key,
                *keep_keys(self.recorded_keep),
            ),
        )
        return make_plan(
            name=self.name,
            form=form,
            config=self.model,
            targets=targets,
            types=types,
            key_values=key_values,
            shard_nbytes=self.recipe.output.shard_nbytes,
        )

    def _draft_plan(self) -> Plan:
        targets = draft_tensors(self.config)
        types = resolve_types(self.recipe, targets)
        self.layout  # noqa: B018 - a wrong word on the command line is told all the same
        self.source.require_sound()
        # No word of the recipe: recipes that differ in the target only share the draft's file.
        key_values = draft_metadata(
            self.config,
            self.source.tokenizer,
            file_type=file_type_id(types[_FIRST_STACK].name),
            name=f"{self.model_name} draft",
            extra=(self._source_key,),
        )
        return make_plan(
            name=self.name if self._is_draft_only else draft_stem(self.name),
            form=draft_form(self.config),
            config=draft_model(self.config),
            targets=targets,
            types=types,
            key_values=key_values,
            shard_nbytes=self.recipe.output.shard_nbytes,
        )

    @cached_property
    def recorded_keep(self) -> KeepList | None:
        """What the target's metadata says was cut: here, and before in the checkpoint itself.

        Raises:
            PlanError: The list beside the checkpoint is not of this checkpoint.
        """
        beside = self.checkpoint.folder / KEEP_NAME
        if not beside.exists():
            return self.keep
        earlier = read_keep_json(beside)
        here = (self.config.n_layers, self.config.n_experts)
        if (earlier.n_layers, earlier.n_kept) != here:
            raise PlanError(
                "the keep list beside the checkpoint is not that of the checkpoint",
                file=beside,
                expected="{} layers of {} experts".format(*here),
                found=f"{earlier.n_layers} layers of {earlier.n_kept} experts",
                next_step="Move it away if it does not belong there.",
            )
        return earlier if self.keep is None else compose(earlier, self.keep)

    @property
    def _source_key(self) -> KeyValue:
        """By which a target and a draft of one checkpoint know each other."""
        return text("quantmill.source.config_sha256", self.checkpoint.config_sha256)

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
        return Sources(self.checkpoint, self.source.origins, needed)

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
    def quantizer(self) -> Quantizer:
        """The quantizer library that writes block types."""
        return GgmlQuantizer()

    @cached_property
    def shard_specs(self) -> tuple[str, ...]:
        """The identity of every shard."""
        version = f"{self.quantizer.name} {self.quantizer.version}"
        return tuple(
            shard_spec(shard, [self.sources.stamp(name) for name in names], version)
            for shard, names in zip(self.shards, self.files_of_shards, strict=True)
        )

    @property
    def spec(self) -> str:
        """The identity of the whole output."""
        return spec_digest({"name": self.name, "shards": self.shard_specs})

    @property
    def store(self) -> ShardStore:
        """Where this job's shards are made."""
        return store_of(self.parameters.out)

    @property
    def folder(self) -> Path:
        """Where the finished files are shown."""
        return Path(self.parameters.out) / self.name

    def budgets(self) -> tuple[Budget, Budget]:
        """The budgets of the source and of the plan."""
        source = budget_of("source", source_items(self.config, self.source.specs, self.tensors))
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
        return not_carried(self.source.specs, self.tensors)


def store_of(out: str) -> ShardStore:
    """The shard store of an output folder."""
    return ShardStore(Path(out) / ".quantmill")


@lru_cache(maxsize=8)
def open_job(parameters: JobParameters) -> Job:
    """The job of these parameters; one per process, since a plan costs seconds at full size."""
    return Job(parameters)
