"""A checkpoint of which only a part is looked at, or of which a part may be absent."""

import json

import numpy as np
import pytest

import pipeline.source.checkpoint as checkpoint_module
from pipeline.errors import Problems, SourceError
from pipeline.source.agreement import check_agreement
from pipeline.source.checkpoint import INDEX_NAME, open_checkpoint
from pipeline.source.scope import WHOLE, Scope
from pipeline.source.spec import TensorSpec
from tests.pipeline.tiny_shards import write_checkpoint, write_index

ONE, TWO, THREE, FOUR = (f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4))
VALUES = ("F32", np.zeros(3))
SHARDS = {
    ONE: {"layers.0.a": VALUES, "layers.0.b": VALUES},
    TWO: {"norm": VALUES, "mtp.0.a": VALUES},
    THREE: {"mtp.1.a": VALUES, "mtp.1.b": VALUES},
    FOUR: {"head": VALUES},
}
APART = SHARDS | {TWO: {"norm": VALUES}, FOUR: {"head": VALUES}, THREE: {"mtp.1.a": VALUES}}
"""The module has a shard of its own."""

ONLY = Scope(only="mtp.")
OPTIONAL = Scope(optional="mtp.")


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model", SHARDS)


@pytest.fixture
def apart(tmp_path):
    return write_checkpoint(tmp_path / "apart", APART)


@pytest.fixture
def opened(monkeypatch):
    """Names of the shards whose headers are read."""
    names, read = [], checkpoint_module.read_source_file

    def listen(path):
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(checkpoint_module, "read_source_file", listen)
    return names


def without(folder, *names, listed=True):
    """Shards removed, and taken from the index too unless they stay ``listed``."""
    for name in names:
        (folder / name).unlink()
    if not listed:
        index = json.loads((folder / INDEX_NAME).read_text())
        kept = {t: name for t, name in index["weight_map"].items() if name not in names}
        write_index(folder, kept, index["metadata"]["total_size"])
    return folder


class TestOnlyAPart:
    def test_just_its_shards_are_opened_and_just_its_tensors_seen(self, folder, opened):
        checkpoint = open_checkpoint(folder, scope=ONLY)
        assert opened == [TWO, THREE]
        assert checkpoint.weight_map == {"mtp.0.a": TWO, "mtp.1.a": THREE, "mtp.1.b": THREE}
        seen = {name: list(file.tensors) for name, file in checkpoint.files.items()}
        assert seen == {TWO: ["mtp.0.a"], THREE: ["mtp.1.a", "mtp.1.b"]}
        assert checkpoint.total_size is None
        assert checkpoint.locate("mtp.0.a")[1].offset > checkpoint.files[TWO].header_nbytes
        with pytest.raises(SourceError, match="no such tensor"):
            checkpoint.locate("norm")

    def test_it_agrees_with_what_is_expected_of_it(self, folder):
        specs = [TensorSpec(name, "F32", (3,)) for name in ("mtp.0.a", "mtp.1.a", "mtp.1.b")]
        assert check_agreement(open_checkpoint(folder, scope=ONLY), specs) == []

    def test_files_are_known_by_the_same_digests(self, folder):
        part, whole = open_checkpoint(folder, scope=ONLY), open_checkpoint(folder)
        assert (part.config_sha256, part.index_sha256) == (whole.config_sha256, whole.index_sha256)
        for name, file in part.files.items():
            assert file.header_sha256 == whole.files[name].header_sha256
            assert file.nbytes == whole.files[name].nbytes

    def test_the_other_shards_may_be_absent_or_broken(self, folder):
        (folder / ONE).write_bytes(b"broken")
        (folder / "extra.safetensors").write_bytes(b"broken")
        without(folder, FOUR)
        assert list(open_checkpoint(folder, scope=ONLY).files) == [TWO, THREE]

    def test_its_own_shards_may_not(self, folder):
        (folder / TWO).write_bytes(b"broken")
        without(folder, THREE)
        with pytest.raises(Problems) as caught:
            open_checkpoint(folder, scope=ONLY)
        assert [problem.file for problem in caught.value.problems] == [
            str(folder / TWO),
            str(folder / THREE),
        ]

    def test_another_source_may_have_them(self, folder):
        without(folder, THREE)
        checkpoint = open_checkpoint(folder, scope=ONLY, may_lack_shards=True)
        assert list(checkpoint.files) == [TWO]
        assert set(checkpoint.weight_map.values()) == {TWO, THREE}

    def test_without_an_index_the_shards_that_are_there_count(self, folder, opened):
        without(folder, INDEX_NAME, THREE)
        checkpoint = open_checkpoint(folder, scope=ONLY)
        assert opened == [ONE, TWO, FOUR]
        assert list(checkpoint.files) == [TWO]
        assert checkpoint.weight_map == {"mtp.0.a": TWO}

    @pytest.mark.parametrize("has_index", [True, False])
    def test_a_part_that_is_nowhere_is_empty(self, folder, has_index):
        if not has_index:
            without(folder, INDEX_NAME)
        checkpoint = open_checkpoint(folder, scope=Scope(only="vision."))
        assert (checkpoint.files, checkpoint.weight_map) == ({}, {})


class TestAnOptionalPart:
    def test_a_whole_checkpoint_is_seen_whole(self, apart):
        assert open_checkpoint(apart, scope=OPTIONAL) == open_checkpoint(apart)

    @pytest.mark.parametrize("listed", [True, False])
    def test_all_of_it_may_be_absent(self, apart, listed):
        checkpoint = open_checkpoint(without(apart, THREE, listed=listed), scope=OPTIONAL)
        assert list(checkpoint.files) == [ONE, TWO, FOUR]
        assert list(checkpoint.weight_map) == ["layers.0.a", "layers.0.b", "norm", "head"]
        if listed:
            assert checkpoint.total_size is None

    def test_all_of_it_may_be_absent_without_an_index_too(self, apart):
        without(apart, THREE, INDEX_NAME)
        assert list(open_checkpoint(apart, scope=OPTIONAL).files) == [ONE, TWO, FOUR]
        with pytest.raises(SourceError, match=f"a shard is missing.*{THREE}"):
            open_checkpoint(apart)

    @pytest.mark.parametrize("has_index", [True, False])
    def test_some_of_it_is_not_enough(self, folder, has_index):
        """One of its tensors lies in a shard that has to be there anyway."""
        without(folder, THREE, *(() if has_index else (INDEX_NAME,)))
        with pytest.raises(SourceError, match=f"a shard is missing.*{THREE}"):
            open_checkpoint(folder, scope=OPTIONAL)

    def test_nothing_else_may_be_absent_with_it(self, apart):
        without(apart, ONE, THREE)
        with pytest.raises(SourceError, match=f"a shard is missing.*{ONE}"):
            open_checkpoint(apart, scope=OPTIONAL)

    def test_it_is_no_longer_listed_when_another_source_has_the_rest(self, apart):
        without(apart, ONE, THREE)
        checkpoint = open_checkpoint(apart, scope=OPTIONAL, may_lack_shards=True)
        assert set(checkpoint.weight_map.values()) == {ONE, TWO, FOUR}


def test_names_are_told_by_how_they_begin():
    assert ONLY.covers("mtp.0.a")
    assert not ONLY.covers("layers.0.mtp.a")
    assert WHOLE.covers("anything")
    assert OPTIONAL.may_lack("mtp.0.a")
    assert not OPTIONAL.may_lack("layers.0.mtp.a")
    assert not WHOLE.may_lack("mtp.0.a")
