"""A repository: immutable commits, and branches that can be moved from one to another."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.hub_server.blob import Blob

COMMIT_ID = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Commit:
    """Files by name (posix, relative), in order."""

    id: str
    files: Mapping[str, Blob]

    @classmethod
    def of(cls, folder: Path, commit: str | None, sha256: Mapping[str, str]) -> Commit:
        """Everything in ``folder`` now; the id is made from names and sizes when not given.

        Raises:
            ValueError: The id is no commit id, or a digest is for a file that is not there.
        """
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        if unknown := set(sha256) - set(names):
            raise ValueError(f"digests of files that are not in the commit: {sorted(unknown)}")
        pairs = zip(names, paths, strict=True)
        files = {name: Blob.of(path, sha256.get(name)) for name, path in pairs}
        commit = commit or _id_of(folder, files)
        if not COMMIT_ID.fullmatch(commit):
            raise ValueError(f"a commit id is 40 hexadecimal digits, not {commit!r}")
        return cls(commit, files)

    def folders(self) -> list[str]:
        """Names of all folders that hold a file, in order; the root is not among them."""
        parents = {str(parent) for name in self.files for parent in PurePosixPath(name).parents}
        return sorted(parents - {"."})


@dataclass(slots=True)
class Repo:
    """Commits by id, and the commit that each branch points to."""

    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision: str) -> Commit | None:
        """The commit that a branch or a full commit id means."""
        return self.commits.get(self.branches.get(revision, revision))


def tree_id(commit: Commit, folder: str) -> str:
    """Stands for git's tree id: 40 digits that depend on the folder's content by name and size."""
    inside = [
        (name, blob.nbytes)
        for name, blob in commit.files.items()
        if not folder or name.startswith(folder + "/")
    ]
    return hashlib.sha1(repr((folder, inside)).encode()).hexdigest()


def _id_of(folder: Path, files: Mapping[str, Blob]) -> str:
    content = [(name, blob.nbytes, blob.modified_ns) for name, blob in files.items()]
    return hashlib.sha1(repr((str(folder), content)).encode()).hexdigest()
