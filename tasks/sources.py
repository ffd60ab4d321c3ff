"""The files of a job's sources: which origin each comes from, and the order to fetch them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hub.snapshot import HubFile
from tasks.origin import Origin, Stamp, at_hand

SPARE_FILES = 3
"""Files of ordinary size that may lie beside the largest one while sources are let go."""


@dataclass(frozen=True, slots=True)
class Sources:
    """One or two origins read as one checkpoint; ``needed``: the files a plan reads, in order."""

    checkpoint: Checkpoint
    origins: Mapping[str, Origin]
    needed: Sequence[str]

    @property
    def is_remote(self) -> bool:
        """Whether any needed file has to be fetched."""
        return any(self.origins[name].is_remote for name in self.needed)

    def origin(self, name: str) -> Origin:
        """Where a file comes from."""
        return self.origins[name]

    def has(self, name: str) -> bool:
        """Whether a file can be read now."""
        return self.origins[name].has(name)

    def hub_file(self, name: str) -> HubFile:
        """What the hub says of a file."""
        return self.origins[name].file(name)

    def stamp(self, name: str) -> Stamp:
        """What identifies the content of a file."""
        return self.origins[name].stamp(name)

    def readable(self) -> Checkpoint:
        """The checkpoint with the paths at which files lie once they are here."""
        paths: dict[str, Path] = {
            name: self.origins[name].path(name)
            for name in self.needed
            if self.origins[name].is_remote
        }
        return at_hand(self.checkpoint, paths)

    def nbytes(self, name: str) -> int:
        """Size of a file."""
        return self.checkpoint.files[name].nbytes

    def fetched(self) -> tuple[str, ...]:
        """The needed files that are not read where they lie, in fetching order."""
        return tuple(name for name in self.needed if self.origins[name].is_remote)

    def window_nbytes(self) -> int:
        """Most bytes of fetched files that lie on the disk while sources are let go."""
        sizes = [self.nbytes(name) for name in self.fetched()]
        if not sizes:
            return 0
        return min(sum(sizes), max(sizes) + SPARE_FILES * int(median(sizes)))

    def let_go_before(self, name: str) -> tuple[str, ...]:
        """The files that must be gone before ``name`` may come, so that the window holds."""
        order, room = self.fetched(), self.window_nbytes()
        live = list(order[: order.index(name) + 1])
        gone = []
        while sum(map(self.nbytes, live)) > room:
            gone.append(live.pop(0))
        return tuple(gone)
