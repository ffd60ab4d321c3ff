"""What a job needs to know of a source, whatever it is: a checkpoint, or a finished GGUF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.budget import Item, NotCarried
from pipeline.experts.keep import KeepList
from pipeline.gguf.keys import KeyValue
from pipeline.model.config import ModelConfig
from pipeline.model.layout import Layout
from pipeline.model.metadata.vocabulary import Vocabulary
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import Keep
from pipeline.source.checkpoint import Checkpoint
from tasks.origin import Origin


class Source(Protocol):
    """A model to be read: its headers, its description, and the stored form of every tensor."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Headers of every file."""

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Where each file comes from."""

    @property
    def names(self) -> Mapping[str, object]:
        """What documents call it."""

    @property
    def notes(self) -> Sequence[str]:
        """What a person should know of it."""

    @property
    def identity(self) -> Mapping[str, object]:
        """What tells it from another: digests."""

    @property
    def release_sha256(self) -> str:
        """Digest of the config.json that everything in it comes from, as far as it is known."""

    @property
    def config(self) -> ModelConfig:
        """The model."""

    @property
    def layout(self) -> Layout | None:
        """The layout of its target, where it has one of the two."""

    @property
    def tokenizer(self) -> Vocabulary:
        """What the keys of the vocabulary are made of."""

    @property
    def token_map(self) -> NDArray[np.int32]:
        """Raw token id -> compressed id, as the engram hash takes them."""

    @property
    def earlier_keep(self) -> KeepList | None:
        """The experts that were left when it was cut before; nothing where it was not."""

    @property
    def own_keys(self) -> Sequence[KeyValue]:
        """Metadata of this project that goes on with whatever is made of it."""

    def require_sound(self) -> None:
        """Refuse a model whose parts disagree or whose tables do not fit their buckets."""

    def frame(self, layout: Layout, keep: Keep | None) -> tuple[TargetTensor, ...]:
        """The tensors of the target that can be made of it: what they are, in model order.

        How they are stored is `stored`'s to say.
        """

    def draft_frame(self) -> tuple[TargetTensor, ...]:
        """The tensors of the draft."""

    def stored(
        self, wanted: Sequence[TargetTensor], layout: Layout, keep: Keep | None
    ) -> tuple[TargetTensor, ...]:
        """Tensors of a frame as they are stored here: a target's with ``keep``, or a draft's."""

    def items(self, frame: Sequence[TargetTensor]) -> list[Item]:
        """Every tensor that it stores, for its budget; ``frame`` is what files carry."""

    def left_out(self, frame: Sequence[TargetTensor]) -> tuple[NotCarried, ...]:
        """What files that carry ``frame`` leave out of it."""
