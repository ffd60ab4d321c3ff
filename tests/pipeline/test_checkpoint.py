import json
import pickle

import numpy as np
import pytest

from pipeline.errors import Problems, SourceError
from pipeline.source.checkpoint import open_checkpoint
from tests.pipeline.tiny_shards import write_checkpoint, write_shard

INDEX = "model.safetensors.index.json"
SHARDS = {
    f"model-0000{n}-of-00003.safetensors": {
        f"layers.{n}.norm.weight": ("BF16", np.zeros(4)),
        f"layers.{n}.hc": ("F32", np.zeros((2, 3))),
    }
    for n in (1, 2, 3)
}
FIRST, SECOND, THIRD = SHARDS


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model", SHARDS)


def test_opens_by_folder_or_by_any_shard(folder):
    checkpoint = open_checkpoint(folder)
    assert open_checkpoint(folder / SECOND) == checkpoint
    assert list(checkpoint.files) == [FIRST, SECOND, THIRD]
    assert checkpoint.config == {"model_type": "tiny"}
    assert checkpoint.total_size == 3 * (8 + 24)
    file, tensor = checkpoint.locate("layers.2.hc")
    assert (file.path, tensor.shape) == (checkpoint.path(SECOND), (2, 3))


def test_is_read_again_as_itself_in_another_process(folder):
    checkpoint = open_checkpoint(folder)
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint


def test_reads_no_weights(folder):
    for name in SHARDS:
        content = (folder / name).read_bytes()
        with (folder / name).open("r+b") as shard:
            shard.truncate(len(content) - 32)
            shard.truncate(len(content))  # the weights are now a hole
    assert len(open_checkpoint(folder).weight_map) == 6


@pytest.mark.parametrize("names", [["model.safetensors"], list(SHARDS)], ids=["lone", "numbered"])
def test_without_an_index_the_headers_are_the_map(tmp_path, names):
    shards = {name: {f"t.{name}": ("F32", np.zeros(2))} for name in names}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, shards, with_index=False))
    assert checkpoint.index_sha256 is None
    assert checkpoint.total_size is None
    assert checkpoint.weight_map == {f"t.{name}": name for name in names}


def test_without_an_index_a_gap_in_the_numbers_is_a_missing_shard(folder):
    (folder / INDEX).unlink()
    (folder / SECOND).unlink()
    with pytest.raises(SourceError, match=f"a shard is missing.*{SECOND}"):
        open_checkpoint(folder)


def test_damaged_and_missing_shards_are_told_together(folder):
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-10])
    (folder / SECOND).unlink()
    (folder / THIRD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(Problems) as caught:
        open_checkpoint(folder)
    messages = [str(problem) for problem in caught.value.problems]
    for message, (name, words) in zip(
        messages,
        [(FIRST, "is cut"), (SECOND, "is missing"), (THIRD, "git-lfs pointer")],
        strict=True,
    ):
        assert name in message
        assert words in message


def test_an_absent_tensor_is_named(folder):
    with pytest.raises(SourceError, match=r"no such tensor.*layers\.9\.hc"):
        open_checkpoint(folder).locate("layers.9.hc")


def test_hidden_files_are_no_shards(folder):
    (folder / f"._{FIRST}").write_bytes(b"resource fork")
    assert list(open_checkpoint(folder).files) == list(SHARDS)


WEIGHT_MAPS = {
    "no map": None,
    "empty map": {},
    "a list": [FIRST],
    "a number for a name": {"a": 7},
    "a path upwards": {"a": "../secret.safetensors"},
    "an absolute path": {"a": "/etc/x.safetensors"},
    "another suffix": {"a": "pytorch_model.bin"},
    "a zero byte": {"a": "a\0.safetensors"},
    "a surrogate": {"a": "\ud800.safetensors"},
    "an endless name": {"a": "a" * 300 + ".safetensors"},
    "two dots": {"a": ".."},
}


@pytest.mark.parametrize("weight_map", WEIGHT_MAPS.values(), ids=WEIGHT_MAPS)
def test_a_bad_weight_map_is_refused(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SourceError, match=r"weight_map|plain shard name") as caught:
        open_checkpoint(folder)
    assert caught.value.file == str(folder / INDEX)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("size", "read"),
    [(96, 96), (96.0, 96), (None, None), (-1, ...), (1.5, ...), (True, ...), ("96", ...)],
    ids=str,
)
def test_total_size_is_a_count_of_bytes(folder, size, read):
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"metadata": {"total_size": size}}))
    if read is ...:
        with pytest.raises(SourceError, match="no count of bytes"):
            open_checkpoint(folder)
    else:
        assert open_checkpoint(folder).total_size == read


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 1}', "'a' twice"),
        (b'{"a": Infinity}', "no finite number"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ],
    ids=["empty", "list", "cut", "key twice", "infinity", "deep", "pointer"],
)
def test_a_damaged_description_is_named(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(folder)
    assert caught.value.file == str(folder / name)


def test_an_endless_description_is_not_read(folder):
    with (folder / "config.json").open("r+b") as config:
        config.truncate(1 << 40)
    with pytest.raises(SourceError, match="too large"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "no checkpoint here"), ("empty", "no config.json"), ("bare", "no shard")],
)
def test_what_is_no_checkpoint_is_said_plainly(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=message):
        open_checkpoint(tmp_path / name)


def test_a_shard_the_index_does_not_name_is_read_too(folder):
    write_shard(folder / "extra.safetensors", {"x": ("F32", np.zeros(1))})
    assert "extra.safetensors" in open_checkpoint(folder).files
