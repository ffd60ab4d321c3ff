"""A job: which checkpoint becomes which files by which recipe, and the plan that follows.

Every task holds the same few strings and gets the same `Job` from them, so that a task can be
rebuilt in another process or on another host from its parameters alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.budget import Budget, NotCarried, budget_of, not_carried, plan_items, source_items
from pipeline.digest import spec_digest
from pipeline.errors import OutputError, SourceError, raise_problems
from pipeline.fill import blocks_from
from pipeline.gguf.keys import text
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.engram.check import EngramReport, TableShapes, check_checkpoint_engram
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.layout import Layout
from pipeline.model.metadata.target import file_type_id, target_metadata
from pipeline.model.targets import TargetTensor, target_tensors
from pipeline.model.tokens.token_map import compress_vocabulary
from pipeline.model.tokens.tokenizer import Tokenizer, read_tokenizer
from pipeline.plan import Plan, make_plan
from pipeline.quant.backend import Quantizer
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, did_you_mean, load_recipe
from pipeline.report.plan_report import DiskNeed
from pipeline.source.agreement import require_agreement
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.spec import TensorSpec
from pipeline.source.supplement import supplemented
from pipeline.store import ShardStore, shard_spec
from tasks.origin import Origin, open_origin
from tasks.sources import Sources

SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
"""The recipes that come with the package."""

MODEL_NAMES = {"v4.1": "DeepSeek-V4.1-Flash", "v4": "DeepSeek-V4-Flash"}
"""Names of outputs where the user gives none."""


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
    def origin(self) -> Origin:
        """Where the checkpoint comes from: headers only."""
        source = self.parameters.source or self.recipe.source.path
        if not source:
            raise SourceError(
                "no source is given",
                next_step="Say --source with a checkpoint folder or owner/name@commit, "
                "or source.path in the recipe.",
            )
        return open_origin(
            source,
            self.store.root / "sources",
            checksums=self.parameters.checksums,
            may_lack_shards=bool(self.parameters.supplement),
        )

    @cached_property
    def supplement(self) -> Origin | None:
        """A second source, for the shards that the first lacks."""
        if not self.parameters.supplement:
            return None
        return open_origin(self.parameters.supplement, self.store.root / "sources")

    @cached_property
    def _supplemented(self) -> tuple[Checkpoint, frozenset[str]]:
        first = self.origin.checkpoint
        if self.supplement is None:
            return first, frozenset()
        expected = expected_tensors(read_config(first.config))
        return supplemented(first, self.supplement.checkpoint, expected)

    @property
    def checkpoint(self) -> Checkpoint:
        """Headers of every source file, as one checkpoint."""
        return self._supplemented[0]

    @cached_property
    def sources(self) -> Sources:
        """The source files that the plan reads, and where each comes from."""
        checkpoint, second = self._supplemented
        needed = {
            checkpoint.weight_map[name]
            for tensor in self.plan.tensors
            for name in tensor.target.source_names
        }
        origins = {
            name: self.supplement if self.supplement and name in second else self.origin
            for name in needed
        }
        return Sources(checkpoint, origins, sorted(needed))

    def files_of(self, no: int) -> tuple[str, ...]:
        """The source files that a shard reads."""
        names = (n for t in self.plan.shards[no].tensors for n in t.target.source_names)
        return tuple(sorted({self.checkpoint.weight_map[name] for name in names}))

    def shards_of(self, file: str) -> tuple[int, ...]:
        """The shards that read a source file."""
        return tuple(s.no for s in self.plan.shards if file in self.files_of(s.no))

    def is_filled_from(self, no: int, file: str) -> bool:
        """Whether everything that a shard takes from a source file is journaled."""
        spec = self.shard_specs[no]
        if self.store.record(spec) is not None:
            return True
        if not self.store.has_errors(spec, file):
            return False
        done = self.store.journaled(spec)
        return all(
            block.offset in done
            for block in blocks_from(self.plan.shards[no], self.checkpoint.weight_map, file)
        )

    def is_used_up(self, file: str) -> bool:
        """Whether no shard needs a source file any more."""
        return all(self.is_filled_from(no, file) for no in self.shards_of(file))

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture that config.json describes."""
        return read_config(self.checkpoint.config)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every stored tensor, once index, shards and config agree on all of them."""
        specs = expected_tensors(self.config)
        require_agreement(self.checkpoint, specs)
        return specs

    @cached_property
    def tokenizer_json(self) -> bytes:
        """The checkpoint's tokenizer.json."""
        return _required(self.checkpoint.folder / "tokenizer.json")

    @cached_property
    def token_map(self) -> NDArray[np.int32]:
        """Raw token id -> compressed id, as the engram hash takes them."""
        return compress_vocabulary(self.tokenizer_json, self.config.vocab_size)

    @cached_property
    def engram(self) -> EngramReport:
        """The engram check of the source's headers and tokenizer."""
        return check_checkpoint_engram(self.config, self._table_shapes(), self.token_map)

    def _table_shapes(self) -> dict[int, TableShapes]:
        shapes = {}
        for layer in self.config.engram.layers if self.config.engram else ():
            names = (f"layers.{layer}.engram.embed.{part}" for part in ("weight", "scale"))
            weight, scale = (self.checkpoint.locate(name)[1].shape for name in names)
            shapes[layer] = (weight, scale)
        return shapes

    def require_sound_source(self) -> None:
        """Refuse a checkpoint whose parts disagree or whose tables do not fit their buckets."""
        self.specs  # noqa: B018 - raises where they disagree
        raise_problems(f"engram tables of {self.checkpoint.folder}", self.engram.problems)

    @cached_property
    def targets(self) -> tuple[TargetTensor, ...]:
        """The tensors of the target file."""
        return target_tensors(self.config, self.layout)

    @cached_property
    def name(self) -> str:
        """Stem of the output's file names."""
        model = self.parameters.name or MODEL_NAMES[self.config.family]
        return f"{model}-{self.recipe.name}-{self.layout}"

    @cached_property
    def plan(self) -> Plan:
        """The plan of the whole output."""
        types = resolve_types(self.recipe, self.targets)
        self.require_sound_source()
        routed = types["blk.0.ffn_gate_exps.weight"].name
        key_values = target_metadata(
            self.config,
            self._tokenizer(),
            self.token_map,
            layout=self.layout,
            file_type=file_type_id(routed),
            name=self.parameters.name or MODEL_NAMES[self.config.family],
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

    def _tokenizer(self) -> Tokenizer:
        settings = self.checkpoint.folder / "tokenizer_config.json"
        return read_tokenizer(
            self.tokenizer_json,
            files.read_bytes(settings) if settings.exists() else None,
            self.config.vocab_size,
        )

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer library that writes block types."""
        return GgmlQuantizer()

    @cached_property
    def shard_specs(self) -> tuple[str, ...]:
        """The identity of every shard."""
        version = f"{self.quantizer.name} {self.quantizer.version}"
        return tuple(
            shard_spec(shard, [self.sources.stamp(f) for f in self.files_of(shard.no)], version)
            for shard in self.plan.shards
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
        source = budget_of("source", source_items(self.config, self.specs, self.targets))
        return source, budget_of("plan", plan_items(self.plan))

    def left_out(self) -> tuple[NotCarried, ...]:
        """What the target file does not carry."""
        return not_carried(self.specs, self.targets)

    def missing_nbytes(self) -> int:
        """Bytes of disk this job still needs: shards that are neither whole nor preallocated."""
        missing = 0
        for shard, spec in zip(self.plan.shards, self.shard_specs, strict=True):
            if self.store.record(spec) is None:
                part = self.store.path(spec).with_name("shard.gguf.part")
                missing += shard.nbytes - files.allocated_nbytes(part)
        return missing

    def disk_need(self) -> DiskNeed:
        """Disk that this job takes and has."""
        return DiskNeed(
            missing=self.missing_nbytes(),
            free=files.free_nbytes(Path(self.parameters.out)),
            fetched=sum(map(self.sources.nbytes, self.sources.fetched())),
            window=self.sources.window_nbytes(),
        )

    def require_disk(self, *, lets_go: bool) -> None:
        """Refuse to start what the disk cannot hold, downloads and outputs together.

        Raises:
            OutputError: With the bytes needed and free.
        """
        need = self.disk_need()
        here = sum(self.sources.nbytes(f) for f in self.sources.fetched() if self.sources.has(f))
        sources = need.window if lets_go else need.fetched - here
        wanted = need.missing + sources
        if wanted > need.free:
            raise OutputError(
                "the job does not fit on the disk",
                file=self.parameters.out,
                expected=f"{wanted:,} bytes free ({wanted / 1e9:.1f} GB)",
                found=f"{need.free:,} bytes ({need.free / 1e9:.1f} GB)",
                next_step=_SPACE_STEP
                if sources and not lets_go
                else "Free some space or choose another --out.",
            )


_SPACE_STEP = "Free some space, choose another --out, or let sources go (--keep-source no)."


def store_of(out: str) -> ShardStore:
    """The shard store of an output folder."""
    return ShardStore(Path(out) / ".quantmill")


def _required(path: Path) -> bytes:
    if not path.exists():
        raise SourceError(
            "the checkpoint has no tokenizer.json",
            file=path,
            next_step="Fetch it with the shards; the GGUF metadata is made from it.",
        )
    return files.read_bytes(path)


def recipe_path(recipe: str) -> Path:
    """The file of a recipe given by shipped name or by path.

    Raises:
        SourceError: Neither exists; the message lists the shipped names.
    """
    shipped = SHIPPED / f"{recipe}.toml"
    if shipped.exists():
        return shipped
    path = Path(recipe)
    if not path.is_file():
        names = sorted(p.stem for p in SHIPPED.glob("*.toml"))
        raise SourceError(
            "no such recipe",
            file=recipe,
            expected="a TOML file or one of " + ", ".join(names),
            next_step=did_you_mean(recipe, names),
        )
    return path


@lru_cache(maxsize=8)
def open_job(parameters: JobParameters) -> Job:
    """The job of these parameters; one per process, since a plan costs seconds at full size."""
    return Job(parameters)
