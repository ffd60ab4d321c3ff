"""Checkpoints without weights: planned with like whole ones, and made whole later."""

import shutil

import numpy as np
import pytest

from pipeline.errors import SourceError
from pipeline.model.config import read_config
from pipeline.model.expected.tensors import expected_tensors
from pipeline.source.agreement import check_agreement
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.hub import headers as headers_module
from pipeline.source.hub.fetch import fetch_file
from pipeline.source.hub.headers import fetch_headers
from pipeline.source.hub.remote import HubRemote
from pipeline.source.scope import Scope
from tests.hub_server import Fault, IgnoredRange, Status
from tests.pipeline.hub_side import REPO, Timeless, access_to, habits, ranges_asked, snapshot_of
from tests.pipeline.tiny_shards import write_checkpoint

BIG = "model-00001-of-00002.safetensors"
SMALL = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ein Ordner, größer"


def tiny(tmp_path):
    shards = {
        BIG: {"a": ("F32", np.arange(1 << 18)), "b": ("F32", np.ones((3, 5)))},
        SMALL: {"c": ("F32", np.ones((2, 2)))},
    }
    return write_checkpoint(tmp_path / "tiny", shards)


def serve(hub, tmp_path, source, commit="d" * 40):
    hub.add_commit(REPO, source, commit=commit)
    snapshot = snapshot_of(hub, tmp_path)
    return HubRemote(snapshot, access_to(hub)), snapshot


def fetch(hub, tmp_path, source, folder):
    remote, snapshot = serve(hub, tmp_path, source)
    fetch_headers(remote, snapshot, folder, habits=habits(Timeless()))
    return remote, snapshot


def described(checkpoint):
    return [
        (file.path.name, file.nbytes, file.header_sha256, tuple(file.tensors.values()))
        for file in checkpoint.files.values()
    ]


def test_a_checkpoint_reads_the_same_without_its_weights(hub, tmp_path, folder, small_miniature):
    fetch(hub, tmp_path, small_miniature, folder)
    assert described(open_checkpoint(folder)) == described(open_checkpoint(small_miniature))
    checkpoint = open_checkpoint(folder)
    assert check_agreement(checkpoint, expected_tensors(read_config(checkpoint.config))) == []
    assert not (folder / ".unfinished").exists()


def test_only_headers_come_and_only_once(hub, tmp_path, folder):
    remote, snapshot = fetch(hub, tmp_path, tiny(tmp_path), folder)
    on_disk = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert on_disk < 1 << 17 < snapshot.file(BIG).nbytes
    assert sum(one.nbytes for one in hub.requests if one.file == BIG) <= 1 << 18
    hub.log.clear()
    fetch_headers(remote, snapshot, folder)
    assert hub.requests == ()


