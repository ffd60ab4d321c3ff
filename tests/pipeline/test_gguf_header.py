"""Header bytes against stock gguf-py, and what no loader would accept."""

import math
import struct
import time

import gguf
import numpy as np
import pytest

from pipeline.errors import FormatError
from pipeline.gguf.header import (
    FILLER_KEY,
    TensorInfo,
    encode_header,
    encode_padded_header,
    padded_header_nbytes,
)
from pipeline.gguf.keys import KeyValue, ValueType, array, f32, flag, i32, text, u16, u32
from pipeline.gguf.reader import read_gguf

KEYS = (
    text("general.architecture", "deepseek41"),
    u32("deepseek41.block_count", 40),
    u16("split.no", 3),
    i32("split.tensors.count", -1),
    f32("eps", 1e-20),
    flag("norm", True),
    text("template", "｜Assistant｜ {{ x }}"),
    KeyValue("small", ValueType.INT8, -128),
    KeyValue("double", ValueType.FLOAT64, 0.1),
    KeyValue("wide", ValueType.UINT64, 2**64 - 1),
    array("multipliers", ValueType.UINT64, [76632096046245, 2**64 - 1]),
    array("layers", ValueType.INT32, [1, 14]),
    array("tokens", ValueType.STRING, ["<s>", "Ġa", ""]),
    array("flags", ValueType.BOOL, [True, False]),
    array("clamp", ValueType.FLOAT32, [10.0, 0.5]),
)
SHAPES = {"a.weight": (3, 64), "b.weight": (5,), "c.weight": (2, 3, 32)}


