"""Decoding against torch's own float8 types, bit by bit."""

import pickle

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pipeline.source import decode
from pipeline.source.decode import (
    BadCodeError,
    decode_bf16,
    decode_fp4,
    decode_fp8,
    f32_bound,
)
from pipeline.source.repack import repack_mxfp4

FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SCALE_BYTES = [0, 1, 2, 6, 7, 8, 60, 118, 126, 127, 128, 134, 135, 200, 247, 254]
FINITE_FP8 = np.array([code for code in range(256) if code & 0x7F != 0x7F], dtype=np.uint8)


def bits(values):
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def torch_scales(scales):
    return torch.from_numpy(np.array(scales)).view(torch.float8_e8m0fnu).to(torch.float32)


def torch_fp8(codes, scales, row_begin, block):
    """The rule as it is written down: each weight times the scale at (row // br, column // bc)."""
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).to(torch.float32)
    rows = (torch.arange(codes.shape[0]) + row_begin) // block[0]
    cols = torch.arange(codes.shape[1]) // block[1]
    return (values * torch_scales(scales)[rows - row_begin // block[0]][:, cols]).numpy()


def torch_fp4(codes, scales):
    codes = torch.from_numpy(codes.copy())
    table = torch.tensor(FP4_VALUES + [-value for value in FP4_VALUES])
    values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1)
    return (values.flatten(1) * torch_scales(scales).repeat_interleave(32, dim=1)).numpy()


@pytest.mark.parametrize("scale", SCALE_BYTES)
def test_every_fp8_code_equals_torch(scale):
    codes = np.resize(FINITE_FP8, (8, 64))
    scales = np.full((1, 2), scale, np.uint8)
    out = np.empty(codes.shape, np.float32)
    bound = decode_fp8(codes, scales, 0, (32, 32), out)
    expected = torch_fp8(codes, scales, 0, (32, 32))
    assert np.array_equal(bits(out), bits(expected))
    assert bound == 448.0 * 2.0 ** (scale - 127)


@pytest.mark.parametrize("scale", SCALE_BYTES)
def test_every_fp4_byte_equals_torch(scale):
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    scales = np.full((2, 8), scale, np.uint8)
    out = np.empty((2, 256), np.float32)
    bound = decode_fp4(codes, scales, out)
    assert np.array_equal(bits(out), bits(torch_fp4(codes, scales)))
    assert bound == 6.0 * 2.0 ** (scale - 127)


BLOCKS = {
    "dense 32x32": (70, 96, 0, (32, 32)),
    "rows that begin inside a block": (50, 96, 45, (32, 32)),
    "rows inside one block": (3, 64, 130, (32, 32)),
    "V4's 128x128": (200, 256, 100, (128, 128)),
    "engram 1x32": (68, 256, 7, (1, 32)),
    "ragged rows and columns": (37, 75, 20, (16, 32)),
    "ragged columns of single rows": (5, 70, 3, (1, 32)),
    "one block larger than the tile": (5, 20, 0, (128, 128)),
    "several steps": (300, 1024, 17, (32, 32)),
    "several steps of single rows": (1500, 256, 1, (1, 32)),
}


@pytest.mark.parametrize("scales_from", [[0, 1, 126, 127], [120, 135, 254]], ids=["low", "high"])
@pytest.mark.parametrize(("n_rows", "n_cols", "begin", "block"), BLOCKS.values(), ids=BLOCKS)
def test_one_fp8_rule_serves_every_block(n_rows, n_cols, begin, block, scales_from):
    rng = np.random.default_rng(n_rows)
    codes = rng.choice(FINITE_FP8, (n_rows, n_cols))
    first, last = begin // block[0], (begin + n_rows - 1) // block[0]
    n_scales = (last - first + 1, -(-n_cols // block[1]))
    scales = rng.choice(np.array(scales_from, np.uint8), n_scales)
    out = np.empty((n_rows, n_cols), np.float32)
    bound = decode_fp8(codes, scales, begin, block, out)
    assert np.array_equal(bits(out), bits(torch_fp8(codes, scales, begin, block)))
    assert float(np.abs(out[np.isfinite(out)]).max()) <= bound


def test_fp4_in_several_steps_equals_torch():
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (900, 128), dtype=np.uint8)
    scales = rng.integers(0, 255, (900, 8), dtype=np.uint8)
    out = np.empty((900, 256), np.float32)
    bound = decode_fp4(codes, scales, out)
    assert np.array_equal(bits(out), bits(torch_fp4(codes, scales)))
    assert float(np.abs(out[np.isfinite(out)]).max()) <= bound


def test_nibble_order():
    codes = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], np.uint8)
    out = np.empty((1, 32), np.float32)
    decode_fp4(codes, np.array([[127]], np.uint8), out)
    assert out[0, :16].tolist() == FP4_VALUES + [-value for value in FP4_VALUES]


def test_the_bound_follows_the_codes():
    codes = np.array([[0x00, 0x38, 0xB8, 0x07]], np.uint8)
    out = np.empty((1, 4), np.float32)
    assert decode_fp8(codes, np.array([[130]], np.uint8), 0, (1, 32), out) == 8.0
    assert out[0].tolist() == [0.0, 8.0, -8.0, 7 * 2.0**-6]
    no_rows = np.zeros((0, 4), np.uint8)
    assert decode_fp8(no_rows, np.zeros((0, 1), np.uint8), 0, (1, 32), out[:0]) == 0


def test_bf16_and_f32_equal_torch_and_give_the_exact_bound():
    words = np.arange(1 << 16, dtype=np.uint16)
    words = words[(words & 0x7F80) != 0x7F80].reshape(-1, 255)
    out = np.empty(words.shape, np.float32)
    bound = decode_bf16(words, out)
    expected = torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bits(out), bits(expected))
    assert bound == np.abs(expected).max()
    assert f32_bound(bits(out)) == bound