LISTED = {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"}


def asked(hub):
    """Files whose content was asked for, the listing of the repository apart."""
    return [one.file for one in hub.requests if not one.file.startswith("api/")]


def test_of_a_part_only_its_headers_come_after_the_small_files(
    hub, tmp_path, folder, small_miniature
):
    remote, snapshot = serve(hub, tmp_path, small_miniature)
    only = Scope(only="mtp.")
    fetch_headers(remote, snapshot, folder, scope=only, habits=habits(Timeless()))
    shards = {f"model-000{n}-of-00014.safetensors" for n in (10, 11, 12)}
    assert set(asked(hub)) == LISTED | shards
    assert {path.name for path in folder.glob("*.safetensors")} == shards
    first = min(asked(hub).index(name) for name in shards)
    assert set(asked(hub)[:first]) == LISTED
    for name in shards:
        assert all(end <= 1 << 18 for _, end in ranges_asked(hub, name))
    part = open_checkpoint(folder, scope=only)
    assert described(part) == described(open_checkpoint(small_miniature, scope=only))
    hub.log.clear()
    fetch_headers(remote, snapshot, folder, scope=only)
    assert hub.requests == ()


def test_the_other_headers_follow_when_all_are_wanted(hub, tmp_path, folder, small_miniature):
    remote, snapshot = serve(hub, tmp_path, small_miniature)
    fetch_headers(remote, snapshot, folder, scope=Scope(only="mtp."), habits=habits(Timeless()))
    had = set(asked(hub))
    hub.log.clear()
    fetch_headers(remote, snapshot, folder, habits=habits(Timeless()))
    assert len(set(asked(hub))) == 11
    assert not had & set(asked(hub))
    assert described(open_checkpoint(folder)) == described(open_checkpoint(small_miniature))


def test_without_an_index_a_part_may_be_in_any_shard(hub, tmp_path, folder):
    source = tiny(tmp_path)
    (source / "model.safetensors.index.json").unlink()
    remote, snapshot = serve(hub, tmp_path, source)
    fetch_headers(remote, snapshot, folder, scope=Scope(only="c"), habits=habits(Timeless()))
    assert list(open_checkpoint(folder, scope=Scope(only="c")).files) == [SMALL]
    assert (folder / BIG).exists()


def test_a_long_header_takes_a_second_read(hub, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(headers_module, "_FIRST_NBYTES", 64)
    source = tiny(tmp_path)
    fetch(hub, tmp_path, source, folder)
    assert described(open_checkpoint(folder)) == described(open_checkpoint(source))
    assert sum(one.file == BIG and one.method == "GET" for one in hub.requests) == 2


def test_a_server_without_ranges_is_left_after_the_header(hub, tmp_path, folder):
    hub.fault(Fault(IgnoredRange(), times=None))
    source = tiny(tmp_path)
    fetch(hub, tmp_path, source, folder)
    assert described(open_checkpoint(folder)) == described(open_checkpoint(source))


def test_what_fails_is_resumed(hub, tmp_path, folder):
    source = tiny(tmp_path)
    hub.fault(Fault(Status(500), BIG, times=None))
    remote, snapshot = serve(hub, tmp_path, source)
    with pytest.raises(SourceError, match="again and again"):
        fetch_headers(remote, snapshot, folder, n_connections=1, habits=habits(Timeless()))
    assert not (folder / BIG).exists()
    hub.clear_faults()
    hub.log.clear()
    fetch_headers(remote, snapshot, folder, habits=habits(Timeless()))
    assert described(open_checkpoint(folder)) == described(open_checkpoint(source))
    assert "config.json" not in {one.file for one in hub.requests}


def test_a_hollow_shard_becomes_whole_without_being_read_first(hub, tmp_path, folder):
    source = tiny(tmp_path)
    remote, snapshot = fetch(hub, tmp_path, source, folder)
    read = []
    from pipeline.source.hub.events import FetchEvents

    fetch_file(remote, snapshot.file(BIG), folder / BIG, events=FetchEvents(hashed=read.append))
    assert (folder / BIG).read_bytes() == (source / BIG).read_bytes()
    assert sum(read) == snapshot.file(BIG).nbytes
    hub.log.clear()
    fetch_headers(remote, snapshot, folder)
    assert (folder / BIG).read_bytes() == (source / BIG).read_bytes()
    assert hub.requests == ()


def test_a_whole_shard_that_lies_there_is_left_alone(hub, tmp_path, folder):
    source = tiny(tmp_path)
    folder.mkdir()
    shutil.copyfile(source / BIG, folder / BIG)
    fetch(hub, tmp_path, source, folder)
    assert (folder / BIG).read_bytes() == (source / BIG).read_bytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (b"\n<!DOCTYPE html><html>Please log in</html>" * 9, "web page"),
        ((1 << 60).to_bytes(8, "little") + b"{" * 99, "header length is too large"),
        ((500).to_bytes(8, "little") + b"{}", "header length is too large"),
        ((2).to_bytes(8, "little") + b"[]" + bytes(9), "is not a JSON object"),
        (b"", "header length is too large"),
    ],
    ids=["pointer", "page", "huge", "cut", "no object", "empty"],
)
def test_what_is_no_header_is_named(hub, tmp_path, folder, content, words):
    source = tiny(tmp_path)
    (source / SMALL).write_bytes(content)
    with pytest.raises(SourceError, match=words) as caught:
        fetch(hub, tmp_path, source, folder)
    assert SMALL in str(caught.value)
    assert not (folder / SMALL).exists()


@pytest.mark.parametrize("missing", ["config.json", "*.safetensors"])
def test_a_repository_without_a_checkpoint_is_named(hub, tmp_path, folder, missing):
    source = tiny(tmp_path)
    for path in source.glob(missing):
        path.unlink()
    with pytest.raises(SourceError, match="no safetensors checkpoint"):
        fetch(hub, tmp_path, source, folder)
