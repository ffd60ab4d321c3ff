"""Stored codes to float32, one tile of rows at a time, without allocating the tile.

Each function fills ``out`` (C-contiguous float32 [rows, columns]) and gives an upper bound of the
absolute values. What has no finite value is found in the bytes, never in the float result, and
raises `BadCodeError` with its place. A value beyond float32 becomes infinite; its bound says so.

Codes: FP8 is E4M3 of the OCP "8-bit Floating Point Specification" 1.0 (torch ``float8_e4m3fn``);
FP4 (E2M1) and scales (E8M0) are those of the OCP "Microscaling Formats (MX) Specification" 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DecodeError

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

FP4_GROUP = 32
"""FP4 weights of a row that share a scale."""

E8M0_NAN = 255
_E8M0_BIAS = 127
_FP8_NAN = 0x7F
_BF16_INF = 0x7F80
_F32_INF = 0x7F800000
_STEP_N_WEIGHTS = 1 << 17
"""Weights decoded at a time: 512 KB of float32 stay in a core's cache between the passes."""

E2M1_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)
"""Value of each FP4 code; bit 3 is the sign."""


class BadCodeError(DecodeError):
    """A stored code without a finite value, at ``row`` and ``column`` of the tile."""

    def __init__(
        self, what: str, row: int, column: int, found: str, *, is_scale: bool = False
    ) -> None:
        super().__init__(what, found=f"{found} at row {row}, column {column}")
        self.is_scale = is_scale
        self.row = row
        self.column = column
        self.code = found


def _powers_of_two(exponents: NDArray[np.int64]) -> F32:
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(np.float64(1), exponents).astype(np.float32)


_SCALES = _powers_of_two(np.arange(256) - _E8M0_BIAS)
_FP8_RAISE = 120
_RAISED_SCALES = _powers_of_two(np.arange(256) - _E8M0_BIAS + _FP8_RAISE)
_MAX_RAISED = 254 - _FP8_RAISE
"""The largest scale byte whose raised scale is still finite."""


def _fp4_pairs() -> NDArray[np.uint64]:
    """Two float32 side by side for each ``scale byte << 8 | code byte``: one lookup per byte."""
    byte = np.arange(256)
    pairs = np.stack([E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]], axis=-1)
    finite = np.where(np.arange(256) == E8M0_NAN, np.float32(0), _SCALES)
    with np.errstate(over="ignore"):
        table = pairs[None, :, :] * finite[:, None, None]
    return np.ascontiguousarray(table).view(np.uint64).ravel()


_FP4_PAIRS = _fp4_pairs()


