"""The state between layers in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.observe.state import Digests
from pipeline.observe.topology import Slot


class MemoryState:
    """All of it in the memory of ``device``; a killed run begins anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: dict[tuple[Slot, int], Tensor] = {}

    def begin(self) -> None:
        """Nothing to do: a sequence's new values take the place of its old ones."""

    def read(self, slot: Slot, sequence: int) -> Tensor:
        """The values themselves."""
        return self._values[slot, sequence]

    def write(self, slot: Slot, sequence: int, values: Tensor) -> None:
        """Keep ``values``."""
        self._values[slot, sequence] = values.to(self._device)

    def hold(self, sequence: int, streams: Tensor) -> None:
        """Keep ``streams`` where they will be written in the end."""
        self.write(Slot.STREAMS, sequence, streams)

    def held(self, sequence: int) -> Tensor:
        """The streams themselves."""
        return self.read(Slot.STREAMS, sequence)

    def finish(self) -> Digests:
        """There are no files."""
        return {}

    def tidy(self) -> None:
        """Nothing is kept twice."""
