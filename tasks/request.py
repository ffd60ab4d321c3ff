"""What a person asked for: which source becomes which files by which recipe, and their plans."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from pipeline.errors import OutputError, PlanError, RecipeError, raise_problems
from pipeline.experts.importers.open import read_keep
from pipeline.experts.keep import KeepList, compose
from pipeline.experts.keys import keep_keys
from pipeline.experts.routing import routing_of
from pipeline.gguf.keys import KeyValue, text
from pipeline.gguf.model_file import draft_stem
from pipeline.importance.coverage import Coverage
from pipeline.model.config import ModelConfig
from pipeline.model.layout import Layout
from pipeline.model.metadata.draft import draft_metadata
from pipeline.model.metadata.file_type import file_type_id
from pipeline.model.metadata.target import target_metadata
from pipeline.model.targets.draft import draft_form, draft_model
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import cut_model, target_form
from pipeline.plan import Plan, make_plan
from pipeline.recipe.dump import RECIPE_KEY, recipe_line
from pipeline.recipe.paths import source_from
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe
from pipeline.recipe.values import DraftMode
from pipeline.requant.decodable import check_decodable
from pipeline.requant.keys import RELEASE_KEY
from pipeline.source.checkpoint import Checkpoint
from pipeline.store import ShardStore
from pipeline.verify import check_plan
from tasks.grafts import Grafts, grafts_for
from tasks.model_source import KEEP_NAME as KEEP_NAME
from tasks.model_source import SourceParameters
from tasks.open_source import source_of
from tasks.recipe_file import read_recipe, recipe_path
from tasks.refusals import refuse_idle_words, refuse_own_folder, require_engine
from tasks.source import Source
from tasks.weighing import Cuts, Weighing

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


@lru_cache(maxsize=64)
def one_of_several(said: JobParameters) -> JobParameters:
    """What of the words ``said`` for several recipes concerns the one that they name here.

    Raises:
        RecipeError: The recipe is none, or ``--graft`` is not of its form.
    """
    recipe = read_recipe(said.recipe)
    of_target = {} if recipe.makes_target else {"keep": "", "imatrix": ""}
    return replace(said, graft=grafts_for(recipe, said.graft), **of_target)


def store_of(out: str) -> ShardStore:
    """The shard store of an output folder."""
    return ShardStore(Path(out) / ".quantmill")


class Request:
    """What is to be made of which source: recipe, keep list, importance, and the plans.

    Everything follows from `JobParameters` and is computed when first asked for.
    """

    def __init__(self, parameters: JobParameters) -> None:
        self.parameters = parameters

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, by shipped name or by file."""
        return read_recipe(self.parameters.recipe)

    @cached_property
    def keep(self) -> KeepList | None:
        """The routed experts that stay, where not all do; a draft's are never cut.

        Raises:
            RecipeError: The recipe is made for fewer experts and no list says which.
            PlanError: The list does not fit the model or the recipe, or the model cannot be cut.
            SourceError: The file holds no keep list.
        """
        if self._is_draft_only:
            return None
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
        return str(self._recipe_folder / name) if name else ""

    @property
    def _recipe_folder(self) -> Path:
        return recipe_path(self.parameters.recipe).parent

    @property
    def model(self) -> ModelConfig:
        """The model of the target file: the checkpoint's, less the experts that were cut."""
        return cut_model(self.config, self.keep.layers if self.keep else None)

    @cached_property
    def layout(self) -> Layout:
        """The layout asked for on the command line, else the recipe's, else the source's own."""
        asked = self.parameters.layout
        if asked and asked not in list(Layout):
            raise OutputError("unknown layout", expected=" or ".join(Layout), found=asked)
        if asked:
            return Layout(asked)
        output = self.recipe.output
        return output.said_layout or self.source.layout or output.layout

    @cached_property
    def source(self) -> Source:
        """What is read: a checkpoint, or a finished GGUF."""
        said = self.recipe.source.path or ""
        return source_of(
            SourceParameters(
                source=self.parameters.source or (said and source_from(self._recipe_folder, said)),
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
            beside=self._recipe_folder,
            root=self._sources_root,
            frame=lambda: () if self._is_draft_only else self._frame,
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
        self._frame  # noqa: B018 - a source without a target says so
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
        if self._is_draft_only:
            said = self.parameters
            refuse_idle_words(self.recipe, keep=said.keep, imatrix=said.imatrix)
        target = () if self._is_draft_only else (self._target_plan(),)
        drops = self.recipe.draft.mode is DraftMode.DROP
        refuse_own_folder(self.folder, self.checkpoint)
        plans = target if drops else (*target, self._draft_plan())
        for plan in plans:
            require_engine(plan, self.recipe)
            raise_problems(f"the plan of {plan.name}", list(check_decodable(plan.typed)))
            raise_problems(f"the plan of {plan.name} would not load", check_plan(plan))
        return plans

    @property
    def _is_draft_only(self) -> bool:
        return self.recipe.draft.mode is DraftMode.ONLY

    def _target_plan(self) -> Plan:
        form = target_form(self.config, self.layout)
        targets = self._targets
        self.weighing.require_fit(targets)
        types = resolve_types(self.recipe, targets, weighted=self.weighing.knows)
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
                *self.weighing.keys(targets, types),
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
    def weighing(self) -> Weighing:
        """The importance matrix, if there is one.

        Raises:
            RecipeError: The recipe is made for one and nothing says which.
        """
        path = self.parameters.imatrix or self._beside_recipe(self.recipe.imatrix.file)
        return Weighing(self.recipe, path, self._cuts)

    def _cuts(self) -> Cuts:
        hidden = self.config.hidden
        n_cols = {"gate": hidden, "up": hidden, "down": self.config.expert_ff}
        return Cuts(self.keep, self.recorded_keep, n_cols)

    @cached_property
    def coverage(self) -> Coverage | None:
        """What the importance matrix knows of the target, where there are both.

        Raises:
            SourceError: It is of another model, or holds values that are no weights.
        """
        return None if self._is_draft_only else self.weighing.coverage(self._targets)

    @property
    def store(self) -> ShardStore:
        """Where this job's shards are made."""
        return store_of(self.parameters.out)

    @property
    def folder(self) -> Path:
        """Where the finished files are shown."""
        return Path(self.parameters.out) / self.name
