"""Folders with a target and its draft: which is the folder's model, which belongs to which."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import FormatError
from pipeline.gguf.header import encode_header
from pipeline.gguf.keys import text
from pipeline.gguf.model_file import (
    draft_stem,
    model_stem,
    models_in,
    read_draft,
    read_model,
    shard_file_name,
    split_keys,
)


def put(folder: Path, stem: str, count: int = 0) -> Path:
    """A model without tensors that says its stem: one file, or ``count`` shards."""
    name = text("general.name", stem)
    if not count:
        path = folder / f"{stem}.gguf"
        path.write_bytes(encode_header([name], []))
        return path
    for no in reversed(range(count)):
        path = folder / shard_file_name(stem, no, count)
        path.write_bytes(encode_header([name, *split_keys(no, count, 0)], []))
    return path


def name_of(model) -> str:
    return model.key_values["general.name"].value


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("a-b-00001-of-00012.gguf", "a-b"),
        ("a-draft-00001-of-00001.gguf", "a-draft"),
        ("a.gguf", "a"),
        ("a-1-of-2.gguf", "a-1-of-2"),
    ],
)
def test_stem_is_what_all_files_of_a_model_share(name, stem):
    assert model_stem(Path("folder") / name) == stem


@pytest.mark.parametrize("target_count", [0, 1, 3])
@pytest.mark.parametrize("draft_count", [0, 1, 2])
def test_the_model_of_a_folder_is_the_target(tmp_path, target_count, draft_count):
    target = put(tmp_path, "mini", target_count)
    draft = put(tmp_path, draft_stem("mini"), draft_count)
    assert models_in(tmp_path) == tuple(sorted((target, draft)))
    assert (name_of(read_model(target)), name_of(read_model(draft))) == ("mini", "mini-draft")
    assert name_of(read_model(tmp_path)) == "mini"
    for file in tmp_path.glob("*.gguf"):
        beside = read_draft(file)
        assert (beside and name_of(beside)) == (None if "draft" in file.name else "mini-draft"), (
            file.name
        )


def test_a_draft_alone_is_the_folders_model(tmp_path):
    put(tmp_path, "mini-draft", 1)
    assert name_of(read_model(tmp_path)) == "mini-draft"
    assert read_draft(tmp_path / "mini-draft-00001-of-00001.gguf") is None


def test_a_draft_of_another_name_is_another_model(tmp_path):
    target = put(tmp_path, "mini", 2)
    put(tmp_path, "other-draft", 1)
    assert read_draft(target) is None
    with pytest.raises(FormatError, match=r"mini-00001-of-00002\.gguf, other-draft-00001"):
        read_model(tmp_path)


def test_two_targets_are_several_models(tmp_path):
    for stem in ("mini", "maxi", "mini-draft"):
        put(tmp_path, stem)
    assert len(models_in(tmp_path)) == 3
    with pytest.raises(FormatError, match=r"found maxi\.gguf, mini\.gguf"):
        read_model(tmp_path)


def test_two_drafts_of_one_model_are_refused(tmp_path):
    target = put(tmp_path, "mini")
    put(tmp_path, "mini-draft")
    put(tmp_path, "mini-draft", 1)
    with pytest.raises(FormatError, match="has two drafts beside it"):
        read_draft(target)


def test_a_set_without_its_first_shard_is_listed_and_refused_when_read(tmp_path):
    put(tmp_path, "mini", 3).unlink()
    (first,) = models_in(tmp_path)
    assert first.name == "mini-00002-of-00003.gguf"
    with pytest.raises(FormatError, match="a shard is missing"):
        read_model(first)
