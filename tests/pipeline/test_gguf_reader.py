"""The GGUF reader: good files of others, hostile headers, and split sets."""

import contextlib
import os
import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import FormatError, SourceError
from pipeline.gguf.header import TensorInfo, encode_header
from pipeline.gguf.keys import KeyValue, ValueType, array, f32, flag, i32, text, u16, u32
from pipeline.gguf.model_file import read_model, shard_file_name, split_keys
from pipeline.gguf.reader import read_gguf
from pipeline.quant.types import TYPES

HUGE = 2**60


def s(value):
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def head(n_tensors=0, n_keys=0, *, magic=b"GGUF", version=3):
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys)


def entry(kind, payload, key="k"):
    return s(key) + struct.pack("<I", kind) + payload


def tensor(name="t", ne=(32,), type_id=0, offset=0, n_dims=None):
    ne_bytes = struct.pack(f"<{len(ne)}Q", *ne)
    n_dims = struct.pack("<I", len(ne) if n_dims is None else n_dims)
    return s(name) + n_dims + ne_bytes + struct.pack("<IQ", type_id, offset)


def one(info, nbytes=128, **more):
    """A file with one tensor info and so many bytes of data."""
    header = head(1, **more) + info
    return header + bytes(-len(header) % 32) + bytes(nbytes)


def two(a, b, nbytes):
    header = head(2) + a + b
    return header + bytes(-len(header) % 32) + bytes(nbytes)


def written(path, content):
    path.write_bytes(content)
    return path


