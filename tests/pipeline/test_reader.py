import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pipeline import files
from pipeline.errors import DecodeError, SourceError
from pipeline.source import reader as reader_module
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec, MatrixRef, Picks
from tests.pipeline.tiny_shards import write_checkpoint

RNG = np.random.default_rng(1)
FINITE_FP8 = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)


def fp8(n_rows, n_cols, block):
    scales = RNG.integers(110, 130, (-(-n_rows // block[0]), -(-n_cols // block[1])), np.uint8)
    return RNG.choice(FINITE_FP8, (n_rows, n_cols)), scales


def fp4(n_rows, n_cols):
    codes = RNG.integers(0, 256, (n_rows, n_cols // 2), np.uint8)
    return codes, RNG.integers(110, 130, (n_rows, n_cols // 32), np.uint8)


DENSE, TABLE, EXPERT = fp8(100, 96, (32, 32)), fp8(3000, 256, (1, 32)), fp4(48, 128)
WORDS = RNG.integers(0, 0x7F80, (20, 6), np.uint16)
VALUES = RNG.normal(size=(9, 7)).astype(np.float32)
IDS = RNG.integers(-(2**40), 2**40, (11, 6))
VECTOR = RNG.normal(size=40).astype(np.float32)

SHARDS = {
    "model-00001-of-00002.safetensors": {
        "bf16": ("BF16", WORDS),
        "f32": ("F32", VALUES),
        "ids": ("I64", IDS),
        "vector": ("F32", VECTOR),
        "dense.weight": ("F8_E4M3", DENSE[0]),
        "dense.scale": ("F8_E8M0", DENSE[1]),
    },
    "model-00002-of-00002.safetensors": {
        "table.weight": ("F8_E4M3", TABLE[0]),
        "table.scale": ("F8_E8M0", TABLE[1]),
        "expert.weight": ("I8", EXPERT[0]),
        "expert.scale": ("F8_E8M0", EXPERT[1]),
    },
}

BF16 = MatrixRef(Codec.BF16, "bf16", None, 20, 6)
F32 = MatrixRef(Codec.F32, "f32", None, 9, 7)
I64 = MatrixRef(Codec.I64, "ids", None, 11, 6)
LINE = MatrixRef(Codec.F32, "vector", None, 1, 40)
FP8 = MatrixRef(Codec.FP8, "dense.weight", "dense.scale", 100, 96, (32, 32))
ENGRAM = MatrixRef(Codec.FP8, "table.weight", "table.scale", 3000, 256, (1, 32))
FP4 = MatrixRef(Codec.FP4, "expert.weight", "expert.scale", 48, 128, (1, 32))


def fp8_values(pair, block):
    codes, scales = (torch.from_numpy(part) for part in pair)
    rows = torch.arange(codes.shape[0]) // block[0]
    cols = torch.arange(codes.shape[1]) // block[1]
    scale = scales.view(torch.float8_e8m0fnu).float()[rows][:, cols]
    return (codes.view(torch.float8_e4m3fn).float() * scale).numpy()


def fp4_values(pair):
    codes, scales = pair
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(codes.shape[0], -1)
    return (values * np.repeat(2.0 ** (scales - 127.0), 32, axis=1)).astype(np.float32)


WHOLE = {
    BF16: (WORDS.astype(np.uint32) << 16).view(np.float32),
    F32: VALUES,
    LINE: VECTOR.reshape(1, -1),
    FP8: fp8_values(DENSE, (32, 32)),
    ENGRAM: fp8_values(TABLE, (1, 32)),
    FP4: fp4_values(EXPERT),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("model"), SHARDS))


@pytest.fixture
def source(checkpoint):
    with SourceReader(checkpoint) as source:
        yield source


def decoded(source, matrix, begin=0, n_rows=None):
    n_rows = matrix.n_rows - begin if n_rows is None else n_rows
    out = np.full((n_rows, matrix.n_cols), np.nan, np.float32)
    bound = source.decode_rows(matrix, begin, out)
    assert n_rows == 0 or float(np.abs(out).max()) <= bound
    return out


@pytest.mark.parametrize("step", [1, 300, 1 << 20], ids="step {}".format)
@pytest.mark.parametrize("matrix", WHOLE, ids=lambda matrix: matrix.weight)
def test_rows_are_the_same_however_they_are_cut(source, monkeypatch, matrix, step):
    monkeypatch.setattr(reader_module, "_STEP_NBYTES", step)
    whole = WHOLE[matrix]
    assert np.array_equal(decoded(source, matrix).view(np.uint32), whole.view(np.uint32))
    for begin in {0, 1, 31, 33, matrix.n_rows - 1} & set(range(matrix.n_rows)):
        for n_rows in {0, 1, 2, 40} & set(range(matrix.n_rows - begin + 1)):
            rows = decoded(source, matrix, begin, n_rows)
            assert np.array_equal(rows, whole[begin : begin + n_rows]), (begin, n_rows)


@pytest.mark.parametrize(
    ("matrix", "stored"), [(BF16, WORDS), (F32, VALUES), (I64, IDS)], ids=["bf16", "f32", "i64"]
)
def test_copied_rows_are_the_stored_bytes(source, matrix, stored):
    out = np.zeros((5, stored[0].nbytes), np.uint8)
    source.copy_rows(matrix, 3, out)
    assert out.tobytes() == stored[3:8].tobytes()


@pytest.mark.parametrize("step", [64, 1 << 20])
def test_repacked_rows_hold_the_same_nibbles(source, monkeypatch, step):
    monkeypatch.setattr(reader_module, "_STEP_NBYTES", step)
    out = np.zeros((30, 4 * 17), np.uint8)
    source.repack_rows(FP4, 7, out)
    codes, scales = (part[7:37] for part in EXPERT)
    element = np.stack([codes & 15, codes >> 4], axis=-1).reshape(30, 4, 32)
    blocks = [scales[:, :, None], element[:, :, :16] | element[:, :, 16:] << 4]
    assert np.array_equal(out, np.concatenate(blocks, axis=-1).reshape(30, -1))


def test_only_the_rows_asked_for_are_read(source):
    decoded(source, FP8, 40, 30)  # rows 40 … 69 touch scale rows 1 and 2
    assert source.nbytes_read == 30 * 96 + 2 * 3
    decoded(source, FP4, 5, 2)
    assert source.nbytes_read == 30 * 96 + 2 * 3 + 2 * 64 + 2 * 4


def test_threads_share_one_reader(source):
    def read(begin):
        rows = decoded(source, ENGRAM, begin, 100)
        return np.array_equal(rows, WHOLE[ENGRAM][begin : begin + 100])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(0, 2900, 50)))
    assert source.nbytes_read == 58 * 100 * 264


def test_files_are_opened_once_and_closed(checkpoint, monkeypatch):
    opened = []

    def counting_open(path, flags, *mode):
        opened.append(os.open(path, flags, *mode))
        return opened[-1]

    monkeypatch.setattr(files, "_open", counting_open)
    with SourceReader(checkpoint) as source:
        assert opened == []
        for matrix in (FP8, BF16, FP4, ENGRAM, FP8):
            decoded(source, matrix)
        assert len(opened) == 2
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with pytest.raises(AssertionError):
        decoded(source, FP8)


def test_scratch_stays_small_for_a_large_tile(source):
    decoded(source, ENGRAM)
    scratch = [part for part in vars(source._local).values() if isinstance(part, np.ndarray)]
    held = sum(part.nbytes for part in scratch)
    assert 0 < held < 2 * (1 << 20)


@pytest.mark.parametrize("matrix", [FP8, FP4, BF16], ids=lambda matrix: matrix.weight)
def test_forgetting_names_the_ranges_that_were_read(source, checkpoint, monkeypatch, matrix):
    ranges = []
    monkeypatch.setattr(
        reader_module, "forget_cached", lambda fd, offset, nbytes: ranges.append((offset, nbytes))
    )
    source.forget(matrix, 10, 5)
    _, weight = checkpoint.locate(matrix.weight)
    row_nbytes = weight.nbytes // matrix.n_rows
    assert ranges[0] == (weight.offset + 10 * row_nbytes, 5 * row_nbytes)
    assert len(ranges) == len(matrix.source_names)
    assert np.array_equal(decoded(source, matrix), WHOLE[matrix])


FP8_OF_ANOTHER = {
    "habit of 128": (
        MatrixRef(Codec.FP8, "dense.weight", "dense.scale", 100, 96, (128, 128)),
        r"another shape than its scale block.*dense.scale.*block 128x128.*block 32x32",
    ),
    "engram rule for a dense matrix": (
        MatrixRef(Codec.FP8, "dense.weight", "dense.scale", 100, 96, (1, 32)),
        r"dense.scale.*\(100, 3\) \(block 1x32\).*found \(4, 3\) \(block 32x32\)",
    ),
    "another number of rows": (
        MatrixRef(Codec.FP8, "dense.weight", "dense.scale", 96, 100, (32, 32)),
        r"another shape than the model.*dense.weight.*\(96, 100\).*\(100, 96\)",
    ),
    "FP4 read as FP8": (
        MatrixRef(Codec.FP8, "expert.weight", "expert.scale", 48, 64, (1, 32)),
        "another dtype.*expert.weight.*expected F8_E4M3.*found I8",
    ),
    "FP4 of another block": (
        MatrixRef(Codec.FP4, "expert.weight", "expert.scale", 48, 128, (1, 64)),
        "one scale per 32.*expert.weight.*found scale block 1x64",
    ),
    "scale of another dtype": (
        MatrixRef(Codec.FP8, "dense.weight", "bf16", 100, 96, (32, 32)),
        "another dtype.*bf16.*expected F8_E8M0.*found BF16",
    ),
    "FP8 without scale": (
        MatrixRef(Codec.FP8, "dense.weight", None, 100, 96, (32, 32)),
        "needs a scale.*dense.weight",
    ),
    "BF16 with a scale": (
        MatrixRef(Codec.BF16, "bf16", "dense.scale", 20, 6),
        "no other has one.*bf16",
    ),
    "absent": (MatrixRef(Codec.BF16, "ghost", None, 2, 2), "no such tensor.*ghost"),
    "BF16 of another size": (
        MatrixRef(Codec.BF16, "bf16", None, 20, 7),
        r"another shape than the model.*bf16.*\(20, 7\).*\(20, 6\)",
    ),
}


@pytest.mark.parametrize(("matrix", "message"), FP8_OF_ANOTHER.values(), ids=FP8_OF_ANOTHER)
def test_a_matrix_stored_otherwise_is_refused(source, matrix, message):
    with pytest.raises(SourceError, match=message):
        decoded(source, matrix, 0, 1)


def spoil(tmp_path, name, at, code):
    shards = {
        file: {key: (dtype, values.copy()) for key, (dtype, values) in tensors.items()}
        for file, tensors in SHARDS.items()
    }
    for tensors in shards.values():
        if name in tensors:
            tensors[name][1].view(f"u{tensors[name][1].itemsize}")[at] = code
    return open_checkpoint(write_checkpoint(tmp_path, shards))


SPOILED = {
    "fp8 NaN": (FP8, "dense.weight", (77, 5), 0xFF, "0xFF at row 77, column 5"),
    "fp8 scale": (FP8, "dense.scale", (2, 1), 255, "scale byte 255 at row 64, column 32"),
    "fp4 scale": (FP4, "expert.scale", (40, 3), 255, "scale byte 255 at row 40, column 96"),
    "engram NaN": (ENGRAM, "table.weight", (2999, 255), 0x7F, "at row 2,999, column 255"),
    "bf16 infinity": (BF16, "bf16", (19, 5), 0x7F80, "0x7F80 at row 19, column 5"),
    "f32 NaN": (F32, "f32", (8, 0), 0x7FC00000, "0x7FC00000 at row 8, column 0"),
}


@pytest.mark.parametrize("begin", [0, 33, 5])
@pytest.mark.parametrize(("matrix", "name", "at", "code", "place"), SPOILED.values(), ids=SPOILED)
def test_a_bad_code_is_named_by_its_row_in_the_matrix(
    tmp_path, monkeypatch, matrix, name, at, code, place, begin
):
    monkeypatch.setattr(reader_module, "_STEP_NBYTES", 256)
    begin = min(begin, matrix.n_rows - 1)
    with (
        SourceReader(spoil(tmp_path, name, at, code)) as source,
        pytest.raises(
            DecodeError,
            match=f"tensor {matrix.scale if 'scale' in place else matrix.weight}.*{place}",
        ) as caught,
    ):
        decoded(source, matrix, begin)
    assert caught.value.file.endswith(".safetensors")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("matrix", "name", "at", "code"),
    [(BF16, "bf16", (8, 1), 0xFFC0), (F32, "f32", (4, 6), 0xFF800000)],
    ids=["bf16", "f32"],
)
def test_copied_rows_are_tested_too(tmp_path, matrix, name, at, code):
    out = np.zeros((5, matrix.n_cols * (2 if matrix is BF16 else 4)), np.uint8)
    with (
        SourceReader(spoil(tmp_path, name, at, code)) as source,
        pytest.raises(DecodeError, match=f"0x{code:X} at row {at[0]}, column {at[1]}"),
    ):
        source.copy_rows(matrix, 4, out)


def test_repacking_a_nan_scale_is_refused(tmp_path):
    with (
        SourceReader(spoil(tmp_path, "expert.scale", (40, 3), 255)) as source,
        pytest.raises(DecodeError, match=r"expert.scale.*row 40, column 96"),
    ):
        source.repack_rows(FP4, 8, np.zeros((40, 68), np.uint8))


@pytest.mark.parametrize("n_lost", [-5, 5], ids=["grown", "cut"])
def test_a_file_that_changed_after_its_header_is_refused(tmp_path, n_lost):
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, SHARDS))
    path = checkpoint.path("model-00001-of-00002.safetensors")
    os.truncate(path, path.stat().st_size - n_lost)
    with SourceReader(checkpoint) as source, pytest.raises(SourceError, match="changed after"):
        decoded(source, BF16)


def test_short_reads_are_completed(source, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(files, "_preadv", lambda fd, views, at: real(fd, [views[0][:7]], at))
    assert np.array_equal(decoded(source, FP8), WHOLE[FP8])


PICKED = (2, 3, 7, 19)


def picked(codec, name, n_rows, n_cols, n_stored, entries=PICKED):
    return MatrixRef(codec, name, None, n_rows, n_cols, picks=Picks(entries, n_stored))


@pytest.mark.parametrize("begin", range(4))
def test_picked_rows_are_those_rows(source, begin):
    matrix = picked(Codec.BF16, "bf16", 4, 6, 20)
    out = np.empty((4 - begin, 12), np.uint8)
    source.copy_rows(matrix, begin, out)
    assert out.tobytes() == WORDS[list(PICKED[begin:])].tobytes()
    values = np.empty((4 - begin, 6), np.float32)
    source.decode_rows(matrix, begin, values)
    assert (values.view(np.uint32) >> 16 == WORDS[list(PICKED[begin:])]).all()


def test_picked_elements_of_a_vector_are_one_row(source):
    out = np.empty((1, 16), np.uint8)
    source.copy_rows(picked(Codec.F32, "vector", 1, 4, 40), 0, out)
    assert out.view(np.float32)[0].tolist() == VECTOR[list(PICKED)].tolist()


def test_picks_of_another_number_of_entries_are_refused(source):
    with pytest.raises(SourceError, match="another shape"):
        source.copy_rows(picked(Codec.BF16, "bf16", 4, 6, 21), 0, np.empty((4, 12), np.uint8))


@pytest.fixture
def hashed(tmp_path):
    """Rows of two ids, and a way to spoil one."""
    ids = RNG.permuted(np.tile(np.arange(8), (50, 1)), axis=1)[:, :2]

    def read(row=None, value=0, limit=8):
        stored = ids.copy()
        if row is not None:
            stored[row] = value
        path = write_checkpoint(tmp_path, {"model.safetensors": {"ids": ("I64", stored)}})
        out = np.empty((50, 8), np.uint8)
        with SourceReader(open_checkpoint(path)) as reader:
            reader.narrow_rows(MatrixRef(Codec.I64, "ids", None, 50, 2), 0, out, limit=limit)
        return out.view(np.int32)

    return read, ids


def test_ids_are_the_same_in_32_bits(hashed):
    read, ids = hashed
    assert (read() == ids).all()


@pytest.mark.parametrize(
    ("value", "what"),
    [([8, 1], "not below 8; .*found 8 at row 33, column 0"), ([1, -1], "not below 8.*-1 at row 33"),
     ([3, 3], "holds an id twice.*row 33")],
)  # fmt: skip
def test_ids_that_no_engine_could_use_are_named(hashed, value, what):
    read, _ = hashed
    with pytest.raises(DecodeError, match=what):
        read(33, value)
