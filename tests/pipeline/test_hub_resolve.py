"""From an address to a commit: recorded once, kept, refused in words that help."""

import json
import socket

import pytest
from huggingface_hub import constants, snapshot_download

from pipeline.errors import SourceError
from pipeline.source.hub.access import HubAccess
from pipeline.source.hub.address import HubAddress
from pipeline.source.hub.resolve import resolve
from tests.hub_server import Fault, Hangup, Status
from tests.pipeline.hub_side import FILES, MAIN, REPO, SHARD, Timeless, access_to, served


@pytest.fixture
def pinned(tmp_path):
    return tmp_path / "ein Ordner" / "pin.json"


def newer_commit(hub, tmp_path):
    folder = tmp_path / "newer"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return hub.add_commit(REPO, folder, commit="b" * 40)


def unused_url():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_files_have_sizes_and_the_right_kind_of_digest(hub, pinned):
    snapshot, note = resolve(MAIN, pinned=pinned, access=access_to(hub))
    assert (snapshot.commit, note) == ("a" * 40, None)
    assert {name: file.nbytes for name, file in snapshot.files.items()} == {
        name: len(content) for name, content in FILES.items()
    }
    assert snapshot.files["config.json"].sha256 is None
    assert len(snapshot.files[SHARD].sha256) == 64
    with pytest.raises(SourceError, match="no such file"):
        snapshot.file("model.gguf")


def test_a_branch_that_moves_is_told_and_not_followed(hub, pinned, tmp_path):
    first, _ = resolve(MAIN, pinned=pinned, access=access_to(hub))
    assert resolve(MAIN, pinned=pinned, access=access_to(hub)) == (first, None)
    newer = newer_commit(hub, tmp_path)
    kept, note = resolve(MAIN, pinned=pinned, access=access_to(hub))
    assert kept == first
    assert newer in note
    assert first.commit in note
    assert str(pinned) in note
    pinned.unlink()
    assert resolve(MAIN, pinned=pinned, access=access_to(hub))[0].commit == newer


def test_a_recorded_commit_is_never_asked_for_again(hub, pinned):
    address = HubAddress(REPO, "a" * 40)
    first = resolve(address, pinned=pinned, access=access_to(hub))
    n_asked = len(hub.requests)
    assert resolve(address, pinned=pinned, access=access_to(hub)) == first
    assert len(hub.requests) == n_asked


@pytest.mark.parametrize("how", ["no network", "offline wished"])
def test_without_a_connection_the_record_is_enough(hub, pinned, monkeypatch, how):
    first, _ = resolve(MAIN, pinned=pinned, access=access_to(hub))
    url = hub.url
    if how == "no network":
        url = unused_url()
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(MAIN, pinned=pinned, access=HubAccess(url)) == (first, None)


@pytest.mark.parametrize("how", ["no network", "offline wished"])
def test_no_connection_and_no_record_is_one_line(hub, pinned, monkeypatch, how):
    url = hub.url
    if how == "no network":
        url = unused_url()
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    timeless = Timeless()
    with pytest.raises(SourceError, match="cannot be reached") as caught:
        resolve(MAIN, pinned=pinned, access=HubAccess(url), clock=timeless.clock)
    message = str(caught.value)
    assert "\n" not in message
    assert REPO in message
    assert "HF_HUB_OFFLINE" in message
    assert timeless.waits == []
    assert not pinned.exists()


def test_no_connection_but_a_whole_copy_in_the_cache(hub, pinned, monkeypatch):
    online, _ = resolve(MAIN, pinned=pinned, access=access_to(hub))
    snapshot_download(REPO, endpoint=hub.url, token=False)
    pinned.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached, note = resolve(MAIN, pinned=pinned, access=access_to(hub))
    assert cached.commit == online.commit
    assert [(f.name, f.nbytes, f.sha256) for f in cached.files.values()] == [
        (f.name, f.nbytes, f.sha256) for f in online.files.values()
    ]
    assert "cache" in note
    (next((hub_cache_of(cached)).rglob(SHARD))).unlink()
    with pytest.raises(SourceError, match="cannot be reached"):
        resolve(MAIN, pinned=pinned, access=access_to(hub))


