"""What a job reads: one or two origins as one checkpoint, checked, with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.errors import SourceError, raise_problems
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.engram.check import EngramReport, TableShapes, check_checkpoint_engram
from pipeline.model.presence import (
    DRAFT_ONLY,
    DRAFT_OPTIONAL,
    require_tensors,
    wanted_tensors,
)
from pipeline.model.tokens.token_map import compress_vocabulary
from pipeline.model.tokens.tokenizer import Tokenizer, read_tokenizer
from pipeline.recipe.values import DraftMode
from pipeline.source.checkpoint import CONFIG_NAME, Checkpoint
from pipeline.source.scope import WHOLE, Scope
from pipeline.source.spec import TensorSpec
from pipeline.source.supplement import supplemented
from tasks.origin import Origin, open_origin

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
    checked where it is there), or the draft alone.
    """

    source: str
    root: Path
    supplement: str = ""
    checksums: str = ""
    draft: DraftMode = DraftMode.KEEP


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
            may_lack_shards=bool(parameters.supplement),
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
