"""The calibration text as the layers ask for it: tokens, and the engram rows that they read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.model.config import ModelConfig
from pipeline.model.engram.arithmetic import hash_rows
from pipeline.observe.sequences import Sequences, Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Sequences, and the map from token ids to those of the engram, ``[vocab]``."""

    sequences: Sequences
    token_map: NDArray[np.int32]
    config: ModelConfig

    def tokens(self, sequence: int) -> Tokens:
        """The tokens of a sequence."""
        return self.sequences.tokens[sequence]

    def engram_rows(self, layer: int, sequence: int) -> NDArray[np.int64] | None:
        """Rows of the layer's table that each token reads, ``[T, n_columns]``; None without one."""
        constants = self.config.engram
        if constants is None or layer not in constants.layers:
            return None
        rows = hash_rows(self.tokens(sequence).tolist(), self.token_map, constants)
        own: NDArray[np.int64] = rows[constants.layers.index(layer)]
        return own
