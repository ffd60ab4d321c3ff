"""What a hub knows: repositories, who may read them, faults, the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.hub_server.call import Call
from tests.hub_server.faults import Fault, Faults
from tests.hub_server.links import Links
from tests.hub_server.log import Log, Request
from tests.hub_server.reply import refusal
from tests.hub_server.repo import Commit, Repo


@dataclass
class HubState:
    """Settings may be changed while the server runs.

    Args:
        token: The one token that is let in; None lets everybody in.
        expired_tokens: Tokens that are refused as expired.
        gated: Whether files, though not listings, are refused to everybody.
        page_size: Entries in one page of a listing.
        has_resolve_cache: Whether small files are answered with a relative redirect first, as the
            hub does it since 2025.
    """

    token: str | None = None
    expired_tokens: set[str] = field(default_factory=set)
    gated: bool = False
    page_size: int = 1000
    has_resolve_cache: bool = False
    url: str = ""
    cdn_url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    links: Links = field(default_factory=Links)
    faults: Faults = field(default_factory=Faults)
    log: Log = field(default_factory=Log)

    def add_commit(
        self,
        repo: str,
        folder: Path,
        *,
        commit: str | None = None,
        branch: str = "main",
        sha256: Mapping[str, str] | None = None,
    ) -> str:
        """Serve ``folder`` as a commit of ``repo``, and move ``branch`` to it.

        Args:
            repo: ``owner/name``; made when it is new.
            folder: Must stay as it is while it is served.
            commit: 40 hexadecimal digits; made up when not given.
            branch: Made when it is new.
            sha256: Digests to believe, by file name; needed for files over 4 GiB.

        Returns:
            The commit's id.
        """
        made = Commit.of(folder, commit, sha256 or {})
        known = self.repos.setdefault(repo, Repo())
        known.commits[made.id] = made
        known.branches[branch] = made.id
        return made.id

    def move_branch(self, repo: str, branch: str, commit: str) -> None:
        """Let ``branch`` point to a commit that is there."""
        if commit not in self.repos[repo].commits:
            raise KeyError(commit)
        self.repos[repo].branches[branch] = commit

    def fault(self, fault: Fault) -> None:
        """Let ``fault`` strike from now on."""
        self.faults.add(fault)

    def clear_faults(self) -> None:
        """Let nothing go wrong any more."""
        self.faults.clear()

    def expire_links(self) -> None:
        """Make all links to the CDN invalid that were handed out so far."""
        self.links.expire_all()

    @property
    def requests(self) -> tuple[Request, ...]:
        """Every request so far, in the order of arrival."""
        return self.log.requests

    def clear_requests(self) -> None:
        """Start the log anew."""
        self.log.clear()

    def commit_of(self, call: Call) -> Commit:
        """The commit that a call names, refused in the hub's words where there is none."""
        repo = self.repo_of(call)
        commit = repo.commit_of(call.revision)
        if commit is None:
            raise refusal(404, f"Invalid rev id: {call.revision}", "RevisionNotFound")
        return commit

    def repo_of(self, call: Call) -> Repo:
        """The repository that a call names."""
        if call.repo not in self.repos:
            raise refusal(404, "Repository not found", "RepoNotFound")
        return self.repos[call.repo]
