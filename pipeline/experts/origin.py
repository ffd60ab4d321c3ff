"""Where numbers came from: a file's name for people, its digest for identity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.files import sha256_of


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """One source of saliency or of a keep list; ``sha256`` is taken over the whole of it."""

    sha256: str
    name: str


def origin_of(path: Path) -> Origin:
    """The file at ``path`` as an origin.

    Raises:
        SourceError: It cannot be read.
    """
    return Origin(sha256_of(path), path.name)
