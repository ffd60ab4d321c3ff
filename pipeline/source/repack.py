"""FP4 experts to ggml's MXFP4 blocks: the same bits in another order, nothing decoded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.source.decode import FP4_GROUP, U8, scale_bound, tile_steps

MXFP4_BLOCK_NBYTES = 17
"""ggml ``block_mxfp4``: one E8M0 byte, then 16 bytes that pair elements i and i + 16."""

_BLOCK = np.dtype([("scale", np.uint8), ("codes", "V16")])
_COST = FP4_GROUP // 4
"""Repacking moves a quarter of what decoding a block to float32 does, so its steps are longer."""
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
_HIGH = np.uint64(0xF0F0F0F0F0F0F0F0)
_NIBBLE = np.uint64(4)


def repack_mxfp4(codes: U8, scales: U8, out: U8) -> None:
    """Fill ``out`` [r, c/32*17] from ``codes`` [r, c/2] and ``scales`` [r, c/32].

    The source holds elements 2k and 2k + 1 in byte k; the scale byte is the same in both forms
    (ggml doubles its code values and halves the scale).

    Raises:
        BadCodeError: A scale byte is 255, which ggml would decode to infinities.
    """
    assert codes.flags.c_contiguous
    assert out.flags.c_contiguous
    assert codes.shape == (out.shape[0], scales.shape[1] * FP4_GROUP // 2)
    assert out.shape == (scales.shape[0], scales.shape[1] * MXFP4_BLOCK_NBYTES)
    scale_bound(scales, 0, (1, FP4_GROUP))
    for rows in tile_steps(scales.shape[0], scales.shape[1] * _COST):
        blocks = out[rows].reshape(-1).view(_BLOCK)
        blocks["scale"] = scales[rows].reshape(-1)
        blocks["codes"] = _paired(codes[rows]).view("V16")


def _paired(codes: U8) -> U8:
    """16 bytes per block in ggml's order, all blocks in a row.

    Each half block (16 elements) is one 64-bit word, so a shift or mask moves 16 nibbles.
    """
    halves = codes.reshape(-1).view(np.uint64).reshape(-1, 2)
    first, second = halves[:, 0], halves[:, 1]
    even = (first & _LOW) | ((second & _LOW) << _NIBBLE)
    odd = ((first >> _NIBBLE) & _LOW) | (second & _HIGH)
    words: NDArray[np.uint16] = odd.view(np.uint8).astype(np.uint16)
    words <<= 8
    words |= even.view(np.uint8)
    return words.view(np.uint8)