def decode_bad_fp8(codes, scales):
    decode_fp8(codes, scales, 40, (32, 32), np.empty(codes.shape, np.float32))


def decode_bad_fp4(codes, scales):
    decode_fp4(codes, scales, np.empty((codes.shape[0], codes.shape[1] * 2), np.float32))


def repack_bad_fp4(codes, scales):
    repack_mxfp4(codes, scales, np.empty((scales.shape[0], scales.shape[1] * 17), np.uint8))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (2100, 63)], ids=["first", "last step"])
def test_an_fp8_nan_is_found_where_it_is(code, row, column):
    codes = np.zeros((2101, 64), np.uint8)
    codes[row, column] = code
    scales = np.zeros((2101, 2), np.uint8)
    with pytest.raises(BadCodeError, match=f"NaN.*0x{code:X} at row {row}, column {column}") as bad:
        decode_fp8(codes, scales, 5, (1, 32), np.empty(codes.shape, np.float32))
    assert (bad.value.row, bad.value.column) == (row, column)
    assert str(pickle.loads(pickle.dumps(bad.value))) == str(bad.value)


@pytest.mark.parametrize(
    ("decode_bad", "shape", "scale_at", "place"),
    [
        (decode_bad_fp8, ((60, 96), (3, 3)), (0, 1), (0, 32)),
        (decode_bad_fp8, ((60, 96), (3, 3)), (2, 2), (56, 64)),
        (decode_bad_fp4, ((5, 48), (5, 3)), (3, 2), (3, 64)),
        (repack_bad_fp4, ((5, 48), (5, 3)), (3, 2), (3, 64)),
    ],
    ids=["fp8 block cut at the top", "fp8", "fp4", "repack"],
)
def test_scale_byte_255_is_refused_where_it_is(decode_bad, shape, scale_at, place):
    codes, scales = (np.zeros(size, np.uint8) for size in shape)
    scales[scale_at] = 255
    with pytest.raises(BadCodeError, match="scale byte 255") as bad:
        decode_bad(codes, scales)
    assert (bad.value.row, bad.value.column) == place


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (decode_bf16, 0x7F80),
        (decode_bf16, 0xFF80),
        (decode_bf16, 0x7FC0),
        (decode_bf16, 0xFFFF),
        (f32_bound, 0x7F800000),
        (f32_bound, 0xFF800000),
        (f32_bound, 0x7F800001),
        (f32_bound, 0xFFFFFFFF),
    ],
    ids=lambda value: f"0x{value:X}" if isinstance(value, int) else value.__name__,
)
def test_nan_and_infinity_are_found_where_they_are(kind, code):
    words = np.zeros((2000, 100), np.uint16 if kind is decode_bf16 else np.uint32)
    words[1999, 98] = code
    out = np.empty(words.shape, np.float32)
    with pytest.raises(BadCodeError, match=f"0x{code:X} at row 1999, column 98"):
        decode_bf16(words, out) if kind is decode_bf16 else f32_bound(words)


def test_the_largest_finite_values_are_no_fault():
    out = np.empty((1, 1), np.float32)
    assert decode_bf16(np.array([[0xFF7F]], np.uint16), out) == 255 * 2.0**120
    assert f32_bound(np.array([[0x7F7FFFFF]], np.uint32)) == float(np.finfo(np.float32).max)
    with np.errstate(all="raise"):
        decode_fp8(np.array([[0x7E]], np.uint8), np.array([[254]], np.uint8), 0, (1, 32), out)
    assert np.isinf(out)


def test_repacked_blocks_decode_in_ggml_to_the_same_values():
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (33, 160), dtype=np.uint8)
    scales = rng.integers(2, 252, (33, 10), dtype=np.uint8)
    blocks = np.empty((33, 170), np.uint8)
    repack_mxfp4(codes, scales, blocks)
    out = np.empty((33, 320), np.float32)
    decode_fp4(codes, scales, out)
    from_ggml = dequantize(blocks, GGMLQuantizationType.MXFP4)
    # Code 8 is minus zero here and plus zero in gguf-py's integer table.
    assert np.array_equal(bits(from_ggml + np.float32(0)), bits(out + np.float32(0)))
    assert np.array_equal(from_ggml.view(np.uint32)[out != 0], out.view(np.uint32)[out != 0])


def test_repacking_pairs_element_i_with_i_plus_16():
    element = np.arange(32) % 16  # codes 0 … 15 in order, twice
    codes = (element[0::2] | element[1::2] << 4).astype(np.uint8).reshape(1, 16)
    block = np.empty((1, 17), np.uint8)
    repack_mxfp4(codes, np.array([[99]], np.uint8), block)
    assert block[0].tolist() == [99, *(i | i << 4 for i in range(16))]


def test_repacking_keeps_each_nibble():
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 256, (7, 64), dtype=np.uint8)
    scales = rng.integers(0, 255, (7, 4), dtype=np.uint8)
    blocks = np.empty((7, 68), np.uint8)
    repack_mxfp4(codes, scales, blocks)
    element = np.stack([codes & 15, codes >> 4], axis=-1).reshape(7, 4, 32)
    expected = np.concatenate(
        [scales[:, :, None], element[:, :, :16] | element[:, :, 16:] << 4], axis=-1
    )
    assert np.array_equal(blocks, expected.reshape(7, 68))


def test_the_tables_hold_every_scale():
    assert decode.E2M1_VALUES[8:].tolist() == (-decode.E2M1_VALUES[:8]).tolist()
    assert np.array_equal(
        bits(decode._SCALES[:255]), bits(torch_scales(np.arange(255, dtype=np.uint8)))
    )
