"""Single rows of tables against the same rows out of a whole read."""

import numpy as np
import pytest

from pipeline.errors import DecodeError, SourceError
from pipeline.observe.table_rows import table_rows
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec, MatrixRef
from tests.pipeline.tiny_shards import write_checkpoint

N_ROWS = 40
TABLE = MatrixRef(Codec.FP8, "t.weight", "t.scale", N_ROWS, 64, (1, 32))
EMBED = MatrixRef(Codec.BF16, "e.weight", None, N_ROWS, 8)
ORDERS = {"one": [7], "mixed": [39, 0, 3, 3, 4, 5, 0], "all": list(range(N_ROWS))}


@pytest.fixture
def stored():
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (N_ROWS, 64)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x40
    return {
        "t.weight": ("F8_E4M3", codes),
        "t.scale": ("F8_E8M0", random.integers(110, 140, (N_ROWS, 2))),
        "e.weight": ("BF16", random.integers(0, 0x4000, (N_ROWS, 8))),
    }


def written(folder, stored):
    return open_checkpoint(write_checkpoint(folder, {"model.safetensors": stored}))


@pytest.mark.parametrize("numbers", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("matrix", [TABLE, EMBED], ids=["fp8", "bf16"])
def test_rows_come_back_in_the_order_asked_for(matrix, numbers, stored, tmp_path):
    checkpoint = written(tmp_path, stored)
    whole = np.empty((N_ROWS, matrix.n_cols), np.float32)
    with SourceReader(checkpoint) as reader:
        reader.decode_rows(matrix, 0, whole)
    found = table_rows(checkpoint, matrix, np.array(numbers))
    assert np.array_equal(found, whole[numbers])


@pytest.mark.parametrize(("name", "tensor"), [("t.weight", "t.weight"), ("t.scale", "t.scale")])
def test_a_bad_code_is_named_with_its_row(name, tensor, stored, tmp_path):
    dtype, codes = stored[name]
    codes[31, 1] = 255
    checkpoint = written(tmp_path, stored | {name: (dtype, codes)})
    assert table_rows(checkpoint, TABLE, np.array([30, 32])).shape == (2, 64)
    with pytest.raises(DecodeError, match="at row 31, column") as caught:
        table_rows(checkpoint, TABLE, np.array([5, 31, 30]))
    assert caught.value.tensor == tensor


def test_another_shape_is_refused(stored, tmp_path):
    checkpoint = written(tmp_path, stored)
    wrong = MatrixRef(Codec.FP8, "t.weight", "t.scale", N_ROWS + 1, 64, (1, 32))
    with pytest.raises(SourceError, match="another shape"):
        table_rows(checkpoint, wrong, np.array([0]))