HOSTILE = {
    "empty": (b"", "ends inside the magic"),
    "magic": (b"GGML" + bytes(100), "not a GGUF file"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "not a GGUF file"),
    "version 0": (head(version=0), "version is not read"),
    "version 1": (head(version=1), "version is not read"),
    "version 4": (head(version=4), "version is not read"),
    "big endian": (head(version=3 << 24), "big-endian"),
    "header cut": (head()[:20], "ends inside the key count"),
    "many tensors": (head(n_tensors=HUGE), "tensor count is absurd"),
    "many keys": (head(n_keys=HUGE), "key count is absurd"),
    "keys missing": (head(n_keys=60_000), "ends inside the length of a metadata key"),
    "tensors missing": (head(n_tensors=100_000), "ends inside the length of a tensor name"),
    "key of 2^60 bytes": (head(0, 1) + struct.pack("<Q", HUGE) + bytes(64), "ends inside a meta"),
    "key of 2^64-1 bytes": (head(0, 1) + b"\xff" * 8 + bytes(64), "ends inside a metadata key"),
    "empty key": (head(0, 1) + entry(4, bytes(4), ""), "empty or too long"),
    "long key": (head(0, 1) + entry(4, bytes(4), "k" * 65536), "empty or too long"),
    "key not utf-8": (head(0, 1) + entry(4, bytes(4), b"\xff\xfe"), "metadata key is not UTF-8"),
    "value type 13": (head(0, 1) + entry(13, bytes(8)), "unknown value type.*found 13"),
    "value type 2^32-1": (head(0, 1) + entry(2**32 - 1, bytes(8)), "unknown value type"),
    "value cut": (head(0, 1) + entry(10, bytes(7)), "ends inside k"),
    "string of 2^60": (head(0, 1) + entry(8, struct.pack("<Q", HUGE)), "ends inside k"),
    "string not utf-8": (head(0, 1) + entry(8, s(b"\xc3\x28")), "k is not UTF-8"),
    "boolean 2": (head(0, 1) + entry(7, b"\2"), "boolean other than 0 and 1"),
    "boolean in array": (
        head(0, 1) + entry(9, struct.pack("<IQ", 7, 3) + b"\0\1\2"),
        "boolean other",
    ),
    "array of arrays": (head(0, 1) + entry(9, struct.pack("<IQ", 9, 1)), "array of arrays"),
    "array type 99": (head(0, 1) + entry(9, struct.pack("<IQ", 99, 1)), "unknown value type"),
    "array of 2^60": (head(0, 1) + entry(9, struct.pack("<IQ", 4, HUGE)), "k is too long"),
    "array wrapping u64": (head(0, 1) + entry(9, struct.pack("<IQ", 10, 2**61)), "k is too long"),
    "string array of 2^20": (head(0, 1) + entry(9, struct.pack("<IQ", 8, 2**20)), "ends inside k"),
    "array cut": (head(0, 1) + entry(9, struct.pack("<IQ", 4, 9) + bytes(32)), "ends inside k"),
    "duplicate key": (head(0, 2) + entry(4, bytes(4)) * 2, "key stands twice.*found k"),
    "alignment 0": (head(0, 1) + entry(4, bytes(4), "general.alignment"), "power of two"),
    "alignment 48": (
        head(0, 1) + entry(4, struct.pack("<I", 48), "general.alignment"),
        "power of two",
    ),
    "alignment i32": (
        head(0, 1) + entry(5, struct.pack("<i", 32), "general.alignment"),
        "power of two in UINT32",
    ),
    "alignment 2^31": (
        one(entry(4, struct.pack("<I", 2**31), "general.alignment") + tensor(), n_keys=1),
        "cut short",
    ),
    "tensor name empty": (one(tensor("")), "tensor name is empty or too long"),
    "tensor name of 64": (one(tensor("n" * 64)), "tensor name is empty or too long"),
    "tensor name not utf-8": (one(tensor(b"\x80")), "tensor name is not UTF-8"),
    "10^6 dimensions": (one(tensor(n_dims=10**6)), "has 1,000,000 dimensions"),
    "5 dimensions": (one(tensor(ne=(1,) * 5)), "has 5 dimensions"),
    "0 dimensions": (one(tensor(ne=())), "has 0 dimensions"),
    "zero dimension": (one(tensor(ne=(32, 0))), "impossible shape"),
    "product wraps to 4": (one(tensor(ne=(2**62 + 1, 4))), "impossible shape"),
    "product wraps to 0": (one(tensor(ne=(2**32, 2**32))), "impossible shape"),
    "bytes wrap": (one(tensor(ne=(2**62,))), "cut short"),
    "unknown type": (one(tensor(type_id=999)), "type this version does not know.*tensor t.*999"),
    "removed type": (one(tensor(type_id=4)), "type this version does not know"),
    "repacked ik type": (one(tensor(type_id=202)), "ik's repacked types"),
    "row not whole blocks": (one(tensor(type_id=11, ne=(200,))), "block of Q3_K.*tensor t.*200"),
    "info cut": (head(1) + tensor()[:-1], "ends inside an offset"),
    "first offset": (one(tensor(offset=32), 256), "first tensor is not at the start.*tensor t"),
    "offset 2^64-32": (one(tensor(offset=2**64 - 32)), "first tensor is not at the start"),
    "offset unaligned": (two(tensor(), tensor("u", offset=130), 512), "leaves a hole.*tensor u"),
    "hole": (two(tensor(), tensor("u", offset=160), 512), "leaves a hole after the one before"),
    "overlap": (two(tensor(), tensor("u", offset=96), 512), "overlaps the one before.*tensor u"),
    "same offset": (two(tensor(), tensor("u"), 256), "overlaps the one before"),
    "duplicate tensor": (two(tensor(), tensor(offset=128), 256), "tensor name stands twice"),
    "data missing": (one(tensor(), 0), "cut short.*tensor t"),
    "data cut by one byte": (one(tensor(), 127), "cut short.*tensor t"),
    "one byte too many": (one(tensor(), 129), "bytes follow the last tensor"),
    "junk behind no tensor": (head() + bytes(32), "bytes follow the last tensor"),
    "id 43 as MXFP8 alone": (one(tensor(ne=(64,), type_id=43), 66), "id 43 but not the 1 byte"),
    "id 43 as MXFP8 first": (
        two(tensor(ne=(320,), type_id=43), tensor("u", offset=352), 480),
        "leaves a hole.*type id 43",
    ),
    "id 43 as 2.25 bits": (one(tensor(ne=(256,), type_id=43), 72), "cut short.*type id 43"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_named_at_no_cost(name, tmp_path):
    content, message = HOSTILE[name]
    path = written(tmp_path / "hostile.gguf", content)
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(FormatError, match=message) as caught:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.file == str(path)
    assert time.process_time() - began < 5
    assert peak < 4 << 20


def test_lengths_that_fit_a_huge_file_are_still_bounded(tmp_path):
    path = written(tmp_path / "sparse.gguf", head(0, 1) + entry(8, struct.pack("<Q", 50 << 30)))
    os.truncate(path, 104 << 30)
    with pytest.raises(FormatError, match="header is too long at k"):
        read_gguf(path)


def test_a_header_of_zeros_in_a_huge_file_is_refused(tmp_path):
    path = written(tmp_path / "sparse.gguf", head(100_000, 60_000))
    os.truncate(path, 104 << 30)
    with pytest.raises(FormatError, match="empty or too long"):
        read_gguf(path)


KEYS = (
    text("general.architecture", "deepseek41"),
    u32("n", 7),
    u16("no", 3),
    i32("minus", -1),
    f32("eps", 0.5),
    flag("yes", True),
    KeyValue("byte", ValueType.UINT8, 255),
    KeyValue("wide", ValueType.UINT64, 2**64 - 1),
    KeyValue("deep", ValueType.INT64, -(2**63)),
    KeyValue("double", ValueType.FLOAT64, 0.1),
    array("words", ValueType.STRING, ["", "Ġa", "｜"]),
    array("flags", ValueType.BOOL, [True, False]),
    array("primes", ValueType.UINT64, [16000057, 2**64 - 1]),
)


def file_bytes(tensors, keys=KEYS):
    """A GGUF file with zero weights: ``tensors`` maps name to (type name, ne)."""
    infos, offset = [], 0
    for name, (kind, ne) in tensors.items():
        infos.append(TensorInfo(name, ne, TYPES[kind].type_id, offset))
        nbytes = TYPES[kind].row_nbytes(ne[0]) * int(np.prod(ne[1:], dtype=object))
        offset += -(-nbytes // 32) * 32
    return encode_header(keys, infos) + bytes(offset)


def test_every_key_comes_back_with_its_type(tmp_path):
    found = read_gguf(written(tmp_path / "a.gguf", file_bytes({})))
    assert tuple(found.key_values.values()) == KEYS
    assert (found.version, found.alignment, dict(found.tensors)) == (3, 32, {})


def test_every_type_is_read_with_its_exact_bytes(tmp_path):
    tensors = {f"{name}.weight": (name, (512, 3, 2)) for name in TYPES}
    path = written(tmp_path / "types.gguf", file_bytes(tensors))
    found = read_gguf(path)
    assert [t.type.name for t in found.tensors.values()] == list(TYPES)
    assert found.tensors["IQ4_KSS.weight"].nbytes == 6 * (4 + 2 * 128)
    assert found.tensors["Q3_K.weight"].shape == (2, 3, 512)
    last = list(found.tensors.values())[-1]
    assert found.nbytes == path.stat().st_size == last.offset + -(-last.nbytes // 32) * 32


def test_row_meta_forgotten_by_the_writer_shows_as_an_overlap(tmp_path):
    nbytes = 8 * 128
    content = two(tensor(ne=(256, 8), type_id=146), tensor("u", offset=nbytes), nbytes + 128)
    with pytest.raises(FormatError, match="tensor u; expected offset 1,184; found offset 1,152"):
        read_gguf(written(tmp_path / "a.gguf", content))


@pytest.mark.parametrize("alignment", [None, 64, 4096])
def test_files_of_gguf_py_are_read(alignment, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "stock.gguf", "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    values = {"a": np.ones((3, 5), np.float32), "b": np.ones((2, 64), np.float16)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "stock.gguf")
    stock = gguf.GGUFReader(tmp_path / "stock.gguf")
    assert found.alignment == (alignment or 32)
    assert found.data_offset == stock.data_offset
    assert [(t.name, t.offset, t.nbytes, t.ne) for t in found.tensors.values()] == [
        (t.name, t.data_offset, t.n_bytes, tuple(t.shape)) for t in stock.tensors
    ]


@pytest.mark.parametrize("cut", [0, 31])
def test_padding_of_the_last_tensor_may_be_left_out(cut, tmp_path):
    content = one(tensor(ne=(1, 33), type_id=24), 64)
    found = read_gguf(written(tmp_path / "a.gguf", content[: len(content) - cut]))
    assert found.tensors["t"].nbytes == 33


def test_id_43_is_read_where_it_is_one_byte_a_weight(tmp_path):
    found = read_gguf(written(tmp_path / "a.gguf", one(tensor(ne=(64,), type_id=43), 64)))
    assert found.tensors["t"].type is TYPES["F8_E4M3"]


def test_weights_are_never_read(tmp_path):
    header = head(1) + tensor(ne=(256, 100 << 22), type_id=24)
    path = written(tmp_path / "sparse.gguf", header)
    os.truncate(path, -(-len(header) // 32) * 32 + (100 << 30))
    began = time.process_time()
    assert read_gguf(path).tensors["t"].nbytes == 100 << 30
    assert time.process_time() - began < 5


def test_a_missing_file_is_a_source_error(tmp_path):
    for read in (read_gguf, read_model):
        with pytest.raises(SourceError, match="cannot open"):
            read(tmp_path / "none.gguf")


VALID = file_bytes({"a.weight": ("Q3_K", (256, 3)), "b": ("IQ4_KS", (256, 2)), "c": ("F32", (5,))})
EDITS = st.lists(
    st.tuples(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=9)), max_size=3
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("mutants") / "mutant.gguf"


@settings(max_examples=300)
@given(edits=EDITS, keep=st.integers(0, len(VALID) + 64))
def test_a_damaged_file_raises_nothing_but_format_errors(scratch, edits, keep):
    content = bytearray(VALID)
    for at, patch in edits:
        content[at : at + len(patch)] = patch
    content = content[:keep] if keep < len(content) else content + bytes(keep - len(content))
    scratch.write_bytes(content)
    with contextlib.suppress(FormatError):
        ends = [t.offset + t.nbytes for t in read_gguf(scratch).tensors.values()]
        assert max(ends, default=0) <= len(content)


@settings(max_examples=200)
@given(junk=st.binary(max_size=200))
def test_a_random_header_raises_nothing_but_format_errors(scratch, junk):
    scratch.write_bytes(head(2, 2) + junk)
    with pytest.raises(FormatError):
        read_gguf(scratch)


SHARDS = ({"a": ("F32", (8,))}, {"b": ("Q3_K", (256, 2)), "c": ("F32", (3,))}, {"d": ("F32", (1,))})


def split_set(folder, stem="model", *, change=None):
    """Three shards of four tensors; ``change(no, keys, tensors)`` may damage one."""
    for no, tensors in enumerate(SHARDS):
        keys = list(KEYS) * (no == 0) + list(split_keys(no, 3, 4))
        if change:
            keys, tensors = change(no, keys, tensors)
        written(folder / shard_file_name(stem, no, 3), file_bytes(tensors, keys))
    return folder


@pytest.mark.parametrize("name", ["", "model-00001-of-00003.gguf", "model-00003-of-00003.gguf"])
def test_a_split_set_is_one_model(name, tmp_path):
    model = read_model(split_set(tmp_path) / name)
    assert {name: no for name, (no, _) in model.tensors.items()} == {"a": 0, "b": 1, "c": 1, "d": 2}
    assert model.tensors["b"][1].nbytes == 220
    assert model.key_values["general.architecture"].value == "deepseek41"
    assert [file.path.name[6:11] for file in model.files] == ["00001", "00002", "00003"]


def test_a_single_file_is_one_model(tmp_path):
    path = written(tmp_path / "m.gguf", file_bytes(SHARDS[1]))
    assert list(read_model(path).tensors) == list(read_model(tmp_path).tensors) == ["b", "c"]


def test_gguf_py_splits_are_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for name in "abcde":
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_model(tmp_path)
    numbers = {name: no for name, (no, _) in model.tensors.items()}
    assert numbers == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}


def without_total(no, keys, tensors):
    return (keys[:-1] if no else keys), tensors


def test_later_shards_may_leave_the_tensor_count_out(tmp_path):
    assert len(read_model(split_set(tmp_path, change=without_total)).files) == 3


CHANGES = {
    "wrong number": (1, lambda keys, t: ([*split_keys(2, 3, 4)], t), "split.no does not fit.*U.*1"),
    "wrong count": (1, lambda keys, t: ([*split_keys(1, 4, 4)], t), "split.count does not fit"),
    "other set": (2, lambda keys, t: ([*split_keys(2, 3, 5)], t), "split.tensors.count does not"),
    "lost tensor": (2, lambda keys, t: (keys, {}), "split.tensors.count does not fit"),
    "no split keys": (1, lambda keys, t: ([], t), "split.no does not fit.*found nothing"),
    "wrong type": (
        1,
        lambda keys, t: ([u32("split.no", 1), *keys[1:]], t),
        "expected UINT16 1; found UINT32 1",
    ),
    "same tensor twice": (
        2,
        lambda keys, t: (keys, SHARDS[0]),
        "two shards hold the same",
    ),
    "count missing in first": (0, lambda keys, t: (keys[:-1], t), "split.tensors.count.*nothing"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_sets_that_do_not_belong_together_are_refused(name, tmp_path):
    at, change, message = CHANGES[name]
    split_set(tmp_path, change=lambda no, keys, t: change(keys, t) if no == at else (keys, t))
    with pytest.raises(FormatError, match=message) as caught:
        read_model(tmp_path)
    if name != "lost tensor":  # which shows in the first shard's count
        assert shard_file_name("model", at, 3) in caught.value.file


def test_a_missing_shard_is_named(tmp_path):
    (split_set(tmp_path) / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(FormatError, match=r"a shard is missing; file .*model-00002-of-00003\.gguf"):
        read_model(tmp_path)


def test_a_renamed_shard_is_refused(tmp_path):
    (split_set(tmp_path) / "model-00002-of-00003.gguf").rename(tmp_path / "second.gguf")
    with pytest.raises(FormatError, match="one shard of a set but not named as one"):
        read_model(tmp_path / "second.gguf")


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf"])
def test_impossible_shard_numbers_are_refused(name, tmp_path):
    with pytest.raises(FormatError, match="shard number in the name"):
        read_model(written(tmp_path / name, file_bytes({})))


def test_a_folder_must_hold_exactly_one_model(tmp_path):
    with pytest.raises(FormatError, match=r"found no \.gguf file"):
        read_model(tmp_path)
    split_set(tmp_path)
    written(tmp_path / "draft.gguf", file_bytes({}))
    with pytest.raises(FormatError, match=r"draft\.gguf, model-00001-of-00003\.gguf"):
        read_model(tmp_path)
    assert len(read_model(tmp_path / "draft.gguf").files) == 1
