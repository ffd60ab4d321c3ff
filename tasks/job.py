"""A job: which checkpoint becomes which files by which recipe, and the plans that follow.

Every task holds the same few strings and gets the same `Job` from them, so that a task can be
rebuilt in another process or on another host from its parameters alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
from pipeline.errors import OutputError, PlanError, RecipeError, raise_problems
from pipeline.experts.importers.open import read_keep
from pipeline.experts.keep import KeepList, compose
from pipeline.experts.keys import keep_keys
from pipeline.experts.routing import routing_of
from pipeline.gguf.keys import KeyValue, text
from pipeline.gguf.model_file import draft_stem
from pipeline.importance.check import check_heads, check_values
from pipeline.importance.coverage import Coverage, coverage_of
from pipeline.importance.keys import importance_keys
from pipeline.importance.matrix import read_importance
from pipeline.importance.weights import Weights
from pipeline.model.config import ModelConfig
from pipeline.model.engines import engines_of
from pipeline.model.layout import Layout
from pipeline.model.metadata.draft import draft_metadata
from pipeline.model.metadata.file_type import file_type_id
from pipeline.model.metadata.target import target_metadata
from pipeline.model.targets.draft import draft_form, draft_model
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import cut_model, target_form
from pipeline.plan import Plan, PlannedShard, make_plan
from pipeline.quant.guard import takes_importance
from pipeline.quant.libraries import Libraries
from pipeline.recipe.dump import RECIPE_KEY, recipe_line
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe
from pipeline.recipe.values import DraftMode
from pipeline.report.requant_report import origin_table
from pipeline.report.tables import Table
from pipeline.requant.decodable import check_decodable
from pipeline.requant.keys import RELEASE_KEY
from pipeline.source.checkpoint import Checkpoint
from pipeline.store import ShardStore, shard_spec
from pipeline.verify import check_plan
from tasks.grafts import Grafts, Taken
from tasks.model_source import KEEP_NAME as KEEP_NAME
from tasks.model_source import SourceParameters
from tasks.open_source import source_of
from tasks.recipe_file import read_recipe, recipe_path
from tasks.source import Source
from tasks.sources import Sources

MODEL_NAMES = {"v4.1": "DeepSeek-V4.1-Flash", "v4": "DeepSeek-V4-Flash-0731"}
"""Names of outputs where the user gives none."""


_FIRST_STACK = "blk.0.ffn_gate_exps.weight"
"""The tensor whose type names the file's."""

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
    imatrix: str = ""
    graft: str = ""


