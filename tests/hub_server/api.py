"""The JSON routes: model info, listings, paths, refs."""

from __future__ import annotations

import base64
import json
from typing import cast
from urllib.parse import parse_qs, urlencode

from tests.hub_server.blob import Blob
from tests.hub_server.call import Call
from tests.hub_server.reply import Json, Reply, json_reply, refusal
from tests.hub_server.repo import Commit, tree_id
from tests.hub_server.state import HubState

_EXPANDED_PAGE_SIZE = 50
_DATE = "2026-01-01T00:00:00.000Z"


def model_info(state: HubState, call: Call) -> Reply:
    """The model at a revision, with the names of its files; ``blobs`` adds sizes and digests."""
    commit = state.commit_of(call)
    has_blobs = call.flag("blobs")
    siblings = [
        {"rfilename": name, **(_sibling(blob) if has_blobs else {})}
        for name, blob in commit.files.items()
    ]
    info: Json = {
        "_id": commit.id[:24],
        "id": call.repo,
        "modelId": call.repo,
        "author": call.repo.split("/")[0],
        "sha": commit.id,
        "lastModified": _DATE,
        "createdAt": _DATE,
        "private": state.token is not None,
        "gated": "manual" if state.gated else False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": siblings,
    }
    return json_reply(info)


def tree(state: HubState, call: Call) -> Reply:
    """One page of the listing of a folder, with a link to the next."""
    commit = state.commit_of(call)
    folders, files = _inside(commit, call.path, is_recursive=call.flag("recursive"))
    if call.path and not folders and not files:
        message = f"{call.path} does not exist on {call.revision!r}"
        raise refusal(404, message, "EntryNotFound")
    start, end = _page(state, call)
    names = [*folders, *files]
    more = {"Link": f'<{_next_url(state, call, end)}>; rel="next"'} if end < len(names) else {}
    is_expanded = call.flag("expand")
    entries = [_entry(commit, name, is_expanded=is_expanded) for name in names[start:end]]
    return json_reply(entries, more)


def paths_info(state: HubState, call: Call) -> Reply:
    """Those of the named paths that are there; the names come as a form or as JSON."""
    commit = state.commit_of(call)
    if "json" in call.headers.get("content-type", ""):
        asked = json.loads(call.body)
        paths, is_expanded = cast("list[str]", asked["paths"]), bool(asked.get("expand"))
    else:
        form = parse_qs(call.body.decode())
        paths, is_expanded = form.get("paths", []), form.get("expand") == ["true"]
    known = {*commit.files, *commit.folders()}
    found = [path for path in paths if path in known]
    return json_reply([_entry(commit, path, is_expanded=is_expanded) for path in found])


def refs(state: HubState, call: Call) -> Reply:
    """All branches and the commits they point to."""
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
        for name, commit in state.repo_of(call).branches.items()
    ]
    return json_reply({"branches": branches, "tags": [], "converts": []})


def _inside(commit: Commit, folder: str, *, is_recursive: bool) -> tuple[list[str], list[str]]:
    """Names of folders and of files below ``folder``, directly or at any depth."""
    start = f"{folder}/" if folder else ""
    folders, files = (
        [
            name
            for name in names
            if name.startswith(start) and (is_recursive or "/" not in name[len(start) :])
        ]
        for names in (commit.folders(), commit.files)
    )
    return folders, files


def _entry(commit: Commit, name: str, *, is_expanded: bool) -> Json:
    blob = commit.files.get(name)
    last = _last_commit(commit) if is_expanded else {}
    if blob is None:
        return {"type": "directory", "oid": tree_id(commit, name), "size": 0, "path": name, **last}
    file: dict[str, Json]
    file = {"type": "file", "oid": blob.git_sha1, "size": blob.nbytes, "path": name}
    return {**file, **_lfs(blob, "oid"), **last, **(_security() if is_expanded else {})}


def _sibling(blob: Blob) -> dict[str, Json]:
    return {"size": blob.nbytes, "blobId": blob.git_sha1, **_lfs(blob, "sha256")}


def _lfs(blob: Blob, digest_name: str) -> dict[str, Json]:
    """What is said of LFS files only; listings and the model's info name the digest differently."""
    if not blob.is_lfs:
        return {}
    n_pointer = len(blob.pointer)
    return {"lfs": {digest_name: blob.sha256, "size": blob.nbytes, "pointerSize": n_pointer}}


def _last_commit(commit: Commit) -> dict[str, Json]:
    return {"lastCommit": {"id": commit.id, "title": "Add files", "date": _DATE}}


def _security() -> dict[str, Json]:
    return {"securityFileStatus": {"status": "safe", "avScan": None, "pickleImportScan": None}}


def _page(state: HubState, call: Call) -> tuple[int, int]:
    most = min(state.page_size, _EXPANDED_PAGE_SIZE if call.flag("expand") else state.page_size)
    n_entries = min(int(call.query.get("limit", [str(most)])[0]), most)
    start = int(base64.urlsafe_b64decode(call.query.get("cursor", ["MA=="])[0]))
    return start, start + n_entries


def _next_url(state: HubState, call: Call, start: int) -> str:
    cursor = base64.urlsafe_b64encode(str(start).encode()).decode()
    query = {**call.query, "cursor": [cursor]}
    return f"{state.url}{call.url_path}?{urlencode(query, doseq=True)}"
