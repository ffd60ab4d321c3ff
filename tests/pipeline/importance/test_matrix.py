"""Importance matrices as files: both forms, what they say of themselves, and damaged ones."""

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGUFWriter

from pipeline.errors import FormatError, SourceError
from pipeline.gguf.keys import ValueType, array, text
from pipeline.importance.keys import importance_keys
from pipeline.importance.matrix import Form, read_importance
from tests.gguf_builder import file_bytes
from tests.pipeline.importance.writing import CHUNKS, DATASETS, dat_bytes, gguf_bytes

STACK, DENSE = "blk.0.ffn_up_exps.weight", "blk.0.attn_kv.weight"
ENTRIES = {
    STACK: (np.arange(1, 13).reshape(3, 4).astype(np.float32), np.array([2, 0, 5], np.float32)),
    DENSE: (np.arange(1, 7).reshape(1, 6).astype(np.float32), np.array([40], np.float32)),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "imatrix.gguf"


def test_a_gguf_file_says_what_it_was_made_with(path):
    path.write_bytes(gguf_bytes(ENTRIES))
    matrix = read_importance(path)
    assert (matrix.form, matrix.names, matrix.n_entries) == (Form.GGUF, (STACK, DENSE), 2)
    assert (matrix.datasets, matrix.n_chunks) == (DATASETS, CHUNKS)
    assert matrix.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert matrix.shape_of(STACK) == (3, 4)
    assert matrix.shape_of("blk.0.attn_q_a.weight") is None
    for name, (sums, counts) in ENTRIES.items():
        np.testing.assert_array_equal(matrix.values(name), sums)
        np.testing.assert_array_equal(matrix.counts(name), counts)


def test_the_form_before_gguf_is_told_by_its_first_bytes(path):
    path.write_bytes(dat_bytes(ENTRIES))
    matrix = read_importance(path)
    assert (matrix.form, matrix.names) == (Form.DAT, (STACK, DENSE))
    assert (matrix.datasets, matrix.n_chunks) == (DATASETS, CHUNKS)
    assert matrix.shape_of(STACK) == (1, 12)
    assert matrix.counts(STACK) is None
    n_calls = matrix.entries[STACK].n_calls
    sums, counts = ENTRIES[STACK]
    means = matrix.values(STACK).reshape(3, 4) / n_calls
    np.testing.assert_allclose(means[[0, 2]], sums[[0, 2]] / counts[[0, 2], None], rtol=1e-6)
    np.testing.assert_array_equal(means[1], 1)


TAILS = {
    "none": (b"", None, ()),
    "chunks": (struct.pack("<i", 9), 9, ()),
    "no name": (struct.pack("<ii", 9, 0), 9, ()),
    "a cut name": (struct.pack("<ii", 9, 50) + b"wiki", 9, ()),
    "something else": (b"\xff" * 12, None, ()),
    "more": (struct.pack("<ii", 9, 4) + b"wiki" + b"\1\2", 9, ("wiki",)),
}


@pytest.mark.parametrize(("tail", "n_chunks", "datasets"), TAILS.values(), ids=TAILS)
def test_what_follows_the_entries_is_read_where_it_can_be(path, tail, n_chunks, datasets):
    path.write_bytes(dat_bytes(ENTRIES, tail))
    matrix = read_importance(path)
    assert (matrix.n_chunks, matrix.datasets, matrix.n_entries) == (n_chunks, datasets, 2)


def test_other_tensors_of_a_gguf_file_are_passed_over(path):
    head = (text("general.type", "imatrix"),)
    rows = [("a.in_sum2", (4,), "F32"), ("a.counts", (1,), "F32"), ("a.in_sum", (32,), "Q8_0")]
    path.write_bytes(
        file_bytes(
            head, rows, {"a.in_sum2": bytes(16), "a.counts": bytes(4), "a.in_sum": bytes(34)}
        )
    )
    matrix = read_importance(path)
    assert (matrix.names, matrix.datasets, matrix.n_chunks) == (("a",), (), None)


def test_a_file_that_gguf_writes_is_read(path):
    writer = GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["a", "b"])
    writer.add_uint32("imatrix.chunk_count", 7)
    for name, (sums, counts) in ENTRIES.items():
        writer.add_tensor(f"{name}.in_sum2", sums)
        writer.add_tensor(f"{name}.counts", counts.reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    matrix = read_importance(path)
    assert (matrix.datasets, matrix.n_chunks) == (("a", "b"), 7)
    np.testing.assert_array_equal(matrix.values(STACK), ENTRIES[STACK][0])


def gguf_without(suffix):
    head = (text("general.type", "imatrix"),)
    rows = [(f"a.{part}", (1,), "F32") for part in ("in_sum2", "counts") if part != suffix]
    return file_bytes(head, rows, {name: bytes(4) for name, _, _ in rows})


HEAD = (text("general.type", "imatrix"),)
DAMAGED = {
    "no counts": (gguf_without("counts"), "sums without counts.*expected a.counts"),
    "no sums": (gguf_without("in_sum2"), "sums without counts.*expected a.in_sum2"),
    "counts that do not divide": (
        gguf_bytes({"a": (np.ones((2, 5)), np.ones(3))}),
        "do not fit its sums.*tensor a; expected a count for an equal part of 10 values; found 3",
    ),
    "another type": (
        file_bytes(
            HEAD,
            [("a.in_sum2", (4,), "BF16"), ("a.counts", (1,), "F32")],
            {"a.in_sum2": bytes(8), "a.counts": bytes(4)},
        ),
        "F32 matrices only.*tensor a.in_sum2; found BF16",
    ),
    "a model": (file_bytes((text("general.type", "model"),), [], {}), "is no importance matrix"),
    "no entries": (file_bytes(HEAD, [], {}), "has no entries"),
    "no old entries": (struct.pack("<i", 0), "has no entries"),
    "text": (b"plainly something else", "no importance matrix, or a damaged one"),
    "nothing": (b"", "the number of entries cannot be right"),
    "twice": (
        struct.pack("<i", 2) + 2 * (struct.pack("<i", 1) + b"a" + struct.pack("<iif", 1, 1, 1)),
        "stands twice; .*tensor a",
    ),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_each_damage_is_told(path, content, message):
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_importance(path)
    assert caught.value.file == str(path)


def test_a_file_that_is_cut_anywhere_is_refused(path):
    whole = gguf_bytes({STACK: ENTRIES[STACK]})
    for nbytes in range(0, len(whole) - 32, 9):
        path.write_bytes(whole[:nbytes])
        with pytest.raises((SourceError, FormatError)):
            read_importance(path)


def test_metadata_is_what_llama_quantize_writes(path):
    path.write_bytes(gguf_bytes(ENTRIES, datasets=("a.txt", "b.txt")))
    matrix = read_importance(path)
    keys = {entry.key: (entry.type, entry.value) for entry in importance_keys(matrix)}
    assert keys == {
        "quantize.imatrix.file": (ValueType.STRING, "imatrix.gguf"),
        "quantize.imatrix.dataset": (ValueType.STRING, "a.txt"),
        "quantize.imatrix.entries_count": (ValueType.UINT32, 2),
        "quantize.imatrix.chunks_count": (ValueType.UINT32, CHUNKS),
        "quantmill.imatrix.sha256": (ValueType.STRING, matrix.sha256),
    }


def test_metadata_leaves_out_what_is_not_known_and_ends_where_llama_quantize_does(path):
    path.write_bytes(dat_bytes(ENTRIES, b""))
    matrix = read_importance(path)
    assert {entry.key for entry in importance_keys(matrix)} == {
        "quantize.imatrix.file",
        "quantize.imatrix.entries_count",
        "quantmill.imatrix.sha256",
    }
    long = replace(matrix, datasets=("ü" * 100,), n_chunks=0)
    by_key = {entry.key: entry.value for entry in importance_keys(long)}
    assert by_key["quantize.imatrix.dataset"] == "ü" * 63
    assert "quantize.imatrix.chunks_count" not in by_key


def test_datasets_of_another_type_are_none(path):
    path.write_bytes(
        file_bytes(
            (*HEAD, array("imatrix.datasets", ValueType.INT32, (1, 2))),
            [("a.in_sum2", (1,), "F32"), ("a.counts", (1,), "F32")],
            {"a.in_sum2": bytes(4), "a.counts": bytes(4)},
        )
    )
    assert read_importance(path).datasets == ()
