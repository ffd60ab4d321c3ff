"""Float weights cast to FP8, FP4 and BF16 as the release stores them.

A scale is the smallest power of two with which the largest weight of its block still fits, stored
as E8M0 (byte b is 2^(b-127)); weights round to the nearest code, ties to the even one. Formats:
OCP Microscaling Formats specification 1.0 and OCP 8-bit Floating Point specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_F32_MANTISSA = 23
_F32_BIAS = 127
_E8M0_BIAS = 127
_SMALLEST_MAX = 2.0**-100
"""Stands in for the largest weight of an all-zero block, whose scale must be a number too."""


@dataclass(frozen=True, slots=True)
class MiniFloat:
    """A format of a few bits: sign, exponent, mantissa; no code above ``top`` is ever written."""

    n_mantissa: int
    bias: int
    most: float
    top: int
    sign_bit: int


E4M3 = MiniFloat(n_mantissa=3, bias=7, most=448.0, top=0x7E, sign_bit=7)
E2M1 = MiniFloat(n_mantissa=1, bias=1, most=6.0, top=0x7, sign_bit=3)


def codes(values: Floats, to: MiniFloat) -> Bytes:
    """The nearest code of each finite value (ties to even); values above ``most`` saturate."""
    bits = values.view(np.uint32)
    size = np.abs(values)
    drop = _F32_MANTISSA - to.n_mantissa
    magnitude = size.view(np.uint32)
    half = np.uint32((1 << (drop - 1)) - 1)
    rounded = (magnitude + half + ((magnitude >> drop) & 1)) >> drop
    normal = rounded - np.uint32((_F32_BIAS - to.bias) << to.n_mantissa)
    # Below the smallest normal value the codes are evenly spaced.
    steps = np.float32(2.0 ** (to.bias - 1 + to.n_mantissa))
    below = np.rint(np.minimum(size, np.float32(to.most)) * steps).astype(np.uint32)
    code = np.where(size < np.float32(2.0 ** (1 - to.bias)), below, normal)
    sign = np.left_shift((bits >> 31).astype(np.uint8), to.sign_bit, dtype=np.uint8)
    return np.minimum(code, to.top).astype(np.uint8) | sign


def scale_exponents(values: Floats, block: tuple[int, int], most: float) -> NDArray[np.int32]:
    """Exponent of each block's scale: the smallest e with ``max |w| <= most * 2^e``.

    Args:
        values: Weights, ``[n_rows, n_cols]``, whole blocks in both directions.
        block: Rows and columns that share a scale.
        most: Largest value of the format.
    """
    n_rows, n_cols = values.shape
    tiles = np.abs(values).reshape(n_rows // block[0], block[0], n_cols // block[1], block[1])
    largest = np.maximum(tiles.max(axis=(1, 3)).astype(np.float64), _SMALLEST_MAX)
    mantissa, exponent = np.frexp(largest / most)
    return np.asarray(exponent - (mantissa == 0.5), np.int32)


def cast_blocks(values: Floats, block: tuple[int, int], to: MiniFloat) -> tuple[Bytes, Bytes]:
    """Codes of all weights, and the E8M0 byte of every block.

    Returns:
        Codes ``[n_rows, n_cols]``, one a byte; scales ``[n_rows / block, n_cols / block]``.
    """
    exponents = scale_exponents(values, block, to.most)
    n_rows, n_cols = values.shape
    tiles = values.reshape(n_rows // block[0], block[0], n_cols // block[1], block[1])
    # A power of two scales a float without rounding.
    factors = np.ldexp(np.float32(1), -exponents).astype(np.float32, copy=False)
    scaled = (tiles * factors[:, None, :, None]).reshape(n_rows, n_cols)
    return codes(scaled, to), (exponents + _E8M0_BIAS).astype(np.uint8)


def pack_nibbles(fp4: Bytes) -> Bytes:
    """Two codes a byte: element 2k in the low half of byte k, element 2k + 1 in the high half."""
    return np.asarray(fp4[:, 0::2] | (fp4[:, 1::2] << 4), np.uint8)


def bf16_bits(values: Floats) -> NDArray[np.uint16]:
    """The upper halves of finite floats, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
