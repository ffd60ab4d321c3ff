"""From a file's name to its bytes: here for small files, by a redirect to the CDN for LFS files."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from tests.hub_server.access import check_gate
from tests.hub_server.blob import Blob
from tests.hub_server.call import Call
from tests.hub_server.content import content_reply
from tests.hub_server.reply import Reply, refusal, storage_refusal, text_reply
from tests.hub_server.repo import Commit
from tests.hub_server.state import HubState


def resolve(state: HubState, call: Call) -> Reply:
    """A file at a revision: its content, or where it is."""
    commit, blob = _found(state, call)
    if blob.is_lfs:
        return _to_cdn(state, call, commit, blob)
    if state.has_resolve_cache:
        return _to_cache(call, commit, blob)
    return content_reply(call, blob, {"X-Repo-Commit": commit.id})


def resolve_cache(state: HubState, call: Call) -> Reply:
    """A small file at a commit, for those that were redirected here."""
    commit, blob = _found(state, call)
    return content_reply(call, blob, {"X-Repo-Commit": commit.id})


def cdn(state: HubState, call: Call) -> Reply:
    """The bytes of an LFS file, for whoever has a valid link; no hub header comes along."""
    state.links.check(call)
    repo = state.repos.get(call.repo)
    commit = repo.commits.get(call.revision) if repo else None
    if commit is None or call.path not in commit.files:
        raise storage_refusal(404, "NoSuchKey", "The specified key does not exist")
    return content_reply(call, commit.files[call.path], {})


def _found(state: HubState, call: Call) -> tuple[Commit, Blob]:
    commit = state.commit_of(call)
    check_gate(state, call)
    if call.path not in commit.files:
        said = {"X-Repo-Commit": commit.id}
        raise refusal(404, "Entry not found", "EntryNotFound", said)
    return commit, commit.files[call.path]


def _to_cdn(state: HubState, call: Call, commit: Commit, blob: Blob) -> Reply:
    location = state.cdn_url + state.links.sign(call.repo, commit.id, call.path)
    headers = {
        "Location": location,
        "X-Repo-Commit": commit.id,
        "X-Linked-Size": str(blob.nbytes),
        "X-Linked-ETag": blob.etag,
        "Accept-Ranges": "bytes",
        "Content-Type": "text/plain; charset=utf-8",
    }
    return text_reply(302, f"Found. Redirecting to {location}".encode(), headers)


def _to_cache(call: Call, commit: Commit, blob: Blob) -> Reply:
    path = f"/api/resolve-cache/models/{call.repo}/{commit.id}/{quote(call.path)}"
    location = f"{path}?{urlencode({call.url_path: '', 'etag': blob.etag})}"
    headers = {
        "Location": location,
        "X-Repo-Commit": commit.id,
        "X-Linked-Size": str(blob.nbytes),
        "X-Linked-ETag": blob.etag,
        "Content-Type": "text/plain; charset=utf-8",
    }
    return text_reply(307, f"Temporary Redirect. Redirecting to {location}".encode(), headers)
