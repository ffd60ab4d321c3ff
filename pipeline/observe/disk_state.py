"""The state between layers in files that survive a killed run.

One file per kind of values and layer that made it: ``streams-07``, ``rows-02``. While a layer runs,
what it makes goes to ``streams.part``; its sequences lie at fixed places, one after the other. When
the layer is done the parts are synced and renamed, then the layer's record is written
(`pipeline.observe.records`), then what no later layer reads is removed. At most two states lie on
the disk at a time. Writing and hashing go on in the background, a few sequences at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from pipeline import files
from pipeline.digest import sha256
from pipeline.errors import OutputError
from pipeline.model.config import ModelConfig
from pipeline.observe.state import FIXED_TYPES, Digests, file_name, file_names, offsets
from pipeline.observe.topology import Slot, makers, shape_of, written

N_WRITING = 4
"""Sequences that may wait to be written: hashing keeps one core busy at a gigabyte a second."""


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
        self._pool: ThreadPoolExecutor | None = None
        self._writing: dict[tuple[Slot, int], Future[None]] = {}

    def begin(self) -> None:
        """Reserve the parts of what the layer writes."""
        self._digests = {}
        self._pool = ThreadPoolExecutor(N_WRITING, thread_name_prefix="state")
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
        self._hand_over(slot, sequence, values, is_last=True)

    def hold(self, sequence: int, streams: Tensor) -> None:
        """Put ``streams`` where they will be written in the end."""
        self._hand_over(Slot.STREAMS, sequence, streams, is_last=False)

    def held(self, sequence: int) -> Tensor:
        """What lies in the part."""
        self._wait(Slot.STREAMS, sequence)
        return self._read(self._part(Slot.STREAMS), Slot.STREAMS, self._layer, sequence)

    def finish(self) -> Digests:
        """Sync the parts and give them their names."""
        for slot, sequence in list(self._writing):
            self._wait(slot, sequence)
        assert self._pool is not None
        self._pool.shutdown()
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

    def _hand_over(self, slot: Slot, sequence: int, values: Tensor, *, is_last: bool) -> None:
        assert self._pool is not None
        here = values.to("cpu", self._type(slot)).contiguous()
        while len(self._writing) >= N_WRITING:
            self._wait(*next(iter(self._writing)))
        self._wait(slot, sequence)
        done = self._pool.submit(self._put, slot, sequence, here, is_last=is_last)
        self._writing[slot, sequence] = done

    def _wait(self, slot: Slot, sequence: int) -> None:
        """Until what was handed over is written; raises what kept it from that."""
        done = self._writing.pop((slot, sequence), None)
        if done is not None:
            done.result()

    def _put(self, slot: Slot, sequence: int, values: Tensor, *, is_last: bool) -> None:
        if is_last:
            self._digests[slot][sequence] = _digest(values)
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


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.reshape(-1).view(torch.uint8).numpy().data)


def _digest(values: Tensor) -> str:
    return sha256(_bytes(values))
