"""A repository at one commit: its files, their sizes and digests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from pipeline.errors import SourceError
from pipeline.source.json_object import shown

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHORT = 8


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a snapshot.

    ``sha256`` is the digest of the content where the hub stores it with git-lfs. ``blob_id`` is
    the git object id: of the content where ``sha256`` is None, else of the pointer to it.
    ``listed_sha256`` is what a checksum list from elsewhere says (`pipeline.source.hub.checksums`).
    """

    name: str
    nbytes: int
    sha256: str | None
    blob_id: str
    listed_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """All files of ``repo`` at ``commit``, by name and sorted by it; ``revision`` as asked for."""

    repo: str
    commit: str
    revision: str
    files: Mapping[str, HubFile]

    def file(self, name: str) -> HubFile:
        """The file of that name.

        Raises:
            SourceError: The snapshot has none.
        """
        if name not in self.files:
            raise SourceError(
                "the repository has no such file",
                file=f"{self}: {shown(name)}",
                next_step="Check the spelling, or choose another revision.",
            )
        return self.files[name]

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit[:_SHORT]}"


def checked_file(
    name: object, nbytes: object, sha256: object, blob_id: object, *, where: str
) -> HubFile:
    """A file as a listing describes it, once its name, size and digests are possible ones.

    Raises:
        SourceError: They are not: the name leaves the repository, say.
    """
    if not isinstance(name, str) or not _stays_inside(name):
        raise _impossible("name", name, where)
    if type(nbytes) is not int or nbytes < 0:
        raise _impossible(f"size of {shown(name)}", nbytes, where)
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise _impossible(f"sha256 of {shown(name)}", sha256, where)
    if not isinstance(blob_id, str) or not _SHA1.fullmatch(blob_id):
        raise _impossible(f"object id of {shown(name)}", blob_id, where)
    return HubFile(name, nbytes, sha256, blob_id)


def checked_commit(commit: object, where: str) -> str:
    """``commit`` when it is a full one.

    Raises:
        SourceError: It is not.
    """
    if not isinstance(commit, str) or not _SHA1.fullmatch(commit):
        raise _impossible("commit", commit, where)
    return commit


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and str(path) == name
    return plain and not path.is_absolute() and ".." not in path.parts and name not in ("", ".")


def _impossible(what: str, found: object, where: str) -> SourceError:
    return SourceError(
        f"a listing of the repository gives an impossible {what}", file=where, found=shown(found)
    )
