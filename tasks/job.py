"""A job: which checkpoint becomes which files by which recipe, and the plan that follows.

Every task holds the same few strings and gets the same `Job` from them, so that a task can be
rebuilt in another process or on another host from its parameters alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pipeline.budget import Budget, NotCarried, budget_of, not_carried, plan_items, source_items
from pipeline.digest import spec_digest
from pipeline.errors import OutputError
from pipeline.fill import blocks_from
from pipeline.gguf.keys import text
from pipeline.model.config import ModelConfig
from pipeline.model.layout import Layout
from pipeline.model.metadata.target import file_type_id, target_metadata
from pipeline.model.targets import TargetTensor, target_tensors
from pipeline.plan import Plan, make_plan
from pipeline.quant.backend import Quantizer
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, load_recipe
from pipeline.source.checkpoint import Checkpoint
from pipeline.store import ShardStore, shard_spec
from tasks.model_source import ModelSource, SourceParameters
from tasks.recipe_file import recipe_path
from tasks.sources import Sources

MODEL_NAMES = {"v4.1": "DeepSeek-V4.1-Flash", "v4": "DeepSeek-V4-Flash"}
"""Names of outputs where the user gives none."""


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


class Job:
    """Everything that follows from `JobParameters`; computed when first asked for."""

    def __init__(self, parameters: JobParameters) -> None:
        self.parameters = parameters

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, by shipped name or by file."""
        return load_recipe(recipe_path(self.parameters.recipe))

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
    def targets(self) -> tuple[TargetTensor, ...]:
        """The tensors of the target file."""
        return target_tensors(self.config, self.layout)

    @cached_property
    def name(self) -> str:
        """Stem of the output's file names."""
        return f"{self.model_name}-{self.recipe.name}-{self.layout}"

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
                expected="letters, digits, dots, underscores and hyphens",
                found=repr(name),
            )
        return name

    @cached_property
    def plan(self) -> Plan:
        """The plan of the whole output."""
        types = resolve_types(self.recipe, self.targets)
        self.source.require_sound()
        routed = types["blk.0.ffn_gate_exps.weight"].name
        key_values = target_metadata(
            self.config,
            self.source.tokenizer,
            self.source.token_map,
            layout=self.layout,
            file_type=file_type_id(routed),
            name=self.model_name,
            extra=(
                text("quantmill.recipe", self.recipe.name),
                text("quantmill.source.config_sha256", self.checkpoint.config_sha256),
            ),
        )
        return make_plan(
            name=self.name,
            layout=self.layout,
            config=self.config,
            targets=self.targets,
            types=types,
            key_values=key_values,
            shard_nbytes=self.recipe.output.shard_nbytes,
        )

    @cached_property
    def files_of_shards(self) -> tuple[tuple[str, ...], ...]:
        """For every shard, the source files that it reads."""
        weight_map = self.checkpoint.weight_map
        names = (
            {weight_map[name] for tensor in shard.tensors for name in tensor.target.source_names}
            for shard in self.plan.shards
        )
        return tuple(tuple(sorted(files)) for files in names)

    @cached_property
    def sources(self) -> Sources:
        """The source files that the plan reads, and where each comes from."""
        needed = sorted({name for names in self.files_of_shards for name in names})
        return Sources(self.checkpoint, self.source.origins, needed)

    def shards_of(self, file: str) -> tuple[int, ...]:
        """The shards that read a source file."""
        return tuple(no for no, files in enumerate(self.files_of_shards) if file in files)

    def is_filled_from(self, no: int, file: str) -> bool:
        """Whether everything that a shard takes from a source file is journaled and measured."""
        spec, shard = self.shard_specs[no], self.plan.shards[no]
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
            for shard, names in zip(self.plan.shards, self.files_of_shards, strict=True)
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
        source = budget_of("source", source_items(self.config, self.source.specs, self.targets))
        return source, budget_of("plan", plan_items(self.plan))

    def left_out(self) -> tuple[NotCarried, ...]:
        """What the target file does not carry."""
        return not_carried(self.source.specs, self.targets)


def store_of(out: str) -> ShardStore:
    """The shard store of an output folder."""
    return ShardStore(Path(out) / ".quantmill")


@lru_cache(maxsize=8)
def open_job(parameters: JobParameters) -> Job:
    """The job of these parameters; one per process, since a plan costs seconds at full size."""
    return Job(parameters)
