import hashlib
import json
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pipeline.errors import SourceError
from pipeline.source.header import SourceTensor, read_source_file
from tests.pipeline.tiny_shards import header_bytes

A = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
B = {"dtype": "F32", "shape": [], "data_offsets": [12, 16]}


def test_reads_what_the_safetensors_library_wrote(tmp_path):
    path = tmp_path / "model.safetensors"
    arrays = {"x": np.zeros((3, 5), np.float32), "y": np.arange(7, dtype=np.int64)}
    save_file(arrays, path, metadata={"format": "pt"})
    file = read_source_file(path)
    content = path.read_bytes()
    assert file.nbytes == len(content)
    assert file.header_sha256 == hashlib.sha256(content[: file.header_nbytes]).hexdigest()
    for name, array in arrays.items():
        tensor = file.tensors[name]
        assert tensor.shape == array.shape
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()


def test_offsets_are_absolute_and_tensors_in_file_order(tmp_path):
    path = tmp_path / "x"
    head = header_bytes({"__metadata__": {"a": "b"}, "b": B, "a": A})
    path.write_bytes(head + bytes(16))
    assert list(read_source_file(path).tensors.values()) == [
        SourceTensor("a", "BF16", (2, 3), len(head), 12),
        SourceTensor("b", "F32", (), len(head) + 12, 4),
    ]


def test_a_tensor_without_elements_is_allowed(tmp_path):
    path = tmp_path / "x"
    empty = {"dtype": "F32", "shape": [0, 4], "data_offsets": [12, 12]}
    path.write_bytes(header_bytes({"a": A, "e": empty}) + bytes(12))
    assert read_source_file(path).tensors["e"].nbytes == 0


def entry(**changes):
    return {"a": A | changes}


BROKEN = {
    "empty file": (b"", "is empty"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "too short"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
        "git-lfs pointer",
    ),
    "error page": (b"<!DOCTYPE html><html></html>", "does not begin like"),
    "header length 2^60": (header_bytes(b"{}", length=2**60), "does not begin like"),
    "header length just too large": (header_bytes(b"{}", length=100_000_001), "does not begin"),
    "cut in the header": (header_bytes({"a": A})[:-5], "cut inside its header"),
    "cut by 10 bytes": (header_bytes({"a": A}) + bytes(2), "is cut: it ends before"),
    "trailing bytes": (header_bytes({"a": A}) + bytes(13), "goes on after its last"),
    "payload but no tensor": (header_bytes({}) + bytes(1), "goes on after its last"),
    "no JSON": (header_bytes(b"{'a': 1}"), "not valid JSON"),
    "JSON list": (header_bytes(b"[]"), "not a JSON object"),
    "no UTF-8": (header_bytes(b'{"\xff": 1}'), "not UTF-8"),
    "NaN": (header_bytes(b'{"a": NaN}'), "no finite number"),
    "huge float": (header_bytes(b'{"a": 1e999}'), "no finite number"),
    "tensor twice": (header_bytes(b'{"a": {}, "a": {}}'), "holds the key 'a' twice"),
    "key twice": (header_bytes(b'{"a": {"dtype": "I8", "dtype": "I8"}}'), "'dtype' twice"),
    "metadata of numbers": (header_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata list": (header_bytes({"__metadata__": []}), "__metadata__"),
    "entry is a number": (header_bytes({"a": 7}), "must hold dtype, shape"),
    "entry lacks a key": (header_bytes({"a": {"dtype": "I8", "shape": []}}), "must hold dtype"),
    "entry has another key": (header_bytes(entry(x=1)), "must hold dtype"),
    "unknown dtype": (header_bytes(entry(dtype="F4")) + bytes(12), "dtype is not one"),
    "dtype is a list": (header_bytes(entry(dtype=["F32"])) + bytes(12), "dtype is not one"),
    "shape is a number": (header_bytes(entry(shape=6)) + bytes(12), "shape must be"),
    "negative dim": (header_bytes(entry(shape=[-2, -3])) + bytes(12), "shape must be"),
    "fractional dim": (header_bytes(entry(shape=[2.0, 3])) + bytes(12), "shape must be"),
    "boolean dim": (header_bytes(entry(shape=[True, 6])) + bytes(12), "shape must be"),
    "dim of 70 bits": (header_bytes(entry(shape=[2**70, 0])) + bytes(12), "shape must be"),
    "100,000 dims": (header_bytes(entry(shape=[1] * 100_000)) + bytes(12), "shape must be"),
    "product beyond 64 bits": (
        header_bytes(entry(shape=[2**62, 2**62, 16])) + bytes(12),
        "do not fit its shape",
    ),
    "shape too small": (header_bytes(entry(shape=[2, 2])) + bytes(12), "do not fit its shape"),
    "one offset": (header_bytes(entry(data_offsets=[12])) + bytes(12), "data_offsets must"),
    "offsets turned": (header_bytes(entry(data_offsets=[12, 0])) + bytes(12), "data_offsets must"),
    "negative offset": (header_bytes(entry(data_offsets=[-12, 0])) + bytes(12), "data_offsets"),
    "gap at the start": (
        header_bytes(entry(data_offsets=[4, 16])) + bytes(16),
        "a gap before a tensor",
    ),
    "gap between": (
        header_bytes({"a": A, "b": B | {"data_offsets": [16, 20]}}) + bytes(20),
        "a gap before a tensor",
    ),
    "overlap": (
        header_bytes({"a": A, "b": B | {"data_offsets": [8, 12]}}) + bytes(12),
        "an overlap with a tensor",
    ),
    "unprintable name": (header_bytes({"a\x1b[31m": A}) + bytes(12), "not printable text"),
    "lone surrogate": (header_bytes(b'{"\\ud800": {}}'), "not printable text"),
    "endless name": (header_bytes({"a" * 100_000: A}) + bytes(12), "not printable text"),
    "deep JSON": (header_bytes(b'{"a":' + b"[" * 1_000_000), "nested too deep"),
    "deep objects": (header_bytes(b'{"a":' * 500_000), "nested too deep"),
    "5000 digits": (header_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_each_broken_rule_has_its_message(tmp_path, content, message):
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    begin = time.thread_time()
    with pytest.raises(SourceError, match=message) as caught:
        read_source_file(path)
    took, (_, peak) = time.thread_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.file == str(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert took < 20
    assert peak < 64_000_000


def test_a_folder_or_nothing_in_place_of_a_shard_is_a_source_error(tmp_path):
    for path in (tmp_path, tmp_path / "absent.safetensors"):
        with pytest.raises(SourceError, match=path.name):
            read_source_file(path)


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=8)
    | st.sampled_from(["F32", "I8", "dtype", "shape", "data_offsets"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "x", "__metadata__"]), inner
        )
    ),
    max_leaves=12,
)


@settings(max_examples=80)
@given(entries=st.dictionaries(st.text(max_size=4), JSON_LIKE | st.just(A)), tail=st.binary())
def test_any_header_is_read_or_refused_in_our_words(tmp_path_factory, entries, tail):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(header_bytes(json.dumps(entries).encode()) + tail)
    file = read_or_refuse(path)
    if file is not None:
        assert sum(t.nbytes for t in file.tensors.values()) == file.nbytes - file.header_nbytes


def read_or_refuse(path):
    try:
        return read_source_file(path)
    except SourceError:
        return None


@settings(max_examples=100)
@given(content=st.binary(max_size=64))
def test_any_bytes_are_refused_in_our_words(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError):
        read_source_file(path)
