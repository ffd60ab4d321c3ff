"""The name of a repository on the hub, as people write it: ``owner/name`` or ``owner/name@rev``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from pipeline.errors import SourceError
from pipeline.source.json_object import shown

DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_REF = re.compile(r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|@\{|//|^/|/$|\.lock$|\.$")
"""What git forbids in a branch or tag name (git-check-ref-format(1))."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A repository (``owner/name``) and a revision of it: branch, tag or commit."""

    repo: str
    revision: str

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a full commit, which can never move."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def parse_address(text: str) -> HubAddress:
    """The address that ``text`` names; without ``@rev`` the branch ``main`` is meant.

    Raises:
        SourceError: ``text`` is not of that form, or breaks the hub's rules for names.
    """
    repo, at, revision = text.partition("@")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise _malformed(text, shown(error)) from None
    if repo.count("/") != 1:
        raise _malformed(text, f"{shown(repo)!r} has no owner")
    if at and (not revision or _NO_REF.search(revision)):
        raise _malformed(text, f"{shown(revision)!r} is no branch, tag or commit")
    return HubAddress(repo, revision if at else DEFAULT_REVISION)


def is_address(text: str) -> bool:
    """Whether ``text`` means a repository on the hub; a path that exists is always that path."""
    try:
        if Path(text).exists():
            return False
        parse_address(text)
    except (SourceError, OSError, ValueError):  # too long or with a NUL: no path can be so
        return False
    return True


def _malformed(text: str, why: str) -> SourceError:
    return SourceError(
        "this is neither a folder nor the address of a repository on the hub",
        expected="owner/name or owner/name@revision",
        found=f"{shown(text)!r} ({why})",
        next_step="Check the spelling.",
    )