class Job:
    """Everything that follows from `JobParameters`; computed when first asked for."""

    def __init__(self, parameters: JobParameters) -> None:
        self.parameters = parameters

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, by shipped name or by file."""
        return read_recipe(self.parameters.recipe)

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
    def source(self) -> Source:
        """What is read: a checkpoint, or a finished GGUF."""
        return source_of(
            SourceParameters(
                source=self.parameters.source or self.recipe.source.path or "",
                root=self._sources_root,
                supplement=self.parameters.supplement,
                checksums=self.parameters.checksums,
                draft=self.recipe.draft.mode,
            )
        )

    @property
    def _sources_root(self) -> Path:
        return self.store.root / "sources"

    @cached_property
    def grafts(self) -> Grafts:
        """The other sources that the recipe takes tensors from.

        Raises:
            RecipeError: Nothing says where one is, or the command line names one too many.
        """
        return Grafts(
            self.recipe,
            given=self.parameters.graft,
            beside=recipe_path(self.parameters.recipe).parent,
            root=self._sources_root,
        )

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Headers of every source file, those of other sources beside them."""
        return self.grafts.joined(self.source.checkpoint)

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
        self._refuse_own_folder()
        plans = target if drops else (*target, self._draft_plan())
        for plan in plans:
            self._require_engine(plan)
            raise_problems(f"the plan of {plan.name}", list(check_decodable(plan.typed)))
            raise_problems(f"the plan of {plan.name} would not load", check_plan(plan))
        return plans

    def _require_engine(self, plan: Plan) -> None:
        """Refuse a V4.1 layout whose engines do not read the types, where the other's would.

        Raises:
            RecipeError: The layout is mainline's and a type is ik_llama.cpp's.
        """
        types = {tensor.type for tensor in plan.tensors}
        if plan.layout is Layout.MAINLINE and not engines_of(plan.form, types):
            raise RecipeError(
                f"recipe {self.recipe.name}: no engine reads its types in the mainline layout",
                found=", ".join(sorted(t.name for t in types if t.family == "ik")),
                expected="the fork layout, which ik_llama.cpp reads, or types of llama.cpp",
                next_step='Say --layout fork, or layout = "fork" in [output].',
            )

    def _refuse_own_folder(self) -> None:
        """Refuse to put the files where those of the source are.

        Raises:
            OutputError: They would have one folder.
        """
        if self.folder.resolve() == self.source.checkpoint.folder.resolve():
            raise OutputError(
                "the output folder is the source's own",
                file=self.folder,
                next_step="Choose another --out or --name.",
            )

    @property
    def _is_draft_only(self) -> bool:
        return self.recipe.draft.mode is DraftMode.ONLY

    def _target_plan(self) -> Plan:
        form = target_form(self.config, self.layout)
        targets = self._targets
        if self.weights:
            check_heads(self.weights, targets)
        types = resolve_types(self.recipe, targets, weighted=self.is_weighted)
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
                text(RECIPE_KEY, recipe_line(self.recipe)),
                *(importance_keys(self.weights.matrix) if self.weights else ()),
                *self.source.own_keys,
                # Last, as a cut of the finished file puts them.
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

    @cached_property
    def _frame(self) -> tuple[TargetTensor, ...]:
        """The tensors of the target: what they are, however they are stored."""
        return self.source.frame(self.layout, self.keep.layers if self.keep else None)

    @cached_property
    def _targets(self) -> tuple[TargetTensor, ...]:
        """The tensors of the target, each made of what one source stores."""
        return self.grafts.resolve(
            self._frame,
            self.source,
            layout=self.layout,
            keep=self.keep,
            recorded=self.recorded_keep,
        )

    def _draft_plan(self) -> Plan:
        targets = self.source.stored(self.source.draft_frame(), self.layout, None)
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
        earlier = self.source.earlier_keep
        if earlier is None:
            return self.keep
        return earlier if self.keep is None else compose(earlier, self.keep)

    @property
    def _source_key(self) -> KeyValue:
        """By which a target and a draft of one checkpoint know each other."""
        return text(RELEASE_KEY, self.source.release_sha256)

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
    def weights(self) -> Weights | None:
        """What the importance matrix says, where there is one.

        Raises:
            RecipeError: The recipe is made for one and nothing says which.
            SourceError: The file is none, or damaged.
        """
        table = self.recipe.imatrix
        path = self.parameters.imatrix or self._beside_recipe(table.file)
        if not path:
            if table.required:
                raise RecipeError(
                    f"recipe {self.recipe.name} is made for an importance matrix, and none is given",
                    expected="a file (--imatrix, or imatrix.file in the recipe)",
                    next_step="Any imatrix of the model will do, in llama.cpp's GGUF form or .dat.",
                )
            return None
        kept = (self.keep.layers, self.config.n_experts) if self.keep else (None, None)
        return Weights(read_importance(Path(path)), table.prior, *kept)

    def importance(self, target: TargetTensor) -> NDArray[np.float32] | None:
        """What each column of a tensor counts, ``[n_matrices, n_cols]``, where that is known."""
        return self.weights.of(target) if self.weights else None

    @cached_property
    def coverage(self) -> Coverage | None:
        """What the importance matrix knows of the target, where there is one.

        Raises:
            SourceError: It is of another model, or holds values that are no weights.
        """
        if self.weights is None or self._is_draft_only:
            return None
        check_values(self.weights, self._targets)
        return coverage_of(self.weights, self._targets, threshold=self.recipe.imatrix.threshold)

    def is_weighted(self, target: TargetTensor) -> bool:
        """Whether the importance matrix knows ``target``."""
        return self.weights is not None and self.weights.has(target)

    def _importance_of(self, shard: PlannedShard) -> list[object] | None:
        """What identifies the importance that a shard's bytes depend on."""
        uses = any(
            tensor.is_encoded and takes_importance(tensor.type) and self.is_weighted(tensor.target)
            for tensor in shard.tensors
        )
        return self.weights.identity if self.weights and uses else None

    @cached_property
    def shard_specs(self) -> tuple[str, ...]:
        """The identity of every shard."""
        return tuple(
            shard_spec(
                shard,
                [self.sources.stamp(name) for name in names],
                self.quantizer.version_of,
                importance=self._importance_of(shard),
            )
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


def store_of(out: str) -> ShardStore:
    """The shard store of an output folder."""
    return ShardStore(Path(out) / ".quantmill")


@lru_cache(maxsize=16)
def open_job(parameters: JobParameters) -> Job:
    """The job of these parameters; one per process, since a plan costs seconds at full size."""
    return Job(parameters)
