"""Files of the user's hub cache, used where they lie; and checksum lists."""

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from pipeline.errors import Problems, SourceError
from pipeline.source.hub import cache as cache_module
from pipeline.source.hub.cache import cached_file
from pipeline.source.hub.checksums import read_checksums, with_checksums
from tests.pipeline.hub_side import CONTENT, FILES, REPO, SHARD, snapshot_of

A, B = "a" * 64, "b" * 64


@pytest.fixture
def notes(tmp_path):
    return tmp_path / "notes"


def download(hub, name):
    return Path(hf_hub_download(REPO, name, endpoint=hub.url, token=False))


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_is_used_in_place(hub, tmp_path, notes, name):
    snapshot = snapshot_of(hub, tmp_path)
    assert cached_file(snapshot, name, notes=notes) is None
    path = download(hub, name)
    assert cached_file(snapshot, name, notes=notes) == path
    assert path.read_bytes() == FILES[name]


def test_its_digest_is_computed_once(hub, tmp_path, notes, monkeypatch):
    checked = []
    real = cache_module.check_content
    monkeypatch.setattr(
        cache_module,
        "check_content",
        lambda path, file: (checked.append(path), real(path, file))[1],
    )
    snapshot = snapshot_of(hub, tmp_path)
    download(hub, SHARD)
    for _ in range(3):
        assert cached_file(snapshot, SHARD, notes=notes)
    assert len(checked) == 1


@pytest.mark.parametrize("content", [bytes(len(CONTENT)), CONTENT[:-1]], ids=["right size", "cut"])
def test_a_damaged_file_is_not_used(hub, tmp_path, notes, content):
    snapshot = snapshot_of(hub, tmp_path)
    path = download(hub, SHARD)
    assert cached_file(snapshot, SHARD, notes=notes)
    path.resolve().write_bytes(content)
    assert cached_file(snapshot, SHARD, notes=notes) is None
    assert cached_file(snapshot, SHARD, notes=notes) is None


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        (f"{A}  x.bin\n{B} *folder/ein Name.bin\n", {"x.bin": A, "folder/ein Name.bin": B}),
        (f"{A.upper()}  ./größer.bin\r\n\r\n# a word\r\n", {"größer.bin": A}),
        (f"SHA256 (x (1).bin) = {A}", {"x (1).bin": A}),
        (f"\\{A}  a\\nb\\\\c", {"a\nb\\c": A}),
        (f"{A}  x\n{A}  x\n", {"x": A}),
        ("", {}),
    ],
    ids=["plain", "windows", "tagged", "escaped", "twice", "empty"],
)
def test_checksum_lists(tmp_path, text, listed):
    path = tmp_path / "SHA256SUMS"
    path.write_bytes(text.encode())
    assert read_checksums(path) == listed


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"{A}  x\n{A[:-1]}  y\n".encode(), "line 2"),
        (b"<html>", "another form"),
        (f"{A}  x\n{B}  x\n".encode(), "two digests"),
        (b"\xff\xfe", "not UTF-8"),
    ],
    ids=["short digest", "page", "two digests", "no text"],
)
def test_a_broken_checksum_list_is_named(tmp_path, content, words):
    path = tmp_path / "SHA256SUMS"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=words) as caught:
        read_checksums(path)
    assert str(path) in str(caught.value)


def test_a_list_adds_digests_where_the_hub_has_none(hub, tmp_path):
    snapshot = snapshot_of(hub, tmp_path)
    digest = hashlib.sha256(CONTENT).hexdigest()
    joined = with_checksums(snapshot, {SHARD: digest, "config.json": A, "else": B}, Path("list"))
    assert joined.files[SHARD].sha256 == joined.files[SHARD].listed_sha256 == digest
    assert joined.files["config.json"].listed_sha256 == A
    assert joined.files.keys() == snapshot.files.keys()


def test_a_contradiction_names_both(hub, tmp_path):
    snapshot = snapshot_of(hub, tmp_path)
    with pytest.raises(SourceError, match="contradict") as caught:
        with_checksums(snapshot, {SHARD: A}, Path("my list"))
    assert all(word in str(caught.value) for word in (A, "my list", "the hub", SHARD))
    with pytest.raises(Problems, match="2 problems"):
        with_checksums(snapshot, {SHARD: A, "folder/ein Name.bin": B}, Path("my list"))