def decode_fp4(codes: U8, scales: U8, out: F32) -> float:
    """FP4 weights: ``codes`` [r, c/2], element 2k in the low nibble; ``scales`` [r, c/32].

    Raises:
        BadCodeError: A scale byte is 255.
    """
    n_rows, n_cols = out.shape
    assert out.flags.c_contiguous
    assert codes.shape == (n_rows, n_cols // 2)
    assert scales.shape == (n_rows, n_cols // FP4_GROUP)
    bound = 6.0 * scale_bound(scales, 0, (1, FP4_GROUP))
    pairs = out.view(np.uint64)
    for rows in tile_steps(n_rows, n_cols):
        high = scales[rows].astype(np.uint16) << 8
        grouped = codes[rows].reshape(*high.shape, FP4_GROUP // 2)
        keys = (grouped | high[:, :, None]).reshape(-1, n_cols // 2)
        np.take(_FP4_PAIRS, keys, mode="clip", out=pairs[rows])
    return bound


def decode_fp8(codes: U8, scales: U8, row_begin: int, block: tuple[int, int], out: F32) -> float:
    """FP8 weights: ``codes`` [r, c] from row ``row_begin`` of the matrix on.

    ``scales`` holds the scale rows that these rows touch, from ``row_begin // block[0]`` on.

    Raises:
        BadCodeError: A code is NaN (0x7F, 0xFF), or a scale byte is 255.
    """
    n_rows, n_cols = out.shape
    phase = row_begin % block[0]
    assert out.flags.c_contiguous
    assert codes.shape == out.shape
    assert scales.shape == (-(-(phase + n_rows) // block[0]), -(-n_cols // block[1]))
    top = scale_bound(scales, phase, block)
    fits = top <= float(_SCALES[_MAX_RAISED])
    factors = (_RAISED_SCALES if fits else _SCALES)[scales]
    largest = 0
    for rows in tile_steps(n_rows, n_cols):
        step = out[rows]
        largest = max(largest, _largest_fp8(codes[rows], rows.start))
        _widen_fp8(codes[rows], step)
        if not fits:
            step *= np.float32(2.0**_FP8_RAISE)
        first, step_phase = divmod(phase + rows.start, block[0])
        _multiply(step, factors[first:], step_phase, block)
    return top * _fp8_value(largest)


def decode_bf16(words: NDArray[np.uint16], out: F32) -> float:
    """BF16 ``words`` [r, c]; the bound is exact.

    Raises:
        BadCodeError: A value is NaN or infinite.
    """
    bound = bf16_bound(words)
    bits = out.view(np.uint32)
    np.copyto(bits, words)
    np.left_shift(bits, 16, out=bits)
    return bound


def bf16_bound(words: NDArray[np.uint16]) -> float:
    """The largest absolute value of finite BF16 ``words`` [r, c].

    Raises:
        BadCodeError: A value is NaN or infinite.
    """
    largest = 0
    for rows in tile_steps(*words.shape):
        magnitudes = words[rows] & np.uint16(0x7FFF)
        largest = max(largest, int(magnitudes.max(initial=0)))
        if largest >= _BF16_INF:
            raise _bad_code(magnitudes >= _BF16_INF, words[rows], rows.start, "BF16")
    return float(np.uint32(largest << 16).view(np.float32))


def f32_bound(bits: NDArray[np.uint32]) -> float:
    """The largest absolute value of finite F32 ``bits`` [r, c].

    Raises:
        BadCodeError: A value is NaN or infinite.
    """
    largest = 0
    for rows in tile_steps(*bits.shape):
        magnitudes = bits[rows] & np.uint32(0x7FFFFFFF)
        largest = max(largest, int(magnitudes.max(initial=0)))
        if largest >= _F32_INF:
            raise _bad_code(magnitudes >= _F32_INF, bits[rows], rows.start, "F32")
    return float(np.uint32(largest).view(np.float32))


def scale_bound(scales: U8, phase: int, block: tuple[int, int]) -> float:
    """The largest scale of E8M0 ``scales``; ``phase`` rows of the first scale block lie before.

    Raises:
        BadCodeError: A scale byte is 255; the place is the first weight of its block in the tile.
    """
    largest = int(scales.max(initial=0))
    if largest == E8M0_NAN:
        row, column = divmod(int(np.argmax(scales == E8M0_NAN)), scales.shape[1])
        raise BadCodeError(
            "an E8M0 scale is NaN",
            max(row * block[0] - phase, 0),
            column * block[1],
            f"scale byte {E8M0_NAN}",
            is_scale=True,
        )
    return 2.0 ** (largest - _E8M0_BIAS)


def tile_steps(n_rows: int, n_cols: int) -> Iterator[slice]:
    """Row ranges of a tile, each small enough to stay in a core's cache between passes."""
    step = max(1, _STEP_N_WEIGHTS // max(1, n_cols))
    return (slice(begin, begin + step) for begin in range(0, n_rows, step))


def _largest_fp8(codes: U8, row: int) -> int:
    magnitudes = codes & np.uint8(0x7F)
    largest = int(magnitudes.max(initial=0))
    if largest == _FP8_NAN:
        raise _bad_code(magnitudes == _FP8_NAN, codes, row, "FP8")
    return largest


def _widen_fp8(codes: U8, out: F32) -> None:
    """``out`` = value of e4m3fn ``codes`` times 2^-120, exactly.

    Exponent and mantissa bits of e4m3 stand at the same places of a float32 with the smaller
    exponent range, subnormals included; only the two biases (7 and 127) differ, by 120.
    """
    bits = out.view(np.int32)
    np.copyto(bits, codes.view(np.int8))  # carries the sign up to bit 31
    np.left_shift(bits, 20, out=bits)
    np.bitwise_and(bits, np.int32(-0x78100000), out=bits)


def _fp8_value(magnitude: int) -> float:
    exponent, mantissa = magnitude >> 3, magnitude & 7
    return (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9


def _multiply(out: F32, factors: F32, phase: int, block: tuple[int, int]) -> None:
    """Multiply each weight of ``out`` by the factor of its scale block."""
    n_rows, n_cols = out.shape
    height, width = block
    with np.errstate(over="ignore", under="ignore"):
        if height == 1 and n_cols % width == 0:
            grouped = out.reshape(n_rows, n_cols // width, width)
            grouped *= factors[:n_rows, :, None]
            return
        for begin in range(-phase, n_rows, height):
            rows = slice(max(begin, 0), begin + height)
            out[rows] *= np.repeat(factors[(begin + phase) // height], width)[:n_cols]


def _bad_code(
    is_bad: NDArray[np.bool_], codes: NDArray[np.unsignedinteger], row: int, kind: str
) -> BadCodeError:
    at = int(np.argmax(is_bad))
    row_in_step, column = divmod(at, is_bad.shape[1])
    code = int(codes[row_in_step, column])
    return BadCodeError(
        f"a stored {kind} value is NaN or infinite",
        row + row_in_step,
        column,
        f"code 0x{code:0{codes.dtype.itemsize * 2}X}",
    )


def narrow_ids(ids: NDArray[np.int64], limit: int, out: NDArray[np.int32]) -> None:
    """Fill ``out`` [n, k] with ``ids`` [n, k], all below ``limit`` and distinct within a row.

    Raises:
        BadCodeError: One is not. Engines abort on an id out of range and count a repeated expert
            twice without a word.
    """
    outside = (ids < 0) | (ids >= limit)
    if outside.any():
        row, column = (int(at) for at in np.argwhere(outside)[0])
        raise BadCodeError(f"an id is not below {limit}", row, column, str(ids[row, column]))
    ordered = np.sort(ids, axis=1)
    repeated = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    if repeated.size:
        row = int(repeated[0])
        raise BadCodeError("a row holds an id twice", row, 0, str(ids[row].tolist()))
    out[...] = ids


def float_ids(ids: NDArray[np.int64], out: F32) -> float:
    """Fill ``out`` with ``ids`` as floats, exact up to 2^24, to compare them; gives their bound."""
    out[...] = ids
    return float(np.abs(out).max(initial=0))