def hub_cache_of(snapshot):
    from pathlib import Path

    return Path(constants.HF_HUB_CACHE) / f"models--{snapshot.repo.replace('/', '--')}"


@pytest.mark.parametrize(
    ("address", "settings", "token", "words"),
    [
        (HubAddress("owner/other", "main"), {}, None, ["no such repository", "spelling"]),
        (HubAddress(REPO, "v9"), {}, None, ["no such revision", "spelling"]),
        (MAIN, {"token": "right"}, None, ["token", "HF_TOKEN"]),
        (MAIN, {"token": "right"}, "wrong", ["token", "HF_TOKEN"]),
        (MAIN, {"expired_tokens": {"old"}}, "old", ["expired", "HF_TOKEN", "hf auth login"]),
    ],
    ids=["repository", "revision", "no token", "wrong token", "expired token"],
)
def test_refusals_come_at_once_and_say_what_to_do(
    tmp_path, pinned, address, settings, token, words
):
    timeless = Timeless()
    with served(tmp_path, **settings) as hub:
        access = access_to(hub, token=token)
        with pytest.raises(SourceError) as caught:
            resolve(address, pinned=pinned, access=access, clock=timeless.clock)
        assert len(hub.requests) == 1
    assert all(word in str(caught.value) for word in [*words, address.repo])
    assert timeless.waits == []


@pytest.mark.parametrize(
    ("effect", "wait"),
    [
        (Status(503), 0.5),
        (Status(429, retry_after=7), 7.0),
        (Status(429, ratelimit=55), 55.0),
        (Hangup(), 0.5),
    ],
    ids=["503", "429", "429 with the hub's own header", "hangup"],
)
def test_passing_faults_pass(hub, pinned, effect, wait):
    hub.fault(Fault(effect, "api/*"))
    timeless = Timeless()
    snapshot, _ = resolve(MAIN, pinned=pinned, access=access_to(hub), clock=timeless.clock)
    assert snapshot.commit == "a" * 40
    assert timeless.waits == [wait]


def test_a_hub_that_stays_down_ends(hub, pinned):
    hub.fault(Fault(Status(500), "api/*", times=None))
    timeless = Timeless()
    with pytest.raises(SourceError, match="again and again"):
        resolve(MAIN, pinned=pinned, access=access_to(hub), clock=timeless.clock)
    assert timeless.waits == sorted(timeless.waits)
    assert len(hub.requests) == 1 + len(timeless.waits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entry: entry | {"repo": "owner/other"}, "another address"),
        (lambda entry: entry | {"revision": "v2"}, "another address"),
        (lambda entry: entry | {"commit": "main"}, "impossible commit"),
        (lambda entry: entry | {"files": None}, "damaged"),
        (lambda entry: entry | {"files": [{"name": "a"}]}, "damaged"),
    ],
    ids=["repo", "revision", "commit", "no files", "half a file"],
)
def test_a_record_that_does_not_fit_is_refused(hub, pinned, change, words):
    resolve(MAIN, pinned=pinned, access=access_to(hub))
    pinned.write_text(json.dumps(change(json.loads(pinned.read_text()))))
    with pytest.raises(SourceError, match=words):
        resolve(MAIN, pinned=pinned, access=access_to(hub))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\\b", "", "a//b", "./a", "a\nb"])
def test_a_file_name_that_leaves_the_repository_is_refused(hub, pinned, name):
    resolve(MAIN, pinned=pinned, access=access_to(hub))
    entry = json.loads(pinned.read_text())
    entry["files"][0]["name"] = name
    pinned.write_text(json.dumps(entry))
    with pytest.raises(SourceError, match="impossible name"):
        resolve(MAIN, pinned=pinned, access=access_to(hub))
