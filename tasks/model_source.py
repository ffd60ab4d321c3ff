"""What a job reads: one or two origins as one checkpoint, checked, with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.budget import Item, NotCarried, not_carried, source_items
from pipeline.errors import PlanError, SourceError, raise_problems
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import read_keep_json
from pipeline.gguf.keys import KeyValue
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.engram.check import EngramReport, TableShapes, check_checkpoint_engram
from pipeline.model.layout import Layout
from pipeline.model.presence import (
    DRAFT_ONLY,
    DRAFT_OPTIONAL,
    require_tensors,
    wanted_tensors,
)
from pipeline.model.targets.draft import draft_tensors
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import Keep, target_tensors
from pipeline.model.tokens.token_map import compress_vocabulary
from pipeline.model.tokens.tokenizer import Tokenizer, read_tokenizer
from pipeline.recipe.values import DraftMode
from pipeline.source.checkpoint import CONFIG_NAME, Checkpoint
from pipeline.source.scope import WHOLE, Scope
from pipeline.source.spec import TensorSpec
from pipeline.source.supplement import supplemented
from tasks.origin import Origin, open_origin

KEEP_NAME = "keep.json"
"""A keep list beside a checkpoint or an output: what it lost."""

_SCOPES = {
    DraftMode.KEEP: WHOLE,
    DraftMode.DROP: DRAFT_OPTIONAL,
    DraftMode.ONLY: DRAFT_ONLY,
}
"""What becomes of the draft -> what has to be there, and what is read."""


@dataclass(frozen=True, slots=True)
class SourceParameters:
    """What a user says of the source; ``root`` is the folder for what is fetched.

    ``draft`` says how much of the checkpoint counts: all of it, all but the draft (which is still
    checked where it is there), or the draft alone. ``may_lack_shards``: only some tensors are
    wanted, and those shards that hold others need not be there.
    """

    source: str
    root: Path
    supplement: str = ""
    checksums: str = ""
    draft: DraftMode = DraftMode.KEEP
    may_lack_shards: bool = False


class ModelSource:
    """Everything that follows from `SourceParameters`, headers only; computed when asked for."""

    def __init__(self, parameters: SourceParameters) -> None:
        self._parameters = parameters

    @property
    def _scope(self) -> Scope:
        return _SCOPES[self._parameters.draft]

    @cached_property
    def first(self) -> Origin:
        """The checkpoint whose config counts."""
        parameters = self._parameters
        if not parameters.source:
            raise SourceError(
                "no source is given",
                next_step="Say --source with a checkpoint folder or owner/name@commit, "
                "or source.path in the recipe.",
            )
        return open_origin(
            parameters.source,
            parameters.root,
            checksums=parameters.checksums,
            scope=self._scope,
            may_lack_shards=bool(parameters.supplement) or parameters.may_lack_shards,
        )

    @cached_property
    def second(self) -> Origin | None:
        """A second source, for the shards that the first lacks."""
        if not self._parameters.supplement:
            return None
        parameters = self._parameters
        return open_origin(parameters.supplement, parameters.root, scope=self._scope)

    @cached_property
    def _joined(self) -> tuple[Checkpoint, frozenset[str]]:
        checkpoint = self.first.checkpoint
        if self.second is None:
            return checkpoint, frozenset()
        second = self.second.checkpoint
        config = _config_of(checkpoint, {**checkpoint.weight_map, **second.weight_map})
        return supplemented(checkpoint, second, wanted_tensors(config, self._scope))

    @property
    def checkpoint(self) -> Checkpoint:
        """Headers of every source file, as one checkpoint."""
        return self._joined[0]

    @property
    def identity(self) -> dict[str, object]:
        """What tells this checkpoint from another: digests of its config and index."""
        checkpoint = self.checkpoint
        return {
            "config_sha256": checkpoint.config_sha256,
            "index_sha256": checkpoint.index_sha256,
        }

    @property
    def names(self) -> Mapping[str, object]:
        """What documents call it."""
        second = {"supplement": self.second.names} if self.second else {}
        return {**self.first.names, **second}

    @property
    def notes(self) -> Sequence[str]:
        """Nothing: a checkpoint is as it was released, or refused."""
        return ()

    @property
    def release_sha256(self) -> str:
        """Digest of config.json."""
        return self.checkpoint.config_sha256

    @property
    def layout(self) -> None:
        """A checkpoint has none of the two layouts."""

    @property
    def own_keys(self) -> Sequence[KeyValue]:
        """A checkpoint has no metadata of ours."""
        return ()

    @cached_property
    def earlier_keep(self) -> KeepList | None:
        """The list beside the checkpoint, which says what it lost.

        Raises:
            PlanError: It is not of this checkpoint.
        """
        beside = self.checkpoint.folder / KEEP_NAME
        if not beside.exists():
            return None
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
        return earlier

    @cached_property
    def origins(self) -> Mapping[str, Origin]:
        """Where each source file comes from."""
        checkpoint, from_second = self._joined
        return {
            name: self.second if self.second and name in from_second else self.first
            for name in checkpoint.files
        }

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture that config.json describes."""
        return _config_of(self.checkpoint, self.checkpoint.weight_map)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every stored tensor that counts, once index, shards and config agree on all of them."""
        return require_tensors(self.checkpoint, self.config, self._scope)

    def frame(self, layout: Layout, keep: Keep | None) -> tuple[TargetTensor, ...]:
        """The tensors of the target file."""
        return target_tensors(self.config, layout, keep)

    def draft_frame(self) -> tuple[TargetTensor, ...]:
        """The tensors of the draft file."""
        return draft_tensors(self.config)

    def stored(
        self, wanted: Sequence[TargetTensor], layout: Layout, keep: Keep | None
    ) -> tuple[TargetTensor, ...]:
        """Tensors of a frame, its own or another source's, as they are stored here.

        Raises:
            PlanError: One is not here, or has another shape.
        """
        is_draft = any(target.is_draft for target in wanted)
        own = self.draft_frame() if is_draft else self.frame(layout, keep)
        by_name = {target.name: target for target in own}
        for target in wanted:
            here = by_name.get(target.name)
            if here is None or here.shape != target.shape:
                raise PlanError(
                    "the checkpoint has no such tensor of this shape",
                    file=self.checkpoint.folder,
                    tensor=target.name,
                    expected=target.shape,
                    found="none" if here is None else here.shape,
                    next_step="Both sources must be of one model.",
                )
        return tuple(by_name[target.name] for target in wanted)

    def items(self, frame: Sequence[TargetTensor]) -> list[Item]:
        """Every stored tensor, for the budget."""
        return source_items(self.config, self.specs, frame)

    def left_out(self, frame: Sequence[TargetTensor]) -> tuple[NotCarried, ...]:
        """What files that carry ``frame`` leave out."""
        return not_carried(self.specs, frame)

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

    def require_sound(self) -> None:
        """Refuse a checkpoint whose parts disagree or whose tables do not fit their buckets."""
        self.specs  # noqa: B018 - raises where they disagree
        if not self._scope.only:
            raise_problems(f"engram tables of {self.checkpoint.folder}", self.engram.problems)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, as GGUF wants it."""
        settings = self.checkpoint.folder / "tokenizer_config.json"
        return read_tokenizer(
            self.tokenizer_json,
            files.read_bytes(settings) if settings.exists() else None,
            self.config.vocab_size,
        )


def _config_of(checkpoint: Checkpoint, stored: Iterable[str]) -> ModelConfig:
    return read_config(checkpoint.config, file=checkpoint.path(CONFIG_NAME), stored=stored)


def _required(path: Path) -> bytes:
    if not path.exists():
        raise SourceError(
            "the checkpoint has no tokenizer.json",
            file=path,
            next_step="Fetch it with the shards; the GGUF metadata is made from it.",
        )
    return files.read_bytes(path)
