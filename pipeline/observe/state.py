"""What is carried from layer to layer, wherever it is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from pipeline.model.config import ModelConfig
from pipeline.observe.topology import Slot, makers, shape_of

Digests = Mapping[str, Sequence[str]]
"""Name of a state file -> sha256 of every sequence in it."""

FIXED_TYPES = {Slot.PICKS: torch.int32, Slot.BLOCKS: torch.bool}
"""The other slots have the type of values."""


class State(Protocol):
    """Values by slot and sequence. Between `begin` and `finish`, `read` gives what was before.

    What was handed over is not to be changed any more.
    """

    def begin(self) -> None:
        """The next layer runs from now on."""

    def read(self, slot: Slot, sequence: int) -> Tensor:
        """What the layers before left; the caller may change it."""

    def write(self, slot: Slot, sequence: int, values: Tensor) -> None:
        """What the running layer leaves."""

    def hold(self, sequence: int, streams: Tensor) -> None:
        """Streams in the middle of the running layer."""

    def held(self, sequence: int) -> Tensor:
        """What `hold` was given last."""

    def finish(self) -> Digests:
        """The running layer is done; gives the digests of what it wrote, where there are any."""

    def tidy(self) -> None:
        """The layer is on record: what no later one reads may go."""


def file_name(slot: Slot, maker: int) -> str:
    """Name of the state file of a slot that layer ``maker`` made."""
    return f"{slot}-{maker:02}"


def file_names(config: ModelConfig, layer: int) -> frozenset[str]:
    """The state files that the layers after ``layer`` go on from."""
    return frozenset(file_name(slot, maker) for slot, maker in makers(config, layer).items())


def offsets(
    slot: Slot, config: ModelConfig, maker: int, lengths: Iterable[int], dtype: torch.dtype
) -> list[int]:
    """Where every sequence begins in a state file; the last number is the length of the file."""
    sizes = (math.prod(shape_of(slot, config, maker, n)) * dtype.itemsize for n in lengths)
    return list(accumulate(sizes, initial=0))