def infos():
    found, offset = [], 0
    for name, shape in SHAPES.items():
        found.append(TensorInfo(name, shape[::-1], 0, offset))
        offset += -(-4 * math.prod(shape) // 32) * 32
    return found


def contents():
    return {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(SHAPES.items())}


def filled(header):
    padded = [a.tobytes() + bytes(-a.nbytes % 32) for a in contents().values()]
    return header + b"".join(padded)


def test_bytes_equal_those_of_gguf_py(tmp_path):
    stock = tmp_path / "stock.gguf"
    writer = gguf.GGUFWriter(stock, "deepseek41")
    for entry in KEYS[1:]:
        value = list(entry.value) if isinstance(entry.value, tuple) else entry.value
        sub_type = None if entry.element is None else gguf.GGUFValueType(entry.element)
        writer.add_key_value(entry.key, value, gguf.GGUFValueType(entry.type), sub_type=sub_type)
    for name, values in contents().items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert filled(encode_header(KEYS, infos())) == stock.read_bytes()


def test_gguf_py_reads_a_padded_file(tmp_path):
    path = tmp_path / "ours.gguf"
    header = encode_padded_header(KEYS, infos())
    path.write_bytes(filled(header))
    reader = gguf.GGUFReader(path)
    assert len(header) == reader.data_offset == 4096
    found = {t.name: np.asarray(t.data).reshape(t.shape[::-1]) for t in reader.tensors}
    for name, values in contents().items():
        np.testing.assert_array_equal(found[name], values)
    for entry in KEYS:
        value = list(entry.value) if isinstance(entry.value, tuple) else entry.value
        is_float = ValueType.FLOAT32 in (entry.type, entry.element)
        expected = pytest.approx(value, rel=1e-6) if is_float else value
        assert reader.fields[entry.key].contents() == expected


# Every length of the last key, so that the filler takes every length up to a page, zero included.
@pytest.mark.parametrize("n", range(64))
def test_a_padded_header_ends_on_a_page(n, tmp_path):
    keys = (*KEYS, text("last", "x" * n))
    header = encode_padded_header(keys, infos(), page=64)
    assert len(header) % 64 == 0
    assert len(header) - len(encode_header(keys, infos())) < 64 + 12 + len(FILLER_KEY) + 32
    assert len(header) == padded_header_nbytes(keys, infos(), page=64)
    path = tmp_path / "padded.gguf"
    path.write_bytes(filled(header))
    assert read_gguf(path).data_offset == len(header)
    assert set(gguf.GGUFReader(path).fields) >= {"last", FILLER_KEY}


def test_ik_type_ids_are_written():
    header = encode_header((), [TensorInfo("t", (256, 2), 144, 0)])
    assert struct.pack("<QQIQ", 256, 2, 144, 0) in header


def big_vocabulary():
    tokens = [f"token{i}" for i in range(129_280)]
    merges = [f"tok en{i}" for i in range(127_741)]
    return (
        array("tokenizer.ggml.tokens", ValueType.STRING, tokens),
        array("tokenizer.ggml.merges", ValueType.STRING, merges),
        array("tokenizer.ggml.token_type", ValueType.INT32, [1] * len(tokens)),
    )


def test_a_real_vocabulary_is_encoded_measured_and_read_quickly(tmp_path):
    keys = big_vocabulary()
    path = tmp_path / "vocabulary.gguf"
    began = time.process_time()
    header = encode_padded_header(keys, ())
    assert padded_header_nbytes(keys, ()) == len(header) > 4_000_000
    path.write_bytes(header)
    found = read_gguf(path)
    assert time.process_time() - began < 10
    assert [found.key_values[entry.key] for entry in keys] == list(keys)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (u32("k", -1), "the value of k does not fit its type; expected UINT32"),
        (u32("k", 2**32), "does not fit its type"),
        (u16("k", 65536), "does not fit its type"),
        (i32("k", 2**31), "does not fit its type"),
        (KeyValue("k", ValueType.UINT64, 2**64), "does not fit its type"),
        (KeyValue("k", ValueType.INT32, 1.5), "does not fit its type"),
        (KeyValue("k", ValueType.UINT32, True), "does not fit its type"),
        (KeyValue("k", ValueType.BOOL, 1), "does not fit its type"),
        (KeyValue("k", ValueType.STRING, 1), "does not fit its type"),
        (KeyValue("k", ValueType.FLOAT32, "1"), "does not fit its type"),
        (KeyValue("k", ValueType.FLOAT32, 1e39), "does not fit its type"),
        (KeyValue("k", ValueType.ARRAY, (1,)), "does not fit its type"),
        (KeyValue("k", ValueType.ARRAY, 1, ValueType.INT32), "does not fit its type"),
        (KeyValue("k", ValueType.INT32, (1,), None), "does not fit its type"),
        (KeyValue("k", ValueType.INT32, 1, ValueType.INT32), "does not fit its type"),
        (array("k", ValueType.INT32, [1, 2**31]), "expected array of INT32"),
        (array("k", ValueType.STRING, ["a", 1]), "expected array of STRING"),
        (array("k", ValueType.ARRAY, [1]), "expected array of ARRAY"),
        (array("k", ValueType.INT32, []), "k is an empty array.*Leave the key out"),
        (text("k", "\ud800"), "text that is not Unicode"),
        (text("", "x"), "key is empty or too long"),
        (text("k" * 65536, "x"), "key is empty or too long"),
        (u32("general.alignment", 4096), "only one alignment"),
    ],
    ids=lambda value: None if isinstance(value, str) else value.key[:20],
)
def test_entries_no_loader_would_read_are_refused(entry, message):
    with pytest.raises(FormatError, match=message):
        encode_header((entry,), ())


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (TensorInfo("n" * 64, (1,), 0, 0), "a tensor name has 1 to 63 bytes"),
        (TensorInfo("é" * 32, (1,), 0, 0), "a tensor name has 1 to 63 bytes"),
        (TensorInfo("", (1,), 0, 0), "a tensor name has 1 to 63 bytes"),
        (TensorInfo("\ud800", (1,), 0, 0), "a tensor name is Unicode"),
        (TensorInfo("t", (1, 1, 1, 1, 1), 0, 0), "1 to 4 dimensions; tensor t"),
        (TensorInfo("t", (), 0, 0), "1 to 4 dimensions"),
        (TensorInfo("t", (1, 0), 0, 0), "every dimension is positive"),
        (TensorInfo("t", (2**32, 2**32), 0, 0), "less than 2.63 elements"),
        (TensorInfo("t", (1,), -1, 0), "type id"),
        (TensorInfo("t", (1,), 2**32, 0), "type id"),
        (TensorInfo("t", (1,), 0, 16), "an offset is a multiple of 32"),
        (TensorInfo("t", (1,), 0, -32), "an offset is a multiple of 32"),
        (TensorInfo("t", (1,), 0, 2**63), "an offset is a multiple of 32 below"),
    ],
    ids=range(13),
)
def test_tensors_ggml_would_refuse_are_refused(info, message):
    with pytest.raises(FormatError, match=message):
        encode_header((), (info,))


def test_names_of_63_bytes_pass():
    assert b"n" * 63 in encode_header((), (TensorInfo("n" * 63, (1,), 0, 0),))


def test_duplicates_are_refused():
    with pytest.raises(FormatError, match="a metadata key stands twice; found k"):
        encode_header((u32("k", 1), u32("k", 2)), ())
    with pytest.raises(FormatError, match="a tensor name stands twice; found t"):
        encode_header((), (TensorInfo("t", (1,), 0, 0), TensorInfo("t", (1,), 0, 32)))
    with pytest.raises(FormatError, match="filler key is taken"):
        encode_padded_header((text(FILLER_KEY, ""),), ())
