"""Git-LFS pointers: the small text files that stand in for content that was never fetched."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import SourceError

_FIRST_LINE = b"version https://git-lfs.github.com/spec/"
"""Every pointer begins so (git-lfs ``docs/spec.md``)."""

HEAD_NBYTES = len(_FIRST_LINE)
"""How much of a file `refuse_lfs_pointer` needs to see."""


def refuse_lfs_pointer(head: bytes, path: Path) -> None:
    """Stop when a file that begins with ``head`` is only a pointer to its content.

    Raises:
        SourceError: It is a git-lfs pointer.
    """
    if head.startswith(_FIRST_LINE):
        raise SourceError(
            "the file is a git-lfs pointer, not the content it points to",
            file=path,
            next_step="Run `git lfs pull` in its folder, or download the file itself.",
        )
