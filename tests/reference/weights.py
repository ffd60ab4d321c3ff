"""Weights by name, from two sources that share no code with each other or with the converter.

One naming serves both: llama.cpp's (``blk.N.attn_q_a.weight`` …; a draft's stages are its blocks),
with every tensor as its numpy shape has it: matrices ``[out, in]``, experts stacked in front. Three
engram tensors are named alike in both layouts of a GGUF: ``engram_wkv``, ``engram_gate`` (the
product of the query and key gains, which is all that is used of them) and the tables, under the
names that `EngramHash.tables` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike

from tests.reference.arrays import Floats, Ints
from tests.reference.checkpoint_weights import CheckpointWeights
from tests.reference.gguf_weights import GgufWeights
from tests.reference.hyperparameters import Hyperparameters


class Weights(Protocol):
    """Named tensors and the constants that belong to them."""

    @property
    def hyperparameters(self) -> Hyperparameters: ...

    def tensor(self, name: str) -> Floats:
        """A whole tensor.

        Raises:
            KeyError: There is none of this name.
        """

    def rows(self, name: str, numbers: Ints) -> Floats:
        """Rows ``[n, n_cols]`` of a table that may be too large to be taken whole."""


class InMemory:
    """Weights of a source in one float type, each tensor decoded once.

    The type is that of the whole forward pass: nothing in it names another.
    """

    def __init__(self, source: Weights, dtype: DTypeLike) -> None:
        self.hyperparameters = source.hyperparameters
        self.tensor: Callable[[str], Floats] = cache(
            lambda name: source.tensor(name).astype(dtype, copy=False)
        )
        self._rows = source.rows
        self._dtype = dtype

    def rows(self, name: str, numbers: Ints) -> Floats:
        return self._rows(name, numbers).astype(self._dtype, copy=False)


def from_checkpoint(folder: Path, dtype: DTypeLike = np.float64) -> Weights:
    """The trunk of a checkpoint in the released layout."""
    return InMemory(CheckpointWeights.trunk(folder), dtype)


def draft_from_checkpoint(folder: Path, dtype: DTypeLike = np.float64) -> Weights:
    """The draft (``mtp.*``) of a checkpoint in the released layout."""
    return InMemory(CheckpointWeights.draft(folder), dtype)


def from_gguf(files: Sequence[Path] | Path, dtype: DTypeLike = np.float64) -> Weights:
    """The trunk or the draft in a GGUF of either layout; shards in their order."""
    return InMemory(GgufWeights([files] if isinstance(files, Path) else files), dtype)
