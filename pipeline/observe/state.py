"""What is carried from layer to layer: in memory, or in files that survive a killed run.

On disk, one file per kind of values and layer that made it: ``streams-07``, ``rows-02``. While a
layer runs, what it makes goes to ``streams.part``; its sequences lie at fixed places, one after the
other. When the layer is done the parts are synced and renamed, then the layer's record is written
(`pipeline.observe.records`), then what no later layer reads is removed. At most two states lie on
the disk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pipeline import files
from pipeline.digest import sha256
from pipeline.errors import OutputError
from pipeline.model.config import ModelConfig
from pipeline.observe.topology import Slot, makers, shape_of, written

Digests = Mapping[str, Sequence[str]]
"""Name of a state file -> sha256 of every sequence in it."""

FIXED_TYPES = {Slot.PICKS: torch.int32, Slot.BLOCKS: torch.bool}
"""The other slots have the type of values."""


class State(Protocol):
    """Values by slot and sequence. Between `begin` and `finish`, `read` gives what was before."""

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


class DiskState:
    """All of it in the files of ``folder``.

    Args:
        folder: Where they lie; made by the caller.
        config: The model.
        lengths: Tokens of every sequence.
        dtype: The type of values.
        n_done: Layers that earlier processes have finished.
        found: Digests of the state files that those left. What is read of these files is held
            against them once.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        lengths: Sequence[int],
        dtype: torch.dtype,
        *,
        n_done: int,
        found: Digests,
    ) -> None:
        self._folder = folder
        self._config = config
        self._lengths = lengths
        self._dtype = dtype
        self._unproven = {
            (name, n): digest for name, all_of in found.items() for n, digest in enumerate(all_of)
        }
        self._layer = n_done
        self._digests: dict[Slot, list[str]] = {}

    def begin(self) -> None:
        """Reserve the parts of what the layer writes."""
        self._digests = {}
        for slot in written(self._config, self._layer):
            self._digests[slot] = [""] * len(self._lengths)
            with files.writing(self._part(slot), create=True) as fd:
                nbytes = self._offsets(slot, self._layer)[-1]
                files.set_length(fd, nbytes, self._part(slot))
                if nbytes:
                    files.allocate(fd, nbytes, self._part(slot))

    def read(self, slot: Slot, sequence: int) -> Tensor:
        """What lies there, in memory of its own.

        Raises:
            OutputError: It is not what an earlier process wrote.
        """
        maker = makers(self._config, self._layer - 1)[slot]
        path = self._folder / file_name(slot, maker)
        values = self._read(path, slot, maker, sequence)
        digest = self._unproven.pop((path.name, sequence), None)
        if digest is not None and digest != _digest(values):
            raise OutputError(
                "the state between two layers is not what was written",
                file=path,
                offset=self._offsets(slot, maker)[sequence],
                next_step=f"Delete {self._folder} and start again.",
            )
        return values

    def write(self, slot: Slot, sequence: int, values: Tensor) -> None:
        """Put ``values`` into the part, and remember their digest."""
        here = values.to("cpu", self._type(slot)).contiguous()
        self._put(slot, sequence, here)
        self._digests[slot][sequence] = _digest(here)

    def hold(self, sequence: int, streams: Tensor) -> None:
        """Put ``streams`` where they will be written in the end."""
        self._put(Slot.STREAMS, sequence, streams.to("cpu", self._dtype).contiguous())

    def held(self, sequence: int) -> Tensor:
        """What lies in the part."""
        return self._read(self._part(Slot.STREAMS), Slot.STREAMS, self._layer, sequence)

    def finish(self) -> Digests:
        """Sync the parts and give them their names."""
        for slot in self._digests:
            part = self._part(slot)
            with files.writing(part) as fd:
                files.sync(fd, part)
            files.rename(part, self._folder / file_name(slot, self._layer))
        self._layer += 1
        return {file_name(slot, self._layer - 1): own for slot, own in self._digests.items()}

    def tidy(self) -> None:
        """Remove the state files that layers after the last finished one do not read."""
        needed = file_names(self._config, self._layer - 1) if self._layer else frozenset()
        for slot in Slot:
            for path in self._folder.glob(f"{slot}-*"):
                if path.name not in needed:
                    files.remove(path)

    def _put(self, slot: Slot, sequence: int, values: Tensor) -> None:
        path = self._part(slot)
        with files.writing(path) as fd:
            files.write_exact(fd, _bytes(values), self._offsets(slot, self._layer)[sequence], path)

    def _read(self, path: Path, slot: Slot, maker: int, sequence: int) -> Tensor:
        shape = shape_of(slot, self._config, maker, self._lengths[sequence])
        values = torch.empty(shape, dtype=self._type(slot))
        with files.reading(path) as fd:
            files.read_exact(fd, _bytes(values), self._offsets(slot, maker)[sequence], path)
        return values

    def _offsets(self, slot: Slot, maker: int) -> list[int]:
        return offsets(slot, self._config, maker, self._lengths, self._type(slot))

    def _type(self, slot: Slot) -> torch.dtype:
        return FIXED_TYPES.get(slot, self._dtype)

    def _part(self, slot: Slot) -> Path:
        return self._folder / f"{slot}.part"


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


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.reshape(-1).view(torch.uint8).numpy().data)


def _digest(values: Tensor) -> str:
    return sha256(_bytes(values))
